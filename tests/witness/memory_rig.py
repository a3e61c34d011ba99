"""The rig of the witnesses of memory profiling: a worker, and what PyTorch says of its memory.

Numbers that torch would give are answered by `Torch`: PyTorch counts a segment as reserved until it
frees it itself, also where its memory went back to the driver before (pytorch/pytorch#159674).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from tests.witness.world import World

MEMORY = "vllm.utils.mem_utils"
WORKER = "vllm.v1.worker.gpu_worker"
UNIT = 2 << 20
BUDGET = 100 * UNIT


class Torch:
    """What PyTorch says that it reserved and allocated, and a device that knows what is in use."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reserved = 0
        self.allocated = 0
        self.peak = 0
        self.reserved_peak = 0
        self.weights = 0
        self.device = world.torch.device("cuda", 0)
        accelerator = world.torch.accelerator
        accelerator.memory_reserved = lambda device=None: self.reserved
        accelerator.memory_allocated = lambda device=None: self.allocated
        accelerator.memory_stats = lambda device=None: {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
            "reserved_bytes.all.peak": self.reserved_peak,
        }
        accelerator.reset_peak_memory_stats = lambda device=None: self.forget_peak()
        platform = SimpleNamespace(
            mem_get_info=lambda device=None: world.memory(),
            is_integrated_gpu=lambda index=0: False,
            is_cuda=lambda: True,
            is_cuda_alike=lambda: True,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
            current_device=lambda: 0,
        )
        memory: Any = importlib.import_module(MEMORY)
        memory.current_platform = platform
        self.memory = memory
        self.baseline = memory.MemorySnapshot(device=self.device)

    def forget_peak(self) -> None:
        self.peak = self.allocated
        self.reserved_peak = self.reserved

    def tensor(self, size: int) -> None:
        """A tensor that stays, in a segment of its size."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def load(self, kept: int, replaced: int) -> None:
        """Load weights into the sleep-mode pool; some are replaced by others and freed."""
        with self.world.allocator.use_memory_pool("weights"):
            pool = self.world.pools_in_use[-1]
            first = pool.allocate(self.world, replaced)
            self.tensor(replaced)
            pool.allocate(self.world, kept)
            self.tensor(kept)
            pool.free(first)
            # PyTorch keeps the segment: reserved stays as it is.
            self.allocated -= replaced

    def load_without_a_pool(self, kept: int) -> None:
        self.weights = self.world.take(kept)
        self.tensor(kept)

    @contextlib.contextmanager
    def graphs(self, size: int) -> Iterator[None]:
        """Captured graphs, in segments that PyTorch frees in the end."""
        address = self.world.take(size)
        self.tensor(size)
        yield
        self.world.take_back(address)
        self.allocated -= size
        self.reserved -= size

    def forward(self, size: int) -> None:
        """What a forward pass allocates and frees, and what the profiling gives back after it."""
        self.peak = max(self.peak, self.allocated + size)


def worker(
    stats: Torch,
    weights: int,
    peak: int,
    graphs: int,
    *,
    profiling: Callable[[], object] = lambda: None,
    capturing: Callable[[], object] = lambda: None,
) -> Any:
    """A worker with a budget, before it asks how much the cache may take.

    ``profiling`` and ``capturing`` happen during the forward pass and while graphs are measured.
    """

    def profile_run(**_: object) -> None:
        stats.forward(peak)
        profiling()

    def profile_cudagraph_memory() -> int:
        # Captured graphs are freed again; while they are there, more is allocated.
        stats.forward(peak + graphs)
        before = stats.world.memory()[0]
        with stats.graphs(graphs):
            capturing()
            return before - stats.world.memory()[0]

    module: Any = importlib.import_module(WORKER)
    module.current_platform = stats.memory.current_platform
    found = module.Worker.__new__(module.Worker)
    found.device = stats.device
    found.init_snapshot = stats.baseline
    found.requested_memory = BUDGET
    found.cache_config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.5)
    mode = importlib.import_module("vllm.config").CUDAGraphMode
    found.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode.FULL if graphs else mode.NONE, cudagraph_mm_encoder=False
        )
    )
    found.use_v2_model_runner = False
    found.model_config = SimpleNamespace(enforce_eager=not graphs, multimodal_config=None)
    found.parallel_config = SimpleNamespace()
    found._scoped_allocator_max_split = lambda **_: contextlib.nullcontext()
    found.model_runner = SimpleNamespace(
        model_memory_usage=weights,
        profile_run=profile_run,
        profile_cudagraph_memory=profile_cudagraph_memory,
    )
    return found
