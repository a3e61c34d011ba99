"""Tests on a real GPU. SM12X_TREE names the vLLM source tree, of which few files are needed; with
SM12X_BACKEND=keep, sleep and wake_up are those of scripts/sleep-keep, or of the folder SM12X_KEEP.

Each test runs in a process of its own: on the untouched base some abort, and a kernel that met an
illegal address spoils its process for good.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.gpu import rig

ROOT = Path(__file__).resolve().parents[2]
# Seconds one test may take; most need about ten, for importing torch, and 1,000 cycles a minute.
TIME_LIMIT = 240
TAIL = 4000


def pytest_configure(config: pytest.Config) -> None:
    tree = os.environ.get("SM12X_TREE")
    if not tree or not (Path(tree) / "csrc" / "cumem_allocator.cpp").is_file():
        raise pytest.UsageError("set SM12X_TREE to the vLLM source tree under test")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    tree: Path
    library: Path


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    tree = Path(os.environ["SM12X_TREE"]).resolve()
    return Compiled(tree=tree, library=rig.compile_allocator(tree, tmp_path_factory.mktemp("lib")))


@pytest.fixture
def gpu(compiled: Compiled) -> Compiled:
    """In the test's own process this is a tests.gpu.rig.Gpu."""
    return compiled


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "gpu" not in pyfuncitem.fixturenames:
        return None
    compiled = pyfuncitem.funcargs["gpu"]
    assert isinstance(compiled, Compiled)
    command = [sys.executable, "-m", "tests.gpu.child", str(compiled.tree), str(compiled.library)]
    command += [str(pyfuncitem.path), pyfuncitem.originalname]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired as expired:
        said = (expired.stdout or b"").decode(errors="replace")
        pytest.fail(f"hangs: no end after {TIME_LIMIT} s\n{said[-TAIL:]}", pytrace=False)
    if done.returncode < 0:
        pytest.fail(f"killed by signal {-done.returncode}\n{done.stdout[-TAIL:]}", pytrace=False)
    if done.returncode != 0:
        pytest.fail(done.stdout[-TAIL:], pytrace=False)
    return True
