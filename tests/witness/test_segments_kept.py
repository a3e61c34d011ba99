"""PyTorch frees a segment whose memory was given back when its pool ends: it must be known then."""

from __future__ import annotations

from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import EMPTY, World, expect, raised


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


def load_with(world: World, function: str, nth: int) -> dict[int, int]:
    """Three free segments and their sizes, of a pool whose context ends while a call fails."""
    sizes: dict[int, int] = {}

    def load() -> None:
        with world.allocator.use_memory_pool("weights"):
            pool = world.pools_in_use[-1]
            for n in (1, 2, 3):
                sizes[pool.allocate(world, n * GRANULARITY)] = n * GRANULARITY
            for address in sizes:
                pool.free(address)
            world.fake.fail(function, nth=nth, error=999)

    raised(load)
    world.fake.fail_nothing()
    return sizes


def expect_known(world: World, sizes: dict[int, int]) -> None:
    """These segments, and no more, are mapped, recorded, and sleep with the rest."""
    expect("the records", world.records(), set(sizes))
    expect("physical memory", world.fake.alive().physical, sum(sizes.values()))
    world.allocator.sleep(())
    expect("physical memory asleep", world.fake.alive().physical, 0)
    world.allocator.wake_up()
    for address, size in sizes.items():
        assert world.fake.mapped(address, size)


def test_unused_memory_that_cannot_be_given_back_stays_known(world: World) -> None:
    sizes = load_with(world, "cuMemUnmap", 2)
    address = list(sizes)[1]
    expect_known(world, {address: sizes[address]})


def test_unused_memory_that_cannot_be_waited_for_stays_known(world: World) -> None:
    """It waits for the device once for all segments, or before each."""
    sizes = load_with(world, "cudaDeviceSynchronize", 1)
    known = {address: size for address, size in sizes.items() if address in world.records()}
    assert known, "nothing waited for the device"
    expect_known(world, known)


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
