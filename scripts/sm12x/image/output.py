"""Reads what an engine prints while it builds: which stage it is at, and what went wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

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

# What buildah and BuildKit quote of a step that failed says no more than its exit status.
_QUOTED = re.compile(r"building at STEP|failed to solve|executor failed running", re.IGNORECASE)
_ERROR = re.compile(r"^(?:error|fatal|E|ERROR)\b:? ?", re.IGNORECASE)
_OURS = re.compile(r"error: (?!building at STEP).*\. Next: ")
_NO_SPACE = re.compile(r"no space left on device|ENOSPC", re.IGNORECASE)


@dataclass(kw_only=True)
class Stage:
    """A stage of a Dockerfile: seconds spent in its steps, and whether all came from the cache."""

    name: str
    seconds: float = 0.0
    cached: bool = True


class Follower:
    """Fed with an engine's lines; ``on_step`` is told each step as it starts, in one line."""

    def __init__(self, on_step: Callable[[str], None]) -> None:
        self._on_step = on_step
        self._vertices: dict[str, str] = {}
        self._stage = ""
        self._since: float | None = None
        self._said: list[str] = []
        self._errors: list[str] = []
        self.stages: dict[str, Stage] = {}
        self.no_space = False

    def __call__(self, line: str) -> None:
        line = re.sub(r"\x1b\[[0-9;]*m", "", line)
        vertex = _VERTEX.match(line)
        if vertex:
            self._buildkit(vertex["number"], vertex["rest"])
            return
        step = _STEP.match(line)
        if step:
            self._buildah(step)
        elif line.startswith("--> Using cache"):
            self._since = None
        else:
            self._text(line)

    def finish(self) -> None:
        """The build has ended: count the last step."""
        self._close()

    @property
    def reason(self) -> str:
        """The most telling line of what was printed, for an error message."""
        if self._errors:
            # Our own commands say "error: ... Next: ..."; what the engine adds after it tells less.
            ours = [text for text in self._errors if _OURS.match(text)]
            plain = [text for text in self._errors if not _QUOTED.search(text)]
            text = _ERROR.sub("", (ours or plain or self._errors)[-1], count=1)
            return text.partition(". Next: ")[0]
        return self._said[-1] if self._said else "it said nothing"

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
            self._text(_STAMP.sub("", rest))

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
        self._on_step(f"{stage}: {' '.join(words.split())[:90]}")

    def _text(self, line: str) -> None:
        line = line.strip()
        if not line:
            return
        self.no_space = self.no_space or bool(_NO_SPACE.search(line))
        if _ERROR.match(line):
            self._errors.append(line)
        self._said = [*self._said[-4:], line]
