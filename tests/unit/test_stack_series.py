"""The series: it and the folder agree both ways; git's answers and junit files are read right."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_stack_patchfile import GOOD, WHERE

from sm12x import layout
from sm12x.core import git
from sm12x.core.errors import BadFileError, NoSpaceError
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.worktree import tree
from sm12x_dev.witness import environment, junit, witness
from sm12x_dev.witness.pytests import Run
from sm12x_dev.worktree import export, lint


@pytest.fixture
def base(tmp_path: Path) -> Base:
    (tmp_path / "series").write_text(f"# Why.\n{WHERE}\n")
    (tmp_path / WHERE).write_text(GOOD)
    return dataclasses.replace(bases.load(bases.versions()[0]), folder=tmp_path)


def test_a_stack_has_an_id_of_its_content_and_order(base: Base) -> None:
    stack = series.load(base)
    assert [patch.name for patch in stack.patches] == [WHERE]
    assert len(stack.id) == 8
    second = dataclasses.replace(stack.patches[0], name="0002-x.patch")
    both = series.Stack(patches=(stack.patches[0], second))
    turned = series.Stack(patches=(second, stack.patches[0]))
    assert len({stack.id, both.id, turned.id, series.Stack(patches=()).id}) == 4


@pytest.mark.parametrize("name", ["0001", "1", "01", WHERE, WHERE.removesuffix(".patch")])
def test_a_patch_is_found_by_name_or_number(base: Base, name: str) -> None:
    assert series.load(base).get(name).name == WHERE
    with pytest.raises(BadFileError, match=WHERE):
        series.load(base).get("0002")


def test_what_comes_after_a_patch(base: Base) -> None:
    stack = series.load(base)
    both = series.Stack(
        patches=(stack.patches[0], dataclasses.replace(stack.patches[0], name="0002-x.patch"))
    )
    assert both.after("1") == ("0002-x.patch",)
    assert both.after("0002-x.patch") == ()
    assert both.after("0") == (WHERE, "0002-x.patch")
    with pytest.raises(BadFileError):
        both.after("3")


def test_a_kept_patch_is_not_dropped_as_well(base: Base) -> None:
    (base.folder / "base.toml").write_text(f'# one\n[[dropped]]\npatch = "0007-{WHERE[5:]}"\n')
    left = bases.Dropped(patch=f"0007-{WHERE[5:]}", state="conflict", since="", why="x")
    said = [f for f in lint.check(base, root=None) if f.path.name == "base.toml"]
    assert said == []
    spoilt = dataclasses.replace(base, dropped=(left,))
    (fault,) = [f for f in lint.check(spoilt, root=None) if f.path.name == "base.toml"]
    assert fault.line == 3


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"{WHERE}\n0002-x.patch\n", "series:2"),
        ("", f"{WHERE}:1"),
        (f"{WHERE}\n{WHERE}\n", "series:2"),
        (f"{WHERE}\r\n", "series:1"),
        (f"\n{WHERE}\n", "series:1"),
        (f"{WHERE}", "series:1"),
        (f"{WHERE}\n# late\n", "series:2"),
        (f"sub/{WHERE}\n", "series:1"),
        ("README\n", "series:1"),
        ("0001-a\0b.patch\n", "series:1"),
    ],
)
def test_a_malformed_series_is_told_by_line(base: Base, text: str, where: str) -> None:
    base.series_path.write_bytes(text.encode())
    with pytest.raises(BadFileError) as caught:
        series.load(base)
    assert caught.value.message.startswith(f"{base.folder / where}: ")


def test_a_missing_series_is_an_error(base: Base) -> None:
    base.series_path.unlink()
    with pytest.raises(BadFileError):
        series.load(base)
    assert export.header(base) == ""


@pytest.mark.parametrize("name", ["series", WHERE])
def test_a_pipe_is_refused_and_not_waited_for(base: Base, name: str) -> None:
    (base.folder / name).unlink()
    os.mkfifo(base.folder / name)
    with pytest.raises(BadFileError, match=r"regular file|not the name"):
        series.load(base)


def test_check_lists_everything(base: Base) -> None:
    wrong = "0001-Another-name.patch"
    (base.folder / WHERE).rename(base.folder / wrong)
    base.series_path.write_text(f"{wrong}\nnothing\n")
    places = [(fault.path.name, fault.line) for fault in lint.check(base, root=base.folder)]
    assert sorted(places) == [(wrong, 1), (wrong, 19), ("series", 2)]


def test_what_git_apply_says_is_read() -> None:
    said = git.parse_apply(
        "Checking patch a.py...\n"
        "Hunk #2 succeeded at 12 (offset 2 lines).\n"
        "Hunk #3 succeeded at 40 (offset -1 line).\n"
        "Checking patch b.py...\n"
        "error: while searching for:\nsome\n\ntext\n\n"
        "error: patch failed: b.py:7\n"
        "error: b.py: patch does not apply\n",
        1,
    )
    assert not said.ok
    assert [line.split(" fits")[0] for line in said.offsets] == ["a.py: hunk 2", "a.py: hunk 3"]
    assert said.errors == ("patch failed: b.py:7", "b.py: patch does not apply")


JUNIT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.witness.test_it" name="test_a[1]" time="0.5"><failure
 message="assert 1 == 2&#10;more">line 1\nassert 1 == 2</failure></testcase>
<testcase classname="tests.witness.test_it.TestX" name="test_b" time="0"><properties>
 <property name="guard" value="yes"/></properties></testcase>
<testcase classname="tests.witness.test_it" name="test_s" time="0"><properties>
 <property name="patched_only" value="yes"/></properties></testcase>
<testcase classname="tests.witness.test_it" name="test_c" time="0"><failure message="f"/></testcase>
<testcase classname="tests.witness.test_it" name="test_c" time="0"><error message="e"/></testcase>
<testcase classname="" name="tests.witness.test_it" time="0"><skipped message="s"/></testcase>
</testsuite></testsuites>"""


