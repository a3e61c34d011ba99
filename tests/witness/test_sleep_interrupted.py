"""Sleep, wake_up and discard, interrupted anywhere: either call goes on from there."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
from tests.witness.interrupt import interrupter, walk
from tests.witness.world import EMPTY, Block, World, expect, raised

OFFLOAD = ("weights",)
EVERYTHING = ("weights", "kv_cache")
# Real signals a test sends; SM12X_SIGNALS sets another number.
SIGNALS = int(os.environ.get("SM12X_SIGNALS", "20"))
# Seconds after which a signal that is to come counts as lost.
PATIENCE = 4.0


def blocks_of(world: World) -> list[Block]:
    return [world.block("weights"), world.block("kv_cache"), world.block("weights")]


def asleep(world: World) -> list[Block]:
    blocks = blocks_of(world)
    world.allocator.sleep(OFFLOAD)
    return blocks


def expect_sleeps(world: World) -> None:
    """What a sleep has to leave: nothing mapped, whatever was mapped before it."""
    world.allocator.sleep(OFFLOAD)
    expect("physical memory after sleep", world.fake.alive().physical, 0)


def expect_wakes(world: World, blocks: list[Block]) -> None:
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.expect_alive(*blocks)
    copies = [data.cpu_backup_tensor for data in world.allocator.pointer_to_data.values()]
    expect("host copies of what is awake", [copy for copy in copies if copy is not None], [])


def free_all(world: World, blocks: list[Block]) -> None:
    for block in blocks:
        world.free(block)
    expect("what the driver holds in the end", world.fake.alive(), EMPTY)


def same(world: World, blocks: list[Block], call: str) -> None:
    if call == "sleep":
        expect_sleeps(world)
    expect_wakes(world, blocks)
    free_all(world, blocks)


def opposite(world: World, blocks: list[Block], call: str) -> None:
    if call == "wake_up":
        expect_sleeps(world)
    expect_wakes(world, blocks)
    # Not the bytes of an earlier sleep.
    for block in blocks:
        world.fill(block)
    expect_sleeps(world)
    expect_wakes(world, blocks)
    free_all(world, blocks)


def interrupt_everywhere(world: World, call: str, failing: str = "") -> None:
    """``failing`` names the driver's function whose second call fails: the call then goes back."""

    def prepare() -> list[Block]:
        blocks = blocks_of(world) if call == "sleep" else asleep(world)
        world.fake.forget_calls()
        if failing:
            world.fake.fail(failing, nth=2, error=2)
        return blocks

    def operate(blocks: list[Block]) -> None:
        if call == "sleep":
            world.allocator.sleep(OFFLOAD)
        else:
            world.allocator.wake_up()

    def then_same(blocks: list[Block]) -> None:
        world.fake.fail_nothing()
        same(world, blocks, call)

    def then_opposite(blocks: list[Block]) -> None:
        world.fake.fail_nothing()
        opposite(world, blocks, call)

    walk(prepare, operate, then_same, then_opposite)


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_an_interrupt_anywhere(world: World, call: str) -> None:
    interrupt_everywhere(world, call)


def test_an_interrupt_in_a_sleep_that_fails(world: World) -> None:
    interrupt_everywhere(world, "sleep", failing="cuMemUnmap")


def test_an_interrupt_in_a_rollback(world: World) -> None:
    interrupt_everywhere(world, "wake_up", failing="cudaMemcpy")


def test_an_interrupt_in_discard(world: World) -> None:
    def operate(blocks: list[Block]) -> None:
        world.allocator.discard(("kv_cache",))

    def then_sleep(blocks: list[Block]) -> None:
        expect_sleeps(world)
        same(world, blocks, "wake_up")

    def then_discard(blocks: list[Block]) -> None:
        operate(blocks)
        world.expect_alive(blocks[0], blocks[2], asleep=(blocks[1],))
        world.expect_awake(blocks[0], blocks[2])
        same(world, blocks, "wake_up")

    walk(lambda: blocks_of(world), operate, then_sleep, then_discard)


def test_sleep_gives_back_what_a_rollback_could_not(world: World) -> None:
    blocks = asleep(world)
    world.fake.forget_calls()
    world.fake.fail("cudaMemcpy", nth=2, error=2)
    world.fake.fail("cuMemUnmap", error=999, count=100)
    assert isinstance(raised(world.allocator.wake_up), RuntimeError)
    world.fake.fail_nothing()
    assert world.fake.alive().physical > 0, "the rollback should have failed"
    expect_sleeps(world)
    same(world, blocks, "wake_up")


def test_sleep_says_so_where_what_is_mapped_stays_mapped(world: World) -> None:
    """And it does not return as if it had succeeded."""
    blocks = asleep(world)
    world.fake.forget_calls()
    world.fake.fail("cudaMemcpy", nth=2, error=2)
    world.fake.fail("cuMemUnmap", error=999, count=100)
    assert isinstance(raised(world.allocator.wake_up), RuntimeError)
    assert isinstance(raised(lambda: world.allocator.sleep(OFFLOAD)), RuntimeError)
    world.fake.fail_nothing()
    same(world, blocks, "sleep")


def test_a_failed_sleep_keeps_newer_bytes(world: World) -> None:
    """A copy that was made for it is not put over what the model writes later."""
    blocks = blocks_of(world)
    world.fake.fail("cuMemUnmap", error=999)
    assert isinstance(raised(lambda: world.allocator.sleep(EVERYTHING)), RuntimeError)
    world.fake.write(blocks[0].address, b"newer")
    world.allocator.wake_up()
    expect("the bytes", world.fake.read(blocks[0].address, 5), b"newer")
    world.allocator.sleep(EVERYTHING)
    world.allocator.wake_up()
    expect("the bytes", world.fake.read(blocks[0].address, 5), b"newer")


def test_an_interrupt_leaves_nothing_mapped(world: World) -> None:
    """Ctrl-C in wake_up takes back what it mapped, as an error does."""
    blocks = asleep(world)
    copy = world.cumem.libcudart.cudaMemcpy
    copies: list[int] = []

    def interrupted(to: Any, source: Any, size: int) -> None:
        copies.append(size)
        if len(copies) == 2:
            raise KeyboardInterrupt
        copy(to, source, size)

    world.cumem.libcudart.cudaMemcpy = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.allocator.wake_up()
    world.cumem.libcudart.cudaMemcpy = copy
    world.expect_alive(asleep=tuple(blocks))
    same(world, blocks, "wake_up")


def await_signal() -> None:
    """Wait for a signal, in naps: one that comes as a nap begins is handled after the nap."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        time.sleep(0.005)


@pytest.mark.patched_only
@pytest.mark.parametrize("call", ["sleep", "wake_up"])
def test_real_signals(world: World, call: str) -> None:
    """SIGINT at random times. The untouched release holds where no signal happens to come between
    two lines that belong together: that it does not is shown by test_an_interrupt_anywhere."""
    chance = random.Random(call)  # noqa: S311
    landed = 0
    with interrupter() as interrupt:
        duration = 0.0
        for n in range(SIGNALS):
            blocks = blocks_of(world) if call == "sleep" else asleep(world)
            begin = time.perf_counter()
            try:
                # The first one shows how long the call takes.
                interrupt(chance.uniform(0, duration) if n else 1.0)
                if call == "sleep":
                    world.allocator.sleep(OFFLOAD)
                else:
                    world.allocator.wake_up()
                duration = max(duration, time.perf_counter() - begin)
                await_signal()
            except KeyboardInterrupt:
                landed += 1
            (same if chance.random() < 0.5 else opposite)(world, blocks, call)
    expect("signals that came", landed, SIGNALS)
