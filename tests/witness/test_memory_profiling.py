"""What the KV cache may take: the budget less what is in use and what a forward pass adds."""

from __future__ import annotations

import pytest
from tests.witness.memory_rig import BUDGET, MEMORY, UNIT, WORKER, Torch, worker
from tests.witness.world import World, expect

pytestmark = [pytest.mark.loads(MEMORY), pytest.mark.loads(WORKER)]


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
