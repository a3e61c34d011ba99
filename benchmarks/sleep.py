"""Time the allocator's sleep and wake_up on a GPU: trees and settings side by side, in one run.

    PYTHONPATH=. python3 benchmarks/sleep.py --out FOLDER stock=TREE patched=PATCHED_TREE
    PYTHONPATH=. python3 benchmarks/sleep.py --out FOLDER cumem=TREE_0330 keep=TREE_0330+plugin

TREE is an unpacked release. What follows it, in any order and each after a `+`: `plugin` takes
sleep and wake_up from scripts/sleep-keep; `auto`, `keep` or `release` is SLEEP_MODE_HOST_COPY;
`unprepared` lets the first sleep take the host memory; a number is how many processes do the same
at a time, each on a GPU of its own and step by step together, as the workers of one server do. Each
case runs in a process of its own, with PyTorch, the tree's allocator and nothing else of vLLM, and
checks the bytes after every wake_up. The bare copy is timed in that process too: the same bytes,
from the same kind of host memory, to memory that is mapped already, in one go. Of a first sleep
that takes its host memory itself, and of a later sleep that is not counted, the report says when
its steps were made. Of several processes each figure is the slowest one's.

FOLDER gets sleep.json and sleep.md. A case that fails is in both, with its error, and the exit
code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import cases
from benchmarks.cases import GIB, MIB
from tests.gpu.steps.sleep_steps import Spans, Steps

SETTINGS = ("auto", "keep", "release")


@dataclass(frozen=True, kw_only=True)
class Case:
    text: str
    name: str
    tree: str
    plugin: bool = False
    setting: str = "auto"
    prepared: bool = True
    gpus: int = 1


@dataclass(kw_only=True)
class Times(cases.Measured):
    """Seconds, but for what is in GiB. Several runs of one thing are in order."""

    case: str
    gib: float = 0.0
    blocks: int = 0
    prepare: float | None = None
    first_sleep: float | None = None
    # Of a "first" sleep that was not prepared and of a "later" one.
    steps: dict[str, Spans] = field(default_factory=dict)
    later_sleeps: list[float] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)
    # With one tensor of all written to before.
    changed_sleep: float | None = None
    bare_copy: float | None = None
    host_gib_awake: float | None = None
    device: str = ""
    torch: str = ""
    driver: str = ""


def case_of(text: str) -> Case:
    """One NAME=TREE[+WORD...] of the command line. Raises ValueError."""
    name, equals, rest = text.partition("=")
    tree, *words = rest.split("+")
    if not equals or not name or not tree:
        raise ValueError(f"{text!r} is not NAME=TREE")
    settings = [word for word in words if word in SETTINGS]
    gpus = [int(word) for word in words if word.isdecimal()]
    known = (*SETTINGS, "plugin", "unprepared")
    unknown = [word for word in words if word not in known and not word.isdecimal()]
    if unknown or len(settings) > 1 or len(gpus) > 1 or 0 in gpus:
        raise ValueError(
            f"{text!r}: after TREE go +plugin, +unprepared, a number of GPUs and one of "
            f"{', '.join(SETTINGS)}"
        )
    return Case(
        text=text,
        name=name,
        tree=tree,
        plugin="plugin" in words,
        setting=settings[0] if settings else "auto",
        prepared="unprepared" not in words,
        gpus=gpus[0] if gpus else 1,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cases.parser(__doc__)
    parser.add_argument(
        "cases", nargs="+", metavar="NAME=TREE[+WORD...]", type=cases.argument(case_of)
    )
    parser.add_argument("--gib", type=float, default=17.0, help="GiB of weights (default: 17)")
    parser.add_argument("--tensors", type=int, default=341, help="of them (default: 341)")
    parser.add_argument("--cycles", type=int, default=5, help="later sleeps (default: 5)")
    options = parser.parse_args(arguments)
    if options.child is not None:
        (case,) = options.cases
        cases.measure(
            options.child, Times(case=case.name), functools.partial(_measure, case, options)
        )
    command = " ".join(sys.argv if arguments is None else arguments)
    return cases.run_all(
        "sleep",
        options.out,
        [
            (f"{case.name}: {case.tree}", functools.partial(_in_child, case, options))
            for case in options.cases
        ],
        lambda results: report(results, command),
    )


def _in_child(case: Case, options: argparse.Namespace) -> Times:
    words = [case.text, "--gib", str(options.gib), "--tensors", str(options.tensors)]
    words += ["--cycles", str(options.cycles)]
    return cases.in_child(
        __file__,
        words,
        Times(case=case.name),
        environment={**os.environ, "SLEEP_MODE_HOST_COPY": case.setting},
    )


def _measure(case: Case, options: argparse.Namespace, times: Times) -> None:
    if case.gpus == 1:
        _measure_one(case, options, times, lambda: None)
        return
    each = cases.at_a_time(case.gpus, times, functools.partial(_measure_one, case, options))
    for name, value in vars(slowest(each)).items():
        setattr(times, name, value)


def slowest(each: Sequence[Times]) -> Times:
    """Of processes that have measured the same at a time: each figure of the slowest one.

    A step lasts from the first begin to the last end. Each has seen the host memory of all. Where
    one has failed, the error alone.
    """
    failed = [f"GPU {number}: {one.error}" for number, one in enumerate(each) if one.error]
    if failed:
        return dataclasses.replace(each[0], error="; ".join(failed))

    def most(name: str) -> float | None:
        known = [value for one in each if (value := getattr(one, name)) is not None]
        return max(known) if known else None

    return dataclasses.replace(
        each[0],
        prepare=most("prepare"),
        first_sleep=most("first_sleep"),
        changed_sleep=most("changed_sleep"),
        bare_copy=most("bare_copy"),
        steps={name: _joined([one.steps[name] for one in each]) for name in each[0].steps},
        later_sleeps=[max(ones) for ones in zip(*(one.later_sleeps for one in each), strict=True)],
        wakes=[max(ones) for ones in zip(*(one.wakes for one in each), strict=True)],
        host_gib_awake=most("host_gib_awake"),
    )


def _joined(each: Sequence[Spans]) -> Spans:
    """Of each step of one sleep: the first begin, the last end, and the largest sum."""
    joined: Spans = {}
    for spans in each:
        for step, (begin, end, total) in spans.items():
            first, last, most = joined.get(step, (begin, end, total))
            joined[step] = min(first, begin), max(last, end), max(most, total)
    return joined


def _measure_one(
    case: Case, options: argparse.Namespace, times: Times, together: Callable[[], object]
) -> None:
    """Measure one process; ``together`` waits for the others before what is timed."""
    gpu = cases.load_tree(case.tree)
    torch = gpu.torch
    times.device = torch.cuda.get_device_name(0)
    times.torch = torch.__version__
    times.driver = _driver()
    sleep, wake_up, copies, prepare = _calls(case, gpu)
    size = int(options.gib * GIB / options.tensors) // (2 * MIB) * (2 * MIB)
    host_before = _available()
    with gpu.allocator.use_memory_pool("weights"):
        tensors = [gpu.tensor(size, seed) for seed in range(options.tensors)]
    with gpu.allocator.use_memory_pool("kv_cache"):
        cache = torch.zeros(4 * GIB, dtype=torch.uint8, device="cuda")
    times.blocks = len(gpu.allocator.pointer_to_data)
    times.gib = size * options.tensors / GIB
    if case.prepared and copies is not None:
        times.prepare = _seconds(torch, prepare, together)

    def with_steps(name: str) -> None:
        # Stock has no host copies whose steps could be timed.
        steps = Steps(sys.modules["vllm_sleep_keep.host_copies"]) if copies is not None else None
        sleep()
        if steps is not None:
            times.steps[name] = steps.taken()

    def intact() -> None:
        for seed, tensor in enumerate(tensors):
            _require(gpu.intact(tensor, seed), f"tensor {seed} is not what it was")

    first_sleep = sleep if case.prepared else functools.partial(with_steps, "first")
    times.first_sleep = _seconds(torch, first_sleep, together)
    times.wakes.append(_seconds(torch, wake_up, together))
    intact()
    for _ in range(options.cycles):
        times.later_sleeps.append(_seconds(torch, sleep, together))
        times.wakes.append(_seconds(torch, wake_up, together))
        intact()
    _seconds(torch, functools.partial(with_steps, "later"), together)
    wake_up()
    tensors[0].add_(1)
    times.changed_sleep = _seconds(torch, sleep, together)
    wake_up()
    torch.cuda.synchronize()
    _require(gpu.intact(tensors[0], 1), "what was written between two sleeps is lost")
    tensors[0].sub_(1)
    intact()
    times.host_gib_awake = (host_before - _available()) / GIB
    del cache
    times.bare_copy = _bare_copy(torch, tensors, together)


def _calls(
    case: Case, gpu: Any
) -> tuple[Callable[[], None], Callable[[], None], Any, Callable[[], None]]:
    """sleep, wake_up, the host copies, and prepare, which ends when everything is prepared.

    Without the package there are no host copies, None, and nothing is prepared.
    """
    if case.plugin:
        from tests.gpu import rig

        backend = rig.keep_backend()

        def prepare_backend() -> None:
            backend.prepare()
            backend.copies._wait_for_preparation()

        return (
            (lambda: backend.suspend(1)),
            (lambda: backend.resume()),
            backend.copies,
            prepare_backend,
        )
    return (
        (lambda: gpu.allocator.sleep(("weights",))),
        (lambda: gpu.allocator.wake_up()),
        None,
        (lambda: None),
    )


def _seconds(torch: Any, call: Callable[[], None], together: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    together()
    start = time.monotonic()
    call()
    torch.cuda.synchronize()
    return time.monotonic() - start


def _bare_copy(torch: Any, tensors: list[Any], together: Callable[[], object]) -> float:
    """The least of three: as many bytes, one host tensor to one device tensor that exists."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    host = torch.zeros(size, dtype=torch.uint8)
    address = host.data_ptr()
    error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
    _require(int(error) == 0, f"cudaHostRegister: {error}")
    tensors.clear()
    device = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        device.copy_(host, non_blocking=True)

    runs = [_seconds(torch, copy, together) for _ in range(3)]
    torch.cuda.cudart().cudaHostUnregister(address)
    return min(runs)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _driver() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.stdout.split("\n")[0].strip()


