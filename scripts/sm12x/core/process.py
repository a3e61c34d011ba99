"""The one place that starts processes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from sm12x.core.errors import ToolFailedError, ToolMissingError

_TAIL_LINES = 20
_NEXT_STEP = "read the lines above; repeat the command by hand to see all of its output"
_READING = "repeat the command by hand to see what it says"
# Seconds that a program has to end after SIGTERM. docker's client waits for its daemon to give up a
# step, for minutes on a slow disk; debootstrap takes its mounts away, which must not be cut short.
_GRACE_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class Completed:
    """A finished process, and its output as text."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    stdin: str | bytes | None = None,
    check: bool = True,
    timeout: float | None = None,
    next_step: str = _NEXT_STEP,
) -> Completed:
    """Run ``argv`` to its end and return its output as text.

    Args:
        env: variables to set on top of the current environment; None takes one out of it.
        check: raise when the exit status is not 0.
        next_step: what the error says to do when the process fails.

    Raises:
        ToolMissingError: ``argv[0]`` is not an executable.
        ToolFailedError: non-zero exit with ``check``, or ``timeout`` (seconds) ran out.
    """
    words = _words(argv)
    data = stdin.encode() if isinstance(stdin, str) else stdin
    with subprocess.Popen(
        words,
        cwd=cwd,
        env=_environment(env),
        stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # With a timeout the program has its own process group, so that a kill reaches grandchildren
        # too: one that holds the pipes open would block this process.
        start_new_session=timeout is not None,
    ) as process:
        try:
            raw_out, raw_err = process.communicate(data, timeout=timeout)
        except BaseException as error:
            if timeout is None:
                process.kill()
            else:
                _signal_group(process, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise ToolFailedError(
                    f"`{shlex.join(words)}` did not finish in {timeout:g} s", next_step=next_step
                ) from None
            raise
    done = Completed(
        argv=tuple(words),
        returncode=process.returncode,
        stdout=raw_out.decode(errors="replace"),
        stderr=raw_err.decode(errors="replace"),
    )
    if check and done.returncode != 0:
        raise failed(done, next_step)
    return done


def _signal_group(process: subprocess.Popen[Any], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


class Background:
    """A background process in a process group of its own, which ``stop`` ends as a whole.

    Its output goes to ``log``, else to this process's own output. The caller must call ``stop`` on
    every path.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        log: Path | None,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        # Output that is shown is not kept: the log to read is then empty.
        self.log = log or Path(os.devnull)
        with log.open("wb") if log else nullcontext() as handle:
            self._process = subprocess.Popen(
                _words(argv),
                cwd=cwd,
                env=_environment(env),
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT if log else None,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Wait for the exit status, as ``poll`` gives it; None where ``seconds`` have passed."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def terminate(self) -> None:
        """Send SIGTERM to the process group; ``stop`` kills what does not end."""
        _signal_group(self._process, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the process group and do not wait, as a signal handler must not."""
        _signal_group(self._process, signal.SIGKILL)

    def stop(self) -> None:
        """Kill the process group, unless it has ended already."""
        self.kill()
        self._process.wait()


def end_all(children: Sequence[Background], grace: float) -> None:
    """Send SIGTERM to all of them, and after ``grace`` seconds SIGKILL to those that go on."""
    for child in children:
        child.terminate()
    end = time.monotonic() + grace
    while time.monotonic() < end and any(child.poll() is None for child in children):
        time.sleep(0.1)
    for child in children:
        child.stop()


def stream(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str | None] | None = None,
    on_line: Callable[[str], None] | None = None,
    log: Path | None = None,
    next_step: str = _NEXT_STEP,
) -> None:
    """Run ``argv``, handing each line of its stdout and stderr, as it comes, to ``on_line``.

    The lines also go to ``log`` when given; without ``on_line`` they go to our stderr. Raises as
    ``run`` does; the error carries the last lines.
    """
    words = _words(argv)
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    # Line-buffered, so that a reader of the log sees a long step's output at once.
    with (
        log.open("a", buffering=1, encoding="utf-8") if log else nullcontext() as handle,
        subprocess.Popen(
            words,
            cwd=cwd,
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        try:
            if handle:
                handle.write(f"+ {shlex.join(words)}\n")
            for line in process.stdout or ():
                line = line.rstrip("\n")
                tail.append(line)
                if handle:
                    handle.write(line + "\n")
                (on_line or _to_stderr)(line)
            returncode = process.wait()
        except BaseException:
            # Ctrl-C or a failing sink must not leave the child behind.
            process.terminate()
            try:
                process.wait(timeout=_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if returncode != 0:
        raise _failed(words, returncode, list(tail), next_step)


def replace(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> NoReturn:
    """Become ``argv``: the new program has our process id, so signals reach it and nothing else.

    Raises:
        ToolMissingError: ``argv[0]`` is not an executable.
        ToolFailedError: the system does not start it: it is for another machine, say.
    """
    words = _words(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, {**os.environ, **(env or {})})  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise ToolFailedError(
            f"`{words[0]}` cannot be started: {(error.strerror or str(error)).lower()}",
            next_step="it has to be a program for this machine, or a script that begins with #!",
        ) from None


@contextmanager
def reading(argv: Sequence[str | Path]) -> Iterator[IO[bytes]]:
    """Yield the stdout of ``argv`` as it comes, for output too large to keep.

    Raises:
        ToolMissingError: ``argv[0]`` is not an executable.
        ToolFailedError: non-zero exit; raised even if what had come could not be understood, since
            the exit is then the cause.
    """
    words = _words(argv)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout is not None  # noqa: S101 - PIPE was asked for
        try:
            yield process.stdout
            # A reader may stop before the last byte; the writer must not fail for that.
            while process.stdout.read(1 << 20):
                pass
        finally:
            # A writer that still runs was not the cause; one that failed may need a moment to exit.
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            process.stdout.close()
            process.terminate()
            if process.wait() > 0:
                errors.seek(0)
                lines = errors.read().decode(errors="replace").splitlines()
                raise _failed(words, process.returncode, lines, _READING)


def which(name: str) -> Path | None:
    """Return the first executable called ``name`` on PATH, or None."""
    path = shutil.which(name)
    return Path(path) if path else None


def which_all(name: str) -> list[Path]:
    """List every executable called ``name`` on PATH, in order, links to one file once."""
    seen: dict[Path, Path] = {}
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        program = shutil.which(name, path=folder) if folder else None
        if program:
            seen.setdefault(Path(program).resolve(), Path(program))
    return list(seen.values())


def _words(argv: Sequence[str | Path]) -> list[str]:
    words = [str(word) for word in argv]
    if shutil.which(words[0]) is None:
        raise ToolMissingError(
            f"`{words[0]}` is not installed or not on PATH",
            next_step=f"install {words[0]} and run the command again",
        )
    return words


def _environment(extra: Mapping[str, str | None] | None) -> dict[str, str] | None:
    if extra is None:
        return None
    merged: dict[str, str | None] = {**os.environ, **extra}
    return {name: value for name, value in merged.items() if value is not None}


def _failed(
    words: Sequence[str], returncode: int, lines: Sequence[str], next_step: str
) -> ToolFailedError:
    tail = "\n".join(f"    {line}" for line in list(lines)[-_TAIL_LINES:])
    output = f"; its last lines:\n{tail}\n" if tail else ""
    # Of a program that is given as text, its beginning.
    beginnings = (re.sub(r"^\s*(.*)\n(?s:.+)", r"\1...", word) for word in words)
    return ToolFailedError(
        f"`{shlex.join(beginnings)}` ended with {returncode}{output}", next_step=next_step
    )


def failed(done: Completed, next_step: str = _NEXT_STEP) -> ToolFailedError:
    """Return the error that ``run`` raises with ``check``, for a process that ran without it."""
    lines = (done.stderr or done.stdout).splitlines()
    return _failed(done.argv, done.returncode, lines, next_step)


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
