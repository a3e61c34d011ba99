"""What a rebase decides and records, without git: verdict, since, the table, conflict regions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core.errors import BadFileError
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x_dev.rebase import merge, porting, render, status, verdict
from sm12x_dev.rebase.status import RebaseOutcome
from sm12x_dev.witness.junit import Test
from sm12x_dev.witness.witness import Run

FILE = "tests/witness/test_it.py"


def _test(name: str, outcome: str = "failed", *, said: str = "", guard: bool = False) -> Test:
    return Test(name=name, outcome=outcome, guard=guard, said=said, detail=said, seconds=0.1)


def _run(*tests: Test, problem: str = "") -> Run:
    return Run(witness=FILE, side="base", tests=tests, problem=problem)


RED = _test("test_red", said="AssertionError: alive: 1, expected 0")
GREEN = _test("test_green", "passed")
RENAMED = _test("test_renamed", said="AttributeError: module 'a' has no attribute 'b'")
CONTROL = _test("test_lives", "passed", guard=True)


@pytest.mark.parametrize(
    ("run", "state", "summary"),
    [
        (_run(RED, CONTROL), verdict.NEEDED, "1 of 1 red"),
        (_run(RED, GREEN, CONTROL), verdict.NEEDED, "1 of 2 red"),
        (_run(GREEN, CONTROL), verdict.UPSTREAM, "1 of 1 green"),
        (_run(RENAMED, CONTROL), verdict.UNKNOWN, "0 of 1 red, 1 could not run"),
        (_run(RENAMED, RED), verdict.NEEDED, "1 of 2 red, 1 could not run"),
        (_run(GREEN, RENAMED), verdict.UNKNOWN, "0 of 2 red, 1 could not run"),
        (
            _run(_test("test_x", "error", said="FileNotFoundError: no cuda.h")),
            verdict.UNKNOWN,
            "0 of ",
        ),
        (_run(_test("test_x", "skipped", said="no gdb")), verdict.UNKNOWN, "0 of 1 red, 1 could"),
        (_run(CONTROL), verdict.UNKNOWN, ""),
        (_run(), verdict.UNKNOWN, ""),
        (
            _run(GREEN, dataclasses.replace(CONTROL, outcome="failed")),
            verdict.UNKNOWN,
            "0 of 1 red",
        ),
        (_run(problem="pytest ended with 4\nE   ImportError: gone"), verdict.UNKNOWN, ""),
    ],
)
def test_red_green_and_could_not_run_are_told_apart(run: Run, state: str, summary: str) -> None:
    found = verdict.judge([run])
    assert found.state == state
    assert found.summary.startswith(summary)
    assert (found.state == verdict.UNKNOWN) <= bool(
        found.why or not run.tests or run.tests == (CONTROL,)
    )


def test_one_witness_that_could_not_run_leaves_the_other_ones_green_in_doubt() -> None:
    other = Run(witness="tests/witness/test_b.py", side="base", tests=(), problem="ended with 3")
    assert verdict.judge([_run(GREEN), other]).state == verdict.UNKNOWN
    assert verdict.judge([_run(RED), other]).state == verdict.NEEDED
    assert "test_b.py: ended with 3" in verdict.judge([_run(GREEN), other]).why


@pytest.mark.parametrize(
    ("said", "strange"),
    [
        ("AssertionError: physical memory: 4096, expected 0", False),
        ("hangs: no end after 5 s", False),
        ("hangs: no end after 60 s\nRuntimeError: as it was", True),
        ("hangs: no end, and nothing done for 5 s\nTypeError: as it was", False),
        ("E   KeyError: 'a key of another release'", True),
        ("pydantic_core._pydantic_core.ValidationError: 1 error for X", True),
        ("subprocess.CalledProcessError: Command 'g++' returned 1", True),
        ("killed by SIGSEGV", False),
        ("tests/witness/test_it.py:12: AssertionError", False),
        ("vllm.v1.engine.exceptions.EngineDeadError: see above", False),
        ("CUDA Error: invalid argument\nRuntimeError: cumem: free failed", False),
        ("E       ModuleNotFoundError: No module named 'vllm.x'", True),
        ("tests/witness/test_it.py:12: TypeError", True),
        ("E   TypeError: __init__() got an unexpected keyword argument", True),
    ],
)
def test_an_exception_that_other_code_raises_is_not_the_defect(said: str, strange: bool) -> None:
    test = Test(name="t", outcome="failed", guard=False, said="Failed: x", detail=said, seconds=0)
    assert verdict.strange(test) is strange


def test_what_a_test_may_take_that_is_not_marked_is_what_the_witnesses_say() -> None:
    conftest = layout.root() / "tests/witness/conftest.py"
    assert f"\nTIME_LIMIT = {verdict._PATIENCE}\n" in conftest.read_text()


@pytest.mark.parametrize(
    ("needed", "text", "state"),
    [
        (verdict.UPSTREAM, porting.APPLIES, status.UPSTREAM),
        (verdict.UPSTREAM, porting.CONFLICT, status.UPSTREAM),
        (verdict.NEEDED, porting.APPLIES, status.NEEDED),
        (verdict.NEEDED, porting.MERGES, status.NEEDED),
        (verdict.NEEDED, porting.CONFLICT, status.CONFLICT),
        (verdict.NEEDED, porting.PRESENT, status.CONFLICT),
        (verdict.UNKNOWN, porting.PRESENT, status.UPSTREAM),
        (verdict.UNKNOWN, porting.CONFLICT, status.UNKNOWN),
        (verdict.UNKNOWN, porting.FOLLOWS, status.UNKNOWN),
        (verdict.NEEDED, porting.FOLLOWS, status.FOLLOWS),
        (verdict.UPSTREAM, porting.FOLLOWS, status.UPSTREAM),
        (verdict.UNKNOWN, porting.MERGES, status.UNKNOWN),
        (verdict.NEEDED, "", status.NEEDED),
    ],
)
def test_what_becomes_of_a_patch(needed: str, text: str, state: str) -> None:
    assert status.decide(needed, text) == state


def _outcome(release: str, needed: str, text: str = "conflict", **more: str) -> RebaseOutcome:
    known = {"patch": "0003-Wait.patch", "base": "0.21.0", "witness": "", "since": "", "why": ""}
    return RebaseOutcome(**{**known, "release": release, "verdict": needed, "text": text, **more})


def test_since_goes_back_as_far_as_every_release_tried_had_it() -> None:
    known = [
        _outcome("0.22.0", verdict.NEEDED),
        _outcome("0.22.1", verdict.UPSTREAM),
        _outcome("0.24.0", verdict.UNKNOWN),
        _outcome("0.27.1", verdict.UPSTREAM),
        _outcome("0.10.0", verdict.UPSTREAM, patch="0001-Other.patch"),
    ]
    assert status.since("0003-Wait.patch", "0.33.0", known) == "0.22.1"
    # Numbers are places in a series: the same patch may have another elsewhere.
    assert status.since("0002-Wait.patch", "0.27.1", known) == "0.22.1"
    assert status.since("0003-Wait.patch", "0.22.0", known) == "0.22.0"
    assert (
        status.since("0003-Wait.patch", "0.33.0", [_outcome("0.30.0", verdict.NEEDED)]) == "0.33.0"
    )


RELEASES = ["0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.23.0", "0.9.0", "0.24.0", "0.33.0"]


@pytest.mark.parametrize("landed", [*range(4), None])
def test_the_first_release_is_found_by_halving(landed: int | None) -> None:
    candidates = verdict.between(RELEASES, "0.21.0", "0.33.0")
    assert candidates == ["0.22.0", "0.22.1", "0.23.0", "0.24.0"]

    def probe(version: str) -> verdict.PatchVerdict:
        has = landed is not None and candidates.index(version) >= landed
        return verdict.PatchVerdict(state=verdict.UPSTREAM if has else verdict.NEEDED)

    first, said = verdict.first(candidates, "0.33.0", probe)
    assert first == ("0.33.0" if landed is None else candidates[landed])
    assert len(said) <= 3


def test_a_release_on_which_the_witness_cannot_run_does_not_count_as_having_it() -> None:
    first, said = verdict.first(
        ["1.1", "1.2"], "2.0", lambda version: verdict.PatchVerdict(state=verdict.UNKNOWN)
    )
    assert (first, list(said)) == ("2.0", ["1.2"])
    assert verdict.first([], "2.0", lambda version: verdict.PatchVerdict(state=verdict.NEEDED)) == (
        "2.0",
        {},
    )


def test_outcomes_are_recorded_and_a_run_without_witnesses_forgets_none(tmp_path: Path) -> None:
    path = tmp_path / "status.toml"
    assert status.read(path) == ()
    seen = _outcome("0.22.1", verdict.NEEDED, witness="6 of 10 red", why="so")
    status.record(path, [_outcome("0.27.1", verdict.UNKNOWN), seen])
    assert [o.release for o in status.read(path)] == ["0.22.1", "0.27.1"]
    status.record(path, [_outcome("0.22.1", verdict.UNKNOWN, "merges", patch="0002-Wait.patch")])
    (after, _) = status.read(path)
    assert (after.patch, after.verdict, after.text) == ("0002-Wait.patch", verdict.NEEDED, "merges")
    assert after.witness == "6 of 10 red"
    assert path.read_text().startswith("# Made by `sm12x-dev rebase`; do not edit.")


def test_one_witness_of_two_does_not_displace_what_both_have_said(tmp_path: Path) -> None:
    path = tmp_path / "status.toml"
    status.record(path, [_outcome("0.22.1", verdict.NEEDED, witness="29 of 29 red")])
    status.record(path, [_outcome("0.22.1", verdict.UNKNOWN, "merges", witness="0 of 5 red")])
    (after,) = status.read(path)
    assert (after.verdict, after.witness, after.text) == (verdict.NEEDED, "29 of 29 red", "merges")
    status.record(path, [_outcome("0.22.1", verdict.UPSTREAM, witness="29 of 29 green")])
    (after,) = status.read(path)
    assert (after.verdict, after.witness) == (verdict.UPSTREAM, "29 of 29 green")


def test_the_newest_base_s_patch_tells_of_a_release() -> None:
    outcomes = [
        _outcome("0.40.0", verdict.NEEDED, base="0.9.0"),
        _outcome("0.40.0", verdict.UPSTREAM, base="0.33.0", since="0.40.0"),
    ]
    (row,) = status.table([], outcomes).rows.values()
    assert [cell.state for cell in row] == [status.UPSTREAM]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 1", "schema = 2", ": schema is 2, and not 1"),
        (
            'verdict = "needed"',
            'verdict = "maybe"',
            r"outcome\[0\]\.verdict: 'maybe' is not one of",
        ),
        ('why = ""', "", r"outcome\[0\]\.why is missing"),
        ("schema = 1", "schema =", "cannot be read"),
        ('release = "0.22.1"', 'release = "x"', r"outcome\[0\]\.release"),
    ],
)
def test_a_spoilt_record_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "status.toml"
    status.record(path, [_outcome("0.22.1", verdict.NEEDED)])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(BadFileError, match=said):
        status.read(path)


def test_the_table_is_what_folders_and_records_say(tmp_path: Path) -> None:
    """GIVEN a base, a second one that leaves patches out, and a record THEN patch by release."""
    real = bases.load(bases.versions()[0])
    first, second = tmp_path / "1.0", tmp_path / "2.0"
    for folder, names in ((first, ["0001-A.patch", "0002-B.patch"]), (second, ["0001-B.patch"])):
        folder.mkdir()
        (folder / "series").write_text("".join(f"{name}\n" for name in names))
    one = dataclasses.replace(real, version="1.0", folder=first, dropped=())
    left = bases.Dropped(patch="0001-A.patch", state="upstream", since="1.5", why="witness")
    two = dataclasses.replace(real, version="2.0", folder=second, dropped=(left,))
    outcomes = [
        _outcome("1.5", verdict.NEEDED, patch="0001-A.patch", base="1.0", witness="6 of 10 red"),
        _outcome("1.5", verdict.UNKNOWN, patch="0002-B.patch", base="1.0"),
        _outcome(
            "1.6",
            verdict.NEEDED,
            "merges",
            base="1.0",
            patch="0001-A.patch",
            witness="7 of 9 red, 2 could not run",
        ),
        _outcome("1.10", verdict.UPSTREAM, patch="0001-A.patch", base="1.0", since="1.10"),
    ]
    table = status.table([one, two], outcomes)
    assert render.table(table) == (
        "patch   1.0      1.5            1.6      1.10      2.0\n"
        "0001-A  applied  conflict 6/10  needed   upstream  upstream\n"
        "0002-B  applied  unknown        unknown  unknown   applied\n"
        "\n"
        "applied   in the stack of that base\n"
        "needed    the defect is there, and no stack is kept for that release\n"
        "upstream  the release does it itself\n"
        "conflict  needed, and to be written anew for that release\n"
        "unknown   not tried, or its witness could not run\n"
        "n/m       only n of its m tests show the defect: upstream has part of it\n"
    )
    assert table.rows["0001-A.patch"][table.releases.index("2.0")].note == "since 1.5"
    assert render.table(status.table([], [])) == "no base lists a patch\n"
    assert series.read(one)[1] != []  # the patches themselves are not there, and need not be


def test_conflicts_are_placed_by_their_own_markers() -> None:
    """GIVEN a file with lines like markers that are no conflict THEN only the tool's own count."""
    labels = merge.Labels(ours="new", base="old", theirs="0001-x.patch")
    text = (
        b"<<<<<<< HEAD\n=======\na\n<<<<<<< new\nx\r\n||||||| old\n=======\ny\n"
        b">>>>>>> 0001-x.patch\nb\n<<<<<<< new\n"
    )
    assert merge.places(text, labels) == (4, 11)
    assert merge.unresolved(text, labels.markers) == 4
    assert merge.unresolved(b"<<<<<<< HEAD\n>>>>>>> other\n", labels.markers) == 0
    assert merge.unresolved(b"x\n>>>>>>> 0001-x.patch\r\n", labels.markers) == 2


