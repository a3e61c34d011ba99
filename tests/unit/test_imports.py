"""Imports point downward: no circle of modules, none of folders, none of a higher floor."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sm12x

PACKAGE = Path(sm12x.__file__).parent
# From the ground up, as in docs/architecture.md. A folder imports from lower floors, and from its
# own floor where that makes no circle.
FLOORS = (
    ("core", "layout"),
    ("audit", "recipes", "stack"),
    ("deploy", "plan", "wheel"),
    ("doctor", "image", "runtime"),
    ("verify",),
    ("pages",),
    ("commands",),
    ("cli", "__main__"),
)


def modules() -> dict[str, ast.Module]:
    """Every module of the package by its dotted name, parsed; folders by that of their face."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = [sm12x.__name__, *path.relative_to(PACKAGE).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(module: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: {*imported(module, known)} for name, module in known.items()}


def test_no_circle_of_modules(graph: dict[str, set[str]]) -> None:
    order = [*graphlib.TopologicalSorter(graph).static_order()]
    assert len(order) == len(graph) > 150


def test_no_folder_imports_upward_or_sideways_in_a_circle(graph: dict[str, set[str]]) -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    folders: dict[str, set[str]] = {}
    for name, others in graph.items():
        for other in others:
            # The package's own face has the version alone.
            if "." not in name or "." not in other:
                continue
            here, there = name.split(".")[1], other.split(".")[1]
            if here != there:
                folders.setdefault(here, set()).add(there)
                assert floor[there] <= floor[here], f"{name} imports {other}"
    [*graphlib.TopologicalSorter(folders).static_order()]
