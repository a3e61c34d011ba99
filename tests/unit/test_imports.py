"""Imports point downward: no circle of modules, none of folders, none of a higher floor."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import sm12x

SCRIPTS = Path(sm12x.__file__).parents[1]
# From the ground up, as in docs/architecture.md. A folder imports from lower floors, and from its
# own floor where that makes no circle. sm12x_dev is above all of sm12x, which ships without it.
FLOORS = {
    "sm12x": (
        ("core", "layout"),
        ("audit", "stack"),
        ("recipes",),
        ("deploy", "plan", "wheel"),
        ("doctor", "image", "runtime"),
        ("verify",),
        ("bench", "pool"),
        ("commands",),
        ("cli", "__main__"),
    ),
    "sm12x_dev": (
        ("advisories", "base_draft", "listing", "lock", "machine_code", "release", "worktree"),
        ("pages",),
        ("witness",),
        ("rebase", "render"),
        ("commands",),
        ("cli", "__main__"),
    ),
}


def modules() -> dict[str, ast.Module]:
    """Every module of both packages by its dotted name, parsed; folders by that of their face."""
    parsed = {}
    for path in (path for package in FLOORS for path in (SCRIPTS / package).rglob("*.py")):
        parts = path.relative_to(SCRIPTS).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        parsed[name] = ast.parse(path.read_text(encoding="utf-8"))
    return parsed


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


def test_what_ships_imports_nothing_of_what_does_not(graph: dict[str, set[str]]) -> None:
    upward = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if name.split(".")[0] == "sm12x" and other.split(".")[0] == "sm12x_dev"
    }
    assert not upward
    assert any(name.startswith("sm12x_dev.") for name in graph)


@pytest.mark.parametrize("package", FLOORS)
def test_no_folder_imports_upward_or_sideways_in_a_circle(
    graph: dict[str, set[str]], package: str
) -> None:
    floor = {name: number for number, names in enumerate(FLOORS[package]) for name in names}
    folders: dict[str, set[str]] = {}
    for name, others in graph.items():
        for other in others:
            # The package's own face has the version alone.
            if not name.startswith(f"{package}.") or not other.startswith(f"{package}."):
                continue
            here, there = name.split(".")[1], other.split(".")[1]
            if here != there:
                folders.setdefault(here, set()).add(there)
                assert floor[there] <= floor[here], f"{name} imports {other}"
    [*graphlib.TopologicalSorter(folders).static_order()]
