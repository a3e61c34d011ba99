"""HCL as `nomad fmt` leaves it: strings stand for exactly what was given, equals signs in line."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence

_INDENT = "  "
_WIDTH = 100
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Hcl(str):
    """Text that is HCL already; any other string becomes a quoted one."""

    __slots__ = ()


def expression(value: object) -> str:
    """HCL for a value: a quoted string for a string, a list of expressions for a sequence."""
    if isinstance(value, Hcl):
        return value
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Sequence):
        return listed(value)
    return str(value)


def _escaped(text: str) -> str:
    """``text`` with HCL's own template marks made literal."""
    return text.replace("${", "$${").replace("%{", "%%{")


def quoted(text: str) -> Hcl:
    """A string of HCL that stands for exactly ``text``: no interpolation by Nomad or HCL."""
    return Hcl(_escaped(json.dumps(text, ensure_ascii=False)))


def inside(text: str) -> Hcl:
    """``text`` as it stands between the quotes of a string, taken literally."""
    return Hcl(quoted(text)[1:-1])


def runtime(text: str) -> Hcl:
    """A string in which `${NAME}` stays for Nomad to fill in when the task starts."""
    return Hcl(f'"{text}"')


def is_name(text: str) -> bool:
    """Whether ``text`` can name an attribute, a variable or a block."""
    return _NAME.fullmatch(text) is not None


def name(text: str) -> Hcl:
    """``text`` as the name of an attribute or a variable. Raises ValueError if it cannot be one."""
    if not is_name(text):
        raise ValueError(f"{text!r} is not a name in HCL")
    return Hcl(text)


def listed(words: Sequence[object]) -> Hcl:
    """A list: on one line if it is short, else one word per line."""
    texts = [expression(word) for word in words]
    line = f"[{', '.join(texts)}]"
    if len(line) <= _WIDTH - 20:
        return Hcl(line)
    return Hcl("\n".join(("[", *(f"{_INDENT}{text}," for text in texts), "]")))


def rows(pairs: Sequence[tuple[str, object]], indent: int = 0) -> Hcl:
    """`name = value` a line, the equals signs of neighbours in line; ``indent`` counts blanks.

    A value of several lines stands by itself, as the formatter has it.
    """
    lines: list[str] = []
    run: list[tuple[str, str]] = []

    def flush() -> None:
        width = max((len(key) for key, _ in run), default=0)
        lines.extend(f"{key:<{width}} = {value}" for key, value in run)
        run.clear()

    for key, value in ((name(key), expression(value)) for key, value in pairs):
        if "\n" in value:
            flush()
            lines += f"{key} = {value}".split("\n")
        else:
            run.append((key, value))
    flush()
    return Hcl("\n".join(" " * indent + line for line in lines))


def comment(text: str) -> Hcl:
    """``text`` as comments at the left margin, one paragraph, wrapped."""
    # One that fits keeps its blanks; a line break would end the comment.
    text = re.sub(r"[\r\n\v\f\x85\u2028\u2029]+", " ", text.strip())
    fits = len(text) <= _WIDTH - 2
    parts = [text] if fits else textwrap.wrap(text, _WIDTH - 2, break_on_hyphens=False)
    return Hcl("\n".join(f"# {part}".rstrip() for part in parts))


def heredoc(text: str, indent: int) -> Hcl:
    """Lines of text, taken literally but for the indentation, which is ``indent`` blanks."""
    end = "EOT"
    while re.search(rf"^\s*{end}\s*$", text, re.MULTILINE):
        end += "_"
    lines = [
        " " * (indent + len(_INDENT)) + line if line else ""
        for line in _escaped(text).rstrip("\n").split("\n")
    ]
    return Hcl("\n".join((f"<<-{end}", *lines, " " * indent + end)))
