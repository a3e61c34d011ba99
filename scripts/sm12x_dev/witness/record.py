"""Recorded outcomes of tests on the untouched source of a release, in the folder of its base.

That source does not change, and running tests on it takes as long as on the patched source, or
longer: a hang ends at its time limit. Only what differs from a record is run on it.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sm12x.core import declared, process
from sm12x.core.declared import Declared, unless_empty
from sm12x.stack.model.base import Base
from sm12x_dev.witness import imports, junit
from sm12x_dev.witness.environment import environment_name

WITNESSES = "witness-base.json"
_TESTS = Path("tests/witness")
# What any witness may load, whether it imports it or not: rigs, the stand-in driver, the backend.
_SHARED = ("tests/fakecuda", "scripts/sleep-keep")
_PLUGIN = Path("scripts/sm12x_dev/witness/pytest_plugin/sm12x_witness_plugin.py")
# Folders of the modules that witnesses import.
_PLACES = ("", "scripts")
# By this module a witness finds the data of a base.
_LAYOUT = "scripts/sm12x/layout.py"
_SUFFIXES = (".c", ".cpp", ".h", ".py", ".toml")


@dataclass(frozen=True, kw_only=True)
class Outcomes(Declared):
    """The outcomes of a file's tests: how many there are, how many passed, and all in a digest.

    ``inputs`` is a digest of what they depend on besides the record's ``conditions``.
    """

    tests: int
    passed: int
    digest: str
    inputs: Annotated[str, unless_empty] = ""

    @classmethod
    def of(cls, outcomes: Mapping[str, str], *, problem: str = "", inputs: str = "") -> Outcomes:
        """Return the record of ``outcomes`` by test; ``problem`` is why pytest did not end."""
        lines = [f"problem {problem}", *(f"{name} {outcomes[name]}" for name in sorted(outcomes))]
        return cls(
            tests=len(outcomes),
            passed=Counter(outcomes.values())[junit.PASSED],
            digest=_digest(lines),
            inputs=inputs,
        )


@dataclass(frozen=True, kw_only=True)
class Record(Declared):
    """``files`` by the path of the test file; ``conditions`` is what the outcomes depend on."""

    schema: Literal[1]
    conditions: str
    files: Mapping[str, Outcomes]


def load(base: Base, name: str, command: str) -> Record | None:
    """Read the record ``name`` of ``base``, None where there is none.

    Raises:
        BadFileError: it holds something else; ``command`` makes it again.
    """
    path = base.folder / name
    if not path.is_file():
        return None
    return declared.read_json(
        Record,
        path,
        what="record of outcomes on the untouched release",
        next_step=f"make it again: {command} --base {base.version} --record",
    )


def write(base: Base, name: str, conditions: str, files: Mapping[str, Outcomes]) -> None:
    """Write the record ``name`` of ``base``."""
    record = Record(schema=1, conditions=conditions, files=files)
    declared.write_json(base.folder / name, record)


def witness_conditions(base: Base, *, root: Path, machine: str) -> str:
    """Return a digest of what the outcome of every witness on the untouched release depends on.

    That is the release, the packages and their Python, the compiler of the allocator and of the
    stand-in driver, pytest's settings, and all code in tests/witness but for the witnesses.
    """
    rigs = (path for path in _code(root / _TESTS) if not _is_witness(path, root))
    shared = (path for name in _SHARED for path in _code(root / name))
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return _digest(
        [
            base.sdist.sha256,
            environment_name(base, machine=machine, root=root),
            process.run(["g++", "-dumpfullversion"], check=False).stdout,
            repr(project.get("tool", {}).get("pytest")),
            *_contents(root, [*rigs, *shared, root / _PLUGIN]),
        ]
    )


def witness_inputs(base: Base, witness: str, *, root: Path) -> str:
    """Return a digest of a witness, of what it imports of the checkout, and of data it reads."""
    modules = _imported(root / witness.partition("::")[0], root)
    data: list[Path] = []
    if root / _LAYOUT in modules:
        data = [base.folder / "base.toml", *_code(base.folder / "include")]
    return _digest([witness, *_contents(root, [*modules, *data])])


def _imported(start: Path, root: Path) -> set[Path]:
    """Return ``start`` and the modules of the checkout that it imports, directly or not."""
    waiting, seen = [start], {start}
    while waiting:
        for name in imports.names(waiting.pop()):
            fresh = set(_located(name, root)) - seen
            seen |= fresh
            waiting += fresh
    return seen


def _located(name: str, root: Path) -> Iterator[Path]:
    """Yield the files of the module of ``name``, or of which it is a part, and of its packages."""
    parts = name.split(".")
    for place in _PLACES:
        for end in range(1, len(parts) + 1):
            path = (root / place).joinpath(*parts[:end])
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if file.is_file():
                    yield file


def _is_witness(path: Path, root: Path) -> bool:
    return path.parent == root / _TESTS and path.name.startswith("test_")


def _code(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file()]


def _contents(root: Path, paths: Iterable[Path]) -> list[str]:
    """Return the name and the digest of each file, in order of their names."""
    return [
        f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted({*paths})
    ]


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
