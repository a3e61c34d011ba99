"""Run a function in a forked process, so that a crash or a hang is an outcome like any other."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# How much of a failing case's output is worth showing.
TAIL = 6000
# Seconds for which a case may wait, it and its children: locks that wait for each other take no
# processor, and nothing that a case waits for takes as long. Threads that ask for Python's lock in
# vain wake up every 5 ms, hence the share of the time that still counts as waiting.
IDLE = 5.0
_IDLE_SHARE = 0.02
# By their files.
_witnesses: dict[str, Any] = {}


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


class Server:
    """A process that forks for every request: a line of JSON on its stdin, one on its stdout.

    It is ``python -m MODULE ARGUMENTS``, started in the checkout; what it prints goes to ``log``.
    """

    def __init__(
        self, module: str, *arguments: str, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            RuntimeError: the process has ended; with the last line that it printed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # It may have ended: then the answer is missing.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            why = said[-1] if said else "it printed nothing"
            raise RuntimeError(f"the process ended with {self._process.wait()}: {why}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self, seconds: float) -> None:
        """Close its stdin, at which it ends; kill it if it has not ended after ``seconds``."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            # A busy machine takes its time over what torch does at exit.
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def witness(file: str) -> Any:
    """The module of a witness's file.

    Imported in this process, once, it is there in each of its forks: alone pytest, which every
    witness imports, takes a tenth of a second.
    """
    if file not in _witnesses:
        spec = importlib.util.spec_from_file_location(f"witness_{len(_witnesses)}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _witnesses[file] = module
    return _witnesses[file]


def serve(load: Callable[[], Callable[[dict[str, Any]], Outcome]]) -> None:
    """Be a ``Server``'s process: ``load``, and answer each request with what that returned.

    Its end is the end of stdin.
    """
    # Answers go to the real stdout; whatever is printed, from the first import on, to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = load()
    for line in sys.stdin:
        answers.write(json.dumps(vars(answer(json.loads(line)))) + "\n")
        answers.flush()
