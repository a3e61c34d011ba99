"""PyTorch frees a segment whose memory was given back when its pool ends: it must be known then."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import EMPTY, World, expect


@pytest.mark.hangs(5)
def test_a_pool_that_ends_frees_what_was_given_back_before(world: World) -> None:
    with world.allocator.use_memory_pool("weights"):
        pool = world.pools_in_use[-1]
        kept = pool.allocate(world, GRANULARITY)
        unused = pool.allocate(world, 2 * GRANULARITY)
        pool.free(unused)
    expect("physical memory", world.fake.alive().physical, GRANULARITY)
    expect("the records", world.records(), {kept})
    expect("usage", world.allocator.get_current_usage(), GRANULARITY)
    pool.free(kept)
    world.allocator.allocator_and_pools.clear()
    del pool
    expect("what the driver holds", world.fake.alive(), EMPTY)
    world.expect_usable()


@pytest.mark.parametrize("function", ["cuMemUnmap", "cudaDeviceSynchronize"])
def test_unused_memory_that_cannot_be_given_back_stays_known(world: World, function: str) -> None:
    def load() -> Any:
        with world.allocator.use_memory_pool("weights"):
            pool = world.pools_in_use[-1]
            addresses = [pool.allocate(world, n * GRANULARITY) for n in (1, 2, 3)]
            for address in addresses:
                pool.free(address)
            world.fake.fail(function, nth=2, error=999)
        return addresses

    addresses = load()
    expect("the records", world.records(), {addresses[1]})
    expect("physical memory", world.fake.alive().physical, 2 * GRANULARITY)
    world.allocator.sleep(())
    expect("physical memory asleep", world.fake.alive().physical, 0)
    world.allocator.wake_up()
    assert world.fake.mapped(addresses[1], 2 * GRANULARITY)


@pytest.mark.hangs(5)
def test_a_segment_that_stayed_is_freed_once(world: World) -> None:
    with world.allocator.use_memory_pool("weights"):
        pool = world.pools_in_use[-1]
        pool.free(pool.allocate(world, GRANULARITY))
        world.fake.fail("cuMemUnmap", error=999)
    world.allocator.allocator_and_pools.clear()
    del pool
    expect("what the driver holds", world.fake.alive(), EMPTY)
    expect("the records", world.records(), set())
    world.expect_usable()
