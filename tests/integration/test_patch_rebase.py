"""`sm12x patch rebase` with real git and pytest, from a tiny release to made-up later ones."""

from __future__ import annotations

import io
import json
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
from tests.integration.stackrepo import FILES, World, snapshot

from sm12x.core import process
from sm12x.stack import base as bases
from sm12x.stack import refresh, series, status, tree

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
    made.commit(directory, "Mend ten", "tiny/a.py", "a = 10\n", "a = 'ten'\n", witness=TEN)
    made.commit(directory, "Mend five", "tiny/b.py", "b = 5\n", "b = 'five'\n", witness=FIVE)
    return made


def _release(world: World, version: str, changes: Mapping[str, str | None]) -> None:
    """An sdist of the tiny project beside the first one; None takes a file away."""
    files = {name: text for name, text in {**FILES, **changes}.items() if text is not None}
    with tarfile.open(world.archive.parent / f"tiny-{version}.tar.gz", "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"tiny-{version}/{name}")
            body = text.replace("Version: 1.0", f"Version: {version}").encode()
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))


def _sm12x(*words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm12x", *map(str, words)]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def _rebase(world: World, version: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Without locks: the tiny project is on no index. With witnesses, in this Python."""
    links = ("--find-links", world.archive.parent, "--no-lock", "--python", sys.executable)
    return _sm12x("patch", "rebase", version, "--from", "1.0", *links, *words)


A, B = FILES["tiny/a.py"], FILES["tiny/b.py"]


def test_what_applies_is_kept_and_what_is_upstream_is_left_out(world: World) -> None:
    """GIVEN a release that has one fix, in its own words, and moved lines under the other."""
    _release(
        world, "2.0", {"tiny/a.py": "# new\n" * 9 + A, "tiny/b.py": B.replace("= 5", "= 'five!'")}
    )
    done = _rebase(world, "2.0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0001-Mend-ten.patch: kept\n  text     merges; exported anew\n" in done.stdout
    assert "0002-Mend-five.patch: left out: upstream since 2.0\n" in done.stdout
    assert "1 kept, 1 upstream, 0 to resolve" in done.stdout
    assert "to be checked before it is committed:" in done.stdout
    new = bases.load("2.0")
    (entry,) = new.dropped
    assert (entry.patch, entry.state, entry.since) == ("0002-Mend-five.patch", "upstream", "2.0")
    assert "1 of 1 green" in entry.why
    stack = series.load(new)
    assert [patch.name for patch in stack.patches] == ["0001-Mend-ten.patch"]
    assert series.check(new, root=world.root) == []
    # Strictly, and byte for byte out again.
    fresh = world.work / "two"
    tree.unpack(world.archive.parent / "tiny-2.0.tar.gz", fresh)
    report, faults = refresh.round_trip(new, stack, fresh)
    assert (report.ok, faults) == (True, [])
    table = _sm12x("base", "status")
    assert table.stdout.splitlines()[:3] == [
        "patch           1.0      2.0",
        "0001-Mend-ten   applied  applied",
        "0002-Mend-five  applied  upstream",
    ]
    # A later release: what is known of this one says since when.
    _release(world, "3.0", {"tiny/b.py": B.replace("= 5", "= 'five!'")})
    done = _rebase(world, "3.0", "--json")
    assert done.returncode == 0, done.stderr
    said = {patch["patch"]: patch for patch in json.loads(done.stdout)["patches"]}
    assert said["0002-Mend-five.patch"]["since"] == "2.0"
    assert said["0001-Mend-ten.patch"]["text"] == "applies"
    assert (world.root / "patches/3.0/0001-Mend-ten.patch").read_bytes() == world.patches()[
        "0001-Mend-ten.patch"
    ]


def test_releases_in_between_say_since_when(world: World) -> None:
    fixed = {"tiny/b.py": B.replace("= 5", "= 'five!'")}
    for version, changes in (("1.1", {}), ("1.2", fixed), ("1.3", fixed), ("2.0", fixed)):
        _release(world, version, changes)
    done = _rebase(world, "2.0")
    assert done.returncode == 0, done.stderr
    assert "0002-Mend-five.patch: left out: upstream since 1.2\n" in done.stdout
    assert bases.load("2.0").dropped[0].since == "1.2"
    assert _sm12x("base", "status").stdout.splitlines()[:3] == [
        "patch           1.0      1.1      1.2       2.0",
        "0001-Mend-ten   applied  unknown  unknown   applied",
        "0002-Mend-five  applied  needed   upstream  upstream",
    ]


def test_a_conflict_shows_both_texts_and_can_be_resolved_with_the_commands(world: World) -> None:
    _release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0  # as float\n")})
    done = _rebase(world, "2.0")
    assert done.returncode == 11
    assert "tiny/a.py hunk 1 of 1, @@ -7,7 +7,7 @@ a = 6: conflict at line 10\n" in done.stdout
    for title, text in (("1.0 has", "a = 10"), ("2.0 has", "a = 10.0  # as float")):
        assert f"    {title}:\n      | {text}\n" in done.stdout
    assert "    the patch puts there:\n      | a = 'ten'\n" in done.stdout
    assert "0002-Mend-five.patch: kept\n  text     applies as it is\n" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: 1 of 2 patches of 1.0 do not merge into")
    assert bases.load("2.0").dropped[0].state == "conflict"
    steps = [line.strip() for line in done.stdout.splitlines() if line.startswith("  sm12x patch ")]
    commands = [line.strip() for line in done.stdout.splitlines() if line.startswith("  git -C")]
    assert len(steps) == 3
    directory = world.work / "vllm-2.0"
    links = ("--find-links", world.archive.parent)
    unpacked = steps[0].split()[1:-1]
    assert _sm12x(*unpacked, directory, *links).returncode == 0
    shell = commands[0].split("#")[0].replace("../vllm-2.0", str(directory))
    process.run(["bash", "-c", shell], cwd=world.root, check=False)
    assert (directory / "tiny/a.py.rej").exists()
    like = ("--like", world.base.folder / "0001-Mend-ten.patch")
    refused = _sm12x("patch", "new", directory, "--base", "2.0", *like)
    assert refused.returncode == 12
    assert "tiny/a.py.rej" in refused.stderr
    (directory / "tiny/a.py.rej").unlink()
    text = (directory / "tiny/a.py").read_text()
    (directory / "tiny/a.py").write_text(text.replace("a = 10.0  # as float", "a = 'ten'"))
    made = _sm12x("patch", "new", directory, "--base", "2.0", *like)
    assert made.returncode == 0, made.stderr
    stack = series.load(bases.load("2.0"))
    assert [patch.subject for patch in stack.patches] == ["Mend five", "Mend ten"]
    assert stack.patches[1].author.name == "A Person"
    table = json.loads(_sm12x("base", "status", "--json").stdout)
    assert table["0001-Mend-ten.patch"]["2.0"]["state"] == "applied"


def test_a_file_that_is_gone_is_looked_for_elsewhere(world: World) -> None:
    _release(world, "2.0", {"tiny/b.py": None, "small/b.py": B})
    done = _rebase(world, "2.0")
    assert done.returncode == 11
    assert "tiny/b.py: there is no such file in this release; perhaps small/b.py" in done.stdout
    # Its witness finds no file to look into, which says nothing of the defect.
    assert "0002-Mend-five.patch: CONFLICT\n  text     does not merge\n  witness  unknown, 0" in (
        done.stdout
    )
    (_, outcome) = status.read(world.root / "patches/status.toml")
    assert (outcome.need, outcome.text) == ("unknown", "conflict")
    # The record names the file by its place in the tree, which is in another folder each time.
    assert "FileNotFoundError" in outcome.why
    assert "'tiny/b.py'" in outcome.why
    # The commands take its hunks there.
    assert "  $EDITOR ../vllm-2.0/small/b.py  #" in done.stdout
    directory = _resolving(done, world)
    assert (directory / "small/b.py").read_text() == B.replace("b = 5\n", "b = 'five'\n")
    like = ("--like", world.base.folder / "0002-Mend-five.patch")
    made = _sm12x("patch", "new", directory, "--base", "2.0", *like)
    assert made.returncode == 0, made.stderr
    assert "0002-Mend-five.patch: small/b.py\n" in made.stdout
    assert "warning" not in made.stderr


def _resolving(done: subprocess.CompletedProcess[str], world: World) -> Path:
    """The folder that the commands of a report are about, after those of git in it."""
    directory = world.work / "vllm-2.0"
    words = ("--base", "2.0", "--unpack", directory, "--find-links", world.archive.parent)
    assert _sm12x("patch", "apply", *words).returncode == 0
    for line in done.stdout.splitlines():
        if line.startswith(("  git -C", "  sed ")):
            shell = line.split("  #")[0].replace("../vllm-2.0", str(directory))
            process.run(["bash", "-c", shell], cwd=world.root, check=False)
    return directory


def test_a_patch_without_the_hunks_of_a_file_that_is_gone_is_told_of(world: World) -> None:
    """GIVEN a patch of two files, one of them gone WHEN it is made again THEN a warning."""
    author = world.applied("second")
    (author / "tiny/a.py").write_text((author / "tiny/a.py").read_text() + "a = 61\n")
    world.commit(author, "Mend both", "tiny/b.py", "b = 15\n", "b = 'x'\n", witness=TEN)
    _release(world, "2.0", {"tiny/b.py": None})
    done = _rebase(world, "2.0", "--no-witness")
    why = "there is no such file in this release"
    assert done.stdout.count(f"  # tiny/b.py leaves no *.rej ({why}): carry its hunks over by") == 2
    directory = _resolving(done, world)
    assert not list(directory.rglob("*.rej"))
    like = ("--like", world.base.folder / "0003-Mend-both.patch")
    made = _sm12x("patch", "new", directory, "--base", "2.0", *like)
    assert made.returncode == 0, made.stderr
    assert "warning: 0003-Mend-both.patch changes tiny/b.py as well, and 0002-Mend-both.patch" in (
        made.stderr
    )


def test_what_the_release_passes_of_a_conflict_is_in_order_once_resolved(world: World) -> None:
    """GIVEN a conflict whose witness has a test that the release passes THEN that is noted."""
    text = (world.root / TEN).read_text()
    (world.root / TEN).write_text(text + "def test_more(): assert 'a = 61' in TEXT\n")
    _release(world, "2.0", {"tiny/a.py": A.replace("a = 10\n", "a = 10.0\n") + "a = 61\n"})
    done = _rebase(world, "2.0")
    assert done.returncode == 11
    directory = _resolving(done, world)
    (directory / "tiny/a.py.rej").unlink()
    changed = directory / "tiny/a.py"
    changed.write_text(changed.read_text().replace("a = 10.0", "a = 'ten'"))
    like = ("--like", world.base.folder / "0001-Mend-ten.patch")
    assert _sm12x("patch", "new", directory, "--base", "2.0", *like).returncode == 0
    words = ("--python", sys.executable, "--find-links", world.archive.parent)
    checked = _sm12x("patch", "witness", "--base", "2.0", *words)
    assert checked.returncode == 0, checked.stdout


def test_without_witnesses_only_the_text_can_tell(world: World) -> None:
    both = {"tiny/a.py": A.replace("a = 10\n", "a = 'ten'\n"), "tiny/b.py": "# x\n" + B}
    _release(world, "2.0", both)
    done = _rebase(world, "2.0", "--no-witness", "--out", world.work / "elsewhere", "--no-record")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0001-Mend-ten.patch: left out: upstream since 2.0\n  text     all of its" in done.stdout
    assert "witness  unknown\n           its witness was not run\n" in done.stdout
    assert bases.versions() == ["1.0"]
    folder = world.work / "elsewhere" / "2.0"
    assert (folder / "series").read_text() == "# The patches.\n0001-Mend-five.patch\n"
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
    _release(world, "2.0", {"tiny/a.py": f"{A}a = 61\n"})
    assert _rebase(world, "2.0").returncode == 0
    values = tomllib.loads((world.root / "patches/2.0/base.toml").read_text())
    assert values["witness"]["upstream"] == [f"{TEN}::test_more"]
    assert values["witness"]["needed"] == [f"{TEN}::test_less"]
    # With these notes the new base's own witnesses are in order.
    words = ("--python", sys.executable, "--find-links", world.archive.parent)
    done = _sm12x("patch", "witness", "--base", "2.0", *words)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("6 passed, 0 failed\n")
    assert [o.witness for o in status.read(world.root / "patches/status.toml")] == [
        "1 of 2 red",
        "1 of 1 red",
    ]


def test_nothing_is_overwritten_without_being_told_to(world: World) -> None:
    _release(world, "2.0", {})
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
    assert "is no base's folder" in done.stderr


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
    _release(world, "2.0", {})
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
    argv = [sys.executable, "-m", "sm12x", "patch", "rebase", "2.0", "--from", "1.0", *links]
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
