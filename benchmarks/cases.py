"""What the allocator's benchmarks share: cases in processes of their own, and the files of a run.

A script runs itself again for each case, with ``--child FILE``; the child measures one case, and
leaves it in FILE as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
MIB = 1 << 20
# Seconds a case may take: the slowest that was measured takes 60.
LIMIT = 300


@dataclass(kw_only=True)
class Measured:
    """The results of one case; ``error`` says why there are none."""

    error: str = ""


R = TypeVar("R", bound=Measured)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark: ``--out``, and ``--child`` for a case's own."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True, help="folder for the results")
    made.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return made


def argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """``read`` for argparse, which prints the text of a ValueError only of this kind."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def run_all(
    name: str,
    out: Path,
    runs: Iterable[tuple[str, Callable[[], R]]],
    report: Callable[[Sequence[R]], str],
) -> int:
    """Run the cases in order; the exit code is 1 if one of them failed.

    Args:
        name: of the files in ``out``, NAME.json and NAME.md.
        runs: of each case what is printed before it, and what runs it.
        report: the text of NAME.md.
    """
    out.mkdir(parents=True, exist_ok=True)
    known: list[R] = []
    for title, run in runs:
        sys.stdout.write(f"{title}\n")
        sys.stdout.flush()
        known.append(run())
        # After each: a run that is cut off leaves what it has.
        (out / f"{name}.json").write_text(
            json.dumps([asdict(result) for result in known], indent=1) + "\n"
        )
        (out / f"{name}.md").write_text(report(known))
    sys.stdout.write((out / f"{name}.md").read_text())
    return 1 if any(result.error for result in known) else 0


def in_child(
    script: str,
    words: Sequence[str],
    empty: R,
    *,
    environment: Mapping[str, str],
) -> R:
    """Run ``script`` for one case.

    Args:
        words: the arguments of the case.
        empty: the results of the case without any, which an error is noted in.
        environment: of the child, but for the checkout on PYTHONPATH.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "case.json"
        command = [sys.executable, str(Path(script).resolve()), *words]
        command += ["--out", scratch, "--child", str(result)]
        folders = [str(ROOT), environment.get("PYTHONPATH", "")]
        try:
            done = subprocess.run(
                command,
                env={**environment, "PYTHONPATH": os.pathsep.join(folders)},
                timeout=LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            empty.error = f"took more than {LIMIT} s"
            return empty
        return _left(result, empty, done.returncode)


def _left(child: Path, empty: R, code: int | None) -> R:
    """The results that a process left in ``child``; without any, ``empty`` with its exit code."""
    if not child.is_file():
        return dataclasses.replace(empty, error=f"ended with {code}")
    return type(empty)(**json.loads(child.read_text()))


def measure(child: Path, result: R, call: Callable[[R], None]) -> None:
    """In the child: ``call`` fills ``result``, which is left in ``child``; ends the process."""
    try:
        call(result)
    except Exception as error:
        traceback.print_exc()
        result.error = f"{type(error).__name__}: {error}"
    child.write_text(json.dumps(asdict(result)))
    # What a case leaves of a device is not to be taken apart.
    sys.stdout.flush()
    os._exit(0)


def at_a_time(count: int, empty: R, call: Callable[[R, Callable[[], object]], None]) -> list[R]:
    """Run ``call`` in ``count`` processes at a time, each with a GPU of its own.

    Args:
        count: of the visible GPUs, the first so many.
        empty: the results without any, which the error of a process is noted in.
        call: importable; fills the results. What it calls returns when every process is there,
            and raises BrokenBarrierError when one of them has failed.

    Returns:
        The results, in the order of the GPUs.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [str(number) for number in range(count)]
    if len(gpus) < count:
        empty.error = f"{count} GPUs are needed, {len(gpus)} are visible"
        return [empty]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(count, timeout=LIMIT)
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / f"{number}.json" for number in range(count)]
        processes = [
            context.Process(target=_one_of, args=(gpu, file, empty, call, barrier), daemon=True)
            for gpu, file in zip(gpus, files, strict=False)
        ]
        try:
            for process in processes:
                process.start()
            left = dict(zip((process.sentinel for process in processes), files, strict=True))
            while left:
                for sentinel in [one for one in connection.wait([*left]) if isinstance(one, int)]:
                    # One that a signal ends leaves no file, and the others wait for it.
                    if not left.pop(sentinel).is_file():
                        barrier.abort()
        finally:
            for process in processes:
                process.terminate()
                process.join()
        return [
            _left(file, empty, process.exitcode)
            for process, file in zip(processes, files, strict=True)
        ]


def _one_of(
    gpu: str,
    file: Path,
    result: R,
    call: Callable[[R, Callable[[], object]], None],
    barrier: threading.Barrier,
) -> None:
    """One process of `at_a_time`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu

    def checked(result: R) -> None:
        try:
            call(result, barrier.wait)
        except Exception:
            barrier.abort()
            raise

    measure(file, result, checked)


def load_tree(tree: str) -> Any:
    """A ``tests.gpu.rig.Gpu`` with the allocator of a source tree, compiled here."""
    from tests.gpu import rig

    folder = Path(tree).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        return rig.load(folder, rig.compile_allocator(folder, Path(scratch)))
