"""`sm12x-dev` does not eat work: older folders, stopped runs, full disks, read-only folders."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import World, git, snapshot

from sm12x.core.errors import BadFileError, DirtyTreeError, NoSpaceError
from sm12x.stack.model import series
from sm12x.stack.worktree import tree
from sm12x_dev.worktree import add_drop, export, lint
from sm12x_dev.worktree.repository import make_repository


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = stackrepo.make(tmp_path, monkeypatch)
    monkeypatch.setenv("SM12X_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BASE", raising=False)
    directory = made.applied("author")
    made.commit(directory, "Correct ten", "tiny/a.py", "a = 10\n", "a = 'ten'\n")
    made.commit(directory, "Correct five", "tiny/b.py", "b = 5\n", "b = 'five'\n")
    return made


def _sm12x(*words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm12x_dev", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


# Folders that are not of this stack any more


def test_an_older_folder_removes_no_newer_patch(world: World) -> None:
    """GIVEN two folders of one stack WHEN one adds a patch THEN the other cannot take it away."""
    older, newer = world.applied("older"), world.applied("newer")
    world.commit(newer, "Correct six", "tiny/b.py", "b = 6\n", "b = 'six'\n")
    before = world.patches()
    with pytest.raises(DirtyTreeError, match="stack"):
        world.refresh(older)
    assert world.patches() == before
    with pytest.raises(DirtyTreeError):
        world.commit(older, "Correct seven", "tiny/b.py", "b = 7\n", "b = 'seven'\n")
    assert world.patches() == before
    # What was edited is still there, and no commit is left behind.
    assert "b = 'seven'" in (older / "tiny/b.py").read_text()
    assert git(older, "log", "-1", "--format=%s").strip() == "Correct five"
    # The folder that the patches come from goes on.
    assert world.refresh(newer).removed == ()


def test_a_patch_edited_by_hand_is_not_reverted(world: World) -> None:
    directory = world.applied("older")
    path = world.base.folder / "0002-Correct-five.patch"
    path.write_text(path.read_text().replace("never", "always").replace("for years", "for long"))
    before = world.patches()
    with pytest.raises(DirtyTreeError):
        world.refresh(directory)
    assert world.patches() == before


def test_a_stray_patch_is_not_deleted(world: World) -> None:
    directory = world.applied("older")
    stray = world.base.folder / "0009-Mine.patch"
    stray.write_text("mine\n")
    with pytest.raises(BadFileError, match=stray.name):
        world.refresh(directory)
    assert stray.read_text() == "mine\n"


def test_force_exports_an_older_folder(world: World) -> None:
    older, newer = world.applied("older"), world.applied("newer")
    world.commit(newer, "Correct six", "tiny/b.py", "b = 6\n", "b = 'six'\n")
    before = world.patches()
    done = _sm12x("refresh", older)
    assert done.returncode == 12, done.stderr
    assert "--force" in done.stderr
    done = _sm12x("refresh", "--force", "--json", older)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["removed"] == ["0003-Correct-six.patch"]
    assert world.patches() != before
    # The other folder has it still, as git has.
    assert _sm12x("refresh", "--force", newer).returncode == 0
    assert world.patches() == before


@pytest.mark.parametrize(
    "spoil",
    [
        ("checkout", "-q", "--detach", "HEAD~1"),
        ("checkout", "-q", "--detach", "HEAD"),
        ("checkout", "-q", "-b", "mine", "HEAD~1"),
    ],
)
def test_a_head_that_is_not_the_branch_is_refused(world: World, spoil: tuple[str, ...]) -> None:
    directory = world.applied("spoilt")
    git(directory, *spoil)
    before = world.patches()
    with pytest.raises(DirtyTreeError, match="stack"):
        world.refresh(directory)
    assert world.patches() == before


def test_a_bisection_and_a_row_of_picks_are_unfinished(world: World) -> None:
    directory = world.applied("spoilt")
    (directory / ".git/sequencer").mkdir()
    with pytest.raises(DirtyTreeError, match="sequencer"):
        world.refresh(directory)


def test_a_later_patch_that_is_out_of_date_is_seen(world: World) -> None:
    """GIVEN an early patch changed in a tree without the later ones THEN `check` names those."""
    directory = world.fresh("early")
    world.commit(world.applied("more"), "Correct eleven", "tiny/a.py", "a = 11\n", "a = 'XI'\n")
    stack = series.load(world.base)
    make_repository(world.base, stack, directory, rest=stack.after("1"))
    path = directory / "tiny/a.py"
    path.write_text(path.read_text().replace("'ten'", "'TEN'"))
    git(directory, "commit", "-qa", "--amend", "-C", "HEAD")
    world.refresh(directory)
    done = _sm12x("check", "--find-links", world.archive.parent)
    assert done.returncode != 0
    assert "0003-Correct-eleven.patch" in done.stdout


# Users' settings


def test_a_users_settings_do_not_change_the_round_trip(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks, template = tmp_path / "hooks", tmp_path / "template"
    for folder in (hooks, template / "hooks"):
        folder.mkdir(parents=True)
        for name in ("pre-commit", "post-checkout", "commit-msg", "reference-transaction"):
            (folder / name).write_text("#!/bin/sh\nexit 1\n")
            (folder / name).chmod(0o755)
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f"""[core]
 autocrlf = true
 hooksPath = {hooks}
 excludesFile = {template}/x
