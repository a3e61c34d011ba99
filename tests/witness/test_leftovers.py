"""What cannot be given back is tried again later, at a bounded cost, and reported once."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import CHUNK, EMPTY, Block, World, expect, said, sweep

ALWAYS = 1_000_000


class Callback:
    """The free callback, counted, and failing for as long as ``fails`` is set."""

    def __init__(self, world: World) -> None:
        self.calls = 0
        self.fails: Any = None
        self._real = world.allocator.python_free_callback
        world.cumem.init_module(world.allocator.python_malloc_callback, self)

    def __call__(self, pointer: int) -> object:
        self.calls += 1
        if self.fails is not None and self.fails(pointer):
            raise RuntimeError("CUDA error: the synchronize failed")
        return self._real(pointer)


def test_a_thousand_frees_that_fail_cost_a_bounded_number_of_calls(world: World) -> None:
    addresses = [world.malloc(GRANULARITY) for _ in range(1000)]
    callback = Callback(world)
    callback.fails = lambda pointer: True

    def free_all() -> None:
        for address in addresses:
            world.free_raw(address, GRANULARITY)

    text = said(free_all)
    assert callback.calls <= 2 * len(addresses), f"{callback.calls} callbacks"
    expect("the reports", text.count("Traceback"), 1)
    callback.calls = 0
    mallocs = [world.malloc(GRANULARITY) for _ in range(100)]
    assert callback.calls <= 2 * len(mallocs), f"{callback.calls} callbacks"
    expect("blocks refused", mallocs.count(0), 0)
    callback.fails = None
    world.free_raw(mallocs.pop(), GRANULARITY)
    expect("the records", world.records(), set(mallocs))
    for address in mallocs:
        world.free_raw(address, GRANULARITY)
    expect("what the driver holds", world.fake.alive(), EMPTY)


def test_a_thousand_frees_whose_unmap_fails_cost_a_bounded_number_of_calls(world: World) -> None:
    addresses = [world.malloc(GRANULARITY) for _ in range(1000)]
    world.fake.forget_calls()
    world.fake.fail("cuMemUnmap", error=999, count=ALWAYS)

    def free_all() -> None:
        for address in addresses:
            world.free_raw(address, GRANULARITY)

    text = said(free_all)
    calls = world.fake.calls("cuMemUnmap")
    assert calls <= 3 * len(addresses), f"{calls} calls of cuMemUnmap"
    expect("warnings", text.count("WARNING"), 1)
    assert "restart" in text, text
    expect("errors", text.count("CUDA Error"), len(addresses))
    used = world.block()
    world.expect_awake(used)
    world.fake.fail_nothing()
    block = world.block()
    world.expect_alive(used, block)


def test_one_that_never_works_holds_up_no_other(world: World) -> None:
    addresses = [world.malloc(GRANULARITY) for _ in range(4)]
    stuck = addresses[1]
    records = dict(world.allocator.pointer_to_data)
    callback = Callback(world)
    callback.fails = lambda pointer: True
    for address in addresses:
        world.free_raw(address, GRANULARITY)
    callback.fails = lambda pointer: pointer == stuck

    def waiting() -> set[int]:
        # A new block may have the address of one that was freed, and has a record of its own.
        known = world.allocator.pointer_to_data
        return {address for address, record in records.items() if known.get(address) is record}

    for _ in range(3):
        world.block(size=2 * GRANULARITY)
    expect("the blocks that wait", waiting(), {stuck})
    callback.fails = None
    world.block(size=2 * GRANULARITY)
    expect("the blocks that wait in the end", waiting(), set())
    expect("physical memory", world.fake.alive().physical, 8 * GRANULARITY)


def test_an_attempt_tries_no_other(world: World) -> None:
    """One attempt in vain for a call, also where it frees another block meanwhile."""
    stuck, later, block = (world.malloc(GRANULARITY) for _ in range(3))
    callback = Callback(world)
    callback.fails = lambda pointer: True
    for address in (stuck, later):
        world.free_raw(address, GRANULARITY)
    asked: list[int] = []

    def fails_after_a_free(pointer: int) -> bool:
        asked.append(pointer)
        if pointer == stuck and block in world.records():
            world.free_raw(block, GRANULARITY)
        return pointer != block

    callback.fails = fails_after_a_free
    world.block(size=2 * GRANULARITY)
    expect("blocks that Python was asked for", asked, [stuck, block])
    callback.fails = None
    for _ in range(2):
        world.block(size=2 * GRANULARITY)
    expect("physical memory", world.fake.alive().physical, 6 * GRANULARITY)


@pytest.mark.parametrize("function", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_cleanup_that_fails_too_is_done_later(world: World, function: str) -> None:
    before = world.block()
    world.fake.fail("cuMemSetAccess")
    world.fake.fail(function, count=ALWAYS)
    expect("a block that cannot be made accessible", world.malloc(GRANULARITY), 0)
    expect("the records", world.records(), {before.address})
    world.fake.fail_nothing()
    after = world.block()
    world.expect_alive(before, after)
    world.expect_usable(before, after)


@pytest.mark.parametrize("function", ["cuMemRelease", "cuMemAddressFree"])
def test_chunks_are_given_back_later_too(world: World, function: str) -> None:
    world.use_rocm()
    address = world.malloc(3 * CHUNK)
    world.fake.fail(function, count=ALWAYS)
    world.free_raw(address, 3 * CHUNK)
    world.fake.fail_nothing()
    for _ in range(2):
        # One handle is tried again per operation as long as one fails.
        world.free_raw(world.malloc(GRANULARITY), GRANULARITY)
    expect("what the driver holds", world.fake.alive(), EMPTY)


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


def test_a_release_that_fails_leaves_the_block_asleep(world: World) -> None:
    block = world.block()
    world.fake.fail("cuMemRelease")
    world.allocator.sleep(("weights",))
    world.expect_asleep(block)
    world.allocator.wake_up()
    world.expect_awake(block)
    world.free(world.block())
    world.expect_alive(block)


@pytest.mark.parametrize("error", ["MemoryError", "KeyboardInterrupt"])
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
def test_a_free_callback_that_raises_is_asked_again(world: World, asleep: bool, error: str) -> None:
    block, other = world.block(), world.block()

    def fails(*args: object) -> None:
        raise getattr(builtins, error)("while a line was logged")

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


def test_a_block_that_python_does_not_know_is_not_asked_for_again(world: World) -> None:
    callback = Callback(world)
    world.free_raw(0x1000, GRANULARITY)
    expect("calls", callback.calls, 1)
    world.block()
    expect("calls after the next operation", callback.calls, 1)


def test_sleep_frees_no_block(world: World) -> None:
    """It goes through the blocks: what waits to be freed sleeps with the rest."""
    callback = Callback(world)
    block = world.block()
    callback.fails = lambda pointer: True
    world.free(block)
    callback.fails = None
    callback.calls = 0
    world.allocator.sleep(("weights",))
    world.allocator.wake_up()
    expect("calls", callback.calls, 0)
    world.expect_awake(block)
