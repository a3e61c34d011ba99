"""The release's own tests on both trees of a tiny sdist, with real pytest processes."""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.integration import stackrepo
from tests.integration.stackrepo import World

from sm12x.core.errors import FindingsError, Sm12xError
from sm12x.stack.model import series
from sm12x_dev import cli
from sm12x_dev.witness import environment, pytests, record, upstream_run, upstream_tests
from sm12x_dev.witness.upstream_tests import Report, UpstreamResult

HEAD = (
    "import os, pathlib, subprocess, sys, time\n"
    "import pytest\n"
    "import tiny.a\n"
    "PATCHED = tiny.a.a == 'sixty'\n"
)
TESTS = {
    "tests/__init__.py": "",
    "tests/conftest.py": "import pytest\n@pytest.fixture\ndef one(): return 1\n",
    "tests/test_plain.py": HEAD
    + """
@pytest.mark.parametrize("n", [1, 2])
def test_green(one, n): assert n
def test_red_on_both(one): assert False, "needs a device"
def test_mended(): assert PATCHED
@pytest.mark.parametrize("n", [1, 2])
def test_not_run(n): os.abort()
def test_not_run_either(): pass
class TestNotRun:
    def test_it(self): os.abort()
def test_worse(): assert not PATCHED, "sixty is no number"
def test_skipped(): pytest.skip("no")
def test_now_skipped():
    if PATCHED: pytest.skip("no")
if not PATCHED:
    def test_gone(): pass
# Only where it does not run alone.
ran = []
def test_before(): ran.append(1)
def test_flaky(): assert not (PATCHED and ran)
class TestIt:
    def test_worse(self, one): assert not PATCHED
""",
    "tests/test_crash.py": HEAD
    + "def test_quiet(): pass\ndef test_crash(): PATCHED and os.abort()\n",
    "tests/test_unrelated.py": "def test_it(): assert False\n",
    "tests/test_cannot.py": "import tiny.a\nraise SystemExit(3)\n",
}
SAME = HEAD + "def test_green(): pass\ndef test_red(): assert 0\n"
HANG = (
    HEAD
    + """
def test_hang():
    if PATCHED:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path({pids!r}).open("a").write(str(child.pid) + "\\n")
        child.wait()
"""
)
DATA = """schema = 1
[environment]
packages = []
download_mib = 1
[[cannot]]
test = "tests/test_plain.py::test_red_on_both"
needs = "gpu"
why = "a device"
[[cannot]]
test = "tests/test_plain.py::test_green"
needs = "gpu"
why = "it was so once"
[[cannot]]
test = "tests/test_plain.py::test_not_run"
needs = "machine"
why = "it aborts"
run = false
[[cannot]]
test = "tests/test_plain.py::TestNotRun"
needs = "machine"
why = "it aborts"
run = false
[[cannot]]
test = "tests/test_cannot.py"
needs = "machine"
why = "it ends whatever imports it"
run = false
"""


def _make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tests: dict[str, str]) -> World:
    made = stackrepo.make(tmp_path, monkeypatch, more=tests)
    made.commit(made.applied("author"), "Say sixty", "tiny/a.py", "a = 60\n", "a = 'sixty'\n")
    (made.base.folder / upstream_tests.NAME).write_text(DATA)
    return made


def _run(world: World, only: tuple[str, ...] = (), *, seconds: float = 60, **more: Any) -> Report:
    base = world.base
    return upstream_run.run(
        base,
        series.load(base),
        upstream_tests.load(base),
        archive=world.archive,
        python=Path(sys.executable),
        extra=None,
        only=only,
        file_seconds=seconds,
        **more,
    )


def _by_name(report: Report) -> dict[str, UpstreamResult]:
    return {result.id.removeprefix("tests/"): result for result in report.results}


def test_verdicts_of_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = _run(_make(tmp_path, monkeypatch, TESTS))
    found = {
        name: (result.base, result.patched, result.alone, result.verdict)
        for name, result in _by_name(report).items()
    }
    assert found == {
        "test_plain.py::test_green[1]": ("passed", "passed", None, "same"),
        "test_plain.py::test_green[2]": ("passed", "passed", None, "same"),
        "test_plain.py::test_red_on_both": ("failed", "failed", None, "not green"),
        "test_plain.py::test_not_run_either": ("passed", "passed", None, "same"),
        "test_plain.py::test_mended": ("failed", "passed", None, "better"),
        "test_plain.py::test_worse": ("passed", "failed", ("passed", "failed"), "worse"),
        "test_plain.py::test_skipped": ("skipped", "skipped", None, "same"),
        "test_plain.py::test_now_skipped": ("passed", "skipped", ("passed", "skipped"), "worse"),
        "test_plain.py::test_gone": ("passed", "absent", ("passed", "absent"), "worse"),
        "test_plain.py::test_before": ("passed", "passed", None, "same"),
        "test_plain.py::test_flaky": ("passed", "failed", ("passed", "passed"), "flaky"),
        "test_plain.py::TestIt::test_worse": ("passed", "failed", ("passed", "failed"), "worse"),
        # The file crashed; alone it is seen which test it was.
        "test_crash.py::test_quiet": ("passed", "crashed", ("passed", "passed"), "flaky"),
        "test_crash.py::test_crash": ("passed", "crashed", ("passed", "crashed"), "worse"),
    }
    assert not report.ok
    assert len(report.plan.not_run) == 3
    assert report.plan.faults == ()
    (stale,) = report.stale
    assert "test_green: 2 of 2" in stale


