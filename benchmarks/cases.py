"""What the allocator's benchmarks share: cases in processes of their own, and the files of a run.

A script runs itself again for each case, with ``--child FILE``; the child measures one case, and
leaves it in FILE as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    path: Sequence[Path] = (),
) -> R:
    """Run ``script`` for one case.

    Args:
        words: the arguments of the case.
        empty: the results of the case without any, which an error is noted in.
        environment: of the child, but for what is added here.
        path: folders on its PYTHONPATH, besides the checkout.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "case.json"
        command = [sys.executable, str(Path(script).resolve()), *words]
        command += ["--out", scratch, "--child", str(result)]
        folders = [str(ROOT), *map(str, path), environment.get("PYTHONPATH", "")]
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
        if not result.is_file():
            empty.error = f"ended with {done.returncode}"
            return empty
        return type(empty)(**json.loads(result.read_text()))


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


def load_tree(tree: str) -> Any:
    """A ``tests.gpu.rig.Gpu`` with the allocator of a source tree, compiled here."""
    from tests.gpu import rig

    folder = Path(tree).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        return rig.load(folder, rig.compile_allocator(folder, Path(scratch)))
