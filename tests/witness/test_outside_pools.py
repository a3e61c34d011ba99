"""A sleep that leaves weights or KV cache in GPU memory: a warning, or an error where asked for."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.test_worker_sleep import WORKER
from tests.witness.weights_rig import Pooled
from tests.witness.world import World, expect, raised

pytestmark = pytest.mark.loads(WORKER)
SETTING = "VLLM_SLEEP_REQUIRE_POOLS"


def warnings_of(world: World) -> list[str]:
    """What the worker warns of from here on."""
    module: Any = importlib.import_module(WORKER)
    warnings: list[str] = []
    module.logger = SimpleNamespace(
        info=lambda *_: None, warning=lambda text, *values: warnings.append(text % values)
    )
    return warnings


def put_outside(rig: Pooled, kind: str) -> str:
    """Something that no pool has: its name."""
    if kind == "weights":
        rig.register("experts", rig.torch.zeros(64, 64))
        return "experts"
    if kind == "states":
        rig.kv_caches[1][1] = rig.outside(8, 8)
        return "kv_cache.2"
    rig.kv_caches[0] = rig.outside(8, 8)
    return "kv_cache.0"


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["weights", "cache", "states"])
def test_what_no_pool_has_is_a_warning(world: World, level: int, kind: str) -> None:
    """FP8 weights that a framework refits are made anew outside the pools, and must sleep."""
    rig = Pooled(world)
    name = put_outside(rig, kind)
    warnings = warnings_of(world)
    for _ in range(2):
        rig.worker.sleep(level=level)
        world.expect_alive(asleep=tuple(rig.blocks))
        rig.worker.wake_up()
        world.expect_alive(*rig.blocks)
    expect("warnings", len(warnings), 2)
    assert name in warnings[0], warnings


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["weights", "cache", "states"])
def test_what_no_pool_has_is_an_error_where_asked_for(world: World, level: int, kind: str) -> None:
    os.environ[SETTING] = "1"
    rig = Pooled(world)
    name = put_outside(rig, kind)
    rig.expect_refused(level, name)
    # It goes on to be one until it may be left.
    rig.expect_refused(level, name)
    os.environ[SETTING] = "0"
    rig.worker.sleep(level=level)
    world.expect_alive(asleep=tuple(rig.blocks))


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_without_sleep_mode(world: World, fails: bool) -> None:
    os.environ[SETTING] = str(int(fails))
    rig = Pooled(world)
    for block in rig.blocks:
        world.free(block)
    rig.model = rig.torch.nn.Module()
    rig.register("up", rig.torch.zeros(8, 8))
    rig.kv_caches = []
    warnings = warnings_of(world)
    error = raised(lambda: rig.worker.sleep(level=1))
    assert isinstance(error, RuntimeError) is fails, f"sleep ended with {error!r}"
    text = str(error) if fails else warnings[0]
    expect("the way out", "--enable-sleep-mode" in text, True)


def test_a_model_that_sleeps_already_is_not_refused_for_that(world: World) -> None:
    os.environ[SETTING] = "1"
    rig = Pooled(world)
    rig.worker.sleep(level=2)
    rig.worker.sleep(level=2)
    rig.worker.wake_up(["weights"])
    rig.register("experts", rig.torch.zeros(64, 64))
    error = raised(lambda: rig.worker.sleep(level=2))
    assert isinstance(error, RuntimeError), f"sleep ended with {error!r}"


@pytest.mark.guard
@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("kind", ["small", "host", "uva", "prefetch", "shared", "meta"])
def test_what_may_be_outside_is_no_error(world: World, level: int, kind: str) -> None:
    os.environ[SETTING] = "1"
    rig = Pooled(world)
    if kind == "small":
        rig.register("scale", rig.outside(2, 2).data)
    elif kind == "host":
        parameter = rig.torch.nn.Parameter(rig.torch.zeros(64, 64), requires_grad=False)
        rig.model.register_parameter("offloaded", parameter)
    elif kind == "uva":
        rig.register("offloaded", rig.torch.zeros(64, 64))
        rig.model.offloaded._vllm_is_uva_offloaded = True
    elif kind == "prefetch":
        rig.register("offloaded", rig.torch.zeros(64, 64))
        prefetch = SimpleNamespace(offload_group_size=2)
        rig.worker.vllm_config.offload_config = SimpleNamespace(prefetch=prefetch)
    elif kind == "shared":
        small = rig.torch.zeros(2, 2)
        for index in range(40):
            rig.register(f"shared{index}", small)
    else:
        rig.register("later", rig.torch.zeros(64, 64, device="meta"))
    rig.worker.sleep(level=level)
    world.expect_alive(asleep=tuple(rig.blocks))
    rig.worker.wake_up()
    world.expect_alive(*rig.blocks)


def test_a_tensor_is_in_the_block_that_holds_its_first_byte(world: World) -> None:
    world.use_cuda_platform()
    module: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    block = world.block("weights")
    places = {
        "before": block.address - 1,
        "first": block.address,
        "last": block.address + block.size - 1,
        "behind": block.address + block.size,
        "none": 0,
    }
    tensors = {name: SimpleNamespace(data_ptr=lambda at=at: at) for name, at in places.items()}
    inside = module.CuMemBackend().memory_of(tensors)
    expect("inside", inside, {"first": ("weights", False), "last": ("weights", False)})
