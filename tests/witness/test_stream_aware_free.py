"""Nothing is unmapped while kernels may still use it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import Block, World, expect, raised, sweep


def expect_no_violation(world: World) -> None:
    expect("blocks unmapped under work in flight", world.fake.violations(), 0)
    expect("work still in flight", world.fake.work_in_flight(), 0)


@pytest.mark.parametrize("device", [0, 1])
def test_free_waits_for_work_in_flight(world: World, device: int) -> None:
    block = world.block(device=device)
    other = world.block(device=1 - device)
    world.fake.begin_work(block.address, 4096, device)
    world.free(block, device)
    expect_no_violation(world)
    world.expect_alive(other)


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_sleep_waits_for_work_in_flight(world: World, tag: str) -> None:
    blocks = world.blocks()
    busy = next(block for block in blocks if block.tag == tag)
    world.fake.begin_work(busy.address, 4096)
    world.allocator.sleep(("weights",))
    expect_no_violation(world)
    world.allocator.wake_up()
    world.expect_awake(*blocks)


@pytest.mark.guard
@pytest.mark.parametrize("device", [0, 1])
def test_discard_waits_for_work_in_flight(world: World, device: int) -> None:
    busy, other = world.block("kv_cache", device=device), world.block()
    world.fake.begin_work(busy.address, 4096, device)
    world.allocator.discard("kv_cache")
    expect_no_violation(world)
    world.expect_asleep(busy)
    world.expect_awake(other)


def test_sleep_waits_for_every_device_it_has_blocks_on(world: World) -> None:
    blocks = [world.block(device=0), world.block(device=1)]
    for device, block in enumerate(blocks):
        world.fake.begin_work(block.address, 4096, device)
    world.allocator.sleep(("weights",))
    expect_no_violation(world)
    world.expect_asleep(*blocks)


def test_leaving_a_pool_waits_for_work_in_flight(world: World) -> None:
    with world.allocator.use_memory_pool("weights"):
        pool = world.pools_in_use[-1]
        address = pool.allocate(world, GRANULARITY)
        pool.free(address)
        # A transient of weight conversion: freed, and its kernel still runs.
        world.fake.begin_work(address, 4096)
    expect_no_violation(world)
    expect("physical memory", world.fake.alive().physical, 0)


def test_a_pool_that_ends_waits_for_work_in_flight(world: World) -> None:
    with world.allocator.use_memory_pool("weights"):
        pool = world.pools_in_use[-1]
        address = pool.allocate(world, GRANULARITY)
    pool.free(address)
    world.fake.begin_work(address, 4096)
    world.allocator.allocator_and_pools.clear()
    del pool
    expect_no_violation(world)
    expect("physical memory", world.fake.alive().physical, 0)


def test_a_rollback_waits_for_its_copies(world: World) -> None:
    blocks = world.blocks()
    world.allocator.sleep(("weights",))
    copy = world.cumem.libcudart.cudaMemcpy

    def copy_that_goes_on(to: Any, source: Any, size: int) -> None:
        # From memory that is not pinned, the call returns before the device has it all.
        copy(to, source, size)
        world.fake.begin_work(to, size)

    world.cumem.libcudart.cudaMemcpy = copy_that_goes_on
    world.fake.fail("cuMemMap", nth=3)
    assert isinstance(raised(world.allocator.wake_up), RuntimeError)
    world.cumem.libcudart.cudaMemcpy = copy
    expect_no_violation(world)
    world.expect_alive(asleep=tuple(blocks))


def test_a_rollback_that_cannot_wait_is_made_all_the_same(world: World) -> None:
    """The device has failed for good: nothing is under way there, and the first error is told."""
    blocks = world.blocks()
    world.allocator.sleep(("weights",))
    world.fake.forget_calls()
    world.fake.fail("cudaMemcpy", nth=2, error=2)
    wait = world.synchronize

    def failing(device: Any = None) -> None:
        raise RuntimeError("CUDA error: the synchronize failed")

    world.torch.cuda.synchronize = world.torch.accelerator.synchronize = failing
    problem = raised(world.allocator.wake_up)
    world.torch.cuda.synchronize = world.torch.accelerator.synchronize = wait
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    assert "out of memory" in str(problem), str(problem)
    world.expect_alive(asleep=tuple(blocks))
    world.allocator.wake_up()
    world.expect_awake(*blocks)


def test_every_call_of_a_free_with_work_in_flight(world: World) -> None:
    """Where the wait fails, nothing is unmapped; the free is made up for with the next call."""

    def prepare() -> tuple[Block, Block]:
        blocks = (world.block(), world.block())
        world.fake.begin_work(blocks[0].address, 4096)
        return blocks

    def operate(blocks: tuple[Block, Block]) -> None:
        world.free(blocks[0])

    def check(blocks: tuple[Block, Block], problem: Exception | None) -> None:
        expect("what it raised", problem, None)
        another = world.block()
        expect_no_violation(world)
        world.expect_alive(blocks[1], another)
        world.expect_usable(blocks[1], another)

    sweep(world, prepare, operate, check, error=700)


def test_a_sleep_that_cannot_wait_unmaps_nothing(world: World) -> None:
    blocks = world.blocks()
    world.fake.begin_work(blocks[0].address, 4096)
    world.fake.fail("cudaDeviceSynchronize", error=700)
    assert isinstance(raised(lambda: world.allocator.sleep(("weights",))), RuntimeError)
    world.expect_awake(*blocks, bytes_of=("weights", "kv_cache"))
    world.allocator.sleep(("weights",))
    expect_no_violation(world)
    world.allocator.wake_up()
    world.expect_awake(*blocks)


@pytest.mark.parametrize("failing", ["", "cudaMemcpy"])
def test_freeing_a_sleeping_block_waits_for_nothing(world: World, failing: str) -> None:
    """Also not after a wake_up, be it one that failed."""
    block = world.block()
    world.allocator.sleep(("weights",))
    if failing:
        world.fake.fail(failing, error=2)
        raised(world.allocator.wake_up)
    else:
        world.allocator.wake_up()
        world.allocator.sleep(("weights",))
    world.fake.forget_calls()
    world.free(block)
    expect("waits", world.fake.calls("cudaDeviceSynchronize"), 0)


@pytest.mark.guard
def test_a_malloc_waits_for_nothing(world: World) -> None:
    world.block()
    world.fake.forget_calls()
    world.block()
    expect("waits", world.fake.calls("cudaDeviceSynchronize"), 0)