def _case(name: str, said: str, outcome: str = "failed", *, guard: bool = False) -> Test:
    return Test(name=name, outcome=outcome, guard=guard, said=said, detail=f"E   {said}", seconds=0)


def _ran(*tests: Test, problem: str = "") -> Run:
    return Run(witness="w.py", side="base", tests=tests, problem=problem)


def test_an_exception_that_is_the_defect_on_its_own_base_is_the_defect_elsewhere() -> None:
    control = _case("test_c", "", "passed", guard=True)
    there = _ran(_case("test_a", "KeyError: 0x7f0011"), control)
    assert verdict.judge([there]).silent == ("w.py::test_a",)
    own = _ran(_case("test_a", "KeyError: 0x7fff22"), control)
    assert verdict.doubtful([there])
    assert verdict.judge([there], [own]).red == ("w.py::test_a",)
    # Another text, another exception, a broken control there: nothing is known.
    for other in (
        _ran(_case("test_a", "KeyError: 'x'"), control),
        _ran(_case("test_a", "TypeError: 0x7fff22"), control),
        _ran(_case("test_a", "", "passed"), control),
        _ran(_case("test_a", "KeyError: 0x7fff22"), _case("test_c", "no", guard=True)),
        _ran(problem="pytest ended with 3"),
    ):
        assert verdict.judge([there], [other]).silent == ("w.py::test_a",)
    # What an environment lacks is missing on both.
    missing = _ran(_case("test_a", "ModuleNotFoundError: No module named 'x'"), control)
    assert not verdict.doubtful([missing])
    assert verdict.judge([missing], [missing]).silent == ("w.py::test_a",)


