"""The lines of `check`, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sm12x.core import declared

PASS = "pass"  # noqa: S105 - a verdict
FAIL = "fail"
# Works, but probably not as intended.
WARN = "warn"
# Neither good nor bad, but the reader should know.
NOTE = "note"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One finding of `check`. ``next_step`` is "" unless ``state`` is FAIL."""

    topic: str
    state: str
    text: str
    next_step: str = ""


@dataclass(frozen=True)
class Topic:
    """Makes the findings of one topic; ``next_step`` is for failures that name no other."""

    name: str
    next_step: str

    def passed(self, text: str) -> Line:
        return Line(topic=self.name, state=PASS, text=text)

    def failed(self, text: str, next_step: str | None = None) -> Line:
        step = self.next_step if next_step is None else next_step
        return Line(topic=self.name, state=FAIL, text=text, next_step=step)

    def warned(self, text: str) -> Line:
        return Line(topic=self.name, state=WARN, text=text)

    def noted(self, text: str) -> Line:
        return Line(topic=self.name, state=NOTE, text=text)


def as_text(lines: Sequence[Line]) -> str:
    """One line per finding, grouped by topic, then the verdict."""
    out = []
    for topic in dict.fromkeys(line.topic for line in lines):
        out.append(topic)
        for line in lines:
            if line.topic == topic:
                out.append(f"  {line.state}  {line.text}")
                if line.next_step:
                    out.append(f"        next: {line.next_step}")
    bad = sum(line.state == FAIL for line in lines)
    good = sum(line.state == PASS for line in lines)
    out.append(f"check: {'FAILED' if bad else 'ok'}, {good} passed, {bad} failed")
    return "\n".join(out)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `check --json` prints in the image."""

    schema: Literal[1] = 1
    ok: bool
    lines: tuple[Line, ...]


def as_json(lines: Sequence[Line]) -> str:
    ok = all(line.state != FAIL for line in lines)
    return declared.to_json(CheckReport(ok=ok, lines=tuple(lines))).rstrip("\n")
