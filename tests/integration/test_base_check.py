"""`sm12x-dev base check` on made-up releases of a tiny base, and on the index."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import World, release, snapshot

from sm12x.stack.model import base as bases
from sm12x_dev import lock


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A base whose locks are those that base.toml declares: none."""
    world = stackrepo.make(tmp_path, monkeypatch)
    path = world.base.folder / "base.toml"
    head, _, rest = path.read_text().partition("[lock.")
    path.write_text(f"{head}[lock]\n\n[[flashinfer]]{rest.partition('[[flashinfer]]')[2]}")
    (world.root / "patches/default").write_text("1.0\n")
    return world


def check(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "sm12x_dev", "base", "check", *map(str, words)]
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, **env}
    )


@pytest.mark.parametrize(("versions", "code"), [((), 0), (("1.1",), 0), (("1.1", "2.0"), 1)])
def test_one_release_behind_is_current_and_two_are_not(
    world: World, versions: tuple[str, ...], code: int
) -> None:
    for version in (*versions, "3.0rc1"):
        release(world, version, {})
    before = snapshot(world.root)
    done = check("--find-links", world.archive.parent)
    assert done.returncode == code, done.stderr
    newest = [*("1.0",), *versions][-1]
    assert f"tiny {newest}" in done.stdout
    assert (f"sm12x-dev rebase {newest} NEW_DIR --from 1.0" in done.stderr) is (code == 1)
    assert snapshot(world.root) == before


def test_a_lock_that_is_missing_is_a_finding(world: World) -> None:
    path = world.base.folder / "base.toml"
    spec = 'platform = "x"\nbuild_from_sdist = []\nsdist_requires = []\n'
    path.write_text(path.read_text().replace("[lock]\n", f"[lock.x86_64]\n{spec}"))
    assert len(lock.contradictions(world.base)) == 2
    done = check("--find-links", world.archive.parent)
    assert done.returncode == 1
    assert "1.0/requirements-x86_64.lock" in done.stdout


def test_an_index_that_cannot_be_reached(world: World) -> None:
    with socket.socket() as taken:
        # Bound but not listening: every connection is refused, and nobody else gets the port.
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/simple/"
        done = check(PIP_INDEX_URL=address, UV_DEFAULT_INDEX=address, NO_PROXY="127.0.0.1")
    assert (done.returncode, done.stdout) == (6, "")
    assert done.stderr.count("\n") == 1


def test_the_real_index() -> None:
    """The exit code is 1 only where the default base is more than one release behind."""
    done = check()
    if done.returncode == 6:
        pytest.skip(f"the package index cannot be reached: {done.stderr}")
    for version in bases.versions():
        assert f"base {version}" in done.stdout
    # 16: the advisories could not be looked up; 1 also for one that is new since the list was made.
    assert done.returncode in (0, 1, 16), done.stderr
