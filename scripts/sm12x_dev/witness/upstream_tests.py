"""The release's own unit tests: those that belong to a stack, and verdicts on their outcomes.

The sdist holds the release's tests. Those that name a module which the stack changes are run on the
untouched and on the patched source, and none may be worse on the patched one. Which of them cannot
run here, and why, is data: ``upstream-tests.toml`` in the folder of the base.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x.core import declared, files
from sm12x.core.declared import Declared, KeyFaultError, one_of, shown
from sm12x.core.errors import BadFileError
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Stack
from sm12x_dev.witness import imports, junit

NAME = "upstream-tests.toml"
# Where a release keeps its tests.
_TESTS = "tests"
# Why a test cannot run on a machine without a GPU and without a network.
NEEDS = {
    "gpu": "needs a GPU",
    "model": "loads a model or a tokenizer from the network",
    "package": "imports a package that is not in the environment",
    "native": "calls a native module of the release, which is not compiled here",
    "machine": "needs what the machine may not have or allow",
    "release": "is wrong in the release itself",
}
# Outcomes besides junit's.
_ABSENT = "absent"
CRASHED = "crashed"
HUNG = "hung"
# How bad an outcome is. A skipped test shows less than one that passed.
_RANK = {
    junit.PASSED: 0,
    junit.SKIPPED: 1,
    _ABSENT: 2,
    junit.FAILED: 2,
    junit.ERROR: 2,
    CRASHED: 3,
    HUNG: 3,
}
# Verdicts on a test.
SAME = "same"
BETTER = "better"
WORSE = "worse"
FLAKY = "flaky"
NOT_GREEN = "not green"
_TEST_FILE = re.compile(r"(^|/)(test_[^/]*|[^/]*_test)\.py$")


@dataclass(frozen=True, kw_only=True)
class Cannot(Declared):
    """A test that cannot be green here. ``needs`` is a key of NEEDS, ``why`` says what exactly.

    ``test`` is a file (tests/v1/test_x.py), or a test or class in one (file::name, which stands for
    all cases of a parametrised test). ``run`` is False for what is not even started, because it
    would hang, take minutes, or use what it finds on the machine.
    """

    test: str
    needs: Annotated[str, one_of(*NEEDS)]
    why: str
    run: bool = True

    @property
    def file(self) -> str:
        return self.test.split("::", 1)[0]

    def covers(self, file: str, name: str) -> bool:
        """Tell whether this covers the test ``name`` (junit's: "TestThis::test_it[case]")."""
        if file != self.file:
            return False
        words = self.test.split("::")[1:]
        has = name.split("::")
        if not words:
            return True
        if len(has) < len(words):
            return False
        *outer, last = words
        met = has[len(words) - 1]
        return has[: len(outer)] == outer and last in (met, met.split("[", 1)[0])


@dataclass(frozen=True, kw_only=True)
class UpstreamSource(Declared):
    """Test files that do not name the modules of the files that match the globs ``paths``.

    ``tests`` are test files that belong to them without naming their module; ``why`` says why there
    is none. With ``only``, the files that name the module do not belong to it: for one that half
    the release imports, and that the stack changes where those files do not look.
    """

    paths: tuple[str, ...]
    tests: tuple[str, ...] = ()
    only: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class HubModel(Declared):
    """A model that the tests ask the hub for: its name there, and the content of config.json.

    ``implemented`` ("module:Class") is the release's class for it. Unless it is registered, vLLM
    looks at the class in a fork, for each test that asks. ``tokenizer`` is the content
    of tokenizer.json, "" for a model without one.
    """

    name: str
    implemented: str
    config: str
    tokenizer: str = ""

    def __post_init__(self) -> None:
        for key, text in (("config", self.config), ("tokenizer", self.tokenizer or "{}")):
            try:
                json.loads(text)
            except ValueError as error:
                raise KeyFaultError(key, f"is not JSON: {error}") from None


@dataclass(frozen=True, kw_only=True)
class UpstreamEnvironment(Declared):
    """The environment of the tests.

    ``packages`` are names of the base's lock that the tests import and the witnesses do not;
    ``platform`` ("module:Class") is what vLLM is told it runs on; ``empty`` are native modules that
    an import is satisfied with an empty module for; ``preload`` is imported once, before the
    process forks for every test file. ``gated`` are test files that skip themselves unless they
    find CUDA, and are told so.
    """

    packages: tuple[str, ...]
    download_mib: int
    platform: str = ""
    empty: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Suite(Declared):
    """``upstream-tests.toml`` at ``path``. ``models`` are all that the tests find of the hub."""

    path: Path
    schema: Literal[1]
    environment: UpstreamEnvironment
    sources: Annotated[tuple[UpstreamSource, ...], Field(alias="source")] = ()
    cannot: tuple[Cannot, ...] = ()
    models: Annotated[tuple[HubModel, ...], Field(alias="model")] = ()


@dataclass(frozen=True, kw_only=True)
class Touched:
    """A file that the stack changes, the test files that belong to it, and why there is none."""

    path: str
    tests: tuple[str, ...]
    why: str


@dataclass(frozen=True, kw_only=True)
class UpstreamPlan:
    """What is run. ``faults`` are the contradictions between the data and the release's tests."""

    touched: tuple[Touched, ...]
    files: tuple[str, ...]
    not_run: tuple[Cannot, ...]
    faults: tuple[str, ...]

    def narrowed(self, names: Sequence[str]) -> UpstreamPlan:
        """Narrow the plan to the tests of ``names``: test files, or changed files.

        Raises:
            BadFileError: a name is neither.
        """
        chosen: set[str] = set()
        for name in names:
            tests = {test for file in self.touched if file.path == name for test in file.tests}
            test_files = {*self.files, *(entry.file for entry in self.not_run)}
            if not tests and name not in test_files:
                raise BadFileError(
                    f"{name} is neither a file that the stack changes and tests name, nor a test "
                    "file that belongs to one",
                    next_step="`sm12x-dev upstream-tests --list` names them",
                )
            chosen |= tests or {name}
        return replace(
            self,
            touched=tuple(file for file in self.touched if chosen & set(file.tests)),
            files=tuple(file for file in self.files if file in chosen),
            not_run=tuple(entry for entry in self.not_run if entry.file in chosen),
        )


@dataclass(frozen=True, kw_only=True)
class FileRun:
    """One test file on one source tree: outcome by test name; ``problem`` is "" if pytest ended.

    ``problem`` is CRASHED or HUNG, and ``detail`` then the end of what was printed.
    """

    tests: Mapping[str, junit.Test]
    problem: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class UpstreamResult:
    """One test on both trees, and the verdict. ``alone`` is what a second run, alone, gave.

    ``why`` is the reason of the data for a test that is not green, "" where it gives none.
    """

    file: str
    test: str
    base: str
    patched: str
    alone: tuple[str, str] | None
    verdict: str
    why: str
    said: str
    detail: str

    @property
    def id(self) -> str:
        return f"{self.file}::{self.test}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """All results. ``stale`` names reasons of the data that no outcome bears out any more.

    ``recorded`` is the number of files that were run on the patched tree alone: their outcomes are
    those that were recorded of the untouched tree.
    """

    base_version: str
    stack_id: str
    plan: UpstreamPlan
    results: tuple[UpstreamResult, ...]
    stale: tuple[str, ...]
    recorded: int = 0

    def of(self, *verdicts: str) -> tuple[UpstreamResult, ...]:
        return tuple(result for result in self.results if result.verdict in verdicts)

    @shown
    def ok(self) -> bool:
        return not self.plan.faults and not self.of(WORSE)


def load(base: Base) -> Suite:
    """Read the data of ``base``.

    Raises:
        BadFileError: there is none, or a key is missing, unknown or of the wrong kind.
    """
    path = base.folder / NAME
    return declared.read_toml(
        Suite,
        path,
        given={"path": path},
        next_step=f"write it after that of another base, or restore {NAME}",
    )


def _module_of(tree: Path, dotted: str) -> str:
    """Return the module ``dotted``, or the one that it is an attribute of; "" if there is none.

    A name that a package re-exports belongs to its original module: vllm.v1.executor.Executor
    is of vllm.v1.executor.abstract.
    """
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        folder = tree.joinpath(*parts[:end])
        if folder.with_suffix(".py").is_file():
            return name
        if (folder / "__init__.py").is_file():
            return _exports(folder, name).get(parts[end], name) if end < len(parts) else name
    return ""


@functools.cache
def _exports(folder: Path, package: str) -> dict[str, str]:
    """Return the modules that a package's names come from."""
    modules: dict[str, str] = {}
    for node in ast.walk(imports.parsed(folder / "__init__.py")):
        if isinstance(node, ast.ImportFrom):
            parent = package.split(".")
            parent = parent[: len(parent) - node.level + 1] if node.level else []
            module = ".".join([*parent, *([node.module] if node.module else [])])
            modules |= {alias.asname or alias.name: module for alias in node.names}
    return modules


def _module_name(path: str) -> str:
    """Return the module of a file of the tree: "vllm/v1/x.py" -> "vllm.v1.x"; "" if it is none."""
    if not path.endswith(".py"):
        return ""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def plan(suite: Suite, stack: Stack, tree: Path) -> UpstreamPlan:
    """Find the test files of the untouched ``tree`` for the files that ``stack`` changes."""
    paths = sorted({file.path for patch in stack.patches for file in patch.files})
    # A file that the stack adds: the release cannot have a test of it.
    paths = [path for path in paths if (tree / path).is_file()]
    names = {name for path in paths if (name := _module_name(path))}
    by_module: dict[str, list[str]] = {}
    # Every reference to a module, or to a re-export of its package, contains the package's name.
    hints = {
        path.split("/")[-2] if path.endswith("/__init__.py") else name.rpartition(".")[0]
        for path in paths
        if (name := _module_name(path))
    }
    for test in sorted((tree / _TESTS).rglob("*.py")):
        relative = test.relative_to(tree).as_posix()
        if not _TEST_FILE.search(relative):
            continue
        text = test.read_text(encoding="utf-8", errors="replace")
        if any(hint in text for hint in hints):
            for module in {_module_of(tree, name) for name in imports.names(test)} & names:
                by_module.setdefault(module, []).append(relative)
    faults: list[str] = []
    used: set[int] = set()
    touched: list[Touched] = []
    for path in paths:
        tests = set(by_module.get(_module_name(path), ()))
        why: list[str] = []
        for number, source in enumerate(suite.sources):
            if any(files.matches(path, glob) for glob in source.paths):
                used.add(number)
                tests = set(source.tests) | (set() if source.only else tests)
                why += [source.why] if source.why else []
        if not tests and not why:
            faults.append(
                f"{path}: the stack changes it, no test of the release names it, and no [[source]] "
                "says which tests belong to it, or why none does"
            )
        touched.append(Touched(path=path, tests=tuple(sorted(tests)), why=" ".join(why)))
    every = sorted({test for file in touched for test in file.tests})
    faults += [
        f"[[source]] {', '.join(source.paths)}: the stack changes no such file"
        for number, source in enumerate(suite.sources)
        if number not in used
    ]
    faults += [
        f"{test}: the release has no such file" for test in every if not (tree / test).is_file()
    ]
    faults += [
        f"[[cannot]] {entry.test}: the file belongs to nothing that the stack changes"
        for entry in suite.cannot
        if entry.file not in every
    ]
    faults += [
        f"[[cannot]] {entry.test}: the file has no such test"
        for entry in suite.cannot
        if not entry.run and not _defined(tree, entry)
    ]
    faults += [
        f"environment.gated {test}: it belongs to nothing that the stack changes"
        for test in suite.environment.gated
        if test not in every
    ]
    left = {entry.file for entry in suite.cannot if not entry.run and entry.test == entry.file}
    return UpstreamPlan(
        touched=tuple(touched),
        files=tuple(test for test in every if test not in left and (tree / test).is_file()),
        not_run=tuple(entry for entry in suite.cannot if entry.file in every and not entry.run),
        faults=tuple(faults),
    )


def outcome(run: FileRun | None, name: str) -> str:
    """Return the outcome of one test in a run of its file."""
    if run is None:
        return _ABSENT
    test = run.tests.get(name)
    if test is not None:
        # What pytest-timeout ends a test with.
        hung = test.outcome == junit.FAILED and test.said.startswith("Failed: Timeout (>")
        return HUNG if hung else test.outcome
    # A run that did not end says nothing about its remaining tests.
    return run.problem or _ABSENT


def _worse(base: str, patched: str) -> bool:
    return _RANK[patched] > _RANK[base]


def differing(base: FileRun, patched: FileRun) -> list[str]:
    """Return the tests of a file that are worse on the patched tree, to be run again alone."""
    return [
        name
        for name in _names(base, patched)
        if _worse(outcome(base, name), outcome(patched, name))
    ]


def judge(
    suite: Suite,
    file: str,
    base: FileRun,
    patched: FileRun,
    alone: Mapping[str, tuple[FileRun, FileRun]],
) -> list[UpstreamResult]:
    """Return the verdict on each test of ``file``.

    Args:
        alone: test -> its second run, alone in a process, on both trees.
    """
    results: list[UpstreamResult] = []
    for name in _names(base, patched):
        before, after = outcome(base, name), outcome(patched, name)
        again: tuple[str, str] | None = None
        showing = patched
        if _worse(before, after):
            verdict = WORSE
            if name in alone:
                first, second = alone[name]
                again = (outcome(first, name), outcome(second, name))
                # One that cannot be run alone keeps the verdict of the first run.
                if again != (_ABSENT, _ABSENT):
                    verdict, showing = (WORSE, second) if _worse(*again) else (FLAKY, patched)
        elif before == after and after in (junit.PASSED, junit.SKIPPED):
            verdict = SAME
        else:
            verdict = BETTER if _worse(after, before) else NOT_GREEN
        test = showing.tests.get(name)
        reasons = (
            f"{NEEDS[one.needs]}: {one.why}" for one in suite.cannot if one.covers(file, name)
        )
        results.append(
            UpstreamResult(
                file=file,
                test=name,
                base=before,
                patched=after,
                alone=again,
                verdict=verdict,
                why=next(reasons, ""),
                said=test.said if test else "",
                detail=test.detail if test else showing.detail,
            )
        )
    return results


def stale(suite: Suite, ran: Iterable[str], results: Sequence[UpstreamResult]) -> list[str]:
    """Return the reasons that the outcomes contradict: a test is green here, or is missing.

    Args:
        ran: the test files that were run.
    """
    files = set(ran)
    reasons: list[str] = []
    for entry in suite.cannot:
        if entry.file not in files or not entry.run:
            continue
        covered = [result for result in results if entry.covers(result.file, result.test)]
        green = [result for result in covered if result.base == result.patched == junit.PASSED]
        if not covered:
            reasons.append(f"[[cannot]] {entry.test}: the release has no such test")
        elif green:
            reasons.append(
                f"[[cannot]] {entry.test}: {len(green)} of {len(covered)} tests are green here"
            )
    return reasons


def _defined(tree: Path, entry: Cannot) -> bool:
    """Tell whether the file, where it is there, defines what ``entry`` names."""
    path = tree / entry.file
    if entry.test == entry.file or not path.is_file():
        return True
    names = {
        node.name
        for node in ast.walk(imports.parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    return {part.split("[", 1)[0] for part in entry.test.split("::")[1:]} <= names


def _names(base: FileRun, patched: FileRun) -> list[str]:
    names = list(dict.fromkeys([*base.tests, *patched.tests]))
    # A file that ended on both trees before any test is still something to report.
    return names or (["(the whole file)"] if base.problem or patched.problem else [])
