"""What a rebase decides by itself, without git: verdicts, notes in base.toml, locks."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from sm12x.core.errors import ToolFailedError
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, Dropped
from sm12x_dev import lock, rebase
from sm12x_dev.rebase import NEEDED, UNKNOWN, UPSTREAM, Outcome, Verdict
from sm12x_dev.witness.junit import Test
from sm12x_dev.witness.pytests import Run

FILE = "tests/witness/test_it.py"


def _test(name: str, outcome: str, *, guard: bool = False) -> Test:
    return Test(name=name, outcome=outcome, guard=guard, said="", detail="", seconds=0.1)


def _run(*tests: Test, problem: str = "") -> Run:
    return Run(witness=FILE, side="base", tests=tests, problem=problem)


RED, GREEN = _test("test_red", "failed"), _test("test_green", "passed")
CONTROL = _test("test_lives", "passed", guard=True)
BROKEN = replace(CONTROL, outcome="failed")


@pytest.mark.parametrize(
    ("runs", "state"),
    [
        ([_run(RED, CONTROL)], NEEDED),
        ([_run(RED, GREEN)], NEEDED),
        ([_run(RED, BROKEN)], NEEDED),
        ([_run(GREEN, CONTROL)], UPSTREAM),
        ([_run(GREEN), _run(RED)], NEEDED),
        ([_run(GREEN), _run(problem="pytest ended with 4\nImportError")], UNKNOWN),
        ([_run(GREEN, BROKEN)], UNKNOWN),
        ([_run(GREEN, _test("test_x", "error"))], UNKNOWN),
        ([_run(GREEN, _test("test_x", "skipped"))], UNKNOWN),
        ([_run(CONTROL)], UNKNOWN),
        ([_run()], UNKNOWN),
    ],
)
def test_green_is_upstream_red_is_needed_and_all_else_is_unknown(
    runs: list[Run], state: str
) -> None:
    assert rebase.judge(runs).state == state


def test_the_ids_of_a_verdict_are_those_of_pytest() -> None:
    verdict = rebase.judge([replace(_run(RED, GREEN, BROKEN), witness=f"{FILE}::test_one")])
    assert verdict.green == (f"{FILE}::test_green",)
    assert verdict.broken == (f"{FILE}::test_lives",)


@pytest.fixture
def new(tmp_path: Path) -> Base:
    base = bases.load(bases.default())
    path = tmp_path / "9.9.0" / "base.toml"
    path.parent.mkdir()
    text = (base.folder / "base.toml").read_text()
    path.write_text(text.replace(f'version = "{base.version}"', 'version = "9.9.0"', 1))
    return bases.parse(path)


def test_the_tests_of_kept_patches_are_noted_and_none_twice(new: Base) -> None:
    shared = Verdict(state=NEEDED, why="", green=("t.py::b",), broken=("t.py::c",))
    verdicts = {
        "1": shared,
        "2": replace(shared, green=("t.py::b", "u.py::d")),
        "3": Verdict(state=UPSTREAM, why="", green=("v.py::e",)),
        "4": Verdict(state=UNKNOWN, why="", green=("w.py::f",)),
    }
    dropped = (Dropped(patch="3", state="upstream", since="9.9.0", why="all green"),)
    rebase.record(new, Outcome(dropped=dropped), verdicts)
    values = tomllib.loads((new.folder / "base.toml").read_text())
    assert values["witness"]["upstream"] == ["t.py::b", "u.py::d"]
    assert values["witness"]["needed"] == ["t.py::c"]
    assert [entry["patch"] for entry in values["dropped"]] == ["3"]


@pytest.mark.parametrize(("failing", "machine"), [("x86_64", "aarch64"), ("aarch64", "x86_64")])
def test_a_lock_that_fails_keeps_no_other_from_being_made(
    new: Base, monkeypatch: pytest.MonkeyPatch, failing: str, machine: str
) -> None:
    pin = f"torch==1 \\\n    --hash=sha256:{'0' * 64}\n    # via vllm\n"

    def make(base: Base, name: str) -> lock.Locks:
        assert base.toolchain.cuda == "13.9"
        if name == failing:
            raise ToolFailedError("uv finds nothing", next_step="wait")
        return lock.Locks(closure=pin, build=pin)

    monkeypatch.setattr(lock, "resolve", lambda *args: {"cuda-toolkit": "13.9"})
    monkeypatch.setattr(lock, "make", make)
    monkeypatch.setattr(lock, "verify", lambda *args: [])
    monkeypatch.setattr("platform.machine", lambda: machine)
    check = rebase.write_locks(bases.load(bases.default()), new, lambda text: None)
    assert [line.split(":")[0] for line in check] == [f"lock.{failing}"]
    assert new.lock_path(machine).is_file()
    assert not new.lock_path(failing).exists()
    values = tomllib.loads((new.folder / "base.toml").read_text())
    assert values["witness"]["packages"] == ["torch"]
