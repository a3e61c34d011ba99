"""Blocks that are freed while sleep or wake_up goes through them.

By a garbage collection in the same thread, or by another thread during a copy, which does without
the GIL. The driver hands out a freed address again: what is done to a freed block is done to
another one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.witness.world import EMPTY, Block, World, expect, raised

OFFLOAD = ("weights",)


class Meanwhile:
    """Runs ``action`` once, in the midst of the ``at``-th copy, on this thread or another one."""

    def __init__(self, world: World, at: int, action: Callable[[], None], *, thread: bool) -> None:
        self.world = world
        self.copy = world.cumem.libcudart.cudaMemcpy
        self.left = at
        self.action = action
        self.thread = thread
        world.cumem.libcudart.cudaMemcpy = self

    def __call__(self, to: Any, source: Any, size: int) -> None:
        self.left -= 1
        if self.left == 0:
            if self.thread:
                other = threading.Thread(target=self.action)
                other.start()
                other.join()
            else:
                self.action()
        self.copy(to, source, size)


def operate(world: World, call: str) -> None:
    if call == "sleep":
        world.allocator.sleep(OFFLOAD)
    else:
        world.allocator.wake_up()


def note_handles(world: World, passed: list[Any]) -> None:
    """Note what sleep and wake_up pass to the C extension from here on."""
    for name in ("create_and_map", "unmap_and_release"):
        function = getattr(world.cumem, name)

        def noted(handle: Any, function: Any = function) -> None:
            passed.append(handle)
            function(handle)

        setattr(world.cumem, name, noted)


def expect_survivors(world: World, *blocks: Block) -> None:
    """Exactly these blocks are left; they sleep and wake with their bytes."""
    # What could not be freed at once is freed when PyTorch calls next.
    world.free(world.block())
    world.allocator.wake_up()
    world.expect_alive(*blocks)
    world.expect_awake(*blocks)
    world.allocator.sleep(OFFLOAD)
    expect("physical memory asleep", world.fake.alive().physical, 0)
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    for block in blocks:
        world.free(block)
    expect("what the driver holds in the end", world.fake.alive(), EMPTY)


@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_the_block_that_is_copied(world: World, call: str, thread: bool) -> None:
    """Freed, and its address asked for again, in the midst of its copy."""
    blocks = [world.block(), world.block(), world.block()]
    fresh: list[Block] = []

    def action() -> None:
        world.free(blocks[1])
        fresh.append(world.block())

    if call == "wake_up":
        world.allocator.sleep(OFFLOAD)
    Meanwhile(world, 2, action, thread=thread)
    expect("what it raised", raised(lambda: operate(world, call)), None)
    world.expect_awake(*fresh)
    expect_survivors(world, blocks[0], blocks[2], *fresh)


@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_a_block_that_is_next(world: World, call: str, thread: bool) -> None:
    blocks = [world.block(), world.block(), world.block()]
    fresh: list[Block] = []

    stale: list[Any] = []
    passed: list[Any] = []

    def action() -> None:
        stale.append(world.allocator.pointer_to_data[blocks[1].address].handle)
        world.free(blocks[1])
        note_handles(world, passed)
        fresh.append(world.block())

    if call == "wake_up":
        world.allocator.sleep(OFFLOAD)
    meanwhile = Meanwhile(world, 1, action, thread=thread)
    expect("what it raised", raised(lambda: operate(world, call)), None)
    assert stale[0] not in passed, "what described the freed block was passed to C"
    expect("copies, one of each block that is left", 1 - meanwhile.left, 2)
    world.expect_awake(*fresh)
    expect_survivors(world, blocks[0], blocks[2], *fresh)


@pytest.mark.parametrize("freed", [0, 1])
def test_a_block_that_a_rollback_comes_to(world: World, freed: int) -> None:
    """Freed while the rollback waits for the device."""
    blocks = [world.block(), world.block(), world.block()]
    world.allocator.sleep(OFFLOAD)
    world.fake.forget_calls()
    world.fake.fail("cudaMemcpy", nth=3, error=2)
    fresh: list[Block] = []
    began: list[bool] = []
    stale: list[Any] = []
    passed: list[Any] = []
    note_handles(world, passed)
    wait = world.synchronize

    def synchronize(device: Any = None) -> None:
        wait(device)
        if not began and world.fake.calls("cudaMemcpy") == 3:
            began.append(True)
            stale.append(world.allocator.pointer_to_data[blocks[freed].address].handle)
            world.free(blocks[freed])
            passed.clear()
            fresh.append(world.block())

    world.torch.cuda.synchronize = world.torch.accelerator.synchronize = synchronize
    assert isinstance(raised(world.allocator.wake_up), RuntimeError)
    assert fresh, "the rollback waited for nothing"
    # The driver need not refuse: what C frees may look unmapped, or be another block's by now.
    assert stale[0] not in passed, "what described the freed block was passed to C"
    world.expect_awake(*fresh)
    expect_survivors(world, *(block for i, block in enumerate(blocks) if i != freed), *fresh)


def test_a_block_with_a_copy_under_way(world: World) -> None:
    """It counts as asleep until the wake_up is over; freeing it waits for the copy all the same."""
    blocks = [world.block(), world.block()]
    world.allocator.sleep(OFFLOAD)
    meanwhile = Meanwhile(world, 2, lambda: world.free(blocks[0]), thread=True)
    copy = meanwhile.copy

    def copy_that_goes_on(to: Any, source: Any, size: int) -> None:
        copy(to, source, size)
        world.fake.begin_work(to, size)

    meanwhile.copy = copy_that_goes_on
    world.allocator.wake_up()
    expect("blocks unmapped under work in flight", world.fake.violations(), 0)
    world.expect_awake(blocks[1])
    world.synchronize()
    expect("the records", world.records(), {blocks[1].address})


def churn(world: World, begun: threading.Event, own: list[Block], fresh: list[Block]) -> None:
    begun.wait()
    for block in own:
        world.free(block)
        fresh.append(world.block())


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_many_threads_free(world: World, call: str) -> None:
    """Freed at no chosen time, while the copies let other threads run."""
    for _ in range(10):
        blocks = [world.block() for _ in range(6)]
        if call == "wake_up":
            world.allocator.sleep(OFFLOAD)
        begun = threading.Event()
        fresh: list[Block] = []
        threads = [
            threading.Thread(target=churn, args=(world, begun, blocks[i : i + 2], fresh))
            for i in (0, 2)
        ]
        for thread in threads:
            thread.start()
        copy = Meanwhile(world, 1, begun.set, thread=False).copy
        problem = raised(lambda: operate(world, call))
        for thread in threads:
            thread.join()
        world.cumem.libcudart.cudaMemcpy = copy
        expect("what it raised", problem, None)
        expect_survivors(world, *blocks[4:], *fresh)


@pytest.mark.guard
def test_a_block_freed_after_an_interrupt(world: World) -> None:
    """An interrupted sleep does not keep the block that it was at."""
    blocks = [world.block(), world.block()]

    def interrupt() -> None:
        raise KeyboardInterrupt

    Meanwhile(world, 1, interrupt, thread=False)
    with pytest.raises(KeyboardInterrupt):
        world.allocator.sleep(OFFLOAD)
    for block in blocks:
        world.free(block)
    expect("what the driver holds in the end", world.fake.alive(), EMPTY)
