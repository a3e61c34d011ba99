"""A sleeping block whose address is lost on ROCm asks for it again when it wakes."""

from __future__ import annotations

import pytest
from tests.witness.test_rocm_chunks import OFFLOAD, blocks_of_chunks, expect_held
from tests.witness.world import EMPTY, Block, World, expect, raised


def asleep_elsewhere(world: World) -> list[Block]:
    blocks = blocks_of_chunks(world)
    world.fake.ignore_hints(True)
    world.allocator.sleep(OFFLOAD)
    expect("physical memory asleep", world.fake.alive().physical, 0)
    return blocks


def test_a_sleeping_block_gets_its_address_again(world: World) -> None:
    """Some releases free it, for the memory to be given back, and reserve it anew at once."""
    blocks = asleep_elsewhere(world)
    world.fake.ignore_hints(False)
    world.allocator.wake_up()
    expect_held(world, *blocks)


def test_a_wake_without_the_address_can_be_repeated(world: World) -> None:
    blocks = asleep_elsewhere(world)
    problem = raised(world.allocator.wake_up)
    assert isinstance(problem, RuntimeError), problem
    expect("physical memory", world.fake.alive().physical, 0)
    world.fake.ignore_hints(False)
    world.allocator.wake_up()
    expect_held(world, *blocks)


def test_a_block_without_its_address_is_freed(world: World) -> None:
    blocks = asleep_elsewhere(world)
    expect("what the driver holds", world.fake.alive(), EMPTY)
    world.fake.forget_calls()
    for block in blocks:
        world.free(block)
    expect("addresses freed", world.fake.calls("cuMemAddressFree"), 0)
    expect("the records", world.records(), set())


def test_a_lost_address_is_not_freed_again(world: World) -> None:
    """It may be another block's by now."""
    block = asleep_elsewhere(world)[0]
    world.fake.forget_calls()
    world.cumem.unmap_and_release(world.allocator.pointer_to_data[block.address].handle)
    expect("addresses freed", world.fake.calls("cuMemAddressFree"), 0)


def test_a_new_block_never_gets_a_lost_address(world: World) -> None:
    """PyTorch and the records know a block by its address: there is one at each."""
    blocks = asleep_elsewhere(world)
    new = [world.block("weights", block.size) for block in (*blocks, *blocks)]
    expect("blocks", len({block.address for block in (*blocks, *new)}), len(blocks) + len(new))
    world.fake.ignore_hints(False)
    world.allocator.wake_up()
    expect_held(world, *blocks, *new)


def test_a_lost_address_is_reserved_when_a_new_block_would_get_it(world: World) -> None:
    blocks = asleep_elsewhere(world)
    world.fake.ignore_hints(False)
    # Freed are the one that it lost and the one that it was offered.
    new = [world.block("weights", blocks[0].size) for _ in range(2)]
    expect("addresses", world.fake.alive().reservations, len(blocks) + len(new))
    for block in (*blocks, *new):
        world.free(block)
    expect("what the driver holds", world.fake.alive(), EMPTY)


def test_an_address_that_cannot_be_freed_is_kept(world: World) -> None:
    blocks = blocks_of_chunks(world)
    world.fake.fail("cuMemAddressFree")
    world.allocator.sleep(OFFLOAD)
    expect("addresses", world.fake.alive().reservations, len(blocks))
    world.allocator.wake_up()
    expect_held(world, *blocks)


@pytest.mark.guard
def test_blocks_sleep_and_wake(world: World) -> None:
    blocks = blocks_of_chunks(world)
    world.allocator.sleep(OFFLOAD)
    world.allocator.wake_up()
    expect_held(world, *blocks)
