"""The scales of an FP8 KV cache are those of the checkpoint after a wake_up, too (0.21.0)."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.witness.test_worker_sleep import Rig
from tests.witness.world import Block, World, expect

RUNNER = "vllm.v1.worker.gpu_model_runner"
pytestmark = pytest.mark.loads(RUNNER)
NAMES = ("_k_scale", "_v_scale", "_q_scale")
SCALES = (0.03, 0.05, 0.07)


class Scaled(Rig):
    """A worker with a real model runner, an attention layer with scales, and its cache."""

    def __init__(self, world: World, dtype: str = "fp8") -> None:
        super().__init__(world)
        runner = importlib.import_module(RUNNER).GPUModelRunner
        attention = importlib.import_module("vllm.model_executor.layers.attention").Attention
        self.runner: Any = runner.__new__(runner)
        self.attention: Any = attention.__new__(attention)
        self.torch.nn.Module.__init__(self.attention)
        for at, (name, scale) in enumerate(zip(NAMES, SCALES, strict=True)):
            self.attention.register_buffer(name, self.number(self.weights[0], at))
            getattr(self.attention, name).fill_(scale)
            setattr(self.attention, f"{name}_float", scale)
        self.model.attention = self.attention
        block = next(block for block in self.blocks if block.tag == "kv_cache")
        self.caches = [self.bytes_of(block, part) for part in range(3)]
        self.runner.model = self.model
        self.runner.cache_config = SimpleNamespace(cache_dtype=dtype)
        self.runner.compilation_config = SimpleNamespace(
            static_forward_context={"layer": self.attention}
        )
        # Attention has a tensor, a layer with states a list, a shared one nothing.
        self.runner.kv_caches = [self.caches[0], self.caches[1:], None]
        self.worker.model_runner = self.runner
        self.worker.get_draft_model = lambda: None

    def number(self, block: Block, at: int) -> Any:
        memory = (ctypes.c_float * 1).from_address(block.address + 32768 + 4 * at)
        return self.torch.frombuffer(memory, dtype=self.torch.float32)[0]

    def bytes_of(self, block: Block, part: int) -> Any:
        memory = (ctypes.c_uint8 * 512).from_address(block.address + 512 * part)
        return self.torch.frombuffer(memory, dtype=self.torch.uint8)

    def expect_scales(self, *scales: float) -> None:
        found = [round(float(getattr(self.attention, name)), 6) for name in NAMES]
        expect("the scales on the device", found, list(scales))
        floats = [getattr(self.attention, f"{name}_float") for name in NAMES]
        expect("the scales on the host", floats, list(scales))


def wake(rig: Scaled, order: str) -> None:
    """Both at once, or one tag after the other."""
    for tag in order.split(","):
        rig.worker.wake_up([tag] if tag else None)


@pytest.mark.parametrize("order", ["", "weights,kv_cache", "kv_cache,weights"])
@pytest.mark.parametrize("level", [1, 2])
def test_scales_survive_a_wake_up(world: World, level: int, order: str) -> None:
    rig = Scaled(world)
    rig.runner.kv_caches = rig.caches
    for _ in range(2):
        rig.worker.sleep(level=level)
        wake(rig, order)
        rig.expect_scales(*SCALES)


def test_scales_that_the_first_prompt_gave_survive(world: World) -> None:
    rig = Scaled(world)
    rig.runner.kv_caches = rig.caches
    rig.attention.q_range = rig.attention.k_range = rig.attention.v_range = rig.torch.tensor(100.0)
    ones = rig.torch.ones(2)
    rig.attention.calc_kv_scales(ones * 3, ones * 1, ones * 2)
    rig.attention._k_scale_float, rig.attention._v_scale_float = 0.01, 0.02
    rig.attention._q_scale_float = 0.03
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.expect_scales(0.01, 0.02, 0.03)


@pytest.mark.parametrize("level", [1, 2])
def test_a_hybrid_model_wakes_up(world: World, level: int) -> None:
    """Its layers with states have lists of tensors (#41602)."""
    rig = Scaled(world)
    rig.worker.sleep(level=level)
    rig.worker.wake_up()
    rig.expect_scales(*SCALES)
    # As it is called for memory that is mapped with other bytes.
    for cache in rig.caches:
        cache.fill_(0x7F)
    rig.runner.post_kv_cache_wake_up()
    expect("bytes in the caches", [int(cache.sum()) for cache in rig.caches], [0, 0, 0])


@pytest.mark.parametrize("in_checkpoint", [True, False])
def test_scales_of_compressed_tensors_survive_a_discard(world: World, in_checkpoint: bool) -> None:
    """Where the checkpoint has none, no load of the weights brings them back."""
    rig = Scaled(world)
    rig.runner.kv_caches = rig.caches
    for name in ("", ".config", ".quantization", ".transform", ".transform.utils", ".utils"):
        sys.modules[f"compressed_tensors{name}"] = MagicMock()
    module: Any = importlib.import_module(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"
    )
    method = module.CompressedTensorsKVCacheMethod.__new__(module.CompressedTensorsKVCacheMethod)
    method.quant_config = SimpleNamespace(kv_cache_scheme=None)
    rig.attention.num_kv_heads = 8
    method.create_weights(rig.attention)
    for at, name in enumerate(("k_scale", "v_scale", "q_scale")):
        parameter = getattr(rig.attention, name)
        parameter.data = rig.number(rig.weights[2], at).view(1).fill_(1.0)
        if in_checkpoint:
            parameter.data.fill_(SCALES[at])
    method.process_weights_after_loading(rig.attention)
    for name in NAMES:
        rounded = round(getattr(rig.attention, f"{name}_float"), 6)
        setattr(rig.attention, f"{name}_float", rounded)
    rig.worker.sleep(level=2)
    rig.worker.wake_up()
    rig.expect_scales(*(SCALES if in_checkpoint else (1.0, 1.0, 1.0)))


@pytest.mark.guard
def test_a_quantized_cache_is_cleared(world: World) -> None:
    rig = Scaled(world)
    rig.runner.kv_caches = rig.caches
    for cache in rig.caches:
        cache.fill_(0x7F)
    rig.runner.post_kv_cache_wake_up()
    expect("bytes in the caches", [int(cache.sum()) for cache in rig.caches], [0, 0, 0])


@pytest.mark.guard
def test_another_cache_is_not_written_to(world: World) -> None:
    rig = Scaled(world, dtype="auto")
    for cache in rig.caches:
        cache.fill_(9)
    rig.runner.post_kv_cache_wake_up()
    expect("bytes in the caches", [int(cache[0]) for cache in rig.caches], [9, 9, 9])
