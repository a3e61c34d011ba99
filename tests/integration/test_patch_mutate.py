"""`sm12x-dev mutate` with real pytest processes, on a tiny sdist."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.integration import stackrepo
from tests.integration.stackrepo import World, snapshot
from tests.tools import mutate

from sm12x.core.errors import BadFileError, FindingsError
from sm12x.stack.model import series
from sm12x_dev import cli
from sm12x_dev.witness import environment, imports, mutations, record

SOURCE = """def ten():
    return 10


def twice(number):
    if number < 0:
        raise ValueError(number)
    doubled = number * 2
    unused = doubled
    return doubled
"""
WITNESS = """
import importlib.util, os, pathlib
import pytest
PATH = pathlib.Path(os.environ["SM12X_TREE"]) / "tiny/new.py"

@pytest.fixture
def new():
    spec = importlib.util.spec_from_file_location("new", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def load():
    namespace = {}
    exec(PATH.read_text(), namespace)
    return namespace

def test_twice(): assert load()["twice"](2) == 4
def test_negative():
    with pytest.raises(ValueError): load()["twice"](-1)
"""
ENTRY = """[[mutation]]
patch = "Add-twice"
file = "tiny/new.py"
find = "{find}"
replace = "{replace}"
why = "{why}"
"""


def _entries(*edits: tuple[str, str, str]) -> str:
    return "schema = 1\n" + "".join(
        ENTRY.format(find=find, replace=replace, why=why) for find, replace, why in edits
    )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = stackrepo.make(tmp_path, monkeypatch)
    (made.root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nmarkers = ["guard: holds"]\n'
    )
    made.commit(made.applied("author"), "Add twice", "tiny/new.py", "", SOURCE)
    (made.root / stackrepo.WITNESS).write_text(WITNESS)
    return made


def _run(
    world: World, text: str, *, auto: int = 0, kept: Path | None = None
) -> mutate.MutationReport:
    base = world.base
    (base.folder / mutations.NAME).write_text(text)
    stack = series.load(base)
    return mutate.run(
        base,
        stack,
        stack.patches,
        archive=world.archive,
        python=Path(sys.executable),
        root=world.root,
        auto=auto,
        kept=kept,
    )


def test_killed_survived_stale_and_what_could_not_run(world: World) -> None:
    kept = snapshot(world.root)
    report = _run(
        world,
        _entries(
            ("number * 2", "number * 3", "two times"),
            ("if number < 0", "if number < -9", "no negative number"),
            ("unused = doubled", "unused = 0", "nothing"),
            ("doubled = 7", "doubled = 8", "not there"),
            ("doubled", "tripled", "three times there"),
            ("return 10", "return 10)", "no Python"),
        ),
    )
    assert [(outcome.state, outcome.why) for outcome in report.outcomes] == [
        ("killed", "two times"),
        ("killed", "no negative number"),
        ("survived", "nothing"),
        ("stale", "not there"),
        ("stale", "three times there"),
        ("could not run", "no Python"),
    ]
    assert report.outcomes[0].test == f"{stackrepo.WITNESS}::test_twice"
    assert report.outcomes[1].test == f"{stackrepo.WITNESS}::test_negative"
    assert not report.ok
    # The checkout is only read, its caches and the list itself aside.
    after = {
        path: value
        for path, value in snapshot(world.root).items()
        if "__pycache__" not in path and not path.endswith(mutations.NAME)
    }
    assert after == kept


def test_a_witness_that_is_red_anyway_kills_nothing(world: World) -> None:
    (world.root / stackrepo.WITNESS).write_text(f"{WITNESS}\ndef test_zero(): assert False\n")
    report = _run(world, _entries(("return 10", "return 11", "ten is ten")))
    (outcome,) = report.outcomes
    assert outcome.state == "could not run"
    assert "test_zero is not green without a mutation" in outcome.said


def test_a_witness_that_crashes_or_does_not_get_to_run_kills_nothing(world: World) -> None:
    (world.root / stackrepo.WITNESS).write_text(
        f"{WITNESS}\ndef test_eleven(): load()['ten']() == 11 and os.abort()\n"
        "@pytest.fixture\ndef twelve(): assert load()['ten']() != 12\ndef test_it(twelve): ...\n"
    )
    report = _run(
        world,
        _entries(("return 10", "return 11", "crashes"), ("return 10", "return 12", "no set-up")),
    )
    assert [outcome.state for outcome in report.outcomes] == ["could not run"] * 2


def test_the_test_that_is_named_is_asked_first(world: World) -> None:
    by = f'by = "{stackrepo.WITNESS}::test_negative"\n'
    report = _run(
        world,
        # Both tests would see this one; and one that the named test does not see is still killed.
        _entries(("def twice(number)", "def once(number)", "its name"))
        + by
        + ENTRY.format(find="number * 2", replace="number * 3", why="two times")
        + by,
    )
    assert [outcome.test.split("::")[1] for outcome in report.outcomes] == [
        "test_negative",
        "test_twice",
    ]
    assert report.ok


def test_a_run_goes_on_where_an_earlier_one_was_stopped(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "cache" / "outcomes.jsonl"
    two = ("number * 2", "number * 3", "two times")
    negative = ("if number < 0", "if number < -9", "no negative number")
    ran: list[str] = []
    real = mutate._outcome

    def outcome(mutant: mutations.Mutant, *more: Any) -> mutate.MutantOutcome:
        ran.append(mutant.why)
        return real(mutant, *more)

    monkeypatch.setattr(mutate, "_outcome", outcome)
    first = _run(world, _entries(two), kept=kept)
    # The second half of a line: the run was killed while it wrote.
    with kept.open("a") as file:
        file.write('["abc", {"patch"')
    both = _run(world, _entries(negative, two), kept=kept)
    assert ran == ["two times", "no negative number"]
    assert [one.state for one in both.outcomes] == ["killed", "killed"]
    assert both.outcomes[1].test == first.outcomes[0].test
    # A witness that has changed since is asked again.
    (world.root / stackrepo.WITNESS).write_text(f"{WITNESS}# other\n")
    imports.names.cache_clear()
    _run(world, _entries(two), kept=kept)
    assert ran[2:] == ["two times"]


def test_derived_mutations(world: World) -> None:
    report = _run(world, "schema = 1\n", auto=20)
    assert {(outcome.why, outcome.state) for outcome in report.outcomes} == {
        ("without: return 10", "survived"),
        ("negated: if number < 0:", "killed"),
        ("without: raise ValueError(number)", "killed"),
        ("without: doubled = number * 2", "killed"),
        ("without: unused = doubled", "survived"),
        ("without: return doubled", "killed"),
    }


def test_the_command_and_its_exit_codes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "environment", lambda *_, **__: Path(sys.executable))
    # The stack's repository has no locks.
    monkeypatch.setattr(record, "witness_conditions", lambda *_, **__: "these")
    links = ["--base", stackrepo.VERSION, "--find-links", str(world.archive.parent)]
    path = world.base.folder / mutations.NAME
    mutate_words = ["mutate", "--json", *links]
    runner = CliRunner()
    assert isinstance(runner.invoke(cli.root, mutate_words).exception, BadFileError)
    path.write_text(_entries(("number * 2", "number * 3", "two times")))
    done = runner.invoke(cli.root, mutate_words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ok"]
    for find, state in (("unused = doubled", "survived"), ("absent", "stale")):
        path.write_text(_entries((find, "unused = 0", "nothing")))
        done = runner.invoke(cli.root, mutate_words)
        assert isinstance(done.exception, FindingsError)
        assert json.loads(done.stdout)["outcomes"][0]["state"] == state
    # What is derived is for a person to judge.
    done = runner.invoke(cli.root, ["mutate", "--auto", "1", *links])
    assert done.exit_code == 0, done.output
    words = [sys.executable, "-m", "sm12x_dev", "mutate", "9", *links]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert refused.returncode == BadFileError.exit_code
