"""`sm12x-dev` as a person runs it: exit codes, one-line errors, kills, and the real sdist."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import World, git, snapshot

from sm12x import layout
from sm12x.core import index
from sm12x.core.errors import EXIT_CODES
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.worktree import tree
from sm12x_dev.worktree import export, lint
from sm12x_dev.worktree.repository import BASE_TAG


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


def _patch(world: World, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return _sm12x(*words)


def test_from_an_empty_folder_to_a_new_patch(world: World) -> None:
    directory = world.work / "made"
    links = ("--find-links", world.archive.parent)
    done = _patch(world, "apply", "--unpack", directory, *links)
    assert done.returncode == 0, done.stderr
    assert "0002-Correct-five.patch: applied" in done.stdout
    assert f"sm12x-dev refresh --base 1.0 {directory}" in done.stdout
    (directory / "tiny/a.py").write_text("a = 0\n")
    trailers = ("--upstream", "none (ours)", "--drop-when", "it is no more needed")
    new = ("new", directory, *trailers, "--witness", stackrepo.WITNESS, "--author", "A <a@b>")
    refused = _patch(world, *new, "--subject", "Short.", "--body", "Too short.")
    assert refused.returncode == 1
    assert "message:1: the subject ends with a period" in refused.stderr
    assert "message:3: the body does not say" in refused.stderr
    done = _patch(world, *new, "--subject", "Zero", "--body", stackrepo.BODY, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "0003-Zero.patch"
    done = _patch(world, "refresh", directory)
    assert done.stdout.startswith("3 unchanged;")
    done = _patch(world, "check", *links)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("3 patches, applies, and round-trips\n")
    listed = json.loads(_patch(world, "list", "--json").stdout)
    assert [patch["upstream"] for patch in listed["patches"]][-1] == "none (ours)"
    done = _patch(world, "drop", "0001", *links)
    # Three touches the line that one had touched.
    assert done.returncode == 11
    assert "0002-Zero" not in "".join(world.patches())
    assert _patch(world, "drop", "0003", *links).stdout.startswith("dropped 0003-Zero.patch\n")
    assert _patch(world, "check", "--messages-only").returncode == 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("list", "--base", "9.9"), 3, "there is no base 9.9; known bases: 1.0"),
        (("apply", "nowhere"), 12, "nowhere does not exist"),
        (("apply", "tiny-1.0.tar.gz"), 12, "is a file, not a folder"),
        (("apply", "--unpack", "tiny-1.0.tar.gz", "--find-links", "."), 12, "not an empty folder"),
        (("apply", "--unpack", "x", "--find-links", "checkout"), 6, "tiny-1.0.tar.gz"),
        (("refresh", "work/plain"), 12, "not a folder that `sm12x-dev apply` made"),
        (("drop", "0009"), 4, "no patch 0009 in the series"),
        (("witness", "0009"), 4, "no patch 0009 in the series"),
        (("new", "work/plain"), 2, "Missing option"),
    ],
)
def test_a_users_mistake_is_one_line_and_a_code(
    world: World, words: tuple[str, ...], code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(world.archive.parent)
    done = _patch(world, *words)
    assert done.returncode == code, done.stderr
    assert code in EXIT_CODES
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    if code != 2:
        assert done.stderr.count("\n") == 1
        assert " Next: " in done.stderr


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "0009-x.patch").touch(), "0009-x.patch:1: is not listed in the series"),
        (lambda f: (f / "series").write_text("a\n"), "series:1: 'a' is not the name"),
        (
            lambda f: (f / "0001-Correct-ten.patch").write_bytes(
                (f / "0001-Correct-ten.patch").read_bytes().replace(b"\n", b"\r\n")
            ),
            "0001-Correct-ten.patch:1: has CRLF line endings",
        ),
        (
            lambda f: (f / "0001-Correct-ten.patch").write_text(
                (f / "0001-Correct-ten.patch").read_text().replace("Drop-when", "Drop-if")
            ),
            "the trailer `Drop-when:` is missing",
        ),
    ],
)
def test_check_lists_faults_by_file_and_line(world: World, spoil: object, said: str) -> None:
    assert callable(spoil)
    spoil(world.base.folder)
    done = _patch(world, "check", "--messages-only")
    assert done.returncode == 1
    assert said in done.stdout
    full = _patch(world, "check", "--json", "--find-links", world.archive.parent)
    assert full.returncode == 1
    assert any(said.split(": ", 1)[-1] in f["message"] for f in json.loads(full.stdout)["findings"])


def test_a_conflict_is_reported_for_every_patch_with_its_code(world: World) -> None:
    for path in world.base.folder.glob("*.patch"):
        path.write_text(path.read_text().replace(" = 8\n", " = 'eight'\n"))
    directory = world.fresh()
    before = snapshot(directory)
    done = _patch(world, "apply", directory)
    assert done.returncode == 11
    assert done.stdout.count("NOT APPLIED (conflict)") == 2
    assert done.stdout.count("git: patch failed: tiny/") == 2
    assert done.stderr.count("\n") == 1
    assert snapshot(directory) == before
    done = _patch(world, "apply", "--json", directory)
    assert [r["state"] for r in json.loads(done.stdout)["results"]] == ["conflict", "conflict"]
    assert _patch(world, "check", "--find-links", world.archive.parent).returncode == 11


def test_several_bases_want_a_choice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    other = world.root / "patches" / "2.0"
    other.mkdir()
    text = (world.base.folder / "base.toml").read_text()
    (other / "base.toml").write_text(text.replace('version = "1.0"', 'version = "2.0"', 1))
    done = _patch(world, "list")
    assert done.returncode == 3
    assert "there are 2 bases (1.0, 2.0), and none was chosen" in done.stderr
    monkeypatch.setenv("BASE", "1.0")
    assert _patch(world, "list").returncode == 0


def test_sigterm_while_applying_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GIVEN a git that hangs at `apply` WHEN the command is terminated THEN nothing is left."""
    shim, temporary, started = tmp_path / "shim", tmp_path / "tmp", tmp_path / "started"
    shim.mkdir()
    temporary.mkdir()
    program = shim / "git"
    program.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        case " $* " in *" apply "*) touch {started}; exec sleep 60;; esac
        PATH=${{PATH#*:}} exec git "$@"
        """)
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(temporary))
    directory = tmp_path / "killed"
    with monkeypatch.context() as plain:
        plain.setenv("PATH", os.environ["PATH"].split(os.pathsep, 1)[1])
        tree.unpack(world.archive, directory)
    before = snapshot(directory)
    process = subprocess.Popen(
        [sys.executable, "-m", "sm12x_dev", "apply", str(directory)],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.strip() == "interrupted: run the same command again to resume"
    assert snapshot(directory) == before
    assert list(temporary.iterdir()) == []


def test_a_kill_between_two_files_is_told_by_the_next_run(world: World) -> None:
    """What a kill leaves, one file of two written, must not be taken for a patched tree."""
    directory, whole = world.fresh("killed"), world.applied("whole")
    shutil.copy(whole / "tiny/a.py", directory / "tiny/a.py")
    done = _patch(world, "apply", directory)
    assert done.returncode == 12
    assert "half applied (patched: tiny/a.py; not patched: tiny/b.py)" in done.stderr


def test_help_has_an_example_for_every_subcommand() -> None:
    verbs = ("list", "check", "apply", "refresh", "new", "drop", "witness", "rebase")
    for name in verbs:
        done = _sm12x(name, "--help")
        assert done.returncode == 0
        assert f"Example: sm12x-dev {name}" in done.stdout


@pytest.mark.parametrize("version", bases.versions())
def test_the_stack_of_a_real_release_round_trips(version: str, tmp_path: Path) -> None:
    """The committed patches, and one made here, on the release's own sdist."""
    base = bases.load(version)
    archive = index.fetch(
        base.sdist.name.rpartition("-")[0],
        base.sdist.name,
        base.sdist.sha256,
        cache=layout.cache(),
    )
    stack = series.load(base)
    directory = tmp_path / "release"
    tree.unpack(archive, directory)
    report, findings = export.round_trip(base, stack, directory)
    assert findings == []
    assert [result.state for result in report.results] == ["applied"] * len(stack.patches)
    assert git(directory, "status", "--porcelain") == ""
    target = directory / "setup.py"
    target.write_text(target.read_text() + "# changed\n")
    git(directory, "commit", "-q", "-a", "-m", "Change the set-up")
    repository = export.open_repository(base, directory)
    with pytest.raises(export.MessageError, match=f"{len(stack.patches) + 1:04d}-Change-the-set"):
        export.refresh(base, directory, root=None)
    assert lint.file_name(1, "Change the set-up") == "0001-Change-the-set-up.patch"
    assert repository.tree_of(BASE_TAG) == base.sdist.tree
