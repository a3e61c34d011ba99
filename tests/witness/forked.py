"""Run a function in a forked process, so that a crash or a hang is an outcome like any other."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# How much of a failing case's output is worth showing.
TAIL = 6000
# Seconds for which a case may wait, it and its children: locks that wait for each other take no
# processor, and nothing that a case waits for takes as long. Threads that ask for Python's lock in
# vain wake up every 5 ms, hence the share of the time that still counts as waiting.
IDLE = 5.0
_IDLE_SHARE = 0.02


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``value`` is what the function returned (through JSON); ``text`` says why it failed."""

    passed: bool
    value: Any = None
    text: str = ""


def run(function: Callable[[], Any], seconds: float, *, idle: float | None = None) -> Outcome:
    """Fork, call ``function``, and give it ``seconds``, of which it may wait ``idle`` in a row.

    Where the system does not list a process's children (``CONFIG_PROC_CHILDREN``), ``idle`` is not
    watched: a case that hangs then takes all its ``seconds``.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _child(function, reader, writer, output.fileno())
        os.close(writer)
        status, answer, hangs = _wait(child, reader, seconds, idle)
        output.seek(0)
        said = output.read().decode(errors="replace")[-TAIL:]
    if status is None:
        return Outcome(passed=False, text=f"hangs: {hangs}\n{said}")
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return Outcome(passed=False, text=f"killed by {name}\n{said}")
    if os.WEXITSTATUS(status) != 0 or not answer:
        return Outcome(passed=False, text=said or f"exit code {os.WEXITSTATUS(status)}")
    return Outcome(passed=True, value=json.loads(answer))


def _child(function: Callable[[], Any], reader: int, writer: int, output: int) -> None:
    code = 1
    try:
        os.close(reader)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # Whoever called may have put something else in their place.
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        if faulthandler.is_enabled():
            # Where it dumps was set by whoever called: pytest, a copy of its own stderr.
            faulthandler.enable(sys.stderr)
        os.write(writer, json.dumps(function()).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # No cleanup of what was inherited: it belongs to the parent.
        os._exit(code)


def _wait(
    child: int, reader: int, seconds: float, idle: float | None
) -> tuple[int | None, bytes, str]:
    """The child's status (None if it had to be killed, and why) and what it wrote."""
    start = time.monotonic()
    deadline = start + seconds
    watch = None if idle is None else Watch(child, start)
    answer = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            now = time.monotonic()
            left = max(0.0, deadline - now)
            ready, _, _ = select.select([pipe], [], [], left if watch is None else min(left, 0.5))
            if ready:
                piece = pipe.read(65536)
                if not piece:
                    break
                answer += piece
                continue
            now = time.monotonic()
            if now >= deadline:
                return _killed(child, f"no end after {seconds:g} s")
            if watch is not None and idle is not None and watch.waits(now) >= idle:
                return _killed(child, f"no end, and nothing done for {idle:g} s")
    # The pipe is closed: it has ended, or is about to, or hangs in its very last step.
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status, answer, ""
        time.sleep(0.005)
    return _killed(child, f"no end after {seconds:g} s")


def _killed(child: int, why: str) -> tuple[None, bytes, str]:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, b"", why


class Watch:
    """Looks at the processor time of a process, its threads and its children."""

    def __init__(
        self, process: int, now: float, share: float = _IDLE_SHARE, *, queued: bool = False
    ) -> None:
        """``share`` of a processor's time, or less, counts as waiting.

        ``queued``: what it waited for a processor counts as processor time. Of processes that poll
        much, a busy machine gives each less than they take on a quiet one.
        """
        self._process = process
        self._share = share
        self._queued = queued
        self._used = 0
        self._ready = True
        self._looked = self._since = now

    def waits(self, now: float) -> float:
        """Seconds since it last did something, or was ready to, as far as was looked.

        Ready once is what a look finds now and then of a thread that only polls.
        """
        used, ready = _threads(self._process, queued=self._queued)
        if (ready and self._ready) or used - self._used > self._share * (now - self._looked) * 1e9:
            self._since = now
        self._used, self._ready, self._looked = used, ready, now
        return now - self._since


def _threads(process: int, *, queued: bool) -> tuple[int, bool]:
    """Nanoseconds that a process and its children have run; whether a thread of theirs is ready.

    A process whose children are not listed counts as ready. The time of a child that has ended is
    lost with it, which only delays the next look.
    """
    used, ready = 0, False
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
    except OSError:
        return 0, True
    for task in tasks:
        try:
            # Name in parentheses, then the state: running or ready, or waiting for a disk.
            ready |= (task / "stat").read_text().rpartition(")")[2].split()[0] in ("R", "D")
            ran, waited, _ = (task / "schedstat").read_text().split()
            used += int(ran) + (int(waited) if queued else 0)
            children = (task / "children").read_text().split()
        except FileNotFoundError:
            if (task / "stat").exists():
                return used, True
            continue
        except OSError:
            continue
        for child in children:
            more, awake = _threads(int(child), queued=queued)
            used += more
            ready |= awake
    return used, ready


def end(process: subprocess.Popen[str], seconds: float) -> None:
    """End a process that forks for each line on its stdin: close that, and kill it if it stays."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        # A busy machine takes its time over what torch does at exit.
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
