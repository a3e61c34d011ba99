"""Wraps the compiler: names that do not change, and what each unit costs.

CMake calls it once for each unit, as its compiler launcher, so it starts as fast as Python can: it
imports nothing of this package and runs under `python -I -S`. Where the environment names a file
for the costs it measures the compiler; else it becomes the compiler.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time

# The file that gets a line for each unit: a variable of the environment.
RESULTS = "SM12X_UNIT_RESULTS"
_MAP = "-Xcompiler=-ffile-prefix-map="


def with_fixed_name(argv: list[str]) -> list[str]:
    """Return nvcc's arguments, plus those that make its names for local kernels reproducible.

    These names hold a hash of the source's path, which only an option of the front end changes: it
    gets the path as the prefix maps in ``argv`` rewrite it. In a unit of nothing but templates and
    local functions they also hold the compiler's process id, unless there is a seed.
    """
    source = _following(argv, "-c")
    if source is None or _following(argv, "-x") != "cu":
        return argv
    for word in argv:
        # Neither a path nor its name has a "=": CMake would not have written the map like this.
        path, _, name = word.removeprefix(_MAP).rpartition("=")
        if word.startswith(_MAP) and source.startswith(f"{path}/"):
            fixed = name + source.removeprefix(path)
            return [*argv, "-Xcudafe", f"--orig_src_path_name={fixed}", f"-frandom-seed={fixed}"]
    return argv


def main(argv: list[str]) -> int:
    argv = with_fixed_name(argv)
    results, unit = os.environ.get(RESULTS), _following(argv, "-o")
    if not results or unit is None:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    start = time.monotonic()
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    _, raw, usage = os.wait4(child.pid, 0)
    status = child.returncode = os.waitstatus_to_exitcode(raw)
    status = status if status >= 0 else 128 - status
    entry = {
        "unit": unit,
        "status": status,
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        # Of the largest process among the compiler and all that it started (kilobytes on Linux).
        "peak_gib": round(usage.ru_maxrss / 1024**2, 3),
    }
    # One write, so that lines of units that end together do not mix.
    with open(results, "ab", buffering=0) as handle:  # noqa: PTH123 - without pathlib, to start fast
        handle.write(json.dumps(entry).encode() + b"\n")
    return status


def _following(argv: list[str], option: str) -> str | None:
    for word, following in itertools.pairwise(argv):
        if word == option:
            return following
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
