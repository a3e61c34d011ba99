"""A block that could not be mapped, or recorded, leaves nothing behind: no record, no memory."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import CHUNK, Block, OutOfMemoryError, World, expect, raised, sweep

# cuDeviceGetAttribute of "memory can be made with a fabric handle".
FABRIC = 128


def test_sleep_works_after_a_failed_malloc(world: World) -> None:
    block = world.block()
    world.fake.set_capacity(4 * GRANULARITY)
    expect("an oversized block", world.malloc(8 * GRANULARITY), 0)
    expect("the records", world.records(), {block.address})
    world.allocator.sleep(("weights",))
    expect("physical memory asleep", world.fake.alive().physical, 0)
    world.allocator.wake_up()
    world.expect_awake(block)
    world.expect_usable(block)


def test_python_hears_of_mapped_blocks_only(world: World) -> None:
    heard: list[bool] = []

    def callback(handle: tuple[int, int, int, int]) -> None:
        heard.append(world.fake.mapped(handle[2], handle[1]))

    world.cumem.init_module(callback, world.allocator.python_free_callback)
    assert world.malloc(GRANULARITY)
    world.fake.fail("cuMemSetAccess")
    assert not world.malloc(GRANULARITY)
    expect("mapped when Python heard of it", heard, [True])


@pytest.mark.parametrize("fabric", [False, True], ids=["plain", "fabric"])
@pytest.mark.parametrize("first", [False, True], ids=["later", "first"])
def test_every_call_of_malloc(world: World, first: bool, fabric: bool) -> None:
    """The first block of a thread also sets its context."""

    def prepare() -> dict[str, Any]:
        world.fake.set_attribute(FABRIC, int(fabric))
        return {"before": () if first else (world.block(),)}

    def operate(state: dict[str, Any]) -> None:
        world.allocator.current_tag = "weights"
        state["address"] = world.malloc(GRANULARITY)

    def check(state: dict[str, Any], problem: Exception | None) -> None:
        expect("what it raised", problem, None)
        blocks: tuple[Block, ...] = state["before"]
        if state["address"]:
            # Not every call is needed: without an answer about fabric handles, plain ones do.
            data = bytes(GRANULARITY)
            blocks = (
                *blocks,
                Block(address=state["address"], size=len(data), tag="weights", data=data),
            )
        world.expect_alive(*blocks)
        world.expect_usable(*blocks)

    sweep(world, prepare, operate, check)


def test_every_call_of_malloc_with_chunks(world: World) -> None:
    world.use_rocm()

    def prepare() -> Block:
        return world.block("weights", 3 * CHUNK)

    def operate(block: Block) -> None:
        world.malloc(3 * CHUNK)

    def check(block: Block, problem: Exception | None) -> None:
        expect("what it raised", problem, None)
        blocks = len(world.records())
        expect("handles", world.fake.alive().handles, 3 * blocks)
        expect("mappings", world.fake.alive().mappings, 3 * blocks)
        expect("addresses", world.fake.alive().reservations, blocks)

    sweep(world, prepare, operate, check)


@pytest.mark.parametrize("chunks", [1, 3])
def test_every_call_of_a_map_that_is_repeated(world: World, chunks: int) -> None:
    """As wake_up maps: what fails leaves the block as it was, and the same call does it."""
    size = GRANULARITY
    if chunks > 1:
        world.use_rocm()
        size = chunks * CHUNK

    def prepare() -> Any:
        handle = world.allocator.pointer_to_data[world.block("weights", size).address].handle
        world.cumem.unmap_and_release(handle)
        return handle

    def operate(handle: Any) -> None:
        world.cumem.create_and_map(handle)

    def check(handle: Any, problem: Exception | None) -> None:
        if problem is not None:
            expect("physical memory", world.fake.alive().physical, 0)
            operate(handle)
        expect("physical memory", world.fake.alive().physical, size)
        assert world.fake.mapped(handle[2], size)

    sweep(world, prepare, operate, check)


def test_a_block_that_stays_mapped_without_access_gets_it_later(world: World) -> None:
    block = world.block()
    handle = world.allocator.pointer_to_data[block.address].handle
    world.cumem.unmap_and_release(handle)
    world.fake.fail("cuMemSetAccess")
    world.fake.fail("cuMemUnmap")
    assert isinstance(raised(lambda: world.cumem.create_and_map(handle)), RuntimeError)
    world.cumem.create_and_map(handle)
    assert world.fake.mapped(block.address, block.size)
    world.expect_alive(block)


def test_a_malloc_callback_that_raises_leaves_nothing(world: World) -> None:
    before = world.block()

    def fails(*args: object) -> None:
        raise MemoryError("no memory for a log line")

    logger = world.cumem.logger
    original = logger.debug
    logger.debug = fails
    expect("a block without a record", world.malloc(GRANULARITY), 0)
    logger.debug = original
    world.expect_alive(before)
    world.expect_usable(before)


def test_a_malloc_callback_that_raises_leaves_no_chunk(world: World) -> None:
    world.use_rocm()

    def fails(*args: object) -> None:
        raise MemoryError("no memory for a log line")

    world.cumem.logger.debug = fails
    expect("a block without a record", world.malloc(3 * CHUNK), 0)
    world.expect_alive()


def test_a_failed_allocation_in_a_pool_is_no_record(world: World) -> None:
    world.fake.set_capacity(8 * GRANULARITY)

    def load(tag: str, size: int) -> int:
        with world.allocator.use_memory_pool(tag):
            return world.pools_in_use[-1].allocate(world, size)

    problem = raised(lambda: load("kv_cache", 100 * GRANULARITY))
    assert isinstance(problem, OutOfMemoryError), problem
    address = load("weights", GRANULARITY)
    expect("the records", world.records(), {address})
    world.allocator.sleep(("weights",))
    expect("physical memory asleep", world.fake.alive().physical, 0)


@pytest.mark.guard
def test_a_block_lives(world: World) -> None:
    block = world.block()
    world.expect_alive(block)
    world.expect_usable(block)
