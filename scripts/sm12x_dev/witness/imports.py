"""The modules that Python files name."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def parsed(path: Path) -> ast.Module:
    """Return the file parsed; an empty module where it is none, which pytest reports."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


@functools.cache
def names(path: Path) -> frozenset[str]:
    """Return every dotted name that a file imports, or has as a string, to start it or patch it."""
    dotted: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            dotted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            dotted |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted |= {node.value} if _NAME.fullmatch(node.value) else set()
    return frozenset(dotted)
