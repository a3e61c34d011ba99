"""The worker and the allocator of a base without it: one tag put to sleep, without its content."""

from __future__ import annotations

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.interrupt import walk
from tests.witness.test_worker_sleep import WORKER, Rig
from tests.witness.world import Block, World, expect, raised

pytestmark = pytest.mark.loads(WORKER)
CACHE = ("kv_cache",)


def parts(rig: Rig) -> tuple[list[Block], list[Block]]:
    """The blocks that stay, and those of the KV cache."""
    cache = [block for block in rig.blocks if block.tag == "kv_cache"]
    return [block for block in rig.blocks if block.tag != "kv_cache"], cache


def expect_released(rig: Rig) -> None:
    stay, cache = parts(rig)
    rig.world.expect_alive(*stay, asleep=tuple(cache))
    rig.world.expect_awake(*stay)
    rig.world.expect_asleep(*cache)


def test_the_cache_goes_and_comes_back(world: World) -> None:
    rig = Rig(world)
    before = rig.values()
    for cycle in (1, 2, 3):
        world.fake.forget_calls()
        for _ in range(2):
            rig.worker.discard(CACHE)
            expect_released(rig)
        expect("blocks unmapped", world.fake.calls("cuMemUnmap"), len(parts(rig)[1]))
        expect("copies", world.fake.calls("cudaMemcpy"), 0)
        # The weights are read where they are.
        expect("the buffers", rig.values(), before)
        rig.worker.wake_up(["kv_cache"])
        world.expect_awake(*rig.blocks)
        rig.expect_set_up(times=cycle)


@pytest.mark.parametrize("level", [1, 2])
def test_a_full_sleep_goes_on_from_there(world: World, level: int) -> None:
    rig = Rig(world)
    before = rig.values()
    rig.worker.discard(CACHE)
    rig.worker.sleep(level=level)
    world.expect_alive(asleep=tuple(rig.blocks))
    rig.worker.discard(CACHE)
    rig.worker.wake_up()
    expect("the buffers", rig.values(), before)
    world.expect_awake(*rig.blocks, bytes_of=("weights",) if level == 1 else ())
    rig.expect_set_up(times=1)


@pytest.mark.parametrize("then", ["discard", "sleep", "wake_up"])
def test_a_release_that_fails_part_way(world: World, then: str) -> None:
    rig = Rig(world)
    stay, cache = parts(rig)
    world.fake.fail("cuMemUnmap", nth=len(cache), error=999)
    problem = raised(lambda: rig.worker.discard(CACHE))
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    assert "kv_cache block" in str(problem)
    world.expect_alive(*stay, cache[-1], asleep=tuple(cache[:-1]))
    if then == "discard":
        rig.worker.discard(CACHE)
        expect_released(rig)
    elif then == "sleep":
        rig.worker.sleep(level=1)
        world.expect_alive(asleep=tuple(rig.blocks))
    rig.worker.wake_up()
    world.expect_awake(*rig.blocks)


def test_a_refused_wake_up_leaves_the_cache_asleep(world: World) -> None:
    rig = Rig(world)
    rig.worker.discard(CACHE)
    world.fake.fail("cuMemCreate", nth=len(parts(rig)[1]))
    assert isinstance(raised(rig.worker.wake_up), RuntimeError)
    expect_released(rig)
    rig.worker.wake_up()
    world.expect_awake(*rig.blocks)


def test_a_release_waits_for_work_in_flight(world: World) -> None:
    rig = Rig(world)
    cache = parts(rig)[1]
    world.fake.begin_work(cache[0].address, GRANULARITY)
    rig.worker.discard(CACHE)
    expect_released(rig)


def test_kept_copies_of_weights_stay(world: World) -> None:
    world.use_host_copies("keep")
    rig = Rig(world)
    rig.worker.sleep(level=1)
    rig.worker.wake_up()
    held = world.fake.registered()
    rig.worker.discard(CACHE)
    expect_released(rig)
    expect("registered host memory", world.fake.registered(), held)
    rig.worker.wake_up()
    rig.worker.sleep(level=1)
    world.expect_alive(asleep=tuple(rig.blocks))
    rig.worker.wake_up()
    world.expect_awake(*rig.blocks)


def test_a_block_may_be_freed_and_made_while_released(world: World) -> None:
    rig = Rig(world)
    stay, cache = parts(rig)
    rig.worker.discard(CACHE)
    world.free(cache[0])
    new = world.block("kv_cache")
    world.expect_alive(*stay, new, asleep=tuple(cache[1:]))
    rig.worker.discard(CACHE)
    world.expect_alive(*stay, asleep=(*cache[1:], new))
    rig.worker.wake_up()
    world.expect_awake(*stay, *cache[1:], new)


def test_a_release_may_be_interrupted_anywhere(world: World) -> None:
    rig = Rig(world)

    def woken(rig: Rig) -> None:
        rig.worker.wake_up()
        world.expect_awake(*rig.blocks)

    def finished(rig: Rig) -> None:
        rig.worker.discard(CACHE)
        expect_released(rig)
        woken(rig)

    walk(lambda: rig, lambda rig: rig.worker.discard(CACHE), woken, finished)
