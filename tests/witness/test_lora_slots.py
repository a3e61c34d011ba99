"""Adapters that are in their slots are there after a sleep of level 2, too."""

from __future__ import annotations

import ctypes
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.test_worker_sleep import Rig
from tests.witness.world import Block, World, expect

WORKER = "vllm.v1.worker.gpu_worker"
MANAGER = "vllm.lora.model_manager"
pytestmark = [pytest.mark.loads(WORKER), pytest.mark.loads(MANAGER)]
SLOTS, SIZE = 2, 32


class Adapters(Rig):
    """A model with one LoRA layer, and vLLM's manager of adapters."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        layers: Any = importlib.import_module("vllm.lora.layers.base")
        torch = self.torch
        slots = self.slots(self.weights[0])

        class Layer(layers.BaseLayerWithLoRA):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.lora_a_stacked = (slots,)

            def reset_lora(self, index: int) -> None:
                self.lora_a_stacked[0][index] = 0

            def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
                self.reset_lora(index)
                self.lora_a_stacked[0][index].copy_(lora_a)

        self.layer = Layer()
        self.model.add_module("proj", self.layer)
        module: Any = importlib.import_module(MANAGER)
        kind = module.LRUCacheLoRAModelManager
        manager: Any = kind.__new__(kind)
        manager.lora_config = SimpleNamespace(max_loras=SLOTS, max_cpu_loras=SLOTS)
        manager.lora_index_to_id = [None] * SLOTS
        manager.modules = {"proj": self.layer}
        manager._registered_adapters = module.LoRALRUCache(SLOTS, manager.deactivate_adapter)
        manager._active_adapters = module.LoRALRUCache(SLOTS, manager._deactivate_adapter)
        manager._last_mapping = None
        manager._create_merged_loras_inplace = lambda lora: None
        manager._get_lora_layer_weights = lambda lora, name: lora.weights
        self.manager = manager
        weights = SimpleNamespace(lora_a=torch.full((SIZE,), 7.0), lora_b=None)
        manager.add_adapter(SimpleNamespace(id=1, weights=weights))

    def slots(self, block: Block) -> Any:
        memory = (ctypes.c_float * (SLOTS * SIZE)).from_address(block.address + 16384)
        return self.torch.frombuffer(memory, dtype=self.torch.float32).view(SLOTS, SIZE)

    def used(self) -> Any:
        """What a request with the adapter finds in its slot."""
        self.manager.activate_adapter(1)
        index = self.manager.lora_index_to_id.index(1)
        return self.layer.lora_a_stacked[0][index].tolist()


@pytest.mark.parametrize("tags", [[None], [["kv_cache"], ["weights"]], [["weights"], ["kv_cache"]]])
def test_an_adapter_is_there_after_a_deep_sleep(world: World, tags: list[Any]) -> None:
    adapters = Adapters(world)
    expect("the adapter", adapters.used(), [7.0] * SIZE)
    for _ in range(2):
        adapters.worker.sleep(level=2)
        for some in tags:
            adapters.worker.wake_up(some)
        expect("the adapter", adapters.used(), [7.0] * SIZE)


@pytest.mark.guard
def test_an_adapter_is_there_after_a_light_sleep(world: World) -> None:
    adapters = Adapters(world)
    adapters.used()
    adapters.worker.sleep(level=1)
    adapters.worker.wake_up()
    expect("the adapter", adapters.used(), [7.0] * SIZE)
