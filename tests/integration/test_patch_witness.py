"""The witness runner with real pytest processes, on a tiny sdist."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import World

from sm12x.core.errors import ToolMissingError
from sm12x.stack.model import series
from sm12x_dev import render
from sm12x_dev.witness import record, witness
from sm12x_dev.witness.pytests import Run
from sm12x_dev.witness.witness import WitnessReport

READ = """
import os, pathlib, signal, subprocess, sys, time
import pytest
TEXT = (pathlib.Path(os.environ["SM12X_TREE"]) / "tiny/a.py").read_text()
PATCHED = "'ten'" in TEXT
"""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = stackrepo.make(tmp_path, monkeypatch)
    (made.root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nmarkers = ["guard: holds"]\n'
    )
    made.commit(made.applied("author"), "Correct ten", "tiny/a.py", "a = 10\n", "a = 'ten'\n")
    return made


def _run(world: World, text: str, *, seconds: float = 60, **more: Any) -> WitnessReport:
    (world.root / stackrepo.WITNESS).write_text(READ + text)
    stack = series.load(world.base)
    return witness.run(
        world.base,
        stack,
        stack.patches,
        archive=world.archive,
        python=Path(sys.executable),
        root=world.root,
        seconds=seconds,
        **more,
    )


def test_red_on_the_base_green_on_the_patched_tree(world: World) -> None:
    report = _run(
        world,
        """
@pytest.mark.parametrize("n", range(3))
def test_ten(n): assert PATCHED
class TestMore:
    def test_it(self): assert PATCHED
@pytest.mark.guard
def test_nine(): assert "a = 9" in TEXT
""",
    )
    assert (report.passed, report.failed) == (5, 0)
    assert render.witnessed(report) == (
        "0001-Correct-ten.patch\n"
        "  tests/witness/test_it.py\n"
        "    base      patched   test\n"
        "    red       green     test_ten (3 cases)\n"
        "    red       green     TestMore::test_it\n"
        "    green     green     test_nine (guard)\n"
        "\n"
        "5 passed, 0 failed\n"
    )
    # Nothing is left where the tests are, but the bytecode that any pytest leaves.
    left = {path.name for path in (world.root / "tests/witness").iterdir()}
    assert left - {"__pycache__"} == {"test_it.py"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def test_x(): pass\n", "passes on the untouched base: it does not show"),
        ("def test_x(): assert False, 'why'\n", "fails on the patched tree: AssertionError: why"),
        ("def test_x(): assert PATCHED or pytest.skip('no')\n", "is skipped on the untouched base"),
        ("if not PATCHED: raise OSError\ndef test_x(): pass\n", "did not get to run on the unt"),
        (
            "@pytest.fixture\ndef f(): assert PATCHED\ndef test_x(f): pass\n",
            "did not get to run on the untouched base",
        ),
        (
            "@pytest.fixture\ndef f():\n yield\n assert PATCHED\ndef test_x(f): assert PATCHED\n",
            "did not get to run on the untouched base",
        ),
        ("if not PATCHED:\n def test_x(): assert False\n", "is not there on the patched tree"),
        ("", "has no test, guards aside"),
        ("@pytest.mark.guard\ndef test_g(): pass\n", "has no test, guards aside"),
        ("@pytest.mark.guard\ndef test_g(): assert PATCHED\n", "fails on the untouched base"),
        ("@pytest.mark.gaurd\ndef test_g(): pass\n", "did not get to run on the untouched base"),
        ("def test_x(): PATCHED or os.abort()\n", "on the untouched base: pytest was ended by sig"),
        ("def test_x(): PATCHED or os._exit(3)\n", "on the untouched base: pytest ended with 3"),
        ("def test_x(): PATCHED or os._exit(0)\n", "on the untouched base: pytest ended with 0"),
        ("def test_x(): PATCHED or pytest.exit('enough', 3)\n", "pytest ended with 3"),
    ],
)
def test_what_is_neither_red_nor_green_is_named(world: World, text: str, said: str) -> None:
    report = _run(world, text)
    assert report.failed >= 1
    table, _, end = render.witnessed(report).partition("\nfailed:\n")
    assert said in table
    assert said in end


def test_a_witness_that_hangs_is_killed_with_its_children(world: World, tmp_path: Path) -> None:
    mark = tmp_path / "still-alive"
    start = time.monotonic()
    report = _run(
        world,
        f"""
def test_x():
    if not PATCHED:
        subprocess.run([sys.executable, "-c",
            "import time, pathlib; time.sleep(8); pathlib.Path({str(mark)!r}).touch()"])
