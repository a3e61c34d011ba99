"""`sm12x-dev rebase` with real git and pytest, from a tiny release to made-up later ones."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import FILES, World, git, release, snapshot

from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.worktree import tree
from sm12x_dev.worktree import export, lint

TEN = "tests/witness/test_ten.py"
FIVE = "tests/witness/test_five.py"
# Red as long as the text is the old one; a guard sees that the tree is what it should be.
WITNESS = """
import os, pathlib
import pytest
TEXT = (pathlib.Path(os.environ["SM12X_TREE"]) / "tiny/{file}.py").read_text()
def test_it(): assert "{new}" in TEXT
@pytest.mark.guard
def test_there(): assert "= 1" in TEXT
"""
A, B = FILES["tiny/a.py"], FILES["tiny/b.py"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    world = stackrepo.make(tmp_path, monkeypatch)
    monkeypatch.setenv("SM12X_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BASE", raising=False)
    (world.root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nmarkers = ["guard: holds"]\n'
    )
    (world.root / TEN).write_text(WITNESS.format(file="a", new="ten"))
    (world.root / FIVE).write_text(WITNESS.format(file="b", new="five"))
    directory = world.applied("author")
    world.commit(directory, "Correct ten", "tiny/a.py", "a = 10\n", "a = 'ten'\n", witness=TEN)
    world.commit(directory, "Correct five", "tiny/b.py", "b = 5\n", "b = 'five'\n", witness=FIVE)
    return world


def _sm12x(*words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm12x_dev", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def _rebase(world: World, version: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Without locks: the tiny project is on no index. With witnesses, in this Python."""
    links = ("--find-links", world.archive.parent, "--no-lock", "--python", sys.executable)
    directory = _tree(world, version)
    return _sm12x("rebase", version, directory, "--from", "1.0", *links, *words)


def _tree(world: World, version: str = "2.0") -> Path:
    return world.work / f"rebase-{version}"


def _subjects(version: str = "2.0") -> list[str]:
    return [patch.subject for patch in series.load(bases.load(version)).patches]


def test_what_merges_is_kept_and_what_is_upstream_is_left_out(world: World) -> None:
    """GIVEN a release that has one fix, in its own words, and moved lines under the other."""
    moved = {"tiny/a.py": "# new\n" * 9 + A, "tiny/b.py": B.replace("= 5", "= 'five!'")}
    release(world, "2.0", moved)
    done = _rebase(world, "2.0")
    assert done.returncode == 0, done.stdout + done.stderr
    new = bases.load("2.0")
    (entry,) = new.dropped
    assert (entry.patch, entry.state, entry.since) == ("0002-Correct-five.patch", "upstream", "2.0")
    assert "1 of 1 green" in entry.why
    stack = series.load(new)
    assert [patch.name for patch in stack.patches] == ["0001-Correct-ten.patch"]
    assert stack.patches[0].author.name == "A Person"
    assert lint.check(new, root=world.root) == []
    # Strictly, and byte for byte out again.
    fresh = world.work / "two"
    tree.unpack(world.archive.parent / "tiny-2.0.tar.gz", fresh)
    report, faults = export.round_trip(new, stack, fresh)
    assert (report.ok, faults) == (True, [])


def test_a_patch_that_fits_as_it_is_has_the_same_bytes(world: World) -> None:
    release(world, "2.0", {})
    assert _rebase(world, "2.0").returncode == 0
    for name in ("0001-Correct-ten.patch", "0002-Correct-five.patch"):
        assert (world.root / "patches/2.0" / name).read_bytes() == world.patches()[name]
    # The work tree is one to edit and export.
    assert export.refresh(bases.load("2.0"), _tree(world), root=world.root).rewritten == ()


def test_a_conflict_is_resolved_and_continued_with_git(world: World) -> None:
    """GIVEN one changed token WHEN git goes on after an edit THEN refresh exports both patches."""
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0  # as float\n")})
    done = _rebase(world, "2.0")
    assert done.returncode == 11, done.stderr
    directory = _tree(world)
    assert "tiny/a.py" in done.stderr
    assert git(directory, "status", "--porcelain").strip() == "UU tiny/a.py"
    # What the release has, what the patch was made for, and what the patch makes of it.
    text = (directory / "tiny/a.py").read_text()
    assert all(part in text for part in ("a = 10.0  # as float", "|||||||", "a = 'ten'"))
    refresh = ("refresh", "--base", "2.0", directory)
    # Before git is done there is nothing to export.
    assert _sm12x(*refresh).returncode == 12
    assert _subjects() == []
    (directory / "tiny/a.py").write_text(A.replace("a = 10\n", "a = 'ten'  # as float\n"))
    git(directory, "add", "--all")
    git(directory, "rebase", "--continue")
    done = _sm12x(*refresh)
    assert done.returncode == 0, done.stderr
    assert _subjects() == ["Correct ten", "Correct five"]
    assert series.load(bases.load("2.0")).patches[0].author.name == "A Person"
    assert lint.check(bases.load("2.0"), root=world.root) == []


def test_the_commands_of_the_error_work(world: World) -> None:
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n")})
    done = _rebase(world, "2.0")
    commands = done.stderr.split("`")[1::2]
    assert len(commands) == 4, done.stderr
    (_tree(world) / "tiny/a.py").write_text(A.replace("a = 10\n", "a = 'ten'\n"))
    identity = "git -c user.name=A -c user.email=a@example.org -c core.editor=true "
    for command in (commands[0], commands[1], commands[3]):
        words = command.replace("sm12x-dev ", f"{shlex.quote(sys.executable)} -m sm12x_dev ", 1)
        words = words.replace("git ", identity, 1)
        typed = subprocess.run(
            ["bash", "-c", words], cwd=world.root, capture_output=True, text=True, check=False
        )
        assert typed.returncode == 0, typed.stderr
    assert _subjects() == ["Correct ten", "Correct five"]


