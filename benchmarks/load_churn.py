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
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
MIB = 1 << 20
CAP = 20
KEEPER = 100 * MIB
SMALLEST, LARGEST = 1331, 2048
# Seconds a case may take; it needs about fifteen, most of them for importing torch.
LIMIT = 300


@dataclass(kw_only=True)
class Case:
    name: str
    tree: str
    # max_split_size_mb; 0 is without.
    cap: int
    error: str = ""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="+", metavar="NAME=TREE", type=_tree_argument)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=60, help="of the load (default: 60)")
    # The child of one case.
    parser.add_argument("--cap", type=int, default=CAP, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        name, tree = options.trees[0]
        return _child(Case(name=name, tree=tree, cap=options.cap), options)
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[Case] = []
    command = " ".join(sys.argv if arguments is None else arguments)
    for cap in (CAP, 0):
        for name, tree in options.trees:
            sys.stdout.write(f"{name}: {tree}, max_split_size_mb {cap or 'not set'}\n")
            sys.stdout.flush()
            results.append(_in_child(Case(name=name, tree=tree, cap=cap), options))
            # After each: a run that is cut off leaves what it has.
            (options.out / "load_churn.json").write_text(
                json.dumps([asdict(result) for result in results], indent=1) + "\n"
            )
            (options.out / "load_churn.md").write_text(report(results, command))
    sys.stdout.write((options.out / "load_churn.md").read_text())
    return 1 if any(result.error for result in results) else 0


def _tree_argument(text: str) -> tuple[str, str]:
    try:
        return tree_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _in_child(case: Case, options: argparse.Namespace) -> Case:
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "case.json"
        command = [sys.executable, str(Path(__file__).resolve()), f"{case.name}={case.tree}"]
        command += ["--out", scratch, "--rounds", str(options.rounds), "--cap", str(case.cap)]
        command += ["--child", str(result)]
        # What this process was started with is not what the case is.
        environment = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}
        if case.cap:
            environment["PYTORCH_CUDA_ALLOC_CONF"] = f"max_split_size_mb:{case.cap}"
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        try:
            done = subprocess.run(command, env=environment, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            case.error = f"took more than {LIMIT} s"
            return case
        if not result.is_file():
            case.error = f"ended with {done.returncode}"
            return case
        return Case(**json.loads(result.read_text()))


def _child(case: Case, options: argparse.Namespace) -> int:
    try:
        _measure(case, options.rounds)
    except Exception as error:
        traceback.print_exc()
        case.error = f"{type(error).__name__}: {error}"
    options.child.write_text(json.dumps(asdict(case)))
    # What a case leaves of a device is not to be taken apart.
    sys.stdout.flush()
    os._exit(0)


def _measure(case: Case, rounds: int) -> None:
    from tests.gpu import rig

    tree = Path(case.tree).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        gpu = rig.load(tree, rig.compile_allocator(tree, Path(scratch)))
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
