"""Blocks that are freed while their copies run on: no copy meets memory that is unmapped.

A copy that sleep or wake_up begins can be under way when the copying thread has gone on to its next
block. The tests force the order of copy and free; the drivers leave it to threads and chance.
A longer run: SM12X_SEEDS=160.
"""

from __future__ import annotations

import builtins
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.fuzz import Fuzzer, Settings, seeds
from tests.witness.test_sleep_fuzz import note
from tests.witness.world import EMPTY, Block, World, expect, raised

OFFLOAD = ("weights",)
# Seconds after which a thread does not wait for the other: the order was not to be had.
LIMIT = 2.0
OPERATIONS = 120


def copies_run_on(world: World) -> None:
    """From memory that is not pinned, cudaMemcpy returns before the device has it all."""
    copy = world.cumem.libcudart.cudaMemcpy

    def copy_that_goes_on(to: Any, source: Any, size: int) -> None:
        copy(to, source, size)
        if world.fake.mapped(int(getattr(to, "value", to)), size):
            world.fake.begin_work(to, size)

    world.cumem.libcudart.cudaMemcpy = copy_that_goes_on


@contextmanager
def beside_copies(world: World, action: Callable[[int], None]) -> Iterator[None]:
    """Call ``action`` with the number of each copy, before it is begun."""
    owner, name = world.copier
    copy = getattr(owner, name)
    begun: list[int] = []

    def counted(*arguments: Any) -> Any:
        begun.append(len(begun) + 1)
        action(begun[-1])
        return copy(*arguments)

    setattr(owner, name, counted)
    try:
        yield
    finally:
        setattr(owner, name, copy)


def with_synchronize(world: World, synchronize: Callable[..., None]) -> None:
    world.torch.cuda.synchronize = world.torch.accelerator.synchronize = synchronize


@pytest.mark.parametrize("kind", ["wake_up", "kept sleep", "kept wake_up"])
def test_a_copy_that_is_begun_after_the_free_has_waited(world: World, kind: str) -> None:
    """The free waits for the device, the copy is begun, and the next block is the one in hand."""
    if kind.startswith("kept"):
        world.use_plugin()
    else:
        copies_run_on(world)
    blocks = [world.block() for _ in range(3)]
    if kind.endswith("wake_up"):
        world.allocator.sleep(OFFLOAD)
    freed, waited, moved = (threading.Event() for _ in range(3))
    wait = world.synchronize

    def synchronize(device: Any = None) -> None:
        wait(device)
        if threading.current_thread() is thread and not waited.is_set():
            waited.set()
            moved.wait(LIMIT)

    def free() -> None:
        freed.wait(LIMIT)
        world.free(blocks[0])
        waited.set()

    def action(number: int) -> None:
        if number == 1:
            freed.set()
            waited.wait(LIMIT)
        elif number == 2:
            moved.set()
            thread.join(LIMIT)

    thread = threading.Thread(target=free)
    with_synchronize(world, synchronize)
    thread.start()
    with beside_copies(world, action):
        call = world.allocator.wake_up if kind.endswith("wake_up") else world.allocator.sleep
        problem = raised(call if kind.endswith("wake_up") else lambda: call(OFFLOAD))
    thread.join()
    with_synchronize(world, wait)
    expect("blocks unmapped under a copy", world.fake.violations(), 0)
    expect("what it raised", problem, None)
    # What is freed later is freed when PyTorch calls next.
    world.free(world.block())
    world.allocator.wake_up()
    expect("the records", world.records(), {block.address for block in blocks[1:]})
    world.expect_awake(*blocks[1:])
    for block in blocks[1:]:
        world.free(block)
    expect("what the driver holds in the end", world.fake.alive(), EMPTY)


@pytest.mark.patched_only
def test_an_unused_segment_that_sleep_is_at_stays(world: World) -> None:
    """A pool's context that ends gives segments back as a free does."""
    world.use_plugin()
    blocks = [world.block() for _ in range(2)]

    def action(number: int) -> None:
        if number == 1:
            for block in blocks:
                world.allocator._release_segment(block.address)

    with beside_copies(world, action):
        expect("what sleep raised", raised(lambda: world.allocator.sleep(OFFLOAD)), None)
    expect("blocks unmapped under a copy", world.fake.violations(), 0)
    expect("segments given back", set(world.allocator.released_segments), {blocks[1].address})
    world.allocator.wake_up()
    world.expect_awake(blocks[0])