def report(results: Sequence[Times], command: str) -> str:
    """A dated page: machine, versions, command, table."""
    known = next((result for result in results if result.device), None)
    lines = [f"# Sleep and wake of the allocator, {time.strftime('%Y-%m-%d')}", ""]
    if known is not None:
        lines += [
            f"{known.device}, driver {known.driver}, {os.cpu_count()} cores, torch {known.torch}, "
            f"Python {platform.python_version()}. {known.gib:.1f} GiB of weights.",
            f"Command: `{command}`",
            "",
        ]
    lines += [
        "Seconds. Later sleeps and wakes are medians; in brackets the slowest. The factor is wake",
        "by bare copy, of the same process.",
        "",
        "| case | blocks | prepare | first sleep | later sleep | sleep after a write | wake "
        "| bare copy | factor | host GiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        if result.error:
            lines.append(f"| {result.case} | {result.error} |" + " |" * 8)
            continue
        factor = (
            f"{statistics.median(result.wakes) / result.bare_copy:.2f}"
            if result.wakes and result.bare_copy
            else "-"
        )
        cells = (
            result.case,
            str(result.blocks),
            _number(result.prepare),
            _number(result.first_sleep),
            _numbers(result.later_sleeps),
            _number(result.changed_sleep),
            _numbers(result.wakes),
            _number(result.bare_copy),
            factor,
            "-" if result.host_gib_awake is None else f"{result.host_gib_awake:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    timed = [result for result in results if result.steps]
    if timed:
        lines += [
            "",
            "Of a first sleep that was not prepared, and of a later one: seconds after its begin,",
            "and the sum of the calls, some of which are made at a time.",
            "",
            "| case | sleep | step | first begins | last ends | sum |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
    lines += [
        f"| {result.case} | {name} | {step} | {' | '.join(map(_number, seconds))} |"
        for result in timed
        for name, steps in result.steps.items()
        for step, seconds in steps.items()
    ]
    return "\n".join(lines) + "\n"


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def _numbers(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({max(seconds):.3f})" if seconds else "-"


if __name__ == "__main__":
    sys.exit(main())
