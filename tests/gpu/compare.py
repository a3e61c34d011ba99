"""Run the GPU tests on two trees and print both outcomes side by side.

    python -m tests.gpu.compare BASE_TREE PATCHED_TREE [--out FOLDER] [--upstream TEST ...]

Exit code 1 if a test fails on the patched tree, or passes on the base and is neither a guard nor
named as one whose defect that release does not have any more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/gpu/test_allocator.py"


def outcomes(tree: Path, report: Path, only: str = "") -> dict[str, str]:
    """Test name to "passed", "failed", "error" or "skipped"."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", TESTS]
    if only:
        command += ["-m", only]
    environment = {**os.environ, "SM12X_TREE": str(tree.resolve())}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    found: dict[str, str] = {}
    # The file was written by the pytest just started, not by somebody else.
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314
        kinds = [child.tag for child in case]
        named = [kind for kind in ("error", "failure", "skipped") if kind in kinds]
        outcome = {"failure": "failed"}.get(named[0], named[0]) if named else "passed"
        found[case.get("name", "?")] = outcome
    return found


def guards() -> set[str]:
    """Tests that hold on the base as well."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "guard", TESTS],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return {line.rpartition("::")[2] for line in listed.stdout.splitlines() if "::" in line}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", type=Path)
    parser.add_argument("patched", type=Path)
    parser.add_argument("--out", type=Path, help="keep both junit reports here")
    parser.add_argument(
        "--upstream", nargs="+", default=[], help="tests that pass on the untouched release"
    )
    options = parser.parse_args()
    os.environ.setdefault("SM12X_TREE", str(options.base.resolve()))
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = options.out or Path(scratch)
        base = outcomes(options.base, folder / "base.xml")
        patched = outcomes(options.patched, folder / "patched.xml")
    notes = dict.fromkeys(guards(), "guard") | dict.fromkeys(options.upstream, "upstream")
    wrong = 0
    print(f"\n{'test':<55} {'base':<8} {'patched':<8}")
    for name in sorted(base.keys() | patched.keys()):
        before, after = base.get(name, "absent"), patched.get(name, "absent")
        right = after == "passed" and before == ("passed" if name in notes else "failed")
        wrong += not right
        note = notes.get(name, "")
        print(f"{name:<55} {before:<8} {after:<8} {note if right else 'WRONG'}".rstrip())
    print(f"{len(patched)} tests, {wrong} not as they should be")
    return 1 if wrong or not patched else 0


if __name__ == "__main__":
    sys.exit(main())
