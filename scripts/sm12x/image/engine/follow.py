"""Parses an engine's output during a build: the current stage, and the error."""

from __future__ import annotations

import re
import time
from collections import deque
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
_NAMED = re.compile(r"\[(?:linux/\w+ )?(?P<stage>[\w.-]+) +\d+/\d+\] (?P<text>.*)")
_DONE = re.compile(r"DONE (?P<seconds>[\d.]+)s")
_STAMP = re.compile(r"^[\d.]+(?: |$)")
# buildah: "[2/6] STEP 3/7: RUN ...", or "STEP 3/7: RUN ..." where there is one stage.
_STEP = re.compile(r"(?:\[(?P<stage>\d+)/\d+\] )?STEP (?P<step>\d+)/\d+: (?P<text>.*)")
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


@dataclass(kw_only=True)
class Stage:
    """A stage of a Dockerfile: seconds spent in its steps, and whether all came from the cache."""

    name: str
    seconds: float = 0.0
    cached: bool = True


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
        self._vertices: dict[str, str] = {}
        self._stage = ""
        self._since: float | None = None
        self._at = ""
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self.stages: dict[str, Stage] = {}
        self.no_space = False
        self.exit_code = 0

    def __call__(self, line: str) -> None:
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        if vertex := _VERTEX.match(line):
            self._buildkit(vertex["number"], vertex["rest"])
        elif step := _STEP.match(line):
            self._buildah(step)
        elif line.startswith("--> "):
            # "--> Using cache 30f37abe95b5", or the id of what a step made.
            self._since = None if "Using cache" in line else self._since
        else:
            self._text(line, self._stage)

    def finish(self) -> None:
        """Count the last step: the build has ended."""
        if self._since is not None:
            stage = self.stages[self._stage or "build"]
            stage.seconds += time.monotonic() - self._since
            stage.cached = False
            self._since = None

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
        if errors:
            return _ERROR.sub("", (plain or errors)[-1], count=1)
        silent = f"it ended without an error message in {self._at}" if self._at else ""
        return lines[-1] if lines else silent or "it printed nothing"

    @property
    def next_step(self) -> str:
        """The next step in the failed step's error, "" without one."""
        ours = self._ours()
        return ours["next"] if ours else ""

    def _ours(self) -> re.Match[str] | None:
        return own_error("\n".join(self._lines))

    def _buildkit(self, number: str, rest: str) -> None:
        if named := _NAMED.match(rest):
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
        self.finish()
        if named := _FROM_AS.match(step["text"]):
            self._stage = named["name"]
        elif step["step"] == "1":
            self._stage = f"stage {step['stage'] or 1}"
        self._start(self._stage or "build", step["text"])
        # FROM takes no time of its own, and is not announced as cached.
        self._since = None if step["text"].startswith("FROM") else time.monotonic()

    def _start(self, stage: str, text: str) -> None:
        self.stages.setdefault(stage, Stage(name=stage))
        words = re.sub(r"--mount=\S+|\s+", " ", text)
        at = f"{stage}: {' '.join(words.split())[:90]}"
        if at == self._at:
            # BuildKit names a step again when another one has spoken in between.
            return
        self._at = at
        # Output of an earlier step is not the reason for this failure.
        self._lines.clear()
        self._on_step(self._at)

    def _text(self, line: str, stage: str) -> None:
        self.no_space = self.no_space or bool(_NO_SPACE.search(line))
        ended = _EXIT.search(line) if _QUOTED.search(line) else None
        self.exit_code = int(ended["code"]) if ended else self.exit_code
        if line.startswith(MARK):
            self._on_step(f"{stage}: {line.removeprefix(MARK)}".removeprefix(": "))
        else:
            self._lines.append(line)


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
