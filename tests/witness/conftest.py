"""Witnesses run the real allocator of one vLLM source tree against the stand-in driver.

SM12X_TREE names that tree. A test that takes ``world`` runs in a process of its own: on the
untouched base some of them crash, abort or hang, and that has to be a failure of the test, not the
end of pytest. Its other arguments must survive JSON.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.witness import caching as caching_process
from tests.witness import executor_rig, forked, kernels, native

# Seconds one test may take, its forked cases included; one that only waits is ended before
# (forked.IDLE).
TIME_LIMIT = 60
# ... and where one of these settings asks for a longer run.
LONGER = ("SM12X_CHURN_SEEDS", "SM12X_SEEDS", "SM12X_SIGNALS", "SM12X_WALK")
LONG_LIMIT = 3600


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "loads(module): import this module of the tree before the test's process forks"
    )
    # No model runs here, and torch's compiler imports what the witnesses do not install.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    tree = os.environ.get("SM12X_TREE")
    if not tree or not (Path(tree) / "csrc" / "cumem_allocator.cpp").is_file():
        raise pytest.UsageError(
            "set SM12X_TREE to the vLLM source tree under test, or run `sm12x-dev witness`"
        )


@pytest.fixture(scope="session")
def tree() -> Path:
    """The vLLM source tree under test."""
    return Path(os.environ["SM12X_TREE"]).resolve()


def limit() -> int:
    """Seconds one test may take."""
    return LONG_LIMIT if any(os.environ.get(name) for name in LONGER) else TIME_LIMIT


class Zygote:
    """A process that has loaded torch and the tree's allocator once, and forks for every test."""

    def __init__(self, tree: Path, libraries: Path) -> None:
        self._server = forked.Server(
            "tests.witness.zygote", str(tree), str(libraries), log=libraries / "zygote.log"
        )
        self.ask({"ping": True})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._server.ask(request)
        except RuntimeError as ended:
            pytest.exit(str(ended), returncode=3)

    def close(self) -> None:
        self._server.close(TIME_LIMIT)


@pytest.fixture(scope="session")
def zygote(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    libraries = tmp_path_factory.mktemp("libraries")
    native.build(tree, libraries)
    native.build_rocm(tree, libraries)
    process = Zygote(tree, libraries)
    yield process
    process.close()


@pytest.fixture
def world(zygote: Zygote) -> Zygote:
    """In the test's own process this is a tests.witness.world.World."""
    return zygote


@pytest.fixture(scope="session")
def vllm_executor() -> None:
    """Imports vLLM's executor, engine and server, once for all tests, which fork."""
    executor_rig.prepare()


@pytest.fixture
def gpus(vllm_executor: None, tmp_path: Path) -> executor_rig.Gpus:
    """The pretended GPUs that the executors and engines of a test share."""
    return executor_rig.Gpus(tmp_path / "gpus")


@pytest.fixture(scope="session")
def caching(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[caching_process.Caching]:
    """Runs functions of a witness with PyTorch's own caching allocator."""
    folder = tmp_path_factory.mktemp("caching")
    caching_process.build(tree, folder)
    started = caching_process.Caching(tree, folder)
    yield started
    started.close()


@pytest.fixture(scope="session")
def compiled(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[kernels.KernelProcess]:
    """Runs functions of a witness where Triton compiles for a stand-in device."""
    with kernels.process(tree, tmp_path_factory.mktemp("compiled"), interpret=False) as started:
        yield started


@pytest.fixture(scope="session")
def interpreted(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[kernels.KernelProcess]:
    """Runs functions of a witness where Triton interprets its kernels."""
    with kernels.process(tree, tmp_path_factory.mktemp("interpreted"), interpret=True) as started:
        yield started


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "world" not in pyfuncitem.fixturenames:
        return None
    arguments = dict(pyfuncitem.funcargs)
    process = arguments.pop("world")
    assert isinstance(process, Zygote)
    wanted = pyfuncitem._fixtureinfo.argnames
    answer = process.ask(
        {
            "file": str(pyfuncitem.path),
            "test": pyfuncitem.originalname,
            "loads": [mark.args[0] for mark in pyfuncitem.iter_markers("loads")],
            "arguments": {name: arguments[name] for name in wanted if name != "world"},
            "seconds": limit(),
        }
    )
    if not answer["passed"]:
        pytest.fail(answer["text"], pytrace=False)
    return True