def test_a_control_that_fails_once_or_by_an_address_is_no_verdict() -> None:
    red = _case("test_a", "AssertionError: x")
    once = _ran(red, _case("test_c", "AssertionError: waits: 1", guard=True))
    passed = _ran(red, _case("test_c", "", "passed", guard=True))
    assert verdict.judge([once]).failing_guards == ("w.py::test_c",)
    assert verdict.judge([verdict.repeated(once, passed)]).failing_guards == ()
    assert verdict.judge([verdict.repeated(once, once)]).failing_guards == ("w.py::test_c",)
    # A test that is no control is taken as it came first.
    green = _ran(_case("test_a", "", "passed"), _case("test_c", "", "passed", guard=True))
    assert verdict.judge([verdict.repeated(once, green)]).red == ("w.py::test_a",)
    where = _ran(red, _case("test_c", "AssertionError: 140234567890123 == 7", guard=True))
    said = verdict.judge([where])
    assert said.failing_guards == ()
    assert "140234567890123" not in said.why
    assert "ADDRESS" in said.why


def test_the_record_holds_no_address_and_no_patch_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "status.toml"
    status.record(path, [_outcome("1.0", verdict.UNKNOWN, why="at 0x7f12ab34 and 140234567890123")])
    assert status.read(path)[0].why == "at ADDRESS and ADDRESS"
    more = [_outcome("1.0", verdict.NEEDED, patch="0009-Gone.patch")]
    status.record(path, more, {"0.21.0": ["0001-Wait.patch"]})
    assert [outcome.patch for outcome in status.read(path)] == ["0003-Wait.patch"]


def test_a_base_that_a_record_contradicts_is_named() -> None:
    real = bases.load(bases.versions()[0])
    left = bases.Dropped(patch="0003-Wait.patch", state="upstream", since="0.22.0", why="x")
    base = dataclasses.replace(real, version="0.33.0", dropped=(left,))
    seen = _outcome("0.27.1", verdict.NEEDED, witness="15 of 20 red")
    (line,) = status.contradictions([base], [seen])
    assert "0.27.1" in line
    for other in (
        _outcome("0.21.5", verdict.NEEDED),
        _outcome("0.40.0", verdict.NEEDED),
        _outcome("0.27.1", verdict.UPSTREAM),
        _outcome("0.27.1", verdict.NEEDED, patch="0003-Other.patch"),
    ):
        assert status.contradictions([base], [other]) == []
