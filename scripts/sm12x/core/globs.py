"""Paths against globs: ``*`` stays within a folder, ``**`` goes across folders."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence


def matches(path: str, glob: str) -> bool:
    return _matches(path.split("/"), glob.split("/"))


def _matches(path: Sequence[str], glob: Sequence[str]) -> bool:
    if not glob:
        return not path
    if glob[0] == "**":
        return _matches(path, glob[1:]) or (bool(path) and _matches(path[1:], glob))
    return bool(path) and fnmatch.fnmatchcase(path[0], glob[0]) and _matches(path[1:], glob[1:])
