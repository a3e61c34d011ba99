"""Measure on one GPU what a load maps at most whose temporary tensors differ in size.

    PYTHONPATH=. python3 benchmarks/load_churn.py --out FOLDER stock=TREE patched=PATCHED_TREE

TREE is an unpacked release. A round of the load allocates a temporary tensor of 1.3 to 2 GiB and
fills it, frees it, and allocates a tensor of 100 MiB that stays: 60 rounds, in the pool of the
tree's allocator, with sizes that are the same in every case. Each tree runs twice, with
max_split_size_mb:20, under which vLLM loads, and without: each time in a process of its own, with
PyTorch, the tree's allocator and nothing else of vLLM. Then the tensors that stay sleep, wake up,
and have to hold their bytes.

FOLDER gets load_churn.json and load_churn.md. A case that fails is in both, with its error, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import cases
from benchmarks.cases import GIB, MIB

CAP = 20
KEEPER = 100 * MIB
SMALLEST, LARGEST = 1331, 2048


@dataclass(kw_only=True)
class Case(cases.Measured):
    name: str
    tree: str
    # max_split_size_mb; 0 is without.
    cap: int
    mapped_peak_gib: float | None = None
    used_peak_gib: float | None = None
    live_gib: float | None = None
    mapped_after_gib: float | None = None
    seconds: float | None = None
    device: str = ""
    torch: str = ""


def tree_of(text: str) -> tuple[str, str]:
    """One NAME=TREE of the command line. Raises ValueError."""
    name, equals, tree = text.partition("=")
    if not equals or not name or not tree:
        raise ValueError(f"{text!r} is not NAME=TREE")
    return name, tree


def sizes(rounds: int) -> list[int]:
    """Bytes of the temporary tensors, the same in every run."""
    chosen = random.Random(0)  # noqa: S311
    return [chosen.randrange(SMALLEST, LARGEST) * MIB for _ in range(rounds)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cases.parser(__doc__)
    parser.add_argument("trees", nargs="+", metavar="NAME=TREE", type=cases.argument(tree_of))
    parser.add_argument("--rounds", type=int, default=60, help="of the load (default: 60)")
    # Of the child of one case.
    parser.add_argument("--cap", type=int, default=CAP, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    caps = (CAP, 0) if options.child is None else (options.cap,)
    every = [Case(name=name, tree=tree, cap=cap) for cap in caps for name, tree in options.trees]
    if options.child is not None:
        cases.measure(options.child, every[0], lambda case: _measure(case, options.rounds))
    command = " ".join(sys.argv if arguments is None else arguments)
    return cases.run_all(
        "load_churn",
        options.out,
        [
            (
                f"{case.name}: {case.tree}, max_split_size_mb {case.cap or 'not set'}",
                functools.partial(_in_child, case, options.rounds),
            )
            for case in every
        ],
        lambda results: report(results, command),
    )


def _in_child(case: Case, rounds: int) -> Case:
    # What this process was started with is not what the case is.
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}
    if case.cap:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = f"max_split_size_mb:{case.cap}"
    words = [f"{case.name}={case.tree}", "--rounds", str(rounds), "--cap", str(case.cap)]
    return cases.in_child(__file__, words, case, environment=environment)


def _measure(case: Case, rounds: int) -> None:
    gpu = cases.load_tree(case.tree)
    torch = gpu.torch
    case.device = torch.cuda.get_device_name(0)
    case.torch = torch.__version__
    # Loads the kernels, which stay.
    gpu.intact(gpu.tensor(MIB, 0), 0)
    torch.cuda.empty_cache()
    free_before = gpu.free()
    recorded = used = 0
    keepers: list[Any] = []
    start = time.monotonic()

    def look() -> None:
        nonlocal recorded, used
        recorded = max(recorded, gpu.recorded())
        used = max(used, free_before - torch.cuda.mem_get_info()[0])

    with gpu.allocator.use_memory_pool("weights"):
        for seed, size in enumerate(sizes(rounds)):
            temporary = torch.empty(size, dtype=torch.uint8, device="cuda")
            look()
            temporary.fill_(seed)
            del temporary
            keepers.append(gpu.tensor(KEEPER, seed))
            look()
    torch.cuda.synchronize()
    case.seconds = time.monotonic() - start
    case.mapped_peak_gib = recorded / GIB
    case.used_peak_gib = used / GIB
    case.live_gib = KEEPER * rounds / GIB
    case.mapped_after_gib = gpu.recorded() / GIB
    gpu.allocator.sleep(("weights",))
    gpu.allocator.wake_up()
    lost = [seed for seed, tensor in enumerate(keepers) if not gpu.intact(tensor, seed)]
    if lost:
        raise RuntimeError(f"tensors {lost} are not what they were")


def report(results: Sequence[Case], command: str) -> str:
    """A dated page: machine, versions, command, table."""
    known = next((result for result in results if result.device), None)
    lines = [f"# What a load maps at most, {time.strftime('%Y-%m-%d')}", ""]
    if known is not None:
        lines += [
            f"{known.device}, torch {known.torch}, Python {platform.python_version()}.",
            f"Command: `{command}`",
            "",
        ]
    lines += [
        "GiB. Mapped: the blocks that the allocator has a record of. Used: what the device's free",
        "memory fell by, at most. After: mapped once the pool was left.",
        "",
        "| case | max_split_size_mb | mapped peak | used peak | live | after | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        cap = str(result.cap or "-")
        if result.error:
            lines.append(f"| {result.name} | {cap} | {result.error} |" + " |" * 4)
            continue
        values = (
            result.mapped_peak_gib,
            result.used_peak_gib,
            result.live_gib,
            result.mapped_after_gib,
            result.seconds,
        )
        cells = (result.name, cap, *("-" if value is None else f"{value:.1f}" for value in values))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
