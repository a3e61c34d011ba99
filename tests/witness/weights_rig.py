"""The rig of the witnesses about weights: a worker whose model has parameters that sleep."""

from __future__ import annotations

import ctypes
import importlib
from types import SimpleNamespace
from typing import Any

from tests.witness.test_worker_sleep import WORKER, Rig
from tests.witness.world import Block, World, expect, raised

SIZE = 64


class WeightsRig(Rig):
    """A worker whose model has a parameter in each of two blocks, besides its buffers."""

    def __init__(self, world: World, load_format: str = "auto") -> None:
        super().__init__(world)
        for name, block in zip(("up", "down"), self.weights[:2], strict=True):
            parameter = self.torch.nn.Parameter(self.matrix(block), requires_grad=False)
            self.model.register_parameter(name, parameter)
        # Too small to tell, and on the host.
        self.model.register_parameter(
            "scale", self.torch.nn.Parameter(self.torch.ones(1), requires_grad=False)
        )
        self.worker.vllm_config.load_config = SimpleNamespace(load_format=load_format)
        self.worker._weight_update_active = False
        self.worker._weight_update_is_draft = False
        module: Any = importlib.import_module(WORKER)
        module.set_current_vllm_config = lambda config: self.torch.no_grad()
        self.fails = False

    def matrix(self, block: Block) -> Any:
        """A tensor over device memory, behind the buffer that is there."""
        memory = (ctypes.c_float * SIZE).from_address(block.address + 8192)
        return self.torch.frombuffer(memory, dtype=self.torch.float32).view(8, 8)

    def load(self, *names: str) -> None:
        """As model.load_weights does, called by whomever."""
        for name in names or ("up", "down"):
            self.model.get_parameter(name).data.fill_(3.0)

    def reload_weights(self, *names: str) -> None:
        """The model runner's."""
        self.load(*names)
        if self.fails:
            raise RuntimeError("no such file")


class Pooled(WeightsRig):
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
