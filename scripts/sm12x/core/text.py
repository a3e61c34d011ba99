"""Counts, sizes, durations, lists, paragraphs and tables, each written once for all reports."""

from __future__ import annotations

import difflib
import io
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

if TYPE_CHECKING:
    from rich.table import Table

_T = TypeVar("_T")

KIB, MIB, GIB = 1024, 1024**2, 1024**3
WIDTH = 100
# Wider than any line: what is to be copied or searched for is not broken.
_UNBROKEN = 10_000
# What drives a terminal (C0 without tab and newline, DEL, C1), reorders what is read (the marks,
# embeddings, overrides and isolates of bidirectional text), ends a line in some readers, or is a
# byte that is no UTF-8 (how Python keeps one).
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
# The one escape of ours in a report: a word in a colour (`click.style`), as the doctor has them.
_COLOURED = re.compile(rf"(\x1b\[3[0-7]m[A-Za-z ?]+\x1b\[0m)|{CONTROL.pattern}")


def counted(number: int, one: str, many: str = "") -> str:
    """Return "1 file", "3 files", "2 patches", "4 libraries"."""
    if number == 1:
        return f"1 {one}"
    if not many:
        ending = {"y": "ies", "h": f"{one[-1]}es"}.get(one[-1], f"{one[-1]}s")
        many = one[:-1] + ending
    return f"{number} {many}"


def size(count: float) -> str:
    """Return bytes as "3.2 GiB", "64.0 MiB" or "1.5 KiB"."""
    if abs(count) >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.1f} MiB" if abs(count) >= MIB / 10 else f"{count / KIB:.1f} KiB"


def duration(seconds: float) -> str:
    """Return "12.0 s" or "2.5 min"."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def ranges(numbers: Iterable[int]) -> str:
    """Render numbers without gaps as "0-3", others as "0, 2"."""
    values = sorted(numbers)
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ", ".join(str(number) for number in values)


def either(words: Iterable[str]) -> str:
    """Return "a, b or c"; "" without any."""
    *most, last = [*words] or [""]
    return f"{', '.join(most)} or {last}" if most else last


def first_of(words: Sequence[str], shown: int) -> str:
    """Return the words, or the first of them and how many more there are."""
    if len(words) <= shown:
        return ", ".join(words)
    return f"{', '.join(words[:shown])} and {len(words) - shown} more"


def near(word: str, choices: Iterable[str], *, cutoff: float = 0.6, shown: int = 1) -> str:
    """Return the choice closest to ``word``, or "a or b" of several; "" if none is close."""
    others = [name for name in choices if name != word]
    return either(difflib.get_close_matches(word, others, n=shown, cutoff=cutoff))


def perhaps(word: str, choices: Iterable[str]) -> str:
    """Return "; perhaps you meant X", or "" if no choice is close."""
    suggestion = near(word, choices)
    return f"; perhaps you meant {suggestion}" if suggestion else ""


def paragraph(words: str, width: int = WIDTH, *, first: str = "", rest: str | None = None) -> str:
    """Wrap ``words`` to ``width``; ``first`` begins the first line, ``rest`` the others."""
    # A single word of megabytes takes hours.
    return textwrap.fill(
        words[:_UNBROKEN],
        width,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


def bullets(sentences: Iterable[str], width: int = WIDTH, *, indent: int = 0) -> list[str]:
    """Return a line that begins with "- ", or several, of each sentence."""
    pad = " " * indent
    return [paragraph(sentence, width, first=f"{pad}- ", rest=f"{pad}  ") for sentence in sentences]


class Page:
    """Lines and rich's tables as text, without colours, markup and trailing spaces."""

    def __init__(self, width: int = WIDTH) -> None:
        from rich.console import Console

        self._out = io.StringIO()
        self._console = Console(
            file=self._out,
            width=width,
            color_system=None,
            highlight=False,
            markup=False,
            emoji=False,
        )

    def add(self, what: Table | str = "") -> None:
        """Add a table, a line, or an empty line."""
        self._console.print(what)

    @property
    def text(self) -> str:
        return "".join(f"{line.rstrip()}\n" for line in self._out.getvalue().splitlines())


def draw(table: Table, width: int = WIDTH) -> str:
    """Return one table as lines of text."""
    page = Page(width)
    page.add(table)
    return page.text.removesuffix("\n")


def columns(rows: Iterable[Sequence[str]], *, head: Sequence[str] = (), indent: int = 0) -> str:
    """Align rows in columns; no cell is broken."""
    from rich.table import Table

    table: Any = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for row in (*([head] if head else ()), *rows):
        table.add_row(*row)
    return textwrap.indent(draw(table, _UNBROKEN), " " * indent)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a pipe in a cell is escaped, a line break becomes a blank."""
    lines = [_row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    clean = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(clean) + " |"


def no_markdown(line: str) -> str:
    """Return a line in which nothing of others' words is Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_<[!#" else c for c in line)


def visible(text: str) -> str:
    r"""Escape each character of ``CONTROL`` in ``text``: ``\x1b``, ``\u202e``."""
    return CONTROL.sub(lambda match: _escaped(match[0]), text)


def one_line(name: str) -> str:
    """Return a name as ``visible`` has it, on one line."""
    return visible(name).replace("\n", "\\x0a").replace("\t", "\\x09")


def each(value: _T, change: Callable[[str], str]) -> _T:
    """Return ``value`` with ``change`` made to its texts, at any depth and in keys too.

    ``value`` is a text, or a dataclass, mapping or list of values.
    """
    result: Any = value
    if isinstance(result, str):
        result = change(result)
    elif is_dataclass(result) and not isinstance(result, type):
        names = [one.name for one in fields(result) if one.init]
        result = replace(result, **{name: each(getattr(result, name), change) for name in names})
    elif isinstance(result, Mapping):
        result = {each(key, change): each(one, change) for key, one in result.items()}
    elif isinstance(result, tuple | list):
        result = type(result)(each(one, change) for one in result)
    return cast(_T, result)


def without(value: _T, secrets: Mapping[str, str]) -> _T:
    """Replace every secret in the texts of ``value``, as ``each`` has them, by its name.

    Args:
        secrets: secret -> what stands for it.
    """

    def hidden(text: str) -> str:
        # The longest first: one may be the beginning of another.
        for secret in sorted(secrets, key=len, reverse=True):
            text = text.replace(secret, f"<{secrets[secret]}>")
        return text

    return each(value, hidden)


def _escaped(char: str) -> str:
    r"""Return ``char`` as ``\x1b`` or ``\u202e``; of a byte that is no UTF-8, that byte."""
    number = ord(char)
    if number < 0x100 or 0xDC80 <= number <= 0xDCFF:
        return f"\\x{number & 0xFF:02x}"
    return f"\\u{number:04x}"


class VisibleStream:
    """A text stream that writes ``visible`` text.

    Without ``buffer``, through which click would write past it. rich's consoles write to the stream
    below it, as their own escapes are to reach the terminal: ``progress.stderr_console`` filters.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(
            _COLOURED.sub(lambda match: match[1] or _escaped(match[0]), text)
        )
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.rich_proxied_file, name)


def guard_streams() -> None:
    """From here on text leaves through ``VisibleStream``, whoever it comes from: file names,
    recipes, replies of servers, output of programs."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, cast(TextIO, VisibleStream(stream)))


def discard_stdout() -> None:
    """Send what is still to be printed nowhere: the reader left (`sm12x ... | head`)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
