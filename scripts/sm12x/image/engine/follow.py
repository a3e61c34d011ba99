"""Parses an engine's output during a build: the current stage, and the error."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
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

# BuildKit: "#12 [native 3/7] RUN ...", "#12 CACHED", "#12 DONE 3.2s", "#12 1.25 text".
_VERTEX = re.compile(r"#(?P<number>\d+) (?P<rest>.*)")
_NAMED = re.compile(
    r"\[(?:linux/\w+ )?(?P<stage>[\w.-]+) +(?P<step>\d+)/(?P<steps>\d+)\] (?P<text>.*)"
)
_DONE = re.compile(r"DONE (?P<seconds>[\d.]+)s")
_STAMP = re.compile(r"^[\d.]+ ")
# buildah: "[2/6] STEP 3/7: RUN ...", or "STEP 3/7: RUN ..." where there is one stage.
_STEP = re.compile(r"(?:\[(?P<stage>\d+)/\d+\] )?STEP (?P<step>\d+)/(?P<steps>\d+): (?P<text>.*)")
_FROM_AS = re.compile(r"FROM \S+ AS (?P<name>\S+)", re.IGNORECASE)

# buildah's and BuildKit's own lines about a failed step add only its exit status.
_QUOTED = re.compile(r"building at STEP|failed to solve|executor failed running", re.IGNORECASE)
_ERROR = re.compile(r"^(?:error|fatal|E|ERROR)\b:? ?", re.IGNORECASE)
_OURS = re.compile(r"error: (?!building at STEP)")
_NEXT = ". Next: "
# One of our own errors quotes the last lines of a program it ran; no more than so many are kept.
_BLOCK_LINES = 60
# A step of ours ends with the code of its error: these are not about the build itself.
_KINDS = {kind.exit_code: kind for kind in (BadFileError, NoSpaceError, PatchConflictError)}
_EXIT = re.compile(r"exit (?:code:|status) (?P<code>\d+)")
_NO_SPACE = re.compile(r"no space left on device|ENOSPC", re.IGNORECASE)


@dataclass(kw_only=True)
class Stage:
    """A stage of a Dockerfile: seconds spent in its steps, and whether all came from the cache."""

    name: str
    seconds: float = 0.0
    cached: bool = True


class Follower:
    """Reads an engine's lines; ``on_step`` gets a line for each step at its start, and for progress
    within it.

    ``no_space`` is whether a disk was full, ``exit_code`` the status of the step that failed, 0
    where none did.
    """

    def __init__(self, on_step: Callable[[str], None]) -> None:
        self._on_step = on_step
        self._vertices: dict[str, str] = {}
        self._stage = ""
        self._since: float | None = None
        self._at = ""
        self._said: list[str] = []
        self._errors: list[str] = []
        self._block: list[str] = []
        self._ours = ""
        self.stages: dict[str, Stage] = {}
        self.no_space = False
        self.exit_code = 0

    def __call__(self, line: str) -> None:
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        vertex = _VERTEX.match(line)
        if vertex:
            self._buildkit(vertex["number"], vertex["rest"])
            return
        step = _STEP.match(line)
        if step:
            self._buildah(step)
        elif line.startswith("--> "):
            # "--> Using cache 30f37abe95b5", or the id of what a step made.
            self._since = None if "Using cache" in line else self._since
        else:
            self._text(line, self._stage)

    def finish(self) -> None:
        """The build has ended: count the last step."""
        self._close()
        self._errors += self._block[:1]
        self._block = []

    @property
    def reason(self) -> str:
        """The most informative output, for an error message: more than one line where a step of
        sm12x quoted the failed program."""
        if self._ours:
            return self._ours.partition(_NEXT)[0]
        if self._errors:
            # The engine's own lines after a command's output tell less.
            plain = [text for text in self._errors if not _QUOTED.search(text)]
            return _ERROR.sub("", (plain or self._errors)[-1], count=1)
        if self._said:
            return self._said[-1]
        return (
            f"it ended without an error message in {self._at}" if self._at else "it printed nothing"
        )

    @property
    def next_step(self) -> str:
        """The next step in the failed step's error, "" without one."""
        return self._ours.partition(_NEXT)[2].rstrip(".")

    def _buildkit(self, number: str, rest: str) -> None:
        named = _NAMED.match(rest)
        if named:
            # FROM is reported as done even where there is nothing to do.
            if not named["text"].startswith("FROM "):
                self._vertices[number] = named["stage"]
            self._start(named["stage"], named["text"])
            return
        stage = self._vertices.get(number)
        done = _DONE.match(rest)
        if stage is not None and done:
            self.stages[stage].seconds += float(done["seconds"])
            # What BuildKit fetches from its cache is "CACHED"; a step that ran is "DONE".
            self.stages[stage].cached = False
        elif not done and rest != "CACHED" and not rest.startswith("sha256:"):
            self._text(_STAMP.sub("", rest), stage or "")

    def _buildah(self, step: re.Match[str]) -> None:
        self._close()
        named = _FROM_AS.match(step["text"])
        if named:
            self._stage = named["name"]
        elif step["step"] == "1":
            self._stage = f"stage {step['stage'] or 1}"
        self._start(self._stage or "build", step["text"])
        # FROM takes no time of its own, and is not announced as cached.
        self._since = None if step["text"].startswith("FROM") else time.monotonic()

    def _close(self) -> None:
        if self._since is not None:
            stage = self.stages[self._stage or "build"]
            stage.seconds += time.monotonic() - self._since
            stage.cached = False
            self._since = None

    def _start(self, stage: str, text: str) -> None:
        self.stages.setdefault(stage, Stage(name=stage))
        words = re.sub(r"--mount=\S+|\s+", " ", text)
        at = f"{stage}: {' '.join(words.split())[:90]}"
        if at == self._at:
            # BuildKit names a step again when another one has spoken in between.
            return
        self._at = at
        # Output of an earlier step is not the reason for this failure.
        self._said = []
        self._on_step(self._at)

    def _text(self, line: str, stage: str) -> None:
        self.no_space = self.no_space or bool(_NO_SPACE.search(line))
        ended = _EXIT.search(line) if _QUOTED.search(line) else None
        self.exit_code = int(ended["code"]) if ended else self.exit_code
        if self._block or (_OURS.match(line) and not self._ours):
            self._quote(line)
            return
        line = line.strip()
        if not line:
            return
        if line.startswith(MARK):
            self._on_step(f"{stage}: {line.removeprefix(MARK)}".removeprefix(": "))
            return
        if _ERROR.match(line):
            self._errors.append(line)
        self._said = [*self._said[-4:], line]

    def _quote(self, line: str) -> None:
        """Collect one of our own errors, which can span lines: it ends with its next step."""
        self._block.append(line)
        if _NEXT in line:
            self._ours = "\n".join(self._block).removeprefix("error: ")
            self._block = []
        elif len(self._block) == 1 and not line.endswith(":"):
            # An error of another program, in one line.
            self._errors.append(line)
            self._said = [*self._said[-4:], line]
            self._block = []
        elif len(self._block) > _BLOCK_LINES:
            self._errors.append(self._block[0])
            self._block = []


def failure(
    engine: Engine, dockerfile: str, follower: Follower, log: Path, *, rest_gib: float
) -> Sm12xError:
    """The error for a failed build.

    ``follower`` has read all that was printed, which is in ``log``; ``rest_gib`` is what the bundle
    still takes in the engine's storage.
    """
    if follower.no_space:
        return NoSpaceError(
            f"the disk of {engine.name} is full ({engine.storage() or 'of the remote daemon'})",
            next_step=f"free about {rest_gib:.0f} GiB there ({engine.more_room}), and run the same "
            "command again: it resumes",
        )
    inside = f" (inside the builder: {follower.next_step})" if follower.next_step else ""
    kind = _KINDS.get(follower.exit_code, BuildFailedError)
    return kind(
        f"{engine.name} could not build {dockerfile}: {follower.reason}",
        next_step=f"read {log}; the same command resumes at the step that failed{inside}",
    )
