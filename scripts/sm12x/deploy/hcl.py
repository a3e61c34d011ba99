"""Writes HCL as `nomad fmt` leaves it, so that a rendered file needs no second tool."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INDENT = "  "
WIDTH = 100
# Nothing that HCL would read as its own syntax, so it may stand unquoted.
_HEREDOC_END = re.compile(r"^\s*EOT\s*$", re.MULTILINE)


class Writer:
    """Collects lines. An expression is given as HCL text; ``quoted`` makes one of a string."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0
        # Attributes that follow each other without a break: their equals signs stand in line.
        self._run: list[tuple[str, str]] = []

    def attr(self, name: str, expression: str) -> None:
        """``name = expression``; one of several lines stands by itself, as the formatter has it."""
        if "\n" not in expression:
            self._run.append((name, expression))
            return
        self._flush()
        first, *rest = expression.split("\n")
        self._put(f"{name} = {first}")
        for line in rest:
            self._put(line)

    def text(self, name: str, value: str) -> None:
        """``name = "value"``, taken literally: no interpolation by Nomad or HCL."""
        self.attr(name, quoted(value))

    def heredoc(self, name: str, value: str) -> None:
        """``name`` as lines of text, taken literally but for the indentation.

        Raises:
            ValueError: a line of ``value`` would end it.
        """
        if _HEREDOC_END.search(value):
            raise ValueError(f"{name} has a line EOT")
        self._run.append((name, "<<-EOT"))
        self._flush()
        for line in escaped(value).rstrip("\n").split("\n"):
            self._put(f"{INDENT}{line}" if line else "")
        self._put("EOT")

    def comment(self, *lines: str) -> None:
        self._flush()
        width = WIDTH - len(INDENT) * self._depth - 2
        for line in lines:
            # A line with blanks in front is set by hand.
            whole = line.startswith(" ") or len(line) <= width
            for part in [line] if whole else textwrap.wrap(line, width, break_on_hyphens=False):
                self._put(f"# {part}".rstrip())

    def blank(self) -> None:
        """An empty line, unless there is one already or a block has just been opened."""
        self._flush()
        if self._lines and self._lines[-1] and not self._lines[-1].endswith("{"):
            self._lines.append("")

    @contextmanager
    def block(self, *head: str) -> Iterator[None]:
        """``head { ... }``; the words after the first are its labels."""
        self._flush()
        self._put(" ".join((head[0], *(quoted(label) for label in head[1:]), "{")))
        self._depth += 1
        yield
        self._flush()
        if self._lines[-1] == "":
            self._lines.pop()
        self._depth -= 1
        self._put("}")

    def __str__(self) -> str:
        self._flush()
        return "\n".join(self._lines) + "\n"

    def _put(self, line: str) -> None:
        self._lines.append(f"{INDENT * self._depth}{line}" if line else "")

    def _flush(self) -> None:
        width = max((len(name) for name, _ in self._run), default=0)
        run, self._run = self._run, []
        for name, expression in run:
            self._put(f"{name:<{width}} = {expression}")


def escaped(text: str) -> str:
    """``text`` with HCL's own template marks made literal."""
    return text.replace("${", "$${").replace("%{", "%%{")


def quoted(text: str) -> str:
    """A string of HCL that stands for exactly ``text``."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped(plain)}"'


def runtime(text: str) -> str:
    """A string in which `${NAME}` stays for Nomad to fill in when the task starts."""
    return f'"{text}"'


def listed(words: Sequence[str]) -> str:
    """A list of expressions: on one line if it is short, else one a line."""
    line = f"[{', '.join(words)}]"
    if len(line) <= WIDTH - 20:
        return line
    return "\n".join(("[", *(f"{INDENT}{word}," for word in words), "]"))