def test_a_junit_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    path.write_text(JUNIT)
    tests = junit.read(path)
    assert [(test.name, test.outcome, test.guard, test.said) for test in tests] == [
        ("test_a[1]", "failed", False, "assert 1 == 2"),
        ("TestX::test_b", "passed", True, ""),
        ("test_s", "passed", False, ""),
        ("test_c", "error", False, "e"),
        ("tests.witness.test_it", "skipped", False, "s"),
    ]
    assert [test.name for test in tests if test.patched_only] == ["test_s"]
    assert {test.module for test in tests} == {"tests.witness.test_it"}
    # The same name in two files is two tests.
    path.write_text(JUNIT.replace('test_it" name="test_s"', 'test_other" name="test_c"'))
    assert [(test.module, test.outcome) for test in junit.read(path) if test.name == "test_c"] == [
        ("tests.witness.test_other", "passed"),
        ("tests.witness.test_it", "error"),
    ]
    path.write_text(JUNIT[:200])
    with pytest.raises(ValueError, match=r"x\.xml"):
        junit.read(path)
    with pytest.raises(ValueError, match=r"x\.xml"):
        junit.read(tmp_path / "y" / "x.xml")


def _run(side: str, *tests: junit.Test, problem: str = "") -> Run:
    return Run(witness="t.py", side=side, tests=tests, problem=problem)


# What a base's [witness] says of its tests.
SAYS_NOTHING = bases.Witness(packages=(), download_mib=0)


def _test(outcome: str, *, guard: bool = False, name: str = "t") -> junit.Test:
    return junit.Test(name=name, outcome=outcome, guard=guard, said="", detail="", seconds=0)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("before", ["passed", "failed", "error", "skipped"])
@pytest.mark.parametrize("after", ["passed", "failed", "error", "skipped"])
def test_only_red_then_green_counts_and_green_twice_for_a_guard(
    guard: bool, before: str, after: str
) -> None:
    checks = witness.judge(
        "p",
        _run("base", _test(before, guard=guard)),
        _run("patched", _test(after, guard=guard)),
        SAYS_NOTHING,
    )
    own = [check for check in checks if check.test == "t"]
    assert [check.ok for check in own] == [
        after == "passed" and before == ("passed" if guard else "failed")
    ]
    # A witness of guards alone shows nothing.
    assert any(not check.ok for check in checks) or not guard


@pytest.mark.parametrize(
    ("before", "after", "ok"),
    [("", "passed", True), ("", "failed", False), ("passed", "passed", False)],
)
def test_a_test_left_to_chance_is_judged_on_the_patched_tree_alone(
    before: str, after: str, ok: bool
) -> None:
    red, green = _test("failed", name="red"), _test("passed", name="red")
    chance = dataclasses.replace(_test(after), patched_only=True)
    on_base = [dataclasses.replace(chance, outcome=before)] if before else []
    checks = witness.judge(
        "p", _run("base", red, *on_base), _run("patched", green, chance), SAYS_NOTHING
    )
    assert [(check.test, check.ok) for check in checks] == [("red", True), ("t", ok)]
    # Alone it shows nothing.
    alone = witness.judge("p", _run("base", *on_base), _run("patched", chance), SAYS_NOTHING)
    assert not all(check.ok for check in alone)


def test_a_crash_on_either_side_hides_no_other() -> None:
    checks = witness.judge(
        "p",
        _run("base", problem="ended by signal 6\ntail"),
        _run("patched", problem="ended"),
        SAYS_NOTHING,
    )
    assert [check.reasons[0] for check in checks] == [
        "on the untouched base: ended by signal 6",
        "on the patched tree: ended",
    ]
    assert checks[0].detail == "tail"


