"""Patch 0001: a failing driver call leaves nothing behind and does not spoil later calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import EMPTY, Block, OutOfMemoryError, World, expect, raised, sweep

# cuDeviceGetAttribute of "memory can be made with a fabric handle".
FABRIC = 128


def test_malloc_works_after_a_failed_one(world: World) -> None:
    # PyTorch frees what it has cached after an out-of-memory, and asks again.
    world.fake.set_capacity(4 * GRANULARITY)
    expect("an oversized block", world.malloc(8 * GRANULARITY), 0)
    block = world.block()
    world.expect_alive(block)
    world.expect_usable(block)


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


@pytest.mark.parametrize("function", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_cleanup_that_fails_too_is_done_later(world: World, function: str) -> None:
    before = world.block()
    world.fake.fail("cuMemSetAccess")
    world.fake.fail(function, count=1000)
    expect("a block that cannot be made accessible", world.malloc(GRANULARITY), 0)
    expect("the records", world.records(), {before.address})
    world.fake.fail_nothing()
    after = world.block()
    world.expect_alive(before, after)
    world.expect_usable(before, after)


@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_every_call_of_free(world: World, asleep: bool) -> None:
    """PyTorch forgets a block it frees, whatever happens: what fails is done with the next call."""

    def prepare() -> tuple[Block, Block]:
        blocks = (world.block(), world.block("kv_cache", 2 * GRANULARITY))
        if asleep:
            world.allocator.sleep(("weights",))
        return blocks

    def operate(state: tuple[Block, Block]) -> None:
        world.free(state[0])

    def check(state: tuple[Block, Block], problem: Exception | None) -> None:
        expect("what it raised", problem, None)
        if asleep:
            world.allocator.wake_up()
        another = world.block()
        world.expect_alive(state[1], another)
        world.expect_usable(state[1], another)

    sweep(world, prepare, operate, check, error=700)


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


def test_free_gives_back_the_size_that_was_mapped(world: World) -> None:
    # The size PyTorch asks for need not be a multiple of what memory comes in.
    address = world.malloc(GRANULARITY + 1)
    expect("physical memory", world.fake.alive().physical, 2 * GRANULARITY)
    world.free_raw(address, GRANULARITY + 1)
    expect("what the driver holds", world.fake.alive(), EMPTY)


@pytest.mark.hangs(5)
@pytest.mark.parametrize(
    "returned", ["nothing, it raises", "no tuple", ["a", "b", "c", "d"]], ids=str
)
def test_a_free_that_fails_in_python_keeps_nothing_locked(world: World, returned: Any) -> None:
    # From a thread, as PyTorch frees from the threads of autograd.
    def callback(pointer: int) -> object:
        return tuple(returned) if isinstance(returned, list) else returned

    callbacks = (world.allocator.python_malloc_callback, world.allocator.python_free_callback)
    if returned != "raises":
        world.cumem.init_module(callbacks[0], callback)
    ended = threading.Event()

    def work() -> None:
        world.free_raw(0x1000, GRANULARITY)
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert ended.wait(2), "the thread that freed holds the GIL, or waits for itself"
    expect("an error left set", raised(lambda: int("7")), None)
    world.cumem.init_module(*callbacks)
    world.expect_usable()


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


@pytest.mark.hangs(5)
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_a_free_callback_that_raises_is_asked_again(world: World, asleep: bool) -> None:
    block, other = world.block(), world.block()

    def fails(*args: object) -> None:
        raise MemoryError("no memory for a log line")

    logger = world.cumem.logger
    original = logger.debug
    logger.debug = fails
    world.free(block)
    logger.debug = original
    if asleep:
        # It sleeps with the others meanwhile.
        world.allocator.sleep(("weights",))
        world.allocator.wake_up()
    third = world.block()
    world.expect_alive(other, third)
    world.expect_awake(other)
    world.expect_usable(other, third)


def test_a_failure_in_one_thread_is_none_in_another(world: World) -> None:
    world.fake.set_capacity(64 * GRANULARITY)
    stop = threading.Event()

    def fail() -> None:
        while not stop.is_set():
            world.malloc(100 * GRANULARITY)

    thread = threading.Thread(target=fail, daemon=True)
    thread.start()
    refused = 0
    for _ in range(200):
        address = world.malloc(GRANULARITY)
        refused += not address
        if address:
            world.free_raw(address, GRANULARITY)
    stop.set()
    thread.join(5)
    expect("blocks refused", refused, 0)
    world.expect_alive()


def test_an_error_without_a_text_is_reported(world: World) -> None:
    block = world.block()
    world.fake.fail("cuMemUnmap", error=12345)
    problem = raised(lambda: world.allocator.sleep(("weights",)))
    assert isinstance(problem, RuntimeError)
    assert "CUDA Error: unknown error" in str(problem), problem
    world.expect_usable(block)


def test_a_failed_allocation_in_a_pool_does_not_end_the_process(world: World) -> None:
    world.fake.set_capacity(8 * GRANULARITY)

    def load(size: int) -> int:
        with world.allocator.use_memory_pool("weights"):
            return world.pools_in_use[-1].allocate(world, size)

    problem = raised(lambda: load(100 * GRANULARITY))
    assert isinstance(problem, OutOfMemoryError), problem
    address = load(GRANULARITY)
    expect("what PyTorch asserts", world.problems, [])
    expect("the records", world.records(), {address})
    world.allocator.sleep(("weights",))
    expect("physical memory asleep", world.fake.alive().physical, 0)


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


@pytest.mark.hangs(5)
def test_a_pool_that_ends_frees_what_was_given_back_before(world: World) -> None:
    """Leaving the context gives back unused memory; PyTorch frees the segment once more later."""
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


def test_unused_memory_that_cannot_be_given_back_stays_known(world: World) -> None:
    def load() -> Any:
        with world.allocator.use_memory_pool("weights"):
            pool = world.pools_in_use[-1]
            addresses = [pool.allocate(world, n * GRANULARITY) for n in (1, 2, 3)]
            for address in addresses:
                pool.free(address)
            world.fake.fail("cuMemUnmap", nth=2, error=999)
        return addresses

    addresses = load()
    expect("the records", world.records(), {addresses[1]})
    expect("physical memory", world.fake.alive().physical, 2 * GRANULARITY)
    world.allocator.sleep(())
    expect("physical memory asleep", world.fake.alive().physical, 0)
    world.allocator.wake_up()
    assert world.fake.mapped(addresses[1], 2 * GRANULARITY)


@pytest.mark.guard
def test_a_block_lives(world: World) -> None:
    block = world.block()
    world.expect_alive(block)
    world.expect_usable(block)


@pytest.mark.guard
def test_unused_memory_of_a_pool_is_given_back(world: World) -> None:
    with world.allocator.use_memory_pool("weights"):
        pool = world.pools_in_use[-1]
        kept = pool.allocate(world, GRANULARITY)
        pool.free(pool.allocate(world, 2 * GRANULARITY))
    expect("physical memory", world.fake.alive().physical, GRANULARITY)
    expect("the records", world.records(), {kept})
    expect("usage", world.allocator.get_current_usage(), GRANULARITY)
