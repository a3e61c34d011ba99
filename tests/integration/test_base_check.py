"""`sm12x-dev base check` with real git, from a tiny base to made-up releases, and on the index."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import World, snapshot
from tests.integration.test_patch_rebase import A, B, release

from sm12x.stack.model import base as bases


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = stackrepo.make(tmp_path, monkeypatch)
    monkeypatch.setenv("SM12X_CACHE", str(tmp_path / "cache"))
    directory = made.applied("author")
    made.commit(directory, "Correct ten", "tiny/a.py", "a = 10\n", "a = 'ten'\n")
    made.commit(directory, "Correct five", "tiny/b.py", "b = 5\n", "b = 'five'\n")
    (made.root / "patches/default").write_text("1.0\n")
    return made


def check(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm12x_dev", "base", "check", *map(str, words)]
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


def test_patches_are_tried_on_the_newest_and_nothing_is_written(world: World) -> None:
    release(world, "2.0", {"tiny/a.py": "# new\n" * 9 + A, "tiny/b.py": B.replace("= 5", "= 'V'")})
    before = snapshot(world.root)
    done = check("--find-links", world.archive.parent, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["newest"], document["current"]) == ("2.0", True)
    assert [(t["base"], t["patch"], t["text"], t["conflicts"]) for t in document["trials"]] == [
        ("1.0", "0001-Correct-ten.patch", "merges", []),
        ("1.0", "0002-Correct-five.patch", "conflict", ["tiny/b.py"]),
    ]
    # An sdist alone: no wheel to make a base of.
    assert document["wheels"] == {"x86_64": None, "aarch64": None}
    assert snapshot(world.root) == before


def test_two_releases_behind_is_exit_1(world: World) -> None:
    for version in ("1.1", "2.0"):
        release(world, version, {"tiny/b.py": B.replace("= 5", "= 'five'")})
    done = check("--find-links", world.archive.parent)
    assert done.returncode == 1
    assert "1.0 is 2 releases behind tiny 2.0" in done.stderr
    assert "sm12x-dev rebase 2.0 --from 1.0" in done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["1.0", "0001-Correct-ten", "applies", "-"] in rows
    assert ["1.0", "0002-Correct-five", "present", "-"] in rows


def test_no_release_is_newer(world: World) -> None:
    done = check("--find-links", world.archive.parent)
    said = "advisories: not looked up, as --find-links uses no network\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert "no release is newer than base 1.0" in done.stdout


def test_an_index_that_cannot_be_reached(world: World) -> None:
    with socket.socket() as taken:
        # Bound but not listening: every connection is refused, and nobody else gets the port.
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/simple/"
        done = check(PIP_INDEX_URL=address, UV_DEFAULT_INDEX=address, NO_PROXY="127.0.0.1")
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr.count("\n") == 1
    assert f"no connection to {address}" in done.stderr


def test_the_real_index() -> None:
    """The exit code is 1 only where the default base is more than one release behind."""
    done = check("--json")
    if done.returncode == 6:
        pytest.skip(f"the package index cannot be reached: {done.stderr}")
    document = json.loads(done.stdout)
    assert document["project"] == "vllm"
    assert [base["version"] for base in document["bases"]] == bases.versions()
    behind = next(base["behind"] for base in document["bases"] if base["default"])
    assert document["current"] == (behind <= 1)
    # 16: the advisories could not be looked up; 1 also for one that is new since the list was made.
    assert done.returncode in ((0, 1, 16) if document["current"] else (1,)), done.stderr
    if document["current"]:
        assert "pins looked up" in done.stderr
