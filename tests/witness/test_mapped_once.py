"""A block is mapped or not, and nothing maps or unmaps it twice; a free unmaps what is mapped."""

from __future__ import annotations

from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import CHUNK, EMPTY, World, expect


def test_freeing_a_sleeping_block_unmaps_nothing(world: World) -> None:
    block, other = world.block(), world.block()
    world.allocator.sleep(("weights",))
    world.fake.forget_calls()
    world.free(block)
    expect("calls of cuMemUnmap", world.fake.calls("cuMemUnmap"), 0)
    expect("calls of cuMemRelease", world.fake.calls("cuMemRelease"), 0)
    world.allocator.wake_up()
    world.expect_awake(other)
    world.expect_alive(other)
    world.expect_usable(other)


def test_freeing_a_sleeping_block_waits_for_nothing(world: World) -> None:
    block = world.block()
    world.allocator.sleep(("weights",))
    world.fake.forget_calls()
    world.free(block)
    expect("waits", world.fake.calls("cudaDeviceSynchronize"), 0)


def test_unmapping_twice_is_unmapping_once(world: World) -> None:
    block = world.block()
    handle = world.allocator.pointer_to_data[block.address].handle
    world.cumem.unmap_and_release(handle)
    world.cumem.unmap_and_release(handle)
    world.cumem.create_and_map(handle)
    assert world.fake.mapped(block.address, block.size)
    world.free(block)
    expect("what the driver holds", world.fake.alive(), EMPTY)


def test_mapping_twice_is_mapping_once(world: World) -> None:
    block = world.block()
    handle = world.allocator.pointer_to_data[block.address].handle
    world.cumem.create_and_map(handle)
    world.expect_awake(block)
    world.expect_alive(block)
    world.free(block)
    expect("what the driver holds", world.fake.alive(), EMPTY)


def test_both_hold_for_several_chunks(world: World) -> None:
    world.use_rocm()
    block = world.block("weights", 3 * CHUNK)
    handle = world.allocator.pointer_to_data[block.address].handle
    world.cumem.create_and_map(handle)
    world.expect_awake(block)
    for _ in range(2):
        world.cumem.unmap_and_release(handle)
        expect("physical memory", world.fake.alive().physical, 0)
    world.free(block)
    expect("what the driver holds", world.fake.alive(), EMPTY)


def test_free_gives_back_the_size_that_was_mapped(world: World) -> None:
    # The size PyTorch asks for need not be a multiple of what memory comes in.
    address = world.malloc(GRANULARITY + 1)
    expect("physical memory", world.fake.alive().physical, 2 * GRANULARITY)
    world.free_raw(address, GRANULARITY + 1)
    expect("what the driver holds", world.fake.alive(), EMPTY)