def test_a_test_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    text = HANG.replace("{pids!r}", repr(str(pids)))
    report = _run(_make(tmp_path, monkeypatch, {"tests/test_hang.py": text}), seconds=8)
    (result,) = report.results
    assert (result.patched, result.alone, result.verdict) == ("hung", ("passed", "hung"), "worse")
    for pid in pids.read_text().split():
        status = Path(f"/proc/{pid}/stat")
        # Dead, and perhaps still to be waited for by whoever has inherited it.
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_only_what_differs_from_the_record_is_run_on_the_untouched_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the verdicts of a run on both trees."""
    again = {f"tests/test_same{number}.py": SAME for number in range(3)}
    world = _make(tmp_path, monkeypatch, {**TESTS, **again})
    first = _run(world, record_for="these packages")
    assert first.recorded == 0
    known = record.load(world.base, upstream_run.RECORD, "sm12x-dev upstream-tests")
    assert known is not None
    assert known.conditions == "these packages"
    # As from a time when a file was not yet recorded.
    late = "tests/test_same2.py"
    known = replace(known, files={f: o for f, o in known.files.items() if f != late})
    ran: list[tuple[str, str]] = []
    second = _run(world, baseline=known, on_file=lambda *one: ran.append(one))
    assert second.results == tuple(
        replace(result, said=mine.said, detail=mine.detail)
        for result, mine in zip(first.results, second.results, strict=True)
    )
    assert second.recorded == 2
    on_both = ["tests/test_crash.py", "tests/test_plain.py", late]
    assert sorted(file for file, side in ran if side == "base") == on_both
    assert sorted(file for file, side in ran if side == "patched") == sorted({*on_both, *again})


def test_a_model_is_looked_at_in_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's own process does, but without what importing vLLM takes."""
    monkeypatch.syspath_prepend(str(pytests.PLUGIN))
    zygote = importlib.import_module("sm12x_zygote")
    registry: Any = types.ModuleType("vllm.model_executor.models.registry")
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    zygote._look_at_models_in_forks()
    inspect: Callable[[Callable[[], object]], object] = registry._run_in_subprocess
    assert inspect(lambda: {"process": os.getpid()}) != {"process": os.getpid()}
    assert inspect(lambda: ["text", None]) == ["text", None]
    for wrong, said in ((lambda: 1 / 0, "ZeroDivisionError"), (lambda: os._exit(1), "it ended")):
        with pytest.raises(RuntimeError, match=said):
            inspect(wrong)


def test_narrowing_by_file_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = _make(tmp_path, monkeypatch, TESTS)
    report = _run(world, ("tests/test_crash.py",))
    assert {result.file for result in report.results} == {"tests/test_crash.py"}
    plan = upstream_run.listed(
        upstream_tests.load(world.base),
        series.load(world.base),
        archive=world.archive,
        only=("tiny/a.py",),
    )
    assert plan.files == ("tests/test_crash.py", "tests/test_plain.py")


def test_an_environment_that_cannot_run_anything_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _make(tmp_path, monkeypatch, {"tests/test_plain.py": TESTS["tests/test_plain.py"]})
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named pytest\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(Sm12xError, match="no module named pytest"):
        upstream_run.run(
            world.base,
            series.load(world.base),
            upstream_tests.load(world.base),
            archive=world.archive,
            python=python,
            extra=None,
        )


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = _make(tmp_path, monkeypatch, {**TESTS, "tests/test_same.py": SAME})
    links = ["--base", stackrepo.VERSION, "--find-links", str(world.archive.parent)]
    monkeypatch.setattr(environment, "environment", lambda *_, **__: Path(sys.executable))
    monkeypatch.setattr(upstream_run, "packages", lambda *_, **__: None)
    # The stack's repository has no locks.
    conditions = ["these"]
    monkeypatch.setattr(upstream_run, "conditions", lambda *_, **__: conditions[0])
    runner = CliRunner()
    shown = runner.invoke(cli.root, ["upstream-tests", "--list", *links])
    assert shown.exit_code == 0, shown.output
    assert "tests/test_plain.py" in shown.output
    assert "it ends whatever imports it" in shown.output

    def ran(*more: str) -> Any:
        done = runner.invoke(cli.root, ["upstream-tests", "--json", *links, *more])
        assert isinstance(done.exception, FindingsError)
        report = json.loads(done.stdout)
        assert not report["ok"]
        assert len(report["results"]) == 16
        return report

    assert ran("--record")["recorded"] == 0
    assert ran()["recorded"] == 1
    conditions[0] = "others"
    assert ran()["recorded"] == 0
    some = runner.invoke(cli.root, ["upstream-tests", "--record", "tests/test_same.py", *links])
    assert isinstance(some.exception, SystemExit)
    assert some.exception.code == 2
    # A changed file that nothing is said of is a fault, also of the list alone.
    (world.base.folder / upstream_tests.NAME).write_text(DATA.split("[[cannot]]")[0])
    made = world.applied("more")
    world.commit(made, "Change b", "tiny/b.py", "b = 2\n", "b = 'two'\n")
    shown = runner.invoke(cli.root, ["upstream-tests", "--list", *links])
    assert isinstance(shown.exception, FindingsError)
    assert "tiny/b.py" in shown.output