def test_a_patch_can_be_skipped_and_a_stopped_rebase_started_again(world: World) -> None:
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n")})
    assert _rebase(world, "2.0").returncode == 11
    git(_tree(world), "rebase", "--skip")
    assert _sm12x("refresh", "--base", "2.0", _tree(world)).returncode == 0
    assert _subjects() == ["Correct five"]
    # Again, in another folder: nothing is overwritten without --force.
    before = snapshot(world.root)
    _tree(world).rename(world.work / "aside")
    assert _rebase(world, "2.0").returncode == 12
    assert snapshot(world.root) == before
    path = world.root / "patches/2.0/base.toml"
    with path.open("a") as handle:
        handle.write('[[override]]\nrequirement = "a==1"\ninstead_of = "a>=2"\nwhy = "no 2"\n')
    assert _rebase(world, "2.0", "--force").returncode == 11
    # The one thing of the old folder that the drafting cannot know.
    assert [entry.requirement for entry in bases.load("2.0").overrides] == ["a==1"]
    assert _subjects() == []


def test_witnesses_that_cannot_run_leave_it_unknown(world: World) -> None:
    release(world, "2.0", {})
    words = ("--find-links", world.archive.parent, "--no-lock", "--python", "/nowhere/python")
    done = _sm12x("rebase", "2.0", _tree(world), "--from", "1.0", *words)
    assert done.returncode == 16, done.stderr
    assert "/nowhere/python" in done.stderr
    # Not a tree to work in, and a draft to correct.
    assert not _tree(world).exists()
    assert (bases.load("2.0").version, _subjects()) == ("2.0", [])


def test_without_witnesses_only_the_text_can_tell(world: World) -> None:
    """GIVEN a release with the text of one patch, and of a later one that changed it again."""
    world.commit(
        world.applied("more"), "Correct it more", "tiny/a.py", "'ten'", "'TEN'", witness=TEN
    )
    release(world, "2.0", {"tiny/a.py": "# x\n" + A.replace("a = 10\n", "a = 'TEN'\n")})
    done = _rebase(world, "2.0", "--no-witness")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _subjects() == ["Correct five"]
    assert [entry.patch for entry in bases.load("2.0").dropped] == [
        *("0001-Correct-ten.patch", "0003-Correct-it-more.patch")
    ]


def test_a_red_witness_keeps_a_patch_whose_text_is_there(world: World) -> None:
    """GIVEN text that does not help there THEN git stops at the patch without a change."""
    (world.root / TEN).write_text(WITNESS.format(file="a", new="eleven"))
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 'ten'\n")})
    done = _rebase(world, "2.0")
    assert done.returncode == 11, done.stdout + done.stderr
    assert bases.load("2.0").dropped == ()


def test_a_test_that_the_release_passes_is_noted_for_the_new_base(world: World) -> None:
    text = (world.root / TEN).read_text()
    more = "def test_more(): assert 'a = 61' in TEXT\n"
    guard = "@pytest.mark.guard\ndef test_less(): assert '= 61' not in TEXT or 'ten' in TEXT\n"
    (world.root / TEN).write_text(text + more + guard)
    release(world, "2.0", {"tiny/a.py": f"{A}a = 61\n"})
    assert _rebase(world, "2.0").returncode == 0
    values = tomllib.loads((world.root / "patches/2.0/base.toml").read_text())
    assert values["witness"]["upstream"] == [f"{TEN}::test_more"]
    assert values["witness"]["needed"] == [f"{TEN}::test_less"]
    # With these notes the new base's own witnesses are in order.
    words = ("--python", sys.executable, "--find-links", world.archive.parent)
    done = _sm12x("witness", "--base", "2.0", *words)
    assert done.returncode == 0, done.stdout


def test_a_line_of_a_message_that_looks_like_a_comment_stays(world: World) -> None:
    directory = world.applied("message")
    (directory / "tiny/a.py").write_text((directory / "tiny/a.py").read_text() + "a = 61\n")
    body = f"{stackrepo.BODY}\n#12 has more of it.\n"
    text = world.message("Count to 61").replace(stackrepo.BODY, body.rstrip())
    git(directory, "commit", "-q", "--all", "--cleanup=verbatim", "-m", text)
    world.refresh(directory)
    release(world, "2.0", {"tiny/a.py": f"{A}a = 61.0\n"})
    assert _rebase(world, "2.0", "--no-witness").returncode == 11
    (_tree(world) / "tiny/a.py").write_text(A.replace("a = 10\n", "a = 'ten'\n") + "a = 61\n")
    git(_tree(world), "add", "--all")
    git(_tree(world), "rebase", "--continue")
    assert _sm12x("refresh", "--base", "2.0", _tree(world)).returncode == 0
    assert "#12 has more of it." in series.load(bases.load("2.0")).patches[-1].message


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("1.0", "--force"), 2),
        (("7.0",), 6),
        (("2.0", "--from", "9.9"), 3),
    ],
)
def test_a_users_mistake_is_one_line_and_a_code(
    world: World, words: tuple[str, ...], code: int
) -> None:
    done = _rebase(world, words[0], "--no-witness", *words[1:])
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert bases.versions() == ["1.0"]
