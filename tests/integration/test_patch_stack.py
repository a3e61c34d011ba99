"""The patch stack through real git, on a tiny sdist: apply, refresh, new, drop."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import World, git, snapshot

from sm12x.core.errors import BadFileError, DirtyTreeError
from sm12x.stack.model import series
from sm12x.stack.worktree import apply as applying
from sm12x.stack.worktree import tree
from sm12x.stack.worktree.apply import StackConflictError, apply
from sm12x_dev import render
from sm12x_dev.worktree import add_drop, export, lint
from sm12x_dev.worktree.repository import make_repository


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return stackrepo.make(tmp_path, monkeypatch)


@pytest.fixture
def stacked(world: World) -> World:
    """A world with three patches; the second and third touch the same file."""
    directory = world.applied("author")
    world.commit(directory, "Correct line ten", "tiny/a.py", "a = 10\n", "a = 'ten'\n")
    world.commit(directory, "Correct b: größer", "tiny/b.py", "b = 5\n", "b = 'five'\nb = 5.5\n")
    world.commit(directory, "Add a module", "tiny/sub/c.py", "", "c = 1\n")
    return world


def test_new_makes_patches_that_apply_to_a_fresh_tree(stacked: World) -> None:
    base = stacked.base
    stack = series.load(base)
    assert [patch.name for patch in stack.patches] == [
        "0001-Correct-line-ten.patch",
        "0002-Correct-b-gr-er.patch",
        "0003-Add-a-module.patch",
    ]
    assert stack.patches[1].subject == "Correct b: größer"
    assert lint.check(base, root=stacked.root) == []
    directory = stacked.fresh()
    report = apply(base, stack, directory)
    assert [result.state for result in report.results] == ["applied"] * 3
    assert report.changed == ("tiny/a.py", "tiny/b.py", "tiny/sub/c.py")
    assert "a = 'ten'\n" in (directory / "tiny/a.py").read_text()
    assert not (directory / ".git").exists()
    assert tree.tree_id(directory) == report.tree


def test_apply_then_refresh_changes_no_byte(stacked: World) -> None:
    before = stacked.patches()
    directory = stacked.applied("second")
    assert git(directory, "status", "--porcelain") == ""
    assert git(directory, "log", "--format=%s", "base..HEAD").splitlines() == [
        "Add a module",
        "Correct b: größer",
        "Correct line ten",
    ]
    # Settings of the folder's owner do not leak into the files.
    for setting in ("diff.noprefix", "format.signOff", "diff.mnemonicPrefix", "format.thread"):
        git(directory, "config", setting, "true")
    git(directory, "config", "diff.context", "9")
    git(directory, "config", "format.subjectPrefix", "MINE")
    report = stacked.refresh(directory)
    assert len(report.unchanged) == 3
    assert stacked.patches() == before
    report_again, findings = export.round_trip(
        stacked.base, series.load(stacked.base), stacked.fresh("third")
    )
    assert report_again.ok
    assert findings == []


def test_the_round_trip_names_the_line_that_differs(stacked: World) -> None:
    path = stacked.base.folder / "0001-Correct-line-ten.patch"
    text = path.read_text().replace("diff --git", "---\n 1 file changed\n\ndiff --git", 1)
    path.write_text(text)
    _, findings = export.round_trip(stacked.base, series.load(stacked.base), stacked.fresh())
    assert [finding.path.name for finding in findings] == [path.name]
    assert text.split("\n")[findings[0].line - 1] == "---"


def test_refresh_follows_commits_that_go_move_and_come(stacked: World) -> None:
    directory = stacked.applied("edited")
    tip = git(directory, "rev-parse", "HEAD").strip()
    git(directory, "reset", "--hard", "-q", "base")
    git(directory, "cherry-pick", tip, f"{tip}~1")
    report = stacked.refresh(directory)
    assert report.removed == (
        "0001-Correct-line-ten.patch",
        "0003-Add-a-module.patch",
    )
    assert report.added == ("0001-Add-a-module.patch",)
    assert stacked.patches()["series"].decode().splitlines() == [
        "# The patches.",
        "0001-Add-a-module.patch",
        "0002-Correct-b-gr-er.patch",
    ]
    assert lint.check(stacked.base, root=stacked.root) == []
    apply(stacked.base, series.load(stacked.base), stacked.fresh())


def _orphan(directory: Path) -> None:
    git(directory, "checkout", "-q", "--orphan", "new")
    git(directory, "commit", "-q", "-m", "x")
    git(directory, "branch", "-q", "-M", "new", "stack")


def _merge(directory: Path) -> None:
    git(directory, "checkout", "-q", "-b", "side", "base")
    git(directory, "commit", "-q", "--allow-empty", "-m", "x")
    git(directory, "merge", "-q", "-m", "y", "stack")
    git(directory, "branch", "-q", "-M", "side", "stack")


@pytest.mark.parametrize(
    ("spoil", "fact"),
    [
        (lambda d: (d / "tiny/a.py").write_text("x"), "tiny/a.py"),
        (lambda d: (d / "left.txt").write_text("x"), "left.txt"),
        (lambda d: (d / ".git/rebase-merge").mkdir(), "rebase-merge"),
        (lambda d: git(d, "tag", "-f", "base", "HEAD"), "tagged base"),
        (_orphan, "tagged base"),
        (_merge, "merge"),
        (lambda d: git(d, "tag", "-d", "base"), "sm12x-dev apply"),
    ],
)
def test_refresh_refuses_what_is_not_one_line_of_commits(
    stacked: World, spoil: object, fact: str
) -> None:
    before = stacked.patches()
    directory = stacked.applied("spoiled")
    assert callable(spoil)
    spoil(directory)
    with pytest.raises(DirtyTreeError, match=fact):
        stacked.refresh(directory)
    assert stacked.patches() == before


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Only a subject", "`Upstream:` is missing"),
        ("Two lines of\nsubject", "does not survive as a mail"),
        ("A subject\n\ndiff --git a/x b/x\n", "no part of a diff"),
    ],
)
def test_refresh_refuses_a_commit_without_reasons(stacked: World, message: str, said: str) -> None:
    before = stacked.patches()
    directory = stacked.applied("spoiled")
    (directory / "tiny/b.py").write_text("b = 0\n")
    git(directory, "commit", "-q", "-a", "-m", message)
    with pytest.raises(export.MessageError) as caught:
        stacked.refresh(directory)
    assert any(said in finding.message for finding in caught.value.findings)
    assert stacked.patches() == before


def test_every_patch_is_tried_and_the_place_is_shown(stacked: World) -> None:
    folder = stacked.base.folder
    first = folder / "0001-Correct-line-ten.patch"
    first.write_text(first.read_text().replace(" a = 9\n", " a = 'nine'\n", 1))
    second = folder / "0002-Correct-b-gr-er.patch"
    text = second.read_text()
    assert "@@ -2,7 +2,8 @@" in text
    second.write_text(text.replace("@@ -2,7 +2,8 @@", "@@ -4,7 +4,8 @@", 1))
    directory = stacked.fresh()
    before = snapshot(directory)
    with pytest.raises(StackConflictError, match="0001") as caught:
        make_repository(stacked.base, series.load(stacked.base), directory)
    assert snapshot(directory) == before
    report = caught.value.report
    assert [result.state for result in report.results] == ["conflict", "offset", "applied"]
    assert report.results[0].messages[0] == "patch failed: tiny/a.py:7"
    assert report.results[1].messages[0].startswith("tiny/b.py: hunk 1 fits at line 2")
    shown = render.applied(report)
    assert "git: patch failed: tiny/a.py:7" in shown
    assert "0003-Add-a-module.patch: applied" in shown


def test_a_failure_that_may_follow_from_another_says_so(world: World) -> None:
    directory = world.applied("author")
    world.commit(directory, "One", "tiny/a.py", "a = 10\n", "a = 'ten'\n")
    world.commit(directory, "Two", "tiny/a.py", "a = 'ten'\n", "a = 'zehn'\n")
    first = world.base.folder / "0001-One.patch"
    first.write_text(first.read_text().replace(" a = 9\n", " a = 'nine'\n", 1))
    with pytest.raises(StackConflictError) as caught:
        apply(world.base, series.load(world.base), world.fresh())
    assert caught.value.report.results[1].follows == ("0001-One.patch",)


def test_a_patch_the_base_has_already_is_reported_and_skipped(world: World) -> None:
    directory = world.applied("author")
    world.commit(directory, "One", "tiny/a.py", "a = 10\n", "a = 'ten'\n")
    # The same patch from a tree that lacks the fix: here it undoes what the base has.
    name = "0002-Undo-it.patch"
    text = (world.base.folder / "0001-One.patch").read_text()
    swapped = (
        text.replace("Subject: [PATCH] One", "Subject: [PATCH] Undo it")
        .replace("-a = 10\n+a = 'ten'\n", "-a = 0\n+a = 10\n")
        .replace("0001-One", "0002")
    )
    (world.base.folder / "0001-One.patch").write_text(swapped)
    (world.base.folder / "0001-One.patch").rename(world.base.folder / name)
    world.base.series_path.write_text(f"{name}\n")
    directory = world.fresh()
    report = make_repository(world.base, series.load(world.base), directory)
    assert [result.state for result in report.results] == ["upstream"]
    assert report.changed == ()
    # It has no commit to export from, and must not get lost on the way.
    with pytest.raises(DirtyTreeError, match=r"0002-Undo-it\.patch"):
        world.refresh(directory)
    dropped = add_drop.drop(
        world.base, series.load(world.base), "0002", world.archive, root=world.root
    )
    assert dropped.dropped == name
    assert dropped.orphans == (stackrepo.WITNESS,)


def test_drop_renumbers_and_moves_lines(world: World) -> None:
    directory = world.applied("author")
    world.commit(directory, "One", "tiny/a.py", "a = 3\n", "a = 3\na = 3.5\na = 3.6\n")
    world.commit(directory, "Two", "tiny/a.py", "a = 40\n", "a = 'forty'\n")
    report = add_drop.drop(
        world.base, series.load(world.base), "0001-One", world.archive, root=world.root
    )
    assert report.dropped == "0001-One.patch"
    assert report.orphans == ()
    assert sorted(world.patches()) == ["0001-Two.patch", "series"]
    _, findings = export.round_trip(world.base, series.load(world.base), world.fresh())
    assert findings == []


def test_drop_refuses_a_patch_that_others_need(world: World) -> None:
    directory = world.applied("author")
    world.commit(directory, "One", "tiny/a.py", "a = 10\n", "a = 'ten'\n")
    world.commit(directory, "Two", "tiny/a.py", "a = 'ten'\n", "a = 'zehn'\n")
    before = world.patches()
    with pytest.raises(StackConflictError):
        add_drop.drop(world.base, series.load(world.base), "0001", world.archive, root=world.root)
    with pytest.raises(BadFileError, match="0009"):
        add_drop.drop(world.base, series.load(world.base), "0009", world.archive, root=world.root)
    assert world.patches() == before


def test_new_refuses_a_bad_message_and_leaves_the_edit(world: World) -> None:
    directory = world.applied("author")
    with pytest.raises(DirtyTreeError):
        add_drop.new(world.base, directory, world.message("X"), author="A <a@b>", root=world.root)
    (directory / "tiny/a.py").write_text("a = 0\n")
    head = git(directory, "rev-parse", "HEAD")
    with pytest.raises(export.MessageError, match="period"):
        add_drop.new(world.base, directory, world.message("X."), author="A <a@b>", root=world.root)
    with pytest.raises(BadFileError, match="nobody"):
        add_drop.new(world.base, directory, world.message("X"), author="nobody", root=world.root)
    assert git(directory, "rev-parse", "HEAD") == head
    assert (directory / "tiny/a.py").read_text() == "a = 0\n"


def _edit(path: str) -> object:
    return lambda d: (d / path).write_text("changed\n")


@pytest.mark.parametrize(
    "spoil",
    [
        _edit("tiny/a.py"),
        _edit("new.txt"),
        _edit("built.so"),
        lambda d: (d / "run.sh").chmod(0o644),
        lambda d: (d / "tiny/dos.txt").unlink(),
        lambda d: (d / "PKG-INFO").write_text("Name: tiny\nVersion: 1.1\n"),
        lambda d: (d / "tiny/dos.txt").write_bytes(b"one\ntwo\nthree\n"),
    ],
)
def test_a_tree_that_is_not_untouched_stays_as_it_is(stacked: World, spoil: object) -> None:
    directory = stacked.fresh()
    assert callable(spoil)
    spoil(directory)
    before = snapshot(directory)
    with pytest.raises(DirtyTreeError, match="tiny-1"):
        apply(stacked.base, series.load(stacked.base), directory)
    assert snapshot(directory) == before


def test_a_tree_that_is_patched_or_half_patched_is_told_apart(stacked: World) -> None:
    base, stack = stacked.base, series.load(stacked.base)
    directory = stacked.fresh()
    apply(base, stack, directory)
    with pytest.raises(DirtyTreeError, match=f"whole stack {stack.id}"):
        apply(base, stack, directory)
    (directory / "tiny/b.py").write_text(stackrepo.FILES["tiny/b.py"])
    before = snapshot(directory)
    with pytest.raises(
        DirtyTreeError, match=r"half applied .*tiny/a\.py, tiny/sub/c\.py; .*tiny/b\.py"
    ):
        apply(base, stack, directory)
    assert snapshot(directory) == before


def test_a_hunk_that_is_cut_short_is_no_patch_for_git(stacked: World) -> None:
    path = stacked.base.folder / "0002-Correct-b-gr-er.patch"
    path.write_text(path.read_text().rpartition("\n ")[0] + "\n")
    with pytest.raises(StackConflictError) as caught:
        apply(stacked.base, series.load(stacked.base), stacked.fresh())
    assert [result.ok for result in caught.value.report.results] == [True, False, True]


def test_a_missing_folder_and_a_file_are_refused(stacked: World) -> None:
    base, stack = stacked.base, series.load(stacked.base)
    with pytest.raises(DirtyTreeError):
        apply(base, stack, stacked.work / "nowhere")
    with pytest.raises(DirtyTreeError):
        apply(base, stack, stacked.archive)
    with pytest.raises(DirtyTreeError):
        tree.unpack(stacked.archive, stacked.archive)


def test_a_folder_with_a_repository_of_its_own_keeps_it(stacked: World) -> None:
    directory = stacked.fresh()
    git(directory, "init", "-q")
    with pytest.raises(DirtyTreeError):
        make_repository(stacked.base, series.load(stacked.base), directory)
    assert apply(stacked.base, series.load(stacked.base), directory).ok


def test_a_callers_git_variables_do_not_reach_it(
    stacked: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE", "GIT_OBJECT_DIRECTORY"):
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    settings = tmp_path / "gitconfig"
    settings.write_text("[core]\n autocrlf = true\n[apply]\n whitespace = fix\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    assert apply(stacked.base, series.load(stacked.base), stacked.fresh()).ok
    assert not (tmp_path / "elsewhere").exists()


def test_crlf_mangled_patches_are_named(stacked: World) -> None:
    path = stacked.base.folder / "0002-Correct-b-gr-er.patch"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(BadFileError, match=r"0002-Correct-b-gr-er\.patch:1: .*CRLF"):
        series.load(stacked.base)


def test_file_names_are_those_of_git(world: World) -> None:
    directory = world.applied("author")
    for number, subject in enumerate(
        ("...Dots.. and  blanks -- here", "x" * 70, "Ümlaut, komma; ä/b (c)", "End - ."), start=1
    ):
        target = directory / "tiny/a.py"
        target.write_text(f"a = {number}\n")
        git(directory, "commit", "-q", "-a", "-m", subject)
    out = world.work / "out"
    printed = git(directory, "format-patch", "-o", str(out), "base..HEAD").splitlines()
    for number, line in enumerate(printed, start=1):
        subject = git(directory, "log", "-1", "--format=%s", f"HEAD~{4 - number}").strip()
        assert lint.file_name(number, subject) == Path(line).name


def test_executable_bits_and_deletions_travel(world: World) -> None:
    directory = world.applied("author")
    (directory / "tiny/b.py").unlink()
    world.commit(directory, "Delete and add", "tiny/tool.sh", "", "#!/bin/sh\n")
    (directory / "tiny/tool.sh").chmod(0o755)
    world.commit(directory, "Make it run, and no more", "tiny/empty.py", "", "")
    fresh = world.fresh()
    report = apply(world.base, series.load(world.base), fresh)
    assert not (fresh / "tiny/b.py").exists()
    assert (fresh / "tiny/empty.py").read_bytes() == b""
    assert (fresh / "tiny/tool.sh").stat().st_mode & 0o111
    assert tree.tree_id(fresh) == report.tree == tree.tree_id(directory)
    assert applying.APPLIED in {result.state for result in report.results}