@pytest.mark.patched_only
@pytest.mark.parametrize("error", ["RuntimeError", "MemoryError", "KeyboardInterrupt"])
def test_a_wait_that_ends_with_an_exception_keeps_the_record(world: World, error: str) -> None:
    block = world.block()
    data = world.allocator.pointer_to_data[block.address]

    def synchronize(device: Any = None) -> None:
        with_synchronize(world, world.synchronize)
        raise getattr(builtins, error)("broken")

    with_synchronize(world, synchronize)
    world.free(block)
    assert world.allocator.pointer_to_data[block.address] is data
    world.expect_awake(block)
    other = world.block()
    world.expect_alive(other)


@pytest.mark.guard
@pytest.mark.parametrize("asleep", [False, True])
def test_discard_unmaps_and_waits(world: World, asleep: bool) -> None:
    """What is discarded is physical memory that the device has back; the rest keeps its bytes."""
    blocks = world.blocks()
    cache = tuple(block for block in blocks if block.tag == "kv_cache")
    weights = [block for block in blocks if block.tag == "weights"]
    if asleep:
        world.allocator.sleep(OFFLOAD)
        world.allocator.wake_up(["kv_cache"])
    world.fake.begin_work(cache[0].address, 4096)
    world.allocator.discard(("kv_cache",))
    expect("blocks unmapped under work in flight", world.fake.violations(), 0)
    world.expect_asleep(*cache)
    if asleep:
        world.expect_alive(asleep=tuple(blocks))
    else:
        world.expect_alive(*weights, asleep=cache)
        world.expect_awake(*weights)
    world.allocator.wake_up()
    world.expect_awake(*blocks)


class Threads:
    """Threads that free and allocate while another sleeps and wakes."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
        # Once sleep knows its blocks: what is allocated from then on is none of them.
        self.begun = threading.Event()
        self.stop = threading.Event()
        self.fresh: list[Block] = []
        self.wait = world.synchronize

    def churn(self, own: list[Block], chance: random.Random) -> None:
        self.begun.wait(LIMIT)
        while own and not self.stop.is_set():
            self.world.free(own.pop(chance.randrange(len(own))))
            if chance.random() < 0.7:
                own.append(self.world.block("weights", GRANULARITY * chance.randint(1, 3)))
            time.sleep(chance.random() * 0.0005)
        self.fresh += own

    def pause(self, number: int) -> None:
        self.begun.set()
        time.sleep(self.chance.random() * 0.0005)

    def slowly(self, device: Any = None) -> None:
        self.wait(device)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(self.chance.random() * 0.001)

    def run(self) -> list[Block]:
        """One sleep and wake_up beside two threads; the blocks that are left."""
        blocks = [
            self.world.block("weights", GRANULARITY * self.chance.randint(1, 3)) for _ in range(9)
        ]
        self.chance.shuffle(blocks)
        threads = [
            threading.Thread(
                target=self.churn,
                args=(blocks[i : i + 3], random.Random(self.chance.random())),  # noqa: S311
            )
            for i in (0, 3)
        ]
        with_synchronize(self.world, self.slowly)
        with beside_copies(self.world, self.pause):
            for thread in threads:
                thread.start()
            try:
                self.world.allocator.sleep(OFFLOAD)
                self.world.allocator.wake_up()
            finally:
                self.stop.set()
                for thread in threads:
                    thread.join()
                with_synchronize(self.world, self.wait)
        return [*blocks[6:], *self.fresh]


@pytest.mark.patched_only
@pytest.mark.parametrize("kept", [False, True], ids=["allocator", "kept"])
def test_threads_free_and_allocate(world: World, kept: bool) -> None:
    sys.setswitchinterval(1e-5)
    if kept:
        world.use_plugin()
        world.digested = GRANULARITY
    else:
        copies_run_on(world)
    bad: list[str] = []
    for seed in seeds(6):
        violations = world.fake.violations()
        try:
            left = Threads(world, seed).run()
            world.free(world.block())
            world.allocator.wake_up()
            expect("blocks unmapped under a copy", world.fake.violations() - violations, 0)
            world.expect_awake(*left)
            for block in left:
                world.free(block)
            world.free(world.block())
            expect("what the driver holds", world.fake.alive(), EMPTY)
        except Exception as error:
            bad.append(f"seed {seed}: {error}".splitlines()[0])
            world.allocator.pointer_to_data.clear()
            world.fake.reset()
    assert not bad, f"{len(bad)} seeds are bad:\n  " + "\n  ".join(bad[:5])


@pytest.mark.patched_only
@pytest.mark.parametrize("plugin", [False, True], ids=["allocator", "kept"])
@pytest.mark.parametrize("seed", seeds(2))
def test_random_operations_with_threads_and_two_interrupts(
    world: World, seed: int, plugin: bool
) -> None:
    settings = Settings(operations=OPERATIONS, seed=seed, plugin=plugin, rough=True)
    note(Fuzzer(world, settings).run())
