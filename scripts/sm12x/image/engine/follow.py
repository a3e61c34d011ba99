"""Parses an engine's output during a build: the current stage, and the error."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

from sm12x.core.errors import (
    BadFileError,
    BuildFailedError,
    NoSpaceError,
    PatchConflictError,
    Sm12xError,
)
from sm12x.core.progress import MARK
from sm12x.image.engine.engine import Engine

# BuildKit: "#12 [native 3/7] RUN ...", "#12 1.25 text", and "#12 DONE 3.2s" or "#12 CACHED".
_VERTEX = re.compile(r"#\d+ (?:[\d.]+(?: |$))?(?P<text>.*)")
_NAMED = re.compile(r"\[(?:linux/\w+ )?(?P<stage>[\w.-]+) +\d+/\d+\] (?P<text>.*)")
_ENDED = re.compile(r"DONE [\d.]+s|CACHED|sha256:.*")
# buildah: "[2/6] STEP 3/7: RUN ...", or "STEP 3/7: RUN ..." where there is one stage.
_STEP = re.compile(r"(?:\[\d+/\d+\] )?STEP \d+/\d+: (?P<text>.*)")
_FROM_AS = re.compile(r"FROM \S+ AS (?P<name>\S+)", re.IGNORECASE)

# buildah's and BuildKit's own lines about a failed step add only its exit status.
_QUOTED = re.compile(r"building at STEP|failed to solve|executor failed running", re.IGNORECASE)
_ERROR = re.compile(r"^(?:error|fatal|E|ERROR)\b:? ?", re.IGNORECASE)
# One of our own errors: it may quote a program's last lines, and it ends with its next step.
_OURS = re.compile(
    r"^error: (?P<message>(?:(?!^error: ).)*?)\. Next: (?P<next>[^\n]*)\.$", re.M | re.S
)
# A step of ours ends with the code of its error: these are not about the build itself.
_KINDS = {kind.exit_code: kind for kind in (BadFileError, NoSpaceError, PatchConflictError)}
_EXIT = re.compile(r"exit (?:code:|status) (?P<code>\d+)")
_NO_SPACE = re.compile(r"no space left on device|ENOSPC", re.IGNORECASE)
# Lines of the last step that are kept: more than an error of ours quotes.
_KEPT = 200


def own_error(output: str) -> re.Match[str] | None:
    """Find an error of sm12x itself in a container's output: its ``message`` and ``next`` step."""
    return _OURS.search(output)


class Follower:
    """Reads an engine's lines; ``on_step`` gets a line for each step at its start, and for progress
    within it.

    ``no_space`` is whether a disk was full, ``exit_code`` the status of the step that failed, 0
    where none did.
    """

    def __init__(self, on_step: Callable[[str], None]) -> None:
        self._on_step = on_step
        self._stage = ""
        self._step = ""
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self.no_space = False
        self.exit_code = 0

    def __call__(self, line: str) -> None:
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        vertex = _VERTEX.match(line)
        text = vertex["text"] if vertex else line
        if named := vertex and _NAMED.match(text):
            self._start(named["stage"], named["text"])
        elif step := _STEP.match(line):
            stage = _FROM_AS.match(step["text"])
            self._start(stage["name"] if stage else self._stage, step["text"])
        elif text.startswith(MARK):
            self._on_step(f"{self._stage}: {text.removeprefix(MARK)}".removeprefix(": "))
        # Else "--> Using cache 30f37abe95b5", or the id of what a step made.
        elif not line.startswith("--> ") and not (vertex and _ENDED.match(text)):
            self.no_space = self.no_space or bool(_NO_SPACE.search(text))
            if _QUOTED.search(text) and (ended := _EXIT.search(text)):
                self.exit_code = int(ended["code"])
            self._lines.append(text)

    def _start(self, stage: str, text: str) -> None:
        words = re.sub(r"--mount=\S+|\s+", " ", text)
        step = f"{stage}: {' '.join(words.split())[:90]}".removeprefix(": ")
        # BuildKit names a step again when another one has spoken in between.
        if step != self._step:
            self._stage, self._step = stage, step
            # Output of an earlier step is not the reason for this failure.
            self._lines.clear()
            self._on_step(step)

    def _ours(self) -> re.Match[str] | None:
        return own_error("\n".join(self._lines))

    @property
    def reason(self) -> str:
        """The most informative output, for an error message: more than one line where a step of
        sm12x quoted the failed program."""
        if ours := self._ours():
            return ours["message"]
        lines = [line.strip() for line in self._lines if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]
        # The engine's own lines after a command's output tell less.
        plain = [line for line in errors if not _QUOTED.search(line)]
        silent = f"it ended without an error message in {self._step or 'its first step'}"
        return _ERROR.sub("", [silent, *lines[-1:], *errors[-1:], *plain[-1:]][-1], count=1)

    @property
    def next_step(self) -> str:
        """The next step in the failed step's error, "" without one."""
        ours = self._ours()
        return ours["next"] if ours else ""


def failure(
    engine: Engine, dockerfile: str, follower: Follower, log: Path, *, needs_gib: float
) -> Sm12xError:
    """Return the error for a failed build.

    ``follower`` has read all that was printed, which is in ``log``; ``needs_gib`` is what a whole
    bundle takes in the engine's storage.
    """
    if follower.no_space:
        return NoSpaceError(
            f"the disk of {engine.name} is full ({engine.storage() or 'of the remote daemon'}); a "
            f"whole bundle takes {needs_gib:.0f} GiB",
            next_step=f"free space there ({engine.more_room}), and run the same command again: it "
            "resumes",
        )
    inside = f" (inside the builder: {follower.next_step})" if follower.next_step else ""
    kind = _KINDS.get(follower.exit_code, BuildFailedError)
    return kind(
        f"{engine.name} could not build {dockerfile}: {follower.reason}",
        next_step=f"read {log}; the same command resumes at the step that failed{inside}",
    )
