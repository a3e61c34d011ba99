"""Where the driver refuses a fabric handle, the allocator does not ask for one with each block."""

from __future__ import annotations

import pytest
from tests.fakecuda.standin import NOT_PERMITTED
from tests.witness.world import World, expect

# cuDeviceGetAttribute of "memory can be made with a fabric handle".
FABRIC = 128


def test_a_refused_fabric_handle_is_not_asked_for_again(world: World) -> None:
    world.fake.set_attribute(FABRIC, 1)
    blocks = [world.block() for _ in range(4)]
    # The first one is refused, and made anew as the others are.
    expect("calls for four blocks", world.fake.calls("cuMemCreate"), 5)
    world.allocator.sleep(("weights",))
    world.fake.forget_calls()
    world.allocator.wake_up()
    expect("calls of a wake_up", world.fake.calls("cuMemCreate"), 4)
    world.expect_awake(*blocks)


@pytest.mark.guard
def test_without_fabric_each_block_takes_one_call(world: World) -> None:
    blocks = [world.block() for _ in range(4)]
    expect("calls for four blocks", world.fake.calls("cuMemCreate"), 4)
    world.fake.set_attribute(FABRIC, 1)
    blocks.append(world.block())
    expect("calls, of a device that has it", world.fake.calls("cuMemCreate"), 6)
    world.expect_awake(*blocks)


@pytest.mark.guard
def test_a_granted_fabric_handle_is_asked_for_each_time(world: World) -> None:
    world.fake.permit_fabric(True)
    world.fake.set_attribute(FABRIC, 1)
    blocks = [world.block() for _ in range(4)]
    expect("calls for four blocks", world.fake.calls("cuMemCreate"), 4)
    world.expect_awake(*blocks)


@pytest.mark.patched_only
@pytest.mark.parametrize("nth", [1, 2])
def test_another_error_is_no_refusal(world: World, nth: int) -> None:
    """Out of memory fails the block, with a fabric handle (1) and without (2); the next one is."""
    world.fake.set_attribute(FABRIC, 1)
    world.fake.fail("cuMemCreate", nth=nth)
    assert not world.malloc(2 << 20)
    block = world.block()
    world.expect_awake(block)
    world.expect_usable(block)


@pytest.mark.patched_only
def test_a_block_that_is_refused_without_fabric_too(world: World) -> None:
    world.fake.set_attribute(FABRIC, 1)
    world.fake.fail("cuMemCreate", nth=2, error=NOT_PERMITTED)
    assert not world.malloc(2 << 20)
    block = world.block()
    world.expect_awake(block)
    world.expect_usable(block)
