"""A sleep that would leave weights or KV cache in GPU memory is an error, not an answer of 200."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.test_discarded_weights import WORKER, Weights
from tests.witness.world import World, expect, raised

pytestmark = pytest.mark.loads(WORKER)


class Pooled(Weights):
    """A worker whose tensors say that they are on a GPU, with KV caches in a block."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.on_gpu: Any = type("OnGpu", (self.torch.nn.Parameter,), {"is_cpu": False})
        for name in ("up", "down"):
            self.register(name, self.model.get_parameter(name).data)
        cache = next(block for block in self.blocks if block.tag == "kv_cache")
        # Attention has a tensor, a layer with states (Mamba, gated DeltaNet) a list.
        states = [self.tensor(self.matrix(cache)) for _ in range(2)]
        self.kv_caches: Any = [self.tensor(self.matrix(cache)), states]

    def tensor(self, data: Any) -> Any:
        return self.on_gpu(data, requires_grad=False)

    def outside(self, *shape: int) -> Any:
        """Memory that no pool has."""
        return self.tensor(self.torch.zeros(shape))

    def register(self, name: str, data: Any) -> None:
        self.model.register_parameter(name, self.tensor(data))

    def expect_refused(self, level: int, words: str) -> None:
        before = self.values()
        error = raised(lambda: self.worker.sleep(level=level))
        assert isinstance(error, RuntimeError), f"sleep ended with {error!r}"
        expect(f"whether the error says {words}", words in str(error), True)
        self.world.expect_alive(*self.blocks)
        # The caller takes every rank back.
        self.worker.wake_up()
        expect("the buffers", self.values(), before)
        self.world.expect_alive(*self.blocks)


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_no_pool_has_are_an_error(world: World, level: int) -> None:
    rig = Pooled(world)
    rig.register("experts", rig.torch.zeros(64, 64))
    rig.expect_refused(level, "bytes of weights in GPU memory, the first is experts")
    # It goes on to be one until they are in a pool.
    rig.expect_refused(level, "--enable-sleep-mode")
    rig.register("experts", rig.matrix(rig.weights[2]))
    rig.worker.sleep(level=level)
    world.expect_alive(asleep=tuple(rig.blocks))


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_a_cache_that_no_pool_has_is_an_error(world: World, level: int, states: bool) -> None:
    rig = Pooled(world)
    if states:
        rig.kv_caches[1][1] = rig.outside(8, 8)
    else:
        rig.kv_caches[0] = rig.outside(8, 8)
    name = "kv_cache.1.1" if states else "kv_cache.0"
    rig.expect_refused(level, f"of the KV cache in GPU memory, the first is {name}")


def test_a_server_without_sleep_mode_refuses(world: World) -> None:
    rig = Pooled(world)
    for block in rig.blocks:
        world.free(block)
    rig.model = rig.torch.nn.Module()
    rig.register("up", rig.torch.zeros(8, 8))
    rig.kv_caches = []
    error = raised(lambda: rig.worker.sleep(level=1))
    assert isinstance(error, RuntimeError)
    expect("the way out", "--enable-sleep-mode" in str(error), True)


def test_a_model_that_sleeps_already_is_not_refused_for_that(world: World) -> None:
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
