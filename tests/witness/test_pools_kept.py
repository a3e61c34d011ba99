"""Every pool of a tag is kept, trimmed when its tag is opened again, and never while in use."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import OutOfMemoryError, World, expect, raised


def test_a_second_context_of_a_tag_does_not_end_the_process(world: World) -> None:
    def load(size: int) -> int:
        with world.allocator.use_memory_pool("weights"):
            return world.pools_in_use[-1].allocate(world, size)

    addresses = {load(GRANULARITY), load(GRANULARITY)}
    expect("what PyTorch asserts", world.problems, [])
    expect("the records", world.records(), addresses)


def test_memory_freed_after_a_failed_context_is_given_back(world: World) -> None:
    pools: list[Any] = []

    def load(fails: bool) -> None:
        with world.allocator.use_memory_pool("weights"):
            pools.append(world.pools_in_use[-1])
            pools[-1].allocate(world, GRANULARITY)
            if fails:
                raise OutOfMemoryError

    assert isinstance(raised(lambda: load(fails=True)), OutOfMemoryError)
    # The exception is handled: its frames, and the tensor with them, are gone.
    pools[0].free(next(iter(pools[0].segments)))
    load(fails=False)
    expect("what PyTorch asserts", world.problems, [])
    expect("physical memory", world.fake.alive().physical, GRANULARITY)


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_a_context_inside_its_like_leaves_the_outer_pool_alone(world: World, fails: bool) -> None:
    """Weights inside kv_cache inside weights: the outer pool has a segment free to use again."""
    allocator = world.allocator

    def inside() -> None:
        with allocator.use_memory_pool("kv_cache"), allocator.use_memory_pool("weights"):
            world.pools_in_use[-1].allocate(world, GRANULARITY)
            if fails:
                raise OutOfMemoryError

    with allocator.use_memory_pool("weights"):
        outer = world.pools_in_use[-1]
        address = outer.allocate(world, 2 * GRANULARITY)
        outer.free(address)
        raised(inside)
        expect("the segment used again", outer.allocate(world, 2 * GRANULARITY), address)
        assert world.fake.mapped(address, 2 * GRANULARITY), "it is not mapped"
    expect("the records", address in world.records(), True)
    # Nothing is in use any longer: the next one gives back what is free.
    outer.free(address)
    with allocator.use_memory_pool("weights"):
        assert not world.fake.mapped(address, 2 * GRANULARITY), "it is still mapped"


@pytest.mark.guard
def test_unused_memory_of_a_pool_is_given_back(world: World) -> None:
    with world.allocator.use_memory_pool("weights"):
        pool = world.pools_in_use[-1]
        kept = pool.allocate(world, GRANULARITY)
        pool.free(pool.allocate(world, 2 * GRANULARITY))
    expect("physical memory", world.fake.alive().physical, GRANULARITY)
    expect("the records", world.records(), {kept})
    expect("usage", world.allocator.get_current_usage(), GRANULARITY)
