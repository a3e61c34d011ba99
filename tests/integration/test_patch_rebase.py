"""`sm12x-dev rebase` with real git and pytest, from a tiny release to made-up later ones."""

from __future__ import annotations

import io
import json
import shlex
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import FILES, World, git, snapshot

from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.worktree import tree
from sm12x_dev.rebase import status
from sm12x_dev.worktree import export

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


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = stackrepo.make(tmp_path, monkeypatch)
    monkeypatch.setenv("SM12X_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BASE", raising=False)
    (made.root / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nmarkers = ["guard: holds"]\n'
    )
    (made.root / TEN).write_text(WITNESS.format(file="a", new="ten"))
    (made.root / FIVE).write_text(WITNESS.format(file="b", new="five"))
    directory = made.applied("author")
    made.commit(directory, "Correct ten", "tiny/a.py", "a = 10\n", "a = 'ten'\n", witness=TEN)
    made.commit(directory, "Correct five", "tiny/b.py", "b = 5\n", "b = 'five'\n", witness=FIVE)
    return made


def release(world: World, version: str, changes: Mapping[str, str | None]) -> None:
    """An sdist of the tiny project beside the first one; None takes a file away."""
    files = {name: text for name, text in {**FILES, **changes}.items() if text is not None}
    with tarfile.open(world.archive.parent / f"tiny-{version}.tar.gz", "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"tiny-{version}/{name}")
            body = text.replace("Version: 1.0", f"Version: {version}").encode()
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))


