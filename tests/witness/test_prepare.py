"""What a sleep-mode backend prepares after the load: its failure, and the report meanwhile."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.test_rank_report import rig_of
from tests.witness.world import World, expect, raised

WORKER = "vllm.v1.worker.gpu_worker"
BACKENDS = "vllm.device_allocator.sleep_mode_backend"
pytestmark = pytest.mark.loads(WORKER)


def loaded(world: World, backend: Any) -> tuple[Any, list[str]]:
    """A worker that loads its model with that backend, and what it logs as exceptions."""
    module: Any = importlib.import_module(WORKER)
    module.set_current_vllm_config = lambda config: contextlib.nullcontext()
    module.has_ec_transfer = lambda: False
    module.set_torch_threads_for_runtime = lambda: None
    logged: list[str] = []
    module.logger = SimpleNamespace(exception=lambda text, *_: logged.append(text))
    worker: Any = module.Worker.__new__(module.Worker)
    worker._maybe_get_memory_pool_context = lambda tag: contextlib.nullcontext()
    worker._scoped_allocator_max_split = lambda max_split_size_mb: contextlib.nullcontext()
    worker._sleep_mode_backend = backend
    worker.model_runner = SimpleNamespace(load_model=lambda **_: world.blocks())
    options = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="keep")
    worker.vllm_config = SimpleNamespace(model_config=options, weight_transfer_config=None)
    worker.load_model()
    return worker, logged


def test_a_backend_that_cannot_prepare_fails_no_load(world: World) -> None:
    base: Any = importlib.import_module(BACKENDS)
    calls: list[str] = []

    class Failing(base.CuMemBackend):  # type: ignore[misc]
        def prepare(self) -> None:
            calls.append("prepare")
            raise RuntimeError("no host memory")

    worker, logged = loaded(world, Failing())
    world.use_cuda_platform()
    expect("calls", calls, ["prepare"])
    expect("logged", len(logged), 1)
    # What comes later is as without a preparation.
    worker.sleep_mode_backend.suspend(1)
    expect("physical memory asleep", world.fake.alive().physical, 0)
    worker.sleep_mode_backend.resume()


def test_an_interrupted_load_ends(world: World) -> None:
    base: Any = importlib.import_module(BACKENDS)

    class Interrupted(base.CuMemBackend):  # type: ignore[misc]
        def prepare(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loaded(world, Interrupted())


def test_a_name_that_no_backend_has_ends_the_load(world: World) -> None:
    problem = raised(lambda: loaded(world, None))
    assert isinstance(problem, ValueError), f"raised {problem!r}"


def test_the_report_says_that_a_backend_prepares(world: World) -> None:
    rig = rig_of(world)
    expect("preparing", rig.worker.sleep_report()["preparing"], False)
    rig.worker.sleep_mode_backend.is_preparing = lambda: True
    expect("preparing", rig.worker.sleep_report()["preparing"], True)
