"""`sm12x-dev lock` with the real uv: against the real index, and with none to be reached."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.stack.model import base as bases

VERSION = bases.versions()[0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of what the command reads and writes."""
    shutil.copytree(layout.patches(), tmp_path / "patches")
    shutil.copy(layout.root() / "pyproject.toml", tmp_path)
    return tmp_path


def run(root: Path, *more: str, version: str = VERSION, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "sm12x_dev", "lock", "--base", version, *more],
        env={**os.environ, "SM12X_ROOT": str(root), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 6 and "UV_DEFAULT_INDEX" not in env:
        pytest.skip(f"the package index cannot be reached: {done.stderr}")
    return done.returncode, done.stdout, done.stderr


def own(err: str) -> str:
    """What is printed besides the overrides of the base."""
    told = tuple(f"{each} (" for each in bases.load(VERSION).overrides)
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(told))


@pytest.mark.parametrize("version", bases.versions())
def test_the_committed_locks_are_what_is_made(root: Path, version: str) -> None:
    base = bases.load(version)
    said = "".join(
        f"{each} ({', '.join(each.machines or base.locks)})\n" for each in base.overrides
    )
    assert run(root, "--check", version=version) == (0, "", said)


def test_an_edited_lock_is_shown_and_mended(root: Path) -> None:
    path = root / "patches" / VERSION / "requirements-x86_64.lock"
    good = path.read_text()
    path.write_text(good.replace("\ntorch==", "\ntorch==9.", 1))
    code, out, err = run(root, "--check", "--machine", "x86_64")
    assert code == 1
    assert "requirements-x86_64.lock: torch is 9." in out
    assert f"--- patches/{VERSION}/requirements-x86_64.lock (committed)" in out
    assert "\n-torch==9." in out
    assert own(err).count("\n") == 1
    assert "make lock" in err

    code, out, err = run(root, "--machine", "x86_64")
    assert (code, own(err)) == (0, "")
    assert path.read_text() == good


def test_no_index_to_be_reached(root: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        # Bound but not listening: every connection is refused, and nobody else gets the port.
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/simple/"
        code, out, err = run(
            root,
            *("--machine", "x86_64"),
            UV_DEFAULT_INDEX=address,
            UV_CACHE_DIR=str(tmp_path / "cache"),
            UV_HTTP_RETRIES="0",
            NO_PROXY="127.0.0.1",
        )
    assert (code, out) == (6, "")
    assert own(err).count("\n") == 1
    assert f"no answer from {address}" in err


def test_requirements_that_do_not_fit_together(root: Path) -> None:
    path = root / "patches" / VERSION / "base.toml"
    text = path.read_text()
    assert 'build_requires = [\n  "' in text
    path.write_text(text.replace('build_requires = [\n  "', 'build_requires = [\n  "torch<2", "'))
    code, out, err = run(root, "--machine", "x86_64")
    assert (code, out) == (13, "")
    assert own(err).count("\n") == 1
    assert "torch" in err