def _sm12x(*words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm12x_dev", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def _rebase(world: World, version: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Without locks: the tiny project is on no index. With witnesses, in this Python."""
    links = ("--find-links", world.archive.parent, "--no-lock", "--python", sys.executable)
    return _sm12x("rebase", version, "--from", "1.0", *links, *words)


A, B = FILES["tiny/a.py"], FILES["tiny/b.py"]


def test_what_applies_is_kept_and_what_is_upstream_is_left_out(world: World) -> None:
    """GIVEN a release that has one fix, in its own words, and moved lines under the other."""
    release(
        world, "2.0", {"tiny/a.py": "# new\n" * 9 + A, "tiny/b.py": B.replace("= 5", "= 'five!'")}
    )
    done = _rebase(world, "2.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0001-Correct-ten.patch: kept\n  text     merges; exported anew\n" in done.stdout
    assert "0002-Correct-five.patch: left out: upstream since 2.0\n" in done.stdout
    assert "1 kept, 1 upstream, 0 to resolve" in done.stdout
    assert "to be checked before it is committed:" in done.stdout
    new = bases.load("2.0")
    (entry,) = new.dropped
    assert (entry.patch, entry.state, entry.since) == ("0002-Correct-five.patch", "upstream", "2.0")
    assert "1 of 1 green" in entry.why
    stack = series.load(new)
    assert [patch.name for patch in stack.patches] == ["0001-Correct-ten.patch"]
    assert series.check(new, root=world.root) == []
    # Strictly, and byte for byte out again.
    fresh = world.work / "two"
    tree.unpack(world.archive.parent / "tiny-2.0.tar.gz", fresh)
    report, faults = export.round_trip(new, stack, fresh)
    assert (report.ok, faults) == (True, [])
    table = _sm12x("base", "status")
    assert table.stdout.splitlines()[:3] == [
        "patch              1.0      2.0",
        "0001-Correct-ten   applied  applied",
        "0002-Correct-five  applied  upstream",
    ]
    # A later release: what is known of this one says since when.
    release(world, "3.0", {"tiny/b.py": B.replace("= 5", "= 'five!'")})
    done = _rebase(world, "3.0", "--json")
    assert done.returncode == 0, done.stderr
    said = {patch["patch"]: patch for patch in json.loads(done.stdout)["patches"]}
    assert said["0002-Correct-five.patch"]["since"] == "2.0"
    assert said["0001-Correct-ten.patch"]["text"] == "applies"
    assert (world.root / "patches/3.0/0001-Correct-ten.patch").read_bytes() == world.patches()[
        "0001-Correct-ten.patch"
    ]


def test_releases_in_between_say_since_when(world: World) -> None:
    fixed = {"tiny/b.py": B.replace("= 5", "= 'five!'")}
    for version, changes in (("1.1", {}), ("1.2", fixed), ("1.3", fixed), ("2.0", fixed)):
        release(world, version, changes)
    done = _rebase(world, "2.0")
    assert done.returncode == 0, done.stderr
    assert "0002-Correct-five.patch: left out: upstream since 1.2\n" in done.stdout
    assert bases.load("2.0").dropped[0].since == "1.2"
    assert _sm12x("base", "status").stdout.splitlines()[:3] == [
        "patch              1.0      1.1      1.2       2.0",
        "0001-Correct-ten   applied  unknown  unknown   applied",
        "0002-Correct-five  applied  needed   upstream  upstream",
    ]


def _next(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The commands that a report says to run next, as a shell would be given them."""
    lines = [line.removeprefix("next: ") for line in done.stdout.splitlines() if "next: " in line]
    return [line for line in lines if line.startswith(("sm12x-dev ", "mv "))]


def _typed(world: World, command: str) -> subprocess.CompletedProcess[str]:
    """A printed command, run by a shell in the checkout."""
    words = command.replace("sm12x-dev ", f"{shlex.quote(sys.executable)} -m sm12x_dev ", 1)
    if "sm12x_dev witness" in words:
        words += f" --python {shlex.quote(sys.executable)}"
        words += f" --find-links {shlex.quote(str(world.archive.parent))}"
    return subprocess.run(
        ["bash", "-c", words], cwd=world.root, capture_output=True, text=True, check=False
    )


def _tree(done: subprocess.CompletedProcess[str]) -> Path:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("conflicts of ")]
    return Path(line.partition(" are in ")[2].removesuffix(":"))


def test_a_conflict_is_left_in_a_tree_and_what_is_printed_works(world: World) -> None:
    """GIVEN one changed token WHEN it is resolved THEN every command printed does its work."""
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0  # as float\n")})
    done = _rebase(world, "2.0")
    assert done.returncode == 11, done.stderr
    assert "0001-Correct-ten.patch: CONFLICT\n" in done.stdout
    assert "0002-Correct-five.patch: kept\n  text     applies as it is\n" in done.stdout
    directory = _tree(done)
    text = (directory / "tiny/a.py").read_text()
    assert "  tiny/a.py:10\n" in done.stdout
    assert text.split("\n")[9:17] == [
        "<<<<<<< tiny-2.0.tar.gz",
        "a = 10.0  # as float",
        "||||||| 1.0, before the patch",
        "a = 10",
        "=======",
        "a = 'ten'",
        ">>>>>>> 0001-Correct-ten.patch",
        "a = 11",
    ]
    assert not list(directory.rglob("*.rej"))
    # Only the file in conflict is named.
    assert "b.py" not in done.stdout.split("conflicts of ")[1]
    assert bases.load("2.0").dropped[0].state == "conflict"
    assert git(directory, "status", "--porcelain").strip() == "UU tiny/a.py"
    (command,) = _next(done)
    early = _typed(world, command)
    assert early.returncode == 12
    assert "tiny/a.py:10" in early.stderr
    (directory / "tiny/a.py").write_text(A.replace("a = 10\n", "a = 'ten'  # as float\n"))
    done = _typed(world, command)
    assert done.returncode == 0, done.stderr
    stack = series.load(bases.load("2.0"))
    assert [patch.subject for patch in stack.patches] == ["Correct ten", "Correct five"]
    assert stack.patches[0].author.name == "A Person"
    assert bases.load("2.0").dropped == ()
    assert series.check(bases.load("2.0"), root=world.root) == []
    (command,) = _next(done)
    checked = _typed(world, command)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    table = json.loads(_sm12x("base", "status", "--json").stdout)
    assert table["0001-Correct-ten.patch"]["2.0"]["state"] == "applied"
    # The tree is one to go on in.
    again = _sm12x("refresh", "--base", "2.0", directory)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("2 unchanged")
    assert _sm12x("continue", directory).returncode == 12


def test_a_patch_that_waits_for_another_is_said_to(world: World) -> None:
    """GIVEN a patch on top of one in conflict THEN it follows, and merges once that is resolved."""
    author = world.applied("more")
    world.commit(author, "Correct ten more", "tiny/a.py", "a = 'ten'\n", "a = 'TEN'\n", witness=TEN)
    world.commit(author, "Correct sixty", "tiny/a.py", "a = 60\n", "a = 'sixty'\n", witness=TEN)
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n")})
    done = _rebase(world, "2.0", "--json", "--no-witness")
    assert done.returncode == 11
    said = {one["patch"]: one for one in json.loads(done.stdout)["patches"]}
    assert {name: one["text"] for name, one in said.items()} == {
        "0001-Correct-ten.patch": "conflict",
        "0002-Correct-five.patch": "applies",
        "0003-Correct-ten-more.patch": "follows",
        "0004-Correct-sixty.patch": "applies",
    }
    assert said["0003-Correct-ten-more.patch"]["follows"] == ["0001-Correct-ten.patch"]
    assert said["0003-Correct-ten-more.patch"]["conflicts"] == []
    directory = Path(json.loads(done.stdout)["port"]["tree"])
    target = directory / "tiny/a.py"
    target.write_text(A.replace("a = 10\n", "a = 'ten'\n"))
    done = _sm12x("continue", directory)
    assert done.returncode == 0, done.stderr
    names = [patch.subject for patch in series.load(bases.load("2.0")).patches]
    assert names == ["Correct ten", "Correct five", "Correct ten more", "Correct sixty"]


def test_one_conflict_after_the_other_and_one_left_out(world: World) -> None:
    both = {"tiny/a.py": A.replace("a = 10\n", "a = 1e1\n"), "tiny/b.py": B.replace("= 5", "= 5.")}
    release(world, "2.0", both)
    done = _rebase(world, "2.0", "--no-witness")
    assert done.returncode == 11
    directory = _tree(done)
    assert (directory / "tiny/b.py").read_text() == both["tiny/b.py"]
    # A resolution that leaves nothing of the patch is no resolution.
    (directory / "tiny/a.py").write_text(both["tiny/a.py"])
    empty = _sm12x("continue", directory)
    assert empty.returncode == 12
    assert "--skip" in empty.stderr
    done = _sm12x("continue", "--skip", directory)
    assert done.returncode == 11, done.stderr
    assert "conflicts of 0002-Correct-five.patch (2 of 2)" in done.stdout
    assert "  tiny/b.py:5\n" in done.stdout
    assert "tiny/a.py" not in done.stdout
    # Committed by the person's own git: taken, with the patch's message.
    (directory / "tiny/b.py").write_text(B.replace("= 5", "= 'five'"))
    git(directory, "commit", "-q", "-a", "-m", "mine")
    done = _sm12x("continue", directory)
    assert done.returncode == 0, done.stderr
    new = bases.load("2.0")
    assert [patch.subject for patch in series.load(new).patches] == ["Correct five"]
    assert [(entry.patch, entry.state) for entry in new.dropped] == [
        ("0001-Correct-ten.patch", "unknown")
    ]


def test_a_file_that_is_gone_is_merged_where_it_may_be(world: World) -> None:
    release(world, "2.0", {"tiny/b.py": None, "small/b.py": "# moved\n" + B})
    done = _rebase(world, "2.0")
    assert done.returncode == 11
    # Its witness finds no file to look into, which says nothing of the defect.
    assert "0002-Correct-five.patch: UNKNOWN\n  text     does not merge\n" in done.stdout
    (_, outcome) = status.read(world.root / "patches/status.toml")
    assert (outcome.verdict, outcome.text) == ("unknown", "conflict")
    # The record names the file by its place in the tree, which is in another folder each time.
    assert "FileNotFoundError" in outcome.why
    assert "'tiny/b.py'" in outcome.why
    assert "  small/b.py: tiny/b.py is not in this release: its change is merged" in done.stdout
    directory = _tree(done)
    assert (directory / "small/b.py").read_text() == "# moved\n" + B.replace("= 5\n", "= 'five'\n")
    done = _sm12x("continue", directory)
    assert done.returncode == 0, done.stderr
    (_, patch) = series.load(bases.load("2.0")).patches
    assert [file.path for file in patch.files] == ["small/b.py"]


def test_what_has_no_place_is_left_as_a_diff_and_asked_for(world: World) -> None:
    """GIVEN a patch of two files, one of them gone THEN its part has to be dealt with."""
    author = world.applied("second")
    (author / "tiny/a.py").write_text((author / "tiny/a.py").read_text() + "a = 61\n")
    world.commit(author, "Correct both", "tiny/b.py", "b = 15\n", "b = 'x'\n", witness=TEN)
    release(world, "2.0", {"tiny/b.py": None})
    done = _rebase(world, "2.0", "--no-witness")
    directory = _tree(done)
    assert "tiny/b.py: there is no such file in this release (its part is in" in done.stdout
    assert "b = 'five'" in (directory / "tiny/b.py.rej").read_text()
    refused = _sm12x("continue", directory)
    assert refused.returncode == 12
    assert "tiny/b.py.rej" in refused.stderr
    done = _sm12x("continue", "--skip", directory)
    assert done.returncode == 11
    (directory / "tiny/b.py.rej").unlink()
    done = _sm12x("continue", directory)
    assert done.returncode == 0, done.stderr
    names = [patch.subject for patch in series.load(bases.load("2.0")).patches]
    assert names == ["Correct ten", "Correct both"]


@pytest.mark.parametrize("at", range(0, 14, 2))
def test_a_port_that_is_killed_goes_on(world: World, at: int) -> None:
    """SIGKILL before the n-th git command of `continue`: the next run ends in the same stack."""
    author = world.applied("more")
    world.commit(author, "Correct ten more", "tiny/a.py", "a = 'ten'\n", "a = 'TEN'\n", witness=TEN)
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n")})
    done = _rebase(world, "2.0", "--no-witness")
    directory = _tree(done)
    (directory / "tiny/a.py").write_text(A.replace("a = 10\n", "a = 'ten'\n"))
    driver = f"""
import os, signal
from pathlib import Path
import sm12x.core.process as process
from sm12x_dev.rebase import conflicts
real, calls = process.run, []
def run(*args, **more):
    writing = not set(args[0]) & {{"ls-files", "ls-tree", "log", "rev-parse", "cat-file"}}
    calls.append(writing)
    if sum(calls) > {at}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **more)
process.run = run
conflicts.continue_(Path({str(directory)!r}), root=None)
"""
    killed = subprocess.run([sys.executable, "-c", driver], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for lock in (directory / ".git").rglob("*.lock"):
        lock.unlink()
    done = _sm12x("continue", directory)
    assert done.returncode == 0, done.stderr
    texts = [patch.content() for patch in series.load(bases.load("2.0")).patches]
    assert [b"'ten'" in texts[0], b"'five'" in texts[1], b"'TEN'" in texts[2]] == [True] * 3
    assert len(texts) == 3


def test_the_folder_may_have_been_changed_meanwhile(world: World) -> None:
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n")})
    directory = _tree(_rebase(world, "2.0", "--no-witness"))
    (directory / "tiny/a.py").write_text(A.replace("a = 10\n", "a = 'ten'\n"))
    (world.root / "patches/2.0/0001-Correct-five.patch").unlink()
    (world.root / "patches/2.0/series").write_text("# mine\n")
    done = _sm12x("continue", directory)
    assert done.returncode == 12
    assert (world.root / "patches/2.0/series").read_text() == "# mine\n"


def test_witnesses_that_cannot_run_leave_it_unknown(world: World) -> None:
    """GIVEN an environment that cannot be had THEN 16, and no word of a conflict in the table."""
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n")})
    words = ("--find-links", world.archive.parent, "--no-lock", "--python", "/nowhere/python")
    done = _sm12x("rebase", "2.0", "--from", "1.0", *words)
    assert done.returncode == 16, done.stderr
    assert "/nowhere/python is not an executable" in done.stderr
    table = json.loads(_sm12x("base", "status", "--json").stdout)
    cell = table["0001-Correct-ten.patch"]["2.0"]
    assert cell["state"] == "unknown"
    assert "could not run" in cell["note"]


def test_an_error_that_is_the_defect_is_red(world: World) -> None:
    """GIVEN a defect that ends in KeyError, on its own base too THEN it is no strange code."""
    (world.root / TEN).write_text(
        "import os, pathlib, pytest\n"
        'TEXT = (pathlib.Path(os.environ["SM12X_TREE"]) / "tiny/a.py").read_text()\n'
        "def test_it(): {'ten': 1}['ten' if \"'ten'\" in TEXT else id(TEXT) and 'old']\n"
        "@pytest.mark.guard\ndef test_there(): assert '= 1' in TEXT\n"
    )
    release(world, "2.0", {})
    done = _rebase(world, "2.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0001-Correct-ten.patch: kept\n  text     applies as it is\n  witness  1 of 1 red" in (
        done.stdout
    )


def test_what_a_witness_leaves_in_the_tree_is_no_part_of_the_release(world: World) -> None:
    """GIVEN bytecode of a module that a witness imports, on the new release and on its own base."""
    (world.root / TEN).write_text(
        "import os, pathlib, py_compile\n"
        'FILE = pathlib.Path(os.environ["SM12X_TREE"]) / "tiny/a.py"\n'
        "py_compile.compile(str(FILE))\n"
        "def test_it(): {'ten': 1}['ten' if \"'ten'\" in FILE.read_text() else 'old']\n"
    )
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 11\n")})
    done = _rebase(world, "2.0")
    assert done.returncode == 11, done.stdout + done.stderr
    assert not list(_tree(done).rglob("*.pyc"))


def test_a_control_that_depends_on_an_address_is_no_verdict(world: World) -> None:
    """GIVEN a control that fails the first time, and one that fails with an address."""
    text = (world.root / TEN).read_text()
    mark = world.work / "seen"
    (world.root / TEN).write_text(
        text
        + "@pytest.mark.guard\n"
        + f"def test_once(): p = pathlib.Path({str(mark)!r}); s = p.exists(); p.touch(); assert s\n"
        + "@pytest.mark.guard\ndef test_where(): assert 0, f'at {id(TEXT):#x}'\n"
    )
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 'ten'  # theirs\n")})
    assert _rebase(world, "2.0").returncode in (0, 11, 16)
    values = tomllib.loads((world.root / "patches/2.0/base.toml").read_text())
    assert values["witness"].get("needed", []) == []
    recorded = (world.root / "patches/status.toml").read_text()
    assert "0x" not in recorded
    assert "test_once" not in recorded


def test_what_the_release_passes_of_a_conflict_is_in_order_once_resolved(world: World) -> None:
    """GIVEN a conflict whose witness has a test that the release passes THEN that is noted."""
    text = (world.root / TEN).read_text()
    (world.root / TEN).write_text(text + "def test_more(): assert 'a = 61' in TEXT\n")
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n") + "a = 61\n"})
    done = _rebase(world, "2.0")
    assert done.returncode == 11
    changed = _tree(done) / "tiny/a.py"
    changed.write_text(A.replace("a = 10\n", "a = 'ten'\n") + "a = 61\n")
    done = _typed(world, _next(done)[0])
    assert done.returncode == 0, done.stderr
    checked = _typed(world, _next(done)[0])
    assert checked.returncode == 0, checked.stdout


def test_without_witnesses_only_the_text_can_tell(world: World) -> None:
    both = {"tiny/a.py": A.replace("a = 10\n", "a = 'ten'\n"), "tiny/b.py": "# x\n" + B}
    release(world, "2.0", both)
    done = _rebase(world, "2.0", "--no-witness", "--out", world.work / "elsewhere", "--no-record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "0001-Correct-ten.patch: left out: upstream since 2.0\n  text     all of its" in done.stdout
    )
    assert "witness  unknown\n           its witness was not run\n" in done.stdout
    assert bases.versions() == ["1.0"]
    folder = world.work / "elsewhere" / "2.0"
    assert (folder / "series").read_text() == "# The patches.\n0001-Correct-five.patch\n"
    assert not (world.root / "patches/status.toml").exists()
    # One of the two, chosen by its name.
    done = _rebase(world, "2.0", "--witness", "test_five", "--json")
    said = [patch["witness"]["state"] for patch in json.loads(done.stdout)["patches"]]
    assert said == ["unknown", "needed"]
    assert _rebase(world, "2.0", "--force", "--witness", "nine").returncode == 2


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
    assert done.stdout.endswith("6 passed, 0 failed\n")
    assert [o.witness for o in status.read(world.root / "patches/status.toml")] == [
        "1 of 2 red",
        "1 of 1 red",
    ]


def test_nothing_is_overwritten_without_being_told_to(world: World) -> None:
    release(world, "2.0", {})
    assert _rebase(world, "2.0", "--no-witness").returncode == 0
    folder = world.root / "patches/2.0"
    (folder / "series").write_text("# mine\n")
    before = snapshot(world.root)
    done = _rebase(world, "2.0", "--no-witness")
    assert done.returncode == 12
    assert "patches/2.0 exists, and nothing is overwritten. Next: add --force" in done.stderr
    assert snapshot(world.root) == before
    with (folder / "base.toml").open("a") as handle:
        handle.write('[[override]]\nrequirement = "a==1"\ninstead_of = "a>=2"\nwhy = "no 2"\n')
    assert _rebase(world, "2.0", "--no-witness", "--force").returncode == 0
    assert "# mine" not in (folder / "series").read_text()
    # The one thing of the old folder that the drafting cannot find out.
    assert [entry.requirement for entry in bases.load("2.0").overrides] == ["a==1"]
    (folder / "base.toml").unlink()
    done = _rebase(world, "2.0", "--no-witness", "--force")
    assert done.returncode == 12
    assert "is not a base's folder" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("1.0", "--force"), 2, "the stack of 1.0 is on 1.0 already"),
        (("7.0",), 6, "has no 7.0 of tiny"),
        (("2.0", "--from", "9.9"), 3, "there is no base 9.9"),
        (("2.0", "--out", "/proc/x"), 4, "no folder can be made in /proc/x: "),
    ],
)
def test_a_users_mistake_is_one_line_and_a_code(
    world: World, words: tuple[str, ...], code: int, said: str
) -> None:
    done = _rebase(world, words[0], "--no-witness", *words[1:])
    assert done.returncode == code, done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert bases.versions() == ["1.0"]


def test_a_run_that_is_stopped_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a witness that hangs WHEN the command is terminated THEN neither folder nor record."""
    release(world, "2.0", {})
    mark, temporary = tmp_path / "started", tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    (world.root / TEN).write_text(
        textwrap.dedent(f"""\
        import pathlib, time
        def test_it():
            pathlib.Path({str(mark)!r}).touch()
            time.sleep(60)
        """)
    )
    before = snapshot(world.root / "patches")
    links = ["--find-links", str(world.archive.parent), "--no-lock", "--python", sys.executable]
    argv = [sys.executable, "-m", "sm12x_dev", "rebase", "2.0", "--from", "1.0", *links]
    running = subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=30)
    assert running.returncode == 130, said
    assert snapshot(world.root / "patches") == before
    assert [path.name for path in (world.root / "patches").iterdir()] == ["1.0"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("seconds", [0.8, 1.6, 2.4])
def test_a_rebase_that_is_killed_leaves_nothing_that_lasts(world: World, seconds: float) -> None:
    """SIGKILL after some time: the next run ends as if there had been none."""
    release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n")})
    links = ["--find-links", str(world.archive.parent), "--no-lock", "--no-witness"]
    argv = [sys.executable, "-m", "sm12x_dev", "rebase", "2.0", "--from", "1.0", *links]
    running = subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        running.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()
    done = _rebase(world, "2.0", "--no-witness", "--force")
    assert done.returncode == 11, done.stderr
    # A hidden folder of the killed run is no base, and git ignores it.
    assert sorted(path.name for path in (world.root / "patches").glob("[!.]*")) == [
        *("1.0", "2.0", "status.toml")
    ]
    assert [patch.subject for patch in series.load(bases.load("2.0")).patches] == ["Correct five"]
