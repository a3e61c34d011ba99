"""YAML texts: read with the lines of their keys, written, and changed in one place.

Apart from core/declared.py: a bare host that runs the doctor may lack PyYAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from sm12x.core.text import CONTROL, visible


@dataclass(frozen=True, kw_only=True)
class Yaml:
    """What a YAML text holds, and on which line (from 1) each key or item stands.

    ``faults`` are lines and what is wrong there; ``data`` is None if nothing can be read.
    """

    data: Any
    lines: Mapping[tuple[str | int, ...], int]
    faults: tuple[tuple[int, str], ...]

    def line(self, where: tuple[str | int, ...]) -> int:
        """Return the line of a key, or of the nearest table around it."""
        ways = (where[:length] for length in range(len(where), 0, -1))
        return next((self.lines[way] for way in ways if way in self.lines), 1)


def parse(text: str) -> Yaml:
    """Read YAML. A date stays the text it is, as in YAML 1.2, and a key is always text.

    A control character is a fault, written as it is (in a comment too) or as an escape: the
    values are copied into commands and files, where it would be invisible.
    """
    if len(text) > _MOST_TEXT:
        fault = f"has {len(text)} characters: at most {_MOST_TEXT} are read"
        return Yaml(data=None, lines={}, faults=((1, fault),))
    if match := CONTROL.search(text.replace("\r\n", "\n")):
        line = text.count("\n", 0, match.start()) + 1
        return Yaml(data=None, lines={}, faults=((line, _control(match[0])),))
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        reader = _Reader()
        data = reader.value(node, ()) if node else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        fault = getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark else 1
        return Yaml(data=None, lines={}, faults=((line, f"is not YAML: {fault}"),))
    except RecursionError:
        return Yaml(data=None, lines={}, faults=((1, "is nested too deeply"),))
    return Yaml(data=data, lines=reader.lines, faults=tuple(reader.faults))


# Thirty times the longest recipe that ships. PyYAML takes seconds for a megabyte.
_MOST_TEXT = 1 << 18
_MOST_FAULTS = 50


def _control(text: str) -> str:
    return f"has a control character: {visible(text)}"


class _Reader:
    # Nested aliases can expand to more values than fit in memory.
    MOST = 10_000

    def __init__(self) -> None:
        self.lines: dict[tuple[str | int, ...], int] = {}
        self.faults: list[tuple[int, str]] = []
        self._scalars = yaml.SafeLoader("")

    def value(self, node: yaml.Node, where: tuple[str | int, ...]) -> object:
        if len(self.lines) > self.MOST:
            raise yaml.YAMLError(f"more than {self.MOST} values")
        if len(self.faults) > _MOST_FAULTS:
            raise yaml.YAMLError(f"more than {_MOST_FAULTS} faults, the first: {self.faults[0][1]}")
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, object] = {}
            for name, value in node.value:
                line = name.start_mark.line + 1
                if not isinstance(name, yaml.ScalarNode):
                    self.faults.append((line, "a key is not text"))
                    continue
                key = name.value
                if CONTROL.search(key):
                    self.faults.append((line, _control(key)))
                here = (*where, key)
                if key in mapping:
                    # PyYAML keeps the last one silently.
                    first = self.lines[here]
                    self.faults.append((line, f"{key} is given twice, first on line {first}"))
                    for old in [one for one in self.lines if one[: len(here)] == here]:
                        del self.lines[old]
                self.lines[here] = line
                mapping[key] = self.value(value, here)
            return mapping
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                self.lines[*where, index] = item.start_mark.line + 1
                items.append(self.value(item, (*where, index)))
            return items
        if node.tag == "tag:yaml.org,2002:timestamp":
            return node.value
        try:
            data = self._scalars.construct_object(node, deep=True)
            str(data).encode()
        except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
            self.faults.append((node.start_mark.line + 1, f"value cannot be read: {error}"))
            return None
        if not isinstance(data, str | int | float | None):
            self.faults.append((node.start_mark.line + 1, f"{type(data).__name__} is not text"))
            return None
        if isinstance(data, str) and CONTROL.search(data):
            self.faults.append((node.start_mark.line + 1, _control(data)))
        return data


def put(text: str, key: str, value: str, after: tuple[str, ...] = ()) -> str:
    """Replace the value of a top-level key in ``text``, a mapping, or add the key.

    It is added below the first key of ``after`` that is there; every other byte stays.
    """
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(node, yaml.MappingNode)  # noqa: S101 - it has been read as a recipe
    nodes = {name.value: at for name, at in node.value}
    if key in nodes:
        start, end = nodes[key].start_mark.index, nodes[key].end_mark.index
        return text[:start] + value + text[end:]
    for name in after:
        if name in nodes:
            # A scalar's value ends on its own last line, a comment may follow.
            end = text.find("\n", nodes[name].end_mark.index)
            end = len(text) if end < 0 else end + 1
            return f"{text[:end]}{key}: {value}\n{text[end:]}"
    return f"{key}: {value}\n{text}"


class _Dumper(yaml.SafeDumper):
    pass


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


_Dumper.add_representer(str, _text)
# Readers of YAML 1.2 take `1e6` for a float and `0o17` for an integer; PyYAML, which decides by
# YAML 1.1, would leave such a text without quotes.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|0o[0-7]+)$"),
    list("-+.0123456789"),
)


def dump(content: dict[str, object]) -> str:
    """Return YAML as people write it: keys in order, text of several lines as such."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=1000)
