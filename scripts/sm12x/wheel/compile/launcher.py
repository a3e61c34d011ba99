"""Wraps the compiler: waits for its turn, keeps a log, measures the cost.

CMake calls it once for each unit, as its compiler launcher, so it starts as fast as Python can: it
imports nothing of this package and runs under `python -I -S`. The broker (broker.py), on the socket
that the environment names, tells when to start; without a broker it becomes the compiler.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from io import RawIOBase
from pathlib import Path
from typing import Any

SOCKET = "SM12X_UNIT_SOCKET"
LOGS = "SM12X_UNIT_LOGS"
# Before the compiler's words: a folder of sources, and one of headers for its CUDA units.
HEADERS = "--headers"

# What nvcc, gcc and clang print when the kernel kills a program of theirs. Their own exit status
# does not say it.
_KILLED = re.compile(
    rb"died due to signal 9|Killed signal terminated program|unable to execute command: Killed"
)
_TAIL = 8192
_MAP = "-Xcompiler=-ffile-prefix-map="


def log_path(folder: Path, unit: str) -> Path:
    """The log of a unit: its object's path, without the parts that CMake adds."""
    parts = [part.removesuffix(".dir") for part in f"{unit}.log".split("/")]
    return folder.joinpath(*(part for part in parts if part not in ("", "..", "CMakeFiles")))


def with_fixed_name(argv: list[str]) -> list[str]:
    """nvcc's arguments, plus those that make its names for local kernels reproducible.

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


def with_headers(argv: list[str]) -> list[str]:
    """The compiler's arguments; a CUDA unit of the folder gets the base's headers first.

    They stand before every ``-I``, and so before every ``-isystem``. A third party's sources are
    not in the folder: they have what they were written for.
    """
    if argv[0] != HEADERS:
        return argv
    sources, headers, words = argv[1], argv[2], argv[3:]
    source = _following(words, "-c")
    if source is None or _following(words, "-x") != "cu" or not source.startswith(f"{sources}/"):
        return words
    found = (n for n, word in enumerate(words) if word.startswith(("-I", "-isystem")))
    at = next(found, len(words))
    return [*words[:at], f"-I{headers}", *words[at:]]


def main(argv: list[str]) -> int:
    argv = with_fixed_name(with_headers(argv))
    address, unit = os.environ.get(SOCKET), _following(argv, "-o")
    if not address or unit is None:
        os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    # ninja reports what it interrupts; a traceback of ours would say nothing more.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    broker = socket.socket(socket.AF_UNIX)
    try:
        broker.connect(address)
    except OSError:
        sys.stderr.write("the build that this unit belongs to has ended\n")
        return 1
    with broker, broker.makefile("rwb", buffering=0) as channel:
        _send(channel, {"unit": unit})
        log = log_path(Path(os.environ.get(LOGS, "logs")), unit)
        status = 1
        while True:
            order = json.loads(channel.readline() or b"{}")
            if order.get("do") != "run":
                return status
            result = _run(argv, log)
            status = result["status"]
            _send(channel, result)


def _run(argv: list[str], log: Path) -> dict[str, Any]:
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w+b") as handle:
        handle.write(f"+ cd {shlex.quote(str(Path.cwd()))} && {shlex.join(argv)}\n".encode())
        handle.flush()
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=handle, stderr=handle)
        _, raw, usage = os.wait4(child.pid, 0)
        status = child.returncode = os.waitstatus_to_exitcode(raw)
        handle.seek(max(0, handle.seek(0, os.SEEK_END) - _TAIL))
        tail = handle.read()
    killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL) or (
        status != 0 and _KILLED.search(tail) is not None
    )
    return {
        "status": status if status >= 0 else 128 - status,
        "killed": killed,
        "seconds": round(time.monotonic() - start, 3),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
        # Of the largest process among the compiler and all that it started (kilobytes on Linux).
        "peak_gib": round(usage.ru_maxrss / 1024**2, 3),
    }


def _following(argv: list[str], option: str) -> str | None:
    for word, following in itertools.pairwise(argv):
        if word == option:
            return following
    return None


def _send(channel: RawIOBase, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
