"""The release's own tests: which belong to a stack, and the verdicts on their outcomes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sm12x import layout
from sm12x.core.errors import BadFileError
from sm12x.stack.model import base as bases
from sm12x.stack.model.series import Stack
from sm12x_dev import render
from sm12x_dev.witness import junit, record, upstream_run, upstream_tests
from sm12x_dev.witness.upstream_tests import (
    Cannot,
    FileRun,
    HubModel,
    Suite,
    UpstreamEnvironment,
    UpstreamSource,
)

FILE = "tests/v1/test_a.py"


def _suite(*cannot: Cannot, sources: tuple[UpstreamSource, ...] = ()) -> Suite:
    return Suite(
        path=Path("upstream-tests.toml"),
        schema=1,
        environment=UpstreamEnvironment(packages=(), download_mib=1),
        sources=sources,
        cannot=cannot,
    )


def _cannot(test: str, *, run: bool = True) -> Cannot:
    return Cannot(test=test, needs="gpu", why="it allocates", run=run)


def _ran(**outcomes: str) -> FileRun:
    tests = {
        name: junit.Test(
            name=name,
            outcome=junit.FAILED if outcome == upstream_tests.HUNG else outcome,
            guard=False,
            said="Failed: Timeout (>90.0s) from pytest-timeout."
            if outcome == upstream_tests.HUNG
            else "why",
            detail="",
            seconds=0,
        )
        for name, outcome in outcomes.items()
    }
    return FileRun(tests=tests, problem="", detail="")


ENDED = FileRun(tests={}, problem=upstream_tests.CRASHED, detail="signal 11")


def _verdict(before: str, after: str, alone: tuple[str, str] | None = None) -> str:
    again = {"test_x": (_ran(test_x=alone[0]), _ran(test_x=alone[1]))} if alone else {}
    (result,) = upstream_tests.judge(_suite(), FILE, _ran(test_x=before), _ran(test_x=after), again)
    return result.verdict


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("passed", "passed", "same"),
        ("skipped", "skipped", "same"),
        ("passed", "failed", "worse"),
        ("passed", "error", "worse"),
        ("passed", "skipped", "worse"),
        ("passed", "hung", "worse"),
        ("skipped", "failed", "worse"),
        # Red on both is listed; but what never ends takes the others with it.
        ("failed", "hung", "worse"),
        ("failed", "failed", "not green"),
        ("failed", "error", "not green"),
        ("hung", "hung", "not green"),
        ("failed", "passed", "better"),
        ("hung", "failed", "better"),
        ("skipped", "passed", "better"),
    ],
)
def test_what_is_worse_on_the_patched_tree(before: str, after: str, verdict: str) -> None:
    assert _verdict(before, after) == verdict


@pytest.mark.parametrize(
    ("alone", "verdict"),
    [
        (("passed", "failed"), "worse"),
        (("passed", "passed"), "flaky"),
        (("failed", "failed"), "flaky"),
        (("failed", "passed"), "flaky"),
        (("passed", "hung"), "worse"),
    ],
)
def test_a_second_run_alone_decides(alone: tuple[str, str], verdict: str) -> None:
    assert _verdict("passed", "failed", alone) == verdict


def test_what_cannot_be_run_alone_keeps_its_first_verdict() -> None:
    again = {"test_x": (_ran(), _ran())}
    (result,) = upstream_tests.judge(
        _suite(), FILE, _ran(test_x="passed"), _ran(test_x="failed"), again
    )
    assert (result.verdict, result.alone) == ("worse", ("absent", "absent"))


@pytest.mark.parametrize(
    "other",
    [
        _ran(test_x="passed", test_y="passed"),
        _ran(test_x="failed", test_y="hung"),
        _ran(test_x="passed"),
        _ran(test_x="passed", test_y="failed", test_z="passed"),
        _ran(test_x="passed", test_z="failed"),
        ENDED,
        FileRun(tests=_ran(test_x="passed", test_y="failed").tests, problem="hung", detail=""),
    ],
)
def test_a_record_is_met_by_the_same_outcomes_alone(other: FileRun) -> None:
    run = _ran(test_x="passed", test_y="failed")
    kept = upstream_run.outcomes(run)
    assert kept == upstream_run.outcomes(_ran(test_y="failed", test_x="passed"))
    assert kept != upstream_run.outcomes(other)


def test_a_record_is_of_a_release_its_environment_and_its_packages() -> None:
    def conditions(suite: Suite, *packages: str, sdist: str = "a") -> str:
        base = cast(Any, SimpleNamespace(sdist=SimpleNamespace(sha256=sdist)))
        return upstream_run.digest(base, suite, packages)

    suite = _suite()
    platform = replace(suite, environment=replace(suite.environment, platform="a:B"))
    model = HubModel(name="a/b", implemented="c:D", config="{}")
    each = [
        conditions(suite),
        conditions(suite, sdist="b"),
        conditions(platform),
        conditions(replace(suite, models=(model,))),
        conditions(suite, "x==1"),
    ]
    assert len({*each}) == len(each)
    # Which tests are run is no part of it, nor is which list a package is in.
    assert conditions(_suite(_cannot(FILE))) == each[0]
    assert conditions(suite, "x==1\ny==1", "z==1") == conditions(suite, "z==1\ny==1", "x==1")


@pytest.mark.parametrize("text", ["", "{}", '{"schema": 1}', '{"schema": 2, "files": {}}', "[1"])
def test_a_record_that_is_none(tmp_path: Path, text: str) -> None:
    base = cast(Any, SimpleNamespace(folder=tmp_path, version="9.9"))
    assert record.load(base, upstream_run.RECORD, "x") is None
    (tmp_path / upstream_run.RECORD).write_text(text)
    with pytest.raises(BadFileError, match="--record"):
        record.load(base, upstream_run.RECORD, "x")


@pytest.mark.parametrize("version", bases.versions())
def test_the_records_are_of_these_releases_and_packages(version: str) -> None:
    base = bases.load(version)
    kept = record.load(base, upstream_run.RECORD, "x")
    assert kept is not None
    suite = upstream_tests.load(base)
    assert kept.conditions == upstream_run.conditions(
        base, suite, root=layout.root(), machine="x86_64"
    ), f"sm12x-dev upstream-tests --base {version} --record"
    assert sum(outcomes.passed for outcomes in kept.files.values()) > 300


def test_a_test_that_is_gone_is_worse() -> None:
    results = upstream_tests.judge(
        _suite(), FILE, _ran(test_x="passed", test_y="passed"), _ran(test_x="passed"), {}
    )
    assert [(result.test, result.verdict) for result in results] == [
        ("test_x", "same"),
        ("test_y", "worse"),
    ]


def test_a_crash_counts_for_every_test_of_the_file() -> None:
    before = _ran(test_x="passed", test_y="failed")
    assert upstream_tests.differing(before, ENDED) == ["test_x", "test_y"]
    results = upstream_tests.judge(_suite(), FILE, before, ENDED, {})
    assert {result.patched for result in results} == {"crashed"}
    assert {result.verdict for result in results} == {"worse"}
    # The other way round nothing is worse, and on both trees it is one line, not none.
    assert upstream_tests.differing(ENDED, before) == []
    (result,) = upstream_tests.judge(_suite(), FILE, ENDED, ENDED, {})
    assert (result.verdict, result.detail) == ("not green", "signal 11")


@pytest.mark.parametrize(
    ("entry", "name", "covered"),
    [
        (FILE, "test_x", True),
        ("tests/v1/test_b.py", "test_x", False),
        (f"{FILE}::test_x", "test_x", True),
        (f"{FILE}::test_x", "test_x[a-1]", True),
        (f"{FILE}::test_x[a-1]", "test_x[a-1]", True),
        (f"{FILE}::test_x[a-1]", "test_x[a-2]", False),
        (f"{FILE}::test_x", "test_xy", False),
        (f"{FILE}::TestIt", "TestIt::test_x", True),
        (f"{FILE}::TestIt::test_x", "TestIt::test_x[1]", True),
        (f"{FILE}::TestIt::test_x", "TestOther::test_x", False),
        (f"{FILE}::TestIt::test_x", "TestIt", False),
    ],
)
def test_what_a_reason_covers(entry: str, name: str, covered: bool) -> None:
    assert _cannot(entry).covers(FILE, name) is covered


def test_a_reason_that_no_longer_holds_is_reported() -> None:
    suite = _suite(
        _cannot(f"{FILE}::test_x"),
        _cannot(f"{FILE}::test_y"),
        _cannot(f"{FILE}::test_gone"),
        _cannot("tests/other.py::test_x"),
    )
    results = upstream_tests.judge(
        suite,
        FILE,
        _ran(test_x="passed", test_y="failed"),
        _ran(test_x="passed", test_y="failed"),
        {},
    )
    assert [result.why for result in results] == ["needs a GPU: it allocates"] * 2
    first, second = upstream_tests.stale(suite, [FILE], results)
    assert "test_x: 1 of 1 tests are green" in first
    assert "test_gone" in second


def _tree(folder: Path, tests: dict[str, str]) -> Path:
    for path, text in {
        "vllm/__init__.py": "",
        "vllm/v1/__init__.py": "",
        "vllm/v1/executor/__init__.py": "from .abstract import Executor\n",
        "vllm/v1/executor/abstract.py": "class Executor: ...\n",
        "vllm/v1/executor/multi.py": "",
        "csrc/a.cpp": "",
        **tests,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def _stack(*paths: str) -> Stack:
    patch: Any = SimpleNamespace(files=[SimpleNamespace(path=path) for path in paths])
    return cast(Stack, SimpleNamespace(patches=(patch,)))


ABSTRACT = "vllm/v1/executor/abstract.py"


@pytest.mark.parametrize(
    "text",
    [
        "import vllm.v1.executor.abstract\n",
        "import vllm.v1.executor.abstract as it\n",
        "from vllm.v1.executor.abstract import Executor\n",
        "from vllm.v1.executor import abstract\n",
        # What the package passes on is of the module it comes from.
        "from vllm.v1.executor import Executor\n",
        "def test_x(monkeypatch):\n  from vllm.v1.executor.abstract import Executor\n",
        "patch('vllm.v1.executor.abstract.Executor.sleep')\n",
        "patch('vllm.v1.executor.Executor')\n",
    ],
)
def test_every_way_to_name_a_module(tmp_path: Path, text: str) -> None:
    tree = _tree(tmp_path, {FILE: text})
    plan = upstream_tests.plan(_suite(), _stack(ABSTRACT), tree)
    assert (plan.files, plan.faults) == ((FILE,), ())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (FILE, "from vllm.v1.executor import multi\n"),
        (FILE, "import vllm.v1.executor\n"),
        (FILE, "# vllm.v1.executor.abstract\n"),
        (FILE, "vllm.v1.executor.abstract is no Python\n"),
        ("tests/v1/utils.py", "import vllm.v1.executor.abstract\n"),
        ("tests/conftest.py", "import vllm.v1.executor.abstract\n"),
    ],
)
def test_a_changed_file_without_a_test_is_a_fault(tmp_path: Path, path: str, text: str) -> None:
    tree = _tree(tmp_path, {path: text})
    plan = upstream_tests.plan(_suite(), _stack(ABSTRACT), tree)
    assert plan.files == ()
    assert ABSTRACT in plan.faults[0]


def test_what_the_data_says_of_changed_files(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {FILE: "", "tests/test_b.py": "import vllm.v1.executor.abstract\n"})
    suite = _suite(
        sources=(
            UpstreamSource(paths=("csrc/**",), tests=(), why="compiled"),
            UpstreamSource(paths=("vllm/v1/executor/*.py",), tests=(FILE,), why=""),
        )
    )
    # The stack adds a file: the release has no test of it.
    plan = upstream_tests.plan(suite, _stack(ABSTRACT, "csrc/a.cpp", "vllm/new.py"), tree)
    assert plan.faults == ()
    assert plan.files == ("tests/test_b.py", FILE)
    assert [(file.path, file.why) for file in plan.touched] == [
        ("csrc/a.cpp", "compiled"),
        (ABSTRACT, ""),
    ]
    part = plan.narrowed([ABSTRACT])
    assert part.files == plan.files
    assert plan.narrowed([FILE]).files == (FILE,)
    with pytest.raises(BadFileError):
        plan.narrowed(["csrc/a.cpp"])
    with pytest.raises(BadFileError):
        plan.narrowed(["tests/v1"])


def test_a_source_can_leave_out_the_files_that_name_the_module(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {FILE: "", "tests/test_b.py": "import vllm.v1.executor.abstract\n"})
    source = UpstreamSource(paths=(ABSTRACT,), tests=(FILE,), only=True)
    plan = upstream_tests.plan(_suite(sources=(source,)), _stack(ABSTRACT), tree)
    assert (plan.faults, plan.files) == ((), (FILE,))


def test_data_that_fits_nothing_is_a_fault(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {FILE: "import vllm.v1.executor.abstract\n"})
    suite = _suite(
        _cannot("tests/gone.py"),
        _cannot(f"{FILE}::test_x", run=False),
        sources=(
            UpstreamSource(paths=("csrc/b.cpp",), tests=(), why="compiled"),
            UpstreamSource(paths=(ABSTRACT,), tests=("tests/absent.py",), why=""),
        ),
    )
    plan = upstream_tests.plan(suite, _stack(ABSTRACT), tree)
    assert len(plan.faults) == 4
    # The file whose one test has run = false is run.
    assert (plan.files, len(plan.not_run)) == ((FILE,), 1)


def test_a_file_that_is_not_run_is_listed_with_its_reason(tmp_path: Path) -> None:
    tree = _tree(tmp_path, {FILE: "import vllm.v1.executor.abstract\n"})
    suite = _suite(_cannot(FILE, run=False))
    plan = upstream_tests.plan(suite, _stack(ABSTRACT), tree)
    assert (plan.files, plan.faults) == ((), ())
    assert [entry.file for entry in plan.not_run] == [FILE]
    text = render.upstream_listed(plan, suite)
    assert FILE in text
    assert "it allocates" in text


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("schema = 1", "schema = 2", "schema"),
        ('needs = "gpu"', 'needs = "luck"', "needs"),
        ('why = "x"', "", "why"),
        ("[environment]", "[enviroment]", "environment"),
        ("download_mib = 1", "download_mib = 1\nplatfrom = 'a'", "platfrom"),
    ],
)
def test_data_that_is_wrong_is_refused(tmp_path: Path, old: str, new: str, named: str) -> None:
    text = (
        "schema = 1\n[environment]\npackages = []\ndownload_mib = 1\n"
        '[[cannot]]\ntest = "tests/a.py"\nneeds = "gpu"\nwhy = "x"\n'
    )
    base = cast(bases.Base, SimpleNamespace(folder=tmp_path))
    with pytest.raises(BadFileError):
        upstream_tests.load(base)
    (tmp_path / upstream_tests.NAME).write_text(text)
    assert upstream_tests.load(base).cannot[0].run
    (tmp_path / upstream_tests.NAME).write_text(text.replace(old, new))
    with pytest.raises(BadFileError, match=named):
        upstream_tests.load(base)


def test_the_data_of_every_base_can_be_read() -> None:
    for version in bases.versions():
        suite = upstream_tests.load(bases.load(version))
        assert suite.cannot
        for entry in suite.cannot:
            assert entry.why


def test_a_file_without_a_recorded_outcome_is_not_run() -> None:
    """It takes its whole time limit on both trees, and none of its tests can be worse."""
    ran = _ran(test_a="passed")
    calls: list[str] = []

    class Runner:
        def run(
            self, targets: list[str], side: str, on_file: object = None
        ) -> dict[tuple[str, str], FileRun]:
            calls.extend(targets)
            return {(file, side): ran for file in targets}

    hung = record.Outcomes(tests=0, passed=0, digest="")
    runs, recorded = upstream_run._both(
        [FILE, "tests/test_hangs.py", "tests/test_new.py"],
        cast(upstream_run._Runner, Runner()),
        {FILE: upstream_run.outcomes(ran), "tests/test_hangs.py": hung},
        None,
    )
    assert recorded == 2
    assert {*calls} == {FILE, "tests/test_new.py"}
    assert runs["tests/test_hangs.py", "base"].tests == {}
    assert runs["tests/test_hangs.py", "patched"].tests == {}