def test_a_base_says_what_it_passes_and_what_it_fails_unlike_others() -> None:
    known = dataclasses.replace(
        SAYS_NOTHING, upstream=("t.py::corrected", "u.py::other"), needed=("t.py::newly broken",)
    )
    patched = [_test("passed", name=name) for name in ("corrected", "newly broken", "red")]

    def judged(corrected: str, broken: str) -> list[tuple[str, bool, bool]]:
        tests = (
            _test(corrected, name="corrected"),
            _test(broken, name="newly broken", guard=True),
            _test("failed", name="red"),
        )
        checks = witness.judge("p", _run("base", *tests), _run("patched", *patched), known)
        return [(check.test, check.guard, check.ok) for check in checks]

    red = ("red", False, True)
    assert judged("passed", "failed") == [
        ("corrected", True, True),
        ("newly broken", False, True),
        red,
    ]
    assert judged("failed", "passed") == [
        ("corrected", True, False),
        ("newly broken", False, False),
        red,
    ]
    # A test that was renamed must not stay on the list.
    known = dataclasses.replace(known, upstream=("t.py::gone",))
    assert ("(the whole witness)", False, False) in judged("failed", "failed")


def test_the_witness_environment_is_pinned_by_hash(base: Base, tmp_path: Path) -> None:
    (tmp_path / "tests/witness").mkdir(parents=True)
    tools = tmp_path / "tests/witness/requirements.lock"
    tools.write_text("pytest==9.0 \\\n    --hash=sha256:" + "a" * 64 + "\n")
    lock = tmp_path / "requirements-x86_64.lock"
    lock.write_text(
        "one==1.0 \\\n    --hash=sha256:" + "b" * 64 + "\n"
        "two==2.0 \\\n    --hash=sha256:" + "c" * 64 + "\n    # via one\n"
    )
    wanted = bases.Witness(packages=("one",), download_mib=1)
    text = environment.requirements(
        dataclasses.replace(base, witness=wanted), machine="x86_64", root=tmp_path
    )
    assert [line.split("==")[0] for line in text.splitlines() if "==" in line] == ["one", "pytest"]
    assert text.count("--hash=sha256:") == 2
    missing = bases.Witness(packages=("three",), download_mib=1)
    with pytest.raises(BadFileError, match=r"witness\.packages names three"):
        environment.requirements(
            dataclasses.replace(base, witness=missing), machine="x86_64", root=tmp_path
        )


def test_what_lies_apart_makes_another_environment_of_the_same_packages() -> None:
    known = bases.load("0.33.0")
    told: dict[str, Any] = {"machine": "x86_64", "root": layout.root()}
    assert known.witness.apart == ("triton",)
    without = dataclasses.replace(known, witness=dataclasses.replace(known.witness, apart=()))
    assert environment.requirements(known, **told) == environment.requirements(without, **told)
    assert "triton==" not in environment.requirements(known, **told)
    assert environment.environment_name(known, **told) != environment.environment_name(
        without, **told
    )
    unknown = dataclasses.replace(known.witness, apart=("three",))
    with pytest.raises(BadFileError, match=r"witness\.apart names three"):
        environment.environment_name(dataclasses.replace(known, witness=unknown), **told)


def test_an_environment_is_used_while_a_lock_names_it(tmp_path: Path) -> None:
    """GIVEN one of the lock, an older one, two of another kind, and one of no base."""
    known = bases.load(bases.versions()[0])
    homes = tmp_path / environment.HOMES
    named = environment.environment_name(known, machine="x86_64", root=layout.root())
    names = [
        named,
        f"{known.version}-x86_64-000000000000",
        f"{known.version}-x86_64-upstream-000000000000",
        f"{known.version}-x86_64-upstream-111111111111",
        "0.1.0-x86_64-upstream-111111111111",
        f".{named}.abc",
    ]
    for age, name in enumerate(names):
        (homes / name).mkdir(parents=True)
        os.utime(homes / name, (age, age))
    found = environment.environments([known], root=layout.root(), cache=tmp_path, machine="x86_64")
    assert {one.path.name for one in found if one.bases} == {named, names[3]}
    for one in found:
        environment.remove(one)
    assert list(homes.iterdir()) == []
    assert environment.environments([known], root=layout.root(), cache=tmp_path / "none") == []


def test_a_full_disk_is_not_a_spoilt_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "tiny-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("tiny-1.0/a"), io.BytesIO())

    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "extractall", full)
    with pytest.raises(NoSpaceError, match=str(tmp_path)):
        tree.unpack(archive, tmp_path / "tree")
    assert list(tmp_path.iterdir()) == [archive]