""",
        seconds=4,
    )
    assert "on the untouched base: pytest did not finish in 4 s" in render.witnessed(report)
    assert (report.passed, report.failed) == (0, 1)
    time.sleep(max(0.0, start + 16 - time.monotonic()))
    assert not mark.exists()


RECORDED = """
@pytest.mark.guard
def test_nine(): assert "a = 9" in TEXT
def test_ten(): assert PATCHED
"""


def test_what_is_recorded_of_the_base_is_not_run_there(world: World) -> None:
    def ran(text: str, **more: Any) -> tuple[WitnessReport, list[str]]:
        sides: list[str] = []
        report = _run(world, text, on_run=lambda _, side: sides.append(side), **more)
        return report, sorted(sides)

    def known() -> record.Record | None:
        return record.load(world.base, record.WITNESSES, "sm12x-dev witness")

    first, sides = ran(RECORDED, record_for="these")
    assert (first.failed, first.recorded, sides) == (0, 0, ["base", "patched"])
    again, sides = ran(RECORDED, baseline=known())
    assert (again.checks, again.recorded, sides) == (first.checks, 1, ["patched"])
    # The patched tree is judged as ever.
    red, sides = ran(RECORDED + "def test_more(): assert 0\n", baseline=known())
    assert (red.failed, red.recorded, sides) == (1, 0, ["base", "patched"])
    # A test that breaks the rule on the base is never recorded, and so is found each time.
    for more in ({"record_for": "these"}, {"baseline": known()}):
        green, sides = ran(RECORDED + "def test_any(): pass\n", **more)
        assert (green.failed, green.recorded, sides) == (1, 0, ["base", "patched"])


def test_other_tests_than_the_recorded_ones_are_run_on_both(world: World) -> None:
    """Its file and all that it imports are as recorded, and still it has other tests."""
    text = RECORDED + "for n in range(int(os.environ['TESTS'])): vars()[f'test_{n}'] = test_ten\n"
    with pytest.MonkeyPatch.context() as patching:
        patching.setenv("TESTS", "1")
        _run(world, text, record_for="these")
        known = record.load(world.base, record.WITNESSES, "sm12x-dev witness")
        assert _run(world, text, baseline=known).recorded == 1
        patching.setenv("TESTS", "2")
        report = _run(world, text, baseline=known)
    assert (report.recorded, report.passed, report.failed) == (0, 4, 0)


SHARED = """from tests.witness import world
import os, pathlib
TREE = pathlib.Path(os.environ["SM12X_TREE"])
def note(name):
    with (TREE / "said").open("a") as file:
        file.write(f"{name} {os.getpid()}\\n")
"""


def _shared(world: World, tree: Path, *texts: str) -> tuple[list[Run], list[list[str]]]:
    """The runs of witnesses of one rig, and what they noted: name and process."""
    tree.mkdir()
    folder = world.root / "tests" / "witness"
    (folder / "world.py").touch()
    names = [f"tests/witness/test_{number}.py" for number in range(len(texts))]
    for name, text in zip(names, texts, strict=True):
        (world.root / name).write_text(SHARED + text)
    runs = witness.run_on({"base": tree}, names, python=Path(sys.executable), root=world.root)
    noted = [line.split() for line in (tree / "said").read_text().splitlines()]
    return [runs[name, "base"] for name in names], noted


def test_witnesses_of_one_rig_share_a_process(world: World, tmp_path: Path) -> None:
    runs, noted = _shared(
        world,
        tmp_path / "tree",
        "def test_x(): note('a'); assert False",
        "def test_x(): note('b')",
        "raise OSError",
    )
    assert [[(test.name, test.outcome) for test in run.tests] for run in runs] == [
        [("test_x", "failed")],
        [("test_x", "passed")],
        [("tests.witness.test_2", "error")],
    ]
    assert [name for name, _ in noted] == ["a", "b"]
    assert len({process for _, process in noted}) == 1


@pytest.mark.parametrize("end", ["os._exit(0)", "os._exit(3)", "os.abort()"])
def test_one_that_ends_the_process_of_all_leaves_the_others_theirs(
    world: World, tmp_path: Path, end: str
) -> None:
    runs, noted = _shared(
        world,
        tmp_path / "tree",
        "def test_x(): note('a')",
        f"def test_x(): {end}",
        "def test_x(): note('b'); assert False",
    )
    assert [bool(run.problem) for run in runs] == [False, True, False]
    assert [[test.outcome for test in run.tests] for run in runs] == [["passed"], [], ["failed"]]
    # The first in the process of all, then each in its own.
    assert sorted(name for name, _ in noted) == ["a", "a", "b"]
    assert len({process for _, process in noted}) == 3


def test_an_interpreter_that_is_not_there_is_named(world: World) -> None:
    stack = series.load(world.base)
    with pytest.raises(ToolMissingError, match="nowhere/python is not an executable"):
        witness.run(
            world.base,
            stack,
            stack.patches,
            archive=world.archive,
            python=Path("/nowhere/python"),
            root=world.root,
        )