[commit]
 gpgSign = true
 template = {tmp_path}/nowhere
[gpg]
 program = /bin/false
[diff]
 noprefix = true
 mnemonicPrefix = true
 algorithm = patience
 external = /bin/false
 renames = copies
[apply]
 whitespace = fix
[merge]
 conflictStyle = merge
[rerere]
 enabled = true
 autoUpdate = true
[init]
 templateDir = {template}
 defaultBranch = trunk
[format]
 signOff = true
 attach = true
 subjectPrefix = MINE
[i18n]
 commitEncoding = ISO-8859-1
 logOutputEncoding = ISO-8859-1
"""
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("HOME", str(tmp_path))
    before = world.patches()
    directory = world.applied("with settings")
    assert world.refresh(directory).unchanged == tuple(sorted(set(before) - {"series"}))
    world.commit(directory, "Correct größer ✓ now", "tiny/b.py", "b = 7\n", "b = '7'\r\n")
    _, faults = export.round_trip(world.base, series.load(world.base), world.fresh("again"))
    assert faults == []


def test_odd_patches_round_trip(world: World) -> None:
    """Only a mode, only a deletion, a file moved, a link, an odd name: there and back."""
    directory = world.applied("odd")

    def commit(subject: str) -> None:
        add_drop.new(
            world.base,
            directory,
            world.message(subject),
            author="A <a@b>",
            root=world.root,
        )

    (directory / "run.sh").chmod(0o644)
    commit("Make it no program")
    (directory / "tiny/dos.txt").unlink()
    commit("Delete a file")
    (directory / "tiny/b.py").rename(directory / "tiny/c d.py")
    commit("Move a file")
    (directory / "link").symlink_to("tiny/a.py")
    (directory / "dangling").symlink_to("no/where")
    commit("Add two links")
    (directory / "tiny/it's ä.py").write_text("x = 1\n")
    commit("Add an odd name ✓")
    (directory / "link").unlink()
    (directory / "link").write_text("a file now\n")
    commit("Make a link a file")
    (directory / "build/kept.txt").unlink()
    (directory / "build/kept.txt").symlink_to("../run.sh")
    commit("Make a file a link")
    fresh = world.fresh("odd again")
    report = make_repository(world.base, series.load(world.base), fresh)
    assert git(fresh, "status", "--porcelain") == ""
    assert (fresh / "dangling").is_symlink()
    assert str((fresh / "dangling").readlink()) == "no/where"
    assert not (fresh / "link").is_symlink()
    assert str((fresh / "build/kept.txt").readlink()) == "../run.sh"
    assert (fresh / "run.sh").read_text() == "#!/bin/sh\n"
    assert report.ok
    _, faults = export.round_trip(world.base, series.load(world.base), world.fresh("third"))
    assert faults == []


def test_an_empty_series_is_a_stack_too(world: World) -> None:
    for path in world.base.folder.glob("*.patch"):
        path.unlink()
    world.base.series_path.write_text("# none\n")
    directory = world.applied("empty")
    assert world.refresh(directory).unchanged == ()
    assert _sm12x("check", "--find-links", world.archive.parent).returncode == 0
    assert snapshot(directory) == snapshot(directory)


# Folders that may not be written, and full disks


def _stacked(world: World) -> None:
    """Add patches that change, delete, link and add, in several folders."""
    directory = world.applied("more")
    (directory / "tiny/dos.txt").unlink()
    (directory / "build/kept.txt").write_text("other\n")
    (directory / "link").symlink_to("run.sh")
    (directory / "a/b/c").mkdir(parents=True)
    (directory / "a/b/c/d.py").write_text("d\n")
    world.commit(directory, "Change a lot", "run.sh", "sh", "bash")


def test_a_read_only_folder_is_half_applied_and_says_so(world: World) -> None:
    """A file system that may not be written, since no permission stops root."""
    _stacked(world)
    directory = world.fresh("read only")
    folder = directory / "tiny"
    for words in (("--bind", folder, folder), ("-o", "remount,ro,bind", folder)):
        if subprocess.run(["mount", *words], check=False).returncode:
            pytest.skip("nothing can be mounted here")
    try:
        done = _sm12x("apply", directory)
        assert done.returncode == 12, done.stderr
        assert "is half applied" in done.stderr
        assert not (directory / ".git").exists()
    finally:
        subprocess.run(["umount", folder], check=True)
    again = _sm12x("apply", directory)
    assert again.returncode == 12, again.stderr
    assert "NEW_DIR" in again.stderr


@pytest.mark.parametrize("side", ["tree", "scratch"])
def test_a_full_disk_is_no_conflict_and_no_traceback(
    world: World, tmp_path: Path, side: str
) -> None:
    """GIVEN file systems of a few KiB, one after the other THEN 7 or done, and none is mistaken."""
    _stacked(world)
    small = tmp_path / "small disk"
    small.mkdir()
    seen = set()
    for kib in (60, 100, 140, 200, 260, 320, 400, 4000):
        options = f"size={kib}k"
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "x", small], check=False
        ).returncode:
            pytest.skip("no file system can be mounted here")
        try:
            other = tmp_path / "enough"
            other.mkdir(exist_ok=True)
            directory = (small if side == "tree" else tmp_path) / f"tree {kib}"
            try:
                tree.unpack(world.archive, directory)
            except NoSpaceError:
                seen.add(-7)
                continue
            before = snapshot(directory)
            done = subprocess.run(
                [sys.executable, "-m", "sm12x_dev", "apply", str(directory)],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "TMPDIR": str(small if side == "scratch" else other)},
            )
            seen.add(done.returncode)
            assert done.returncode in (0, 7), f"{kib} KiB: {done.stderr}"
            assert "Traceback" not in done.stderr
            if done.returncode:
                assert not (directory / ".git").exists()
                # Either nothing was written, or the folder is refused.
                whole = snapshot(directory) == before
                assert _sm12x("apply", directory).returncode in ((0, 7) if whole else (7, 12))
        finally:
            subprocess.run(["umount", small], check=True)
    assert {0, 7} <= seen


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_folder_that_was_unpacked_for_nothing_goes_again(
    tmp_path: Path, error: BaseException
) -> None:
    """GIVEN an apply that is stopped after its unpack THEN the same command can be run again."""
    directory = tmp_path / "tree"
    (directory / "folder").mkdir(parents=True)
    with pytest.raises((KeyboardInterrupt, OSError)), tree.removed_on_failure(directory):
        raise error
    assert list(tmp_path.iterdir()) == []
    directory.mkdir()
    with tree.removed_on_failure(directory):
        pass
    assert directory.is_dir()


# A tree up to a patch


def test_a_patch_that_does_not_apply_has_a_tree_to_be_mended_in(world: World) -> None:
    """GIVEN a stack whose second patch is spoilt THEN what the error says makes it whole again."""
    author = world.applied("third")
    world.commit(author, "Correct seven", "tiny/a.py", "a = 7\n", "a = 'seven'\n")
    spoilt = world.base.folder / "0002-Correct-five.patch"
    spoilt.write_text(spoilt.read_text().replace(" b = 4\n", " b = 'four'\n"))
    links = ("--find-links", world.archive.parent)
    failed = _sm12x("apply", "--unpack", world.work / "whole", *links)
    assert failed.returncode == 11
    assert "--up-to 0001-Correct-ten.patch" in failed.stderr
    # The same command can be run again.
    assert not (world.work / "whole").exists()
    directory = world.work / "up to"
    done = _sm12x("apply", "--unpack", directory, "--up-to", "1", *links)
    assert done.returncode == 0, done.stderr
    assert "0003-Correct-seven.patch: left out" in done.stdout
    before = world.patches()
    # What is not in the tree stays in the series.
    assert _sm12x("refresh", directory).returncode == 0
    assert world.patches() == before
    text = (directory / "tiny/b.py").read_text()
    (directory / "tiny/b.py").write_text(text.replace("b = 5\n", "b = 'five'\n"))
    made = _sm12x("new", directory, "--like", spoilt)
    assert made.returncode == 0, made.stderr
    assert made.stdout.endswith("next: sm12x-dev witness --base 1.0 0002-Correct-five.patch\n")
    names = [patch.name for patch in series.load(world.base).patches]
    assert names == [
        "0001-Correct-ten.patch",
        "0002-Correct-five.patch",
        "0003-Correct-seven.patch",
    ]
    assert _sm12x("check", *links).returncode == 0
    # And once more, with one that is new in between.
    world.commit(directory, "Correct eight", "tiny/b.py", "b = 8\n", "b = 'eight'\n")
    assert _sm12x("refresh", directory).returncode == 0
    assert [patch.subject for patch in series.load(world.base).patches] == [
        *("Correct ten", "Correct five", "Correct eight", "Correct seven")
    ]
    assert _sm12x("check", *links).returncode == 0


def test_up_to_nothing_is_a_repository_of_the_base(world: World) -> None:
    directory = world.work / "none"
    links = ("--find-links", world.archive.parent)
    done = _sm12x("apply", "--unpack", directory, "--up-to", "0", *links)
    assert done.returncode == 0, done.stderr
    assert git(directory, "rev-parse", "HEAD") == git(directory, "rev-parse", "base")
    before = world.patches()
    assert _sm12x("refresh", directory).returncode == 0
    assert world.patches() == before


def test_a_folder_that_is_moved_is_still_a_repository(world: World) -> None:
    directory = world.applied("here")
    moved = directory.with_name('it\'s over "there"')
    directory.rename(moved)
    assert git(moved, "status", "--porcelain") == ""
    assert world.refresh(moved).removed == ()


def test_printed_commands_can_be_typed(world: World) -> None:
    directory = world.work / 'it\'s a "tree" ✓'
    done = _sm12x("apply", "--unpack", directory, "--find-links", world.archive.parent)
    command = done.stdout.splitlines()[-1].strip().replace("sm12x-dev", "-m sm12x_dev", 1)
    typed = subprocess.run(
        ["bash", "-c", f"{sys.executable} {command}"], capture_output=True, text=True, check=False
    )
    assert typed.returncode == 0, typed.stderr


# Environments


def test_environments_that_no_lock_names_go(world: World, tmp_path: Path) -> None:
    homes = tmp_path / "cache" / "witness"
    for name in ("1.0-x86_64-000000000000", ".1.0-x86_64-abc.xyz"):
        (homes / name / "bin").mkdir(parents=True)
        (homes / name / "bin" / "python").write_text("x" * 5000)
    listed = json.loads(_sm12x("cache", "list", "--json").stdout)
    assert [one["bases"] for one in listed] == [[], []]
    assert all(one["bytes"] >= 5000 for one in listed)
    would = _sm12x("cache", "clear", "--dry-run")
    assert would.stdout.count("would delete") == 2
    assert len(list(homes.iterdir())) == 2
    done = _sm12x("cache", "clear")
    assert done.returncode == 0, done.stderr
    assert list(homes.iterdir()) == []


# Rounds of all of it


@pytest.mark.parametrize("seed", range(int(os.environ.get("SM12X_ROUNDS", "4"))))
def test_random_rounds_lose_nothing(world: World, seed: int) -> None:
    """Commits, drops, moves, refreshes from this and from older trees, kills: no patch gets lost.

    SM12X_ROUNDS sets how many seeds are run.
    """
    rng = random.Random(seed)  # noqa: S311 - a seeded walk, no secret
    model = ["Correct ten", "Correct five"]
    tree_now = world.applied("round-0")
    older: list[Path] = []
    for number in range(10):
        action = rng.choice(("add", "add", "drop", "swap", "older", "fresh", "kill"))
        if action == "add":
            subject = f"Add module {seed} {number}"
            world.commit(tree_now, subject, f"tiny/m {number}.py", "", f"m = {number}\n")
            model.append(subject)
        elif action == "drop" and len(model) > 1:
            model.pop()
            git(tree_now, "reset", "-q", "--hard", "HEAD~1")
            world.refresh(tree_now)
        elif action == "swap" and len(model) > 1:
            last, before = (git(tree_now, "rev-parse", f"HEAD~{n}").strip() for n in (0, 1))
            git(tree_now, "reset", "-q", "--hard", "HEAD~2")
            git(tree_now, "cherry-pick", last, before)
            model[-2:] = [model[-1], model[-2]]
            world.refresh(tree_now)
        elif action == "older" and older:
            before_patches = world.patches()
            chosen = rng.choice(older)
            try:
                world.refresh(chosen)
            except DirtyTreeError:
                assert world.patches() == before_patches
            else:
                # Only one that stands for the very same stack may be exported.
                assert world.patches() == before_patches
        elif action == "kill":
            before_patches = world.patches()
            _killed(world, tree_now, rng)
            try:
                series.load(world.base)
            except BadFileError:
                # As with `git checkout patches`: the folder is in git.
                for name, content in before_patches.items():
                    (world.base.folder / name).write_bytes(content)
            world.refresh(tree_now)
        else:
            older.append(tree_now)
            tree_now = world.applied(f"round-{number + 1}")
        stack = series.load(world.base)
        assert [patch.subject for patch in stack.patches] == model
        assert lint.check(world.base, root=world.root) == []
    report, faults = export.round_trip(
        world.base, series.load(world.base), world.fresh(f"end-{seed}")
    )
    assert (report.ok, faults) == (True, [])


def _killed(world: World, directory: Path, rng: random.Random) -> None:
    """A refresh, or an apply elsewhere, that is killed after a random time."""
    target = world.work / f"killed-{rng.random()}"
    argv = (
        ["refresh", str(directory)]
        if rng.random() < 0.5
        else ["apply", "--unpack", str(target), "--find-links", str(world.archive.parent)]
    )
    running = subprocess.Popen(
        [sys.executable, "-m", "sm12x_dev", *argv],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    with suppress(subprocess.TimeoutExpired):
        running.wait(timeout=rng.uniform(0.3, 1.2))
    running.kill()
    running.wait()
    if target.is_dir():
        # Half applied or whole, never taken for the one when it is the other.
        again = _sm12x("apply", target)
        assert again.returncode in (0, 12), again.stderr
