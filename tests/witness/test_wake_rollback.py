"""A wake_up or sleep that fails changes nothing, or what it says; a retry goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import EMPTY, Block, World, expect, raised, sweep

OFFLOAD = ("weights",)
EVERYTHING = ("weights", "kv_cache")
# What the driver answers on the driver's and on the runtime's side.
ERROR = 2
ERROR_TEXT = "out of memory"


def asleep(world: World) -> list[Block]:
    blocks = world.blocks()
    world.allocator.sleep(OFFLOAD)
    return blocks


def expect_one_error(problem: Exception | None, blocks: list[Block], text: str) -> None:
    """It names the block, its size and the CUDA error."""
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    message = str(problem)
    assert text in message, message
    named = [block for block in blocks if f"{block.address:#x}" in message]
    assert len(named) == 1, f"names {len(named)} blocks: {message}"
    assert str(named[0].size) in message, message


def test_every_call_of_wake_up(world: World) -> None:
    def check(blocks: list[Block], problem: Exception | None) -> None:
        if problem is None:
            # Not every call is needed: without an answer about fabric handles, plain ones do.
            world.expect_awake(*blocks)
        else:
            expect_one_error(problem, blocks, ERROR_TEXT)
            world.expect_asleep(*blocks)
            world.expect_alive(asleep=tuple(blocks))
            world.allocator.wake_up()
        world.expect_awake(*blocks)
        world.expect_alive(*blocks)
        world.expect_usable(*blocks)

    def operate(blocks: list[Block]) -> None:
        world.allocator.wake_up()

    sweep(world, lambda: asleep(world), operate, check, error=ERROR)


def test_every_call_of_sleep(world: World) -> None:
    """After a sleep that failed, another one finishes it."""

    def check(blocks: list[Block], problem: Exception | None) -> None:
        if "synchronize failed" in str(problem):
            world.expect_awake(*blocks, bytes_of=EVERYTHING)
        elif problem is not None:
            expect_one_error(problem, blocks, ERROR_TEXT)
        if problem is not None:
            world.allocator.sleep(OFFLOAD)
        world.expect_asleep(*blocks)
        world.allocator.wake_up()
        world.expect_awake(*blocks)
        # What could not be released is released when PyTorch calls next.
        world.free(world.block())
        world.expect_alive(*blocks)
        world.expect_usable(*blocks)

    def operate(blocks: list[Block]) -> None:
        world.allocator.sleep(OFFLOAD)

    sweep(world, world.blocks, operate, check, error=ERROR)


def test_every_call_of_sleep_taken_back(world: World) -> None:
    """After a sleep that failed, a wake takes it back; offloaded bytes are all there."""

    def check(blocks: list[Block], problem: Exception | None) -> None:
        world.allocator.wake_up()
        world.expect_awake(*blocks, bytes_of=EVERYTHING)
        world.free(world.block())
        world.expect_alive(*blocks)
        world.expect_usable(*blocks)

    def operate(blocks: list[Block]) -> None:
        world.allocator.sleep(EVERYTHING)

    sweep(world, world.blocks, operate, check, error=ERROR)


def test_no_host_memory_discards_nothing(world: World) -> None:
    # The KV cache comes first here, and is to be discarded.
    blocks = [world.block("kv_cache"), world.block("weights"), world.block("weights")]
    empty = world.torch.empty
    calls: list[int] = []

    def short(*size: int, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **options)

    world.torch.empty = short
    problem = raised(lambda: world.allocator.sleep(OFFLOAD))
    world.torch.empty = empty
    expect_one_error(problem, blocks, "out of memory")
    world.expect_awake(blocks[0], blocks[2], bytes_of=EVERYTHING)
    world.expect_asleep(blocks[1])
    world.allocator.wake_up()
    world.expect_awake(*blocks, bytes_of=EVERYTHING)
    world.expect_usable(*blocks)


def test_a_wake_without_memory_changes_nothing_and_can_be_retried(world: World) -> None:
    blocks = asleep(world)
    world.fake.set_capacity(5 * GRANULARITY)
    # What another process has taken meanwhile: room is left for the first blocks only.
    taken = world.take(2 * GRANULARITY)
    before = world.fake.alive()
    problem = raised(world.allocator.wake_up)
    expect_one_error(problem, blocks, ERROR_TEXT)
    expect("what the driver holds", world.fake.alive(), before)
    world.expect_asleep(*blocks)
    assert isinstance(raised(world.allocator.wake_up), RuntimeError)
    expect("what the driver holds", world.fake.alive(), before)
    world.take_back(taken)
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.expect_alive(*blocks)


def test_a_failing_copy_leaves_no_garbage_awake(world: World) -> None:
    blocks = asleep(world)
    world.fake.fail("cudaMemcpy", nth=2, error=ERROR)
    assert isinstance(raised(world.allocator.wake_up), RuntimeError)
    world.expect_asleep(*blocks)
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.expect_usable(*blocks)


def test_a_rollback_that_fails_too_can_be_retried(world: World) -> None:
    blocks = asleep(world)
    world.fake.fail("cudaMemcpy", nth=3, error=ERROR)
    world.fake.fail("cuMemUnmap", nth=2, error=999)
    expect_one_error(raised(world.allocator.wake_up), blocks, ERROR_TEXT)
    # All but the one that could not be.
    expect("physical memory", world.fake.alive().physical, GRANULARITY)
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.expect_alive(*blocks)
    world.expect_usable(*blocks)


def test_sleeping_twice_is_sleeping_once(world: World) -> None:
    blocks = asleep(world)
    world.fake.forget_calls()
    world.allocator.sleep(OFFLOAD)
    for function in ("cudaMemcpy", "cuMemUnmap", "cuMemRelease"):
        expect(f"calls of {function}", world.fake.calls(function), 0)
    # Not even where the second one asks to discard: the host copy is all there is.
    world.allocator.sleep(())
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.expect_usable(*blocks)


def test_waking_twice_is_waking_once(world: World) -> None:
    blocks = asleep(world)
    world.allocator.wake_up()
    for block in blocks:
        world.fill(block)
    world.fake.forget_calls()
    world.allocator.wake_up()
    for function in ("cudaMemcpy", "cuMemCreate", "cuMemMap"):
        expect(f"calls of {function}", world.fake.calls(function), 0)
    world.expect_awake(*blocks, bytes_of=EVERYTHING)
    world.expect_alive(*blocks)
    world.expect_usable(*blocks)


def test_waking_without_having_slept(world: World) -> None:
    blocks = world.blocks()
    world.allocator.wake_up()
    world.expect_awake(*blocks, bytes_of=EVERYTHING)
    world.expect_usable(*blocks)


def test_sleeping_while_half_is_awake(world: World) -> None:
    blocks = asleep(world)
    weights = tuple(block for block in blocks if block.tag == "weights")
    cache = tuple(block for block in blocks if block.tag == "kv_cache")
    world.allocator.wake_up(["weights"])
    world.expect_alive(*weights, asleep=cache)
    world.allocator.sleep(OFFLOAD)
    world.expect_alive(asleep=tuple(blocks))
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.expect_usable(*blocks)


def test_a_block_made_while_others_sleep(world: World) -> None:
    blocks = asleep(world)
    late = world.block("weights")
    world.allocator.sleep(OFFLOAD)
    world.allocator.wake_up()
    world.expect_awake(*blocks, late)
    world.expect_usable(*blocks, late)


def test_waking_by_tag_rolls_back_its_own_blocks_only(world: World) -> None:
    blocks = asleep(world)
    weights = [block for block in blocks if block.tag == "weights"]
    world.allocator.wake_up(["kv_cache"])
    world.fake.fail("cuMemMap", nth=3, error=ERROR)
    problem = raised(lambda: world.allocator.wake_up(["weights"]))
    expect_one_error(problem, weights, ERROR_TEXT)
    world.expect_asleep(*weights)
    world.expect_awake(*(block for block in blocks if block.tag == "kv_cache"))
    world.allocator.wake_up(["weights"])
    world.expect_awake(*blocks)
    world.expect_usable(*blocks)


def test_usage_counts_sleeping_blocks(world: World) -> None:
    blocks = asleep(world)
    size = sum(block.size for block in blocks)
    expect("usage", world.allocator.get_current_usage(), size)
    world.fake.fail("cuMemCreate", nth=2, error=ERROR)
    assert isinstance(raised(world.allocator.wake_up), RuntimeError)
    expect("usage", world.allocator.get_current_usage(), size)
    world.allocator.wake_up()
    expect("usage", world.allocator.get_current_usage(), size)
    world.expect_alive(*blocks)


def free_one(world: World, blocks: list[Block]) -> list[Block]:
    world.free(blocks[1])
    return [blocks[0], *blocks[2:]]


def free_all(world: World, blocks: list[Block]) -> list[Block]:
    for block in blocks:
        world.free(block)
    return []


@pytest.mark.parametrize("freed", ["free_one", "free_all"])
def test_freeing_after_a_failed_wake(world: World, freed: str) -> None:
    free: Callable[[World, list[Block]], list[Block]] = globals()[freed]
    blocks = asleep(world)
    world.fake.fail("cuMemSetAccess", nth=3, error=ERROR)
    assert isinstance(raised(world.allocator.wake_up), RuntimeError)
    left = free(world, blocks)
    world.expect_alive(asleep=tuple(left))
    world.allocator.wake_up()
    world.expect_awake(*left)
    world.expect_usable(*left)


def test_leaving_a_pool_while_it_sleeps(world: World) -> None:
    with world.allocator.use_memory_pool("weights"):
        pool = world.pools_in_use[-1]
        kept, unused = (pool.allocate(world, n * GRANULARITY) for n in (1, 2))
        pool.free(unused)
        world.allocator.sleep(OFFLOAD)
    expect("the records", world.records(), {kept})
    world.allocator.wake_up()
    expect("physical memory", world.fake.alive().physical, GRANULARITY)
    pool.free(kept)
    world.allocator.allocator_and_pools.clear()
    del pool
    expect("what the driver holds", world.fake.alive(), EMPTY)


@pytest.mark.guard
def test_ten_cycles(world: World) -> None:
    blocks = world.blocks()
    for _ in range(10):
        world.allocator.sleep(OFFLOAD)
        world.expect_alive(asleep=tuple(blocks))
        world.allocator.wake_up()
        world.expect_awake(*blocks)
        world.expect_alive(*blocks)


@pytest.mark.guard
def test_waking_tag_by_tag(world: World) -> None:
    blocks = asleep(world)
    world.allocator.wake_up(["weights"])
    weights = tuple(block for block in blocks if block.tag == "weights")
    world.expect_alive(*weights, asleep=(blocks[2],))
    world.expect_awake(*weights)
    world.allocator.wake_up(["kv_cache"])
    world.expect_alive(*blocks)
