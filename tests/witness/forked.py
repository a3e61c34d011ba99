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
from typing import Any

# How much of a failing case's output is worth showing.
TAIL = 6000


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``value`` is what the function returned (through JSON); ``text`` says why it failed."""

    passed: bool
    value: Any = None
    text: str = ""


def run(function: Callable[[], Any], seconds: float) -> Outcome:
    """Fork, call ``function``, and give it ``seconds``."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _child(function, reader, writer, output.fileno())
        os.close(writer)
        status, answer = _wait(child, reader, seconds)
        output.seek(0)
        said = output.read().decode(errors="replace")[-TAIL:]
    if status is None:
        return Outcome(passed=False, text=f"hangs: no end after {seconds:g} s\n{said}")
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


def _wait(child: int, reader: int, seconds: float) -> tuple[int | None, bytes]:
    """The child's status (None if it had to be killed) and what it wrote."""
    deadline = time.monotonic() + seconds
    answer = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None, b""
            piece = pipe.read(65536)
            if not piece:
                break
            answer += piece
    # The pipe is closed: it has ended, or is about to, or hangs in its very last step.
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status, answer
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None, b""


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
