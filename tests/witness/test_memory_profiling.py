"""What the KV cache may take: the budget less what is in use and what a forward pass adds at most.

Numbers that torch would give are answered by `Torch`: PyTorch counts a segment as reserved until it
frees it itself, also where its memory went back to the driver before (pytorch/pytorch#159674).
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import World, expect

MEMORY = "vllm.utils.mem_utils"
WORKER = "vllm.v1.worker.gpu_worker"
pytestmark = [pytest.mark.loads(MEMORY), pytest.mark.loads(WORKER)]
UNIT = GRANULARITY
BUDGET = 100 * UNIT


class Torch:
    """What PyTorch says that it reserved and allocated, and a device that knows what is in use."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reserved = 0
        self.allocated = 0
        self.peak = 0
        self.device = world.torch.device("cuda", 0)
        accelerator = world.torch.accelerator
        accelerator.memory_reserved = lambda device=None: self.reserved
        accelerator.memory_allocated = lambda device=None: self.allocated
        accelerator.memory_stats = lambda device=None: {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
        }
        accelerator.reset_peak_memory_stats = lambda device=None: self.forget_peak()
        platform = SimpleNamespace(
            mem_get_info=lambda device=None: world.memory(),
            is_integrated_gpu=lambda index=0: False,
            is_cuda=lambda: True,
            current_device=lambda: 0,
        )
        memory: Any = importlib.import_module(MEMORY)
        memory.current_platform = platform
        self.memory = memory
        self.baseline = memory.MemorySnapshot(device=self.device)

    def forget_peak(self) -> None:
        self.peak = self.allocated

    def tensor(self, size: int, *, segment: int = 0) -> None:
        """A tensor that stays, in a segment of its size or of ``segment``."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved += segment or size

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
        self.world.take(kept)
        self.tensor(kept)

    def forward(self, size: int) -> None:
        """What a forward pass allocates and frees, and what the profiling gives back after it."""
        self.peak = max(self.peak, self.allocated + size)

    def profile(self, weights: int, peak: int, *, stays: int = 0) -> Any:
        with self.memory.memory_profiling(self.baseline, weights_memory=weights) as result:
            self.forward(peak)
            if stays:
                self.world.take(stays)
        return result


def test_what_a_load_gave_back_is_free_once(world: World) -> None:
    """As Marlin's repacking of experts leaves it: one copy of the weights is freed."""
    stats = Torch(world)
    stats.load(kept=8 * UNIT, replaced=9 * UNIT)
    result = stats.profile(8 * UNIT, peak=3 * UNIT, stays=2 * UNIT)
    expect("outside PyTorch", result.non_torch_increase, 2 * UNIT)
    expect("all but the cache", result.non_kv_cache_memory, (8 + 3 + 2) * UNIT)


def test_a_second_load_counts_what_the_first_gave_back_once(world: World) -> None:
    """A draft model is loaded into a pool of its own."""
    stats = Torch(world)
    stats.load(kept=4 * UNIT, replaced=9 * UNIT)
    stats.load(kept=UNIT, replaced=2 * UNIT)
    result = stats.profile(5 * UNIT, peak=UNIT)
    expect("all but the cache", result.non_kv_cache_memory, (5 + 1) * UNIT)


def test_what_tensors_do_not_fill_is_in_use(world: World) -> None:
    """A segment that is used in part stays mapped: no other process has it, nor the cache."""
    stats = Torch(world)
    stats.world.take(5 * UNIT)
    stats.tensor(2 * UNIT, segment=5 * UNIT)
    result = stats.profile(2 * UNIT, peak=UNIT)
    expect("all but the cache", result.non_kv_cache_memory, (5 + 1) * UNIT)


@pytest.mark.guard
def test_without_a_pool_it_is_as_before(world: World) -> None:
    stats = Torch(world)
    stats.load_without_a_pool(6 * UNIT)
    result = stats.profile(6 * UNIT, peak=4 * UNIT, stays=UNIT)
    expect("outside PyTorch", result.non_torch_increase, UNIT)
    expect("at the peak", result.torch_peak_increase, 4 * UNIT)
    expect("all but the cache", result.non_kv_cache_memory, (6 + 4 + 1) * UNIT)


def worker(stats: Torch, weights: int, peak: int, graphs: int) -> Any:
    """A worker with a budget, before it asks how much the cache may take."""

    def profile_cudagraph_memory() -> int:
        # Captured graphs are freed again; while they are there, more is allocated.
        stats.forward(peak + graphs)
        return graphs

    module: Any = importlib.import_module(WORKER)
    module.current_platform = stats.memory.current_platform
    found = module.Worker.__new__(module.Worker)
    found.device = stats.device
    found.init_snapshot = stats.baseline
    found.requested_memory = BUDGET
    found.cache_config = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.5)
    mode = importlib.import_module("vllm.config").CUDAGraphMode
    found.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_mode=mode.FULL if graphs else mode.NONE)
    )
    found.model_runner = SimpleNamespace(
        model_memory_usage=weights,
        profile_run=lambda: stats.forward(peak),
        profile_cudagraph_memory=profile_cudagraph_memory,
    )
    return found


@pytest.mark.parametrize("graphs", [0, 3 * UNIT])
def test_a_worker_stays_within_its_budget(world: World, graphs: int) -> None:
    stats = Torch(world)
    stats.load(kept=20 * UNIT, replaced=30 * UNIT)
    left = worker(stats, 20 * UNIT, 5 * UNIT, graphs).determine_available_memory()
    expect("left for the cache", left, BUDGET - 25 * UNIT - graphs)


@pytest.mark.guard
def test_a_worker_without_a_pool_has_what_it_had(world: World) -> None:
    stats = Torch(world)
    stats.load_without_a_pool(20 * UNIT)
    left = worker(stats, 20 * UNIT, 5 * UNIT, 0).determine_available_memory()
    expect("left for the cache", left, BUDGET - 25 * UNIT)
