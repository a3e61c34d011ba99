"""Writing TOML that people go on editing: comments above keys, long lists wrapped."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from typing import Any

WIDTH = 100
_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


def dump(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """``values`` as TOML text, in their order, plain keys before tables.

    Args:
        comments: key path ("toolchain.cuda", "module" for the first [[module]]) -> text to put
            above it, lines wrapped by the caller.
    """
    lines: list[str] = []
    _table(values, "", comments or {}, lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _table(
    values: Mapping[str, Any], where: str, comments: Mapping[str, str], lines: list[str]
) -> None:
    later: list[tuple[str, Any]] = []
    for key, value in values.items():
        path = f"{where}{key}"
        if isinstance(value, Mapping) or _is_tables(value):
            later.append((key, value))
            continue
        _comment(path, comments, lines)
        lines.append(f"{_key(key)} = {_value(value, len(key) + 3)}")
    for key, value in later:
        path = f"{where}{key}"
        if isinstance(value, Mapping):
            if not any(not isinstance(inner, Mapping) for inner in value.values()) and value:
                # Only tables in it: they name it themselves.
                _comment(path, comments, lines, gap=True)
                _table(value, f"{path}.", comments, lines)
                continue
            _comment(path, comments, lines, gap=True)
            lines.append(f"[{_path(path)}]")
            _table(value, f"{path}.", comments, lines)
            continue
        for number, entry in enumerate(value):
            if number:
                lines.append("")
            else:
                _comment(path, comments, lines, gap=True)
            lines.append(f"[[{_path(path)}]]")
            _table(entry, f"{path}.", {}, lines)


def _comment(
    path: str, comments: Mapping[str, str], lines: list[str], *, gap: bool = False
) -> None:
    if gap and lines and lines[-1] != "" and not lines[-1].startswith("#"):
        lines.append("")
    if path in comments:
        lines += [f"# {line}".rstrip() for line in comments[path].split("\n")]


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _path(path: str) -> str:
    return ".".join(_key(part) for part in path.split("."))


def _key(key: str) -> str:
    return key if _BARE.match(key) else json.dumps(key)


def _value(value: Any, indent: int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's.
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_key(k)} = {_value(v, 0)}" for k, v in value.items()) + " }"
            if value
            else "{}"
        )
    if isinstance(value, list | tuple):
        return _list([_value(item, 0) for item in value], indent)
    raise TypeError(f"TOML has no {type(value).__name__}")


def _list(items: list[str], indent: int) -> str:
    short = f"[{', '.join(items)}]"
    if indent + len(short) <= WIDTH:
        return short
    rows: list[str] = []
    for item in items:
        if rows and len(rows[-1]) + len(item) + 2 <= WIDTH:
            rows[-1] += f" {item},"
        else:
            rows.append(f"  {item},")
    return "\n".join(["[", *rows, "]"])
