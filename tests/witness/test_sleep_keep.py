"""The sleep-mode backend of scripts/sleep-keep, on the release's registry and allocator.

The package is made for an untouched release too: what holds there as well is a guard.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.fuzz import Fuzzer, Settings, seeds
from tests.witness.world import PLUGIN, Block, World, expect, raised

WORKER = "vllm.v1.worker.gpu_worker"
OFFLOAD = ("weights", "runtime", "cudagraph")


def copies(world: World) -> int:
    return sum(world.fake.calls(name) for name in ("cudaMemcpy", "cudaMemcpyAsync"))


def registered(world: World) -> Any:
    """The registry, with the package's backend, and the backend."""
    backend = world.use_plugin()
    module: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    importlib.import_module("vllm_sleep_keep").register()
    # All of vLLM's processes call it, one of them may twice.
    importlib.import_module("vllm_sleep_keep").register()
    return module.SleepModeBackendFactory, backend


@pytest.mark.guard
def test_the_backend_is_in_the_registry(world: World) -> None:
    factory, backend = registered(world)
    expect("the backend's class", factory.get_backend_class("keep"), type(backend))
    made = factory.create_backend(SimpleNamespace(sleep_mode_backend="keep"))
    expect("its class", type(made), type(backend))
    expect("its state", made.state(), "RUNNING")


@pytest.mark.guard
def test_the_package_names_what_is_missing(world: World) -> None:
    sys.path.append(str(PLUGIN))
    sys.modules["vllm.device_allocator.sleep_mode_backend"] = None  # type: ignore[assignment]
    problem = raised(lambda: importlib.import_module("vllm_sleep_keep").register())
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    assert "no sleep-mode backends" in str(problem)


@pytest.mark.guard
def test_sleep_and_wake_up(world: World) -> None:
    """The backend's calls, with the release's own allocator and tags."""
    backend = world.use_plugin()
    blocks = [*world.blocks(), world.block("runtime")]
    saved = ("weights", "runtime")
    for i in range(3):
        world.fake.forget_calls()
        backend.suspend(1)
        expect("copies in a sleep", copies(world), 0 if i else 4)
        expect("state", backend.state(), "SUSPENDED")
        expect("physical memory asleep", world.fake.alive().physical, 0)
        backend.resume(["weights"])
        world.expect_awake(*(b for b in blocks if b.tag in saved), bytes_of=saved)
        world.expect_asleep(*(b for b in blocks if b.tag == "kv_cache"))
        backend.resume()
        world.expect_awake(*blocks, bytes_of=saved)
        expect("state", backend.state(), "RUNNING")
    # In place, by no call that anybody hears of.
    new = Block(address=blocks[0].address, size=blocks[0].size, tag="weights", data=blocks[3].data)
    world.fill(new)
    world.fake.forget_calls()
    backend.suspend(1)
    expect("copies after a change", copies(world), 1)
    backend.resume()
    world.expect_awake(new, *blocks[1:], bytes_of=saved)


@pytest.mark.guard
def test_level_2(world: World) -> None:
    backend = world.use_plugin()
    blocks = [*world.blocks(), world.block("runtime")]
    backend.suspend(1)
    backend.resume()
    backend.suspend(2)
    size = sum(block.size for block in blocks if block.tag == "runtime")
    expect("registered host memory after level 2", world.fake.registered(), size)
    backend.resume()
    world.expect_awake(*blocks, bytes_of=("runtime",))


@pytest.mark.guard
def test_release_kv_cache_memory(world: World) -> None:
    backend = world.use_plugin()
    world.use_cuda_platform()
    blocks = world.blocks()
    backend.discard(("kv_cache",))
    world.expect_asleep(*(b for b in blocks if b.tag == "kv_cache"))
    backend.resume(["kv_cache"])
    world.expect_awake(*blocks)


@pytest.mark.guard
@pytest.mark.parametrize("kv_cache_alone", [False, True])
def test_one_memory_for_gpu_and_host(world: World, kv_cache_alone: bool) -> None:
    """A wake_up has no more than one block twice, and leaves no host memory taken."""
    backend = world.use_plugin()
    world.use_cuda_platform()
    blocks = world.blocks()
    limit = world.share_memory_of(blocks)
    for _ in range(3):
        if kv_cache_alone:
            backend.discard(("kv_cache",))
            backend.resume(["kv_cache"])
        backend.suspend(1)
        world.expect_asleep(*blocks)
        expect("physical memory asleep", world.fake.alive().physical, 0)
        backend.resume()
        world.expect_awake(*blocks)
        world.expect_alive(*blocks)
        expect("host memory of a server that is awake", world.fake.registered(), 0)
    assert world.fake.shared_peak() <= limit


@pytest.mark.guard
def test_vllm_s_own_backend_has_weights_twice_in_one_memory(world: World) -> None:
    """What the backend is for there: the release's own finds no memory to wake up in."""
    module: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    own = module.CuMemBackend()
    world.use_cuda_platform()
    world.share_memory_of(world.blocks())
    own.suspend(1)
    problem = raised(own.resume)
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    assert "out of memory" in str(problem)


@pytest.mark.guard
def test_a_wake_up_that_fails_is_rolled_back(world: World) -> None:
    """Also on the untouched release, whose own wake_up keeps what it has mapped."""
    backend = world.use_plugin()
    blocks = world.blocks()
    backend.suspend(1)
    world.fake.fail("cudaMemcpyAsync", nth=2, error=2)
    problem = raised(backend.resume)
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    assert "out of memory" in str(problem)
    expect("state", backend.state(), "SUSPENDED")
    expect("physical memory", world.fake.alive().physical, 0)
    backend.resume()
    world.expect_awake(*blocks)


@pytest.mark.patched_only
@pytest.mark.parametrize("seed", seeds(3))
def test_random_operations(world: World, seed: int) -> None:
    """The untouched allocator does not survive its part of it."""
    Fuzzer(world, Settings(operations=200, seed=seed, plugin=True)).run()


@pytest.mark.loads(WORKER)
def test_the_worker_prepares_after_the_load(world: World) -> None:
    registered(world)
    module: Any = importlib.import_module(WORKER)
    module.set_current_vllm_config = lambda config: contextlib.nullcontext()
    module.has_ec_transfer = lambda: False
    module.set_torch_threads_for_runtime = lambda: None
    worker: Any = module.Worker.__new__(module.Worker)
    worker._maybe_get_memory_pool_context = lambda tag: contextlib.nullcontext()
    worker._scoped_allocator_max_split = lambda max_split_size_mb: contextlib.nullcontext()
    worker._sleep_mode_backend = None
    blocks: list[Block] = []
    worker.model_runner = SimpleNamespace(load_model=lambda **o: blocks.extend(world.blocks()))
    options = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="keep")
    worker.vllm_config = SimpleNamespace(model_config=options, weight_transfer_config=None)
    worker.load_model()
    worker.sleep_mode_backend.copies._wait_for_preparation()
    size = sum(block.size for block in blocks if block.tag == "weights")
    expect("registered host memory", world.fake.registered(), size)
    worker.sleep_mode_backend.suspend(1)
    expect("registered in all", world.fake.registered(), size)
    # Without sleep mode there is nothing to prepare.
    worker._sleep_mode_backend = None
    options.enable_sleep_mode = False
    worker.load_model()
    expect("the backend", worker._sleep_mode_backend, None)
