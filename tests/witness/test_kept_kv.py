"""Blocks of the KV cache that scripts/sleep-keep keeps on the host while the KV cache sleeps.

As the rest of the package, it is made for an untouched release too: what holds there is a guard.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.fuzz import seeds
from tests.witness.interrupt import walk
from tests.witness.kv_fuzz import KvFuzzer
from tests.witness.kv_rig import BLOCKS, KEPT, LAYOUTS, PIECE, Cache, make
from tests.witness.test_sleep_keep import COPIES
from tests.witness.world import GIB, INTEGRATED, Block, World, expect, raised, sweep

# Content that is kept in a sweep or a walk, in which there are thousands of cases.
FEW = (1, 2, 5)
# Ranges of one, of several, the first and the last block.
SCATTERED = (0, 3, 4, 5, 6, 11, 13, 14, BLOCKS - 1)
COPYING = ("cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpyBatchAsync")


def filled(
    world: World, layout: str = "layers", blocks: Sequence[int] = SCATTERED, **options: Any
) -> Cache:
    """A KV cache with content in these blocks, after a first sleep has copied the weights."""
    cache = make(world, layout, **options)
    cache.backend.suspend(1)
    cache.backend.resume()
    cache.write(*blocks)
    world.fake.forget_calls()
    return cache


def copies(world: World) -> dict[str, int]:
    return {name: world.fake.calls(name) for name in COPYING}


def refusal(call: Callable[[], object]) -> str:
    """The text of the RuntimeError that the call raises."""
    problem = raised(call)
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    return str(problem)


def module(name: str = KEPT) -> Any:
    return importlib.import_module(name)


def test_the_backend_has_what_vllm_calls(world: World) -> None:
    """Each method of vLLM's own backend that keeps nothing is one of the package's, which does."""
    vllm: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    backend = type(make(world, "layers").backend)
    for name in ("kv_room", "keep_kv", "restore_kv", "drop_kv", "kept_kv", "weights_changed"):
        declared = inspect.signature(getattr(vllm.SleepModeBackend, name))
        assert list(inspect.signature(vars(backend)[name]).parameters) == list(declared.parameters)


# ---- what is kept comes back ----


@pytest.mark.guard
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_blocks_come_back(world: World, layout: str) -> None:
    cache = filled(world, layout)
    for _ in range(3):
        cache.swap()
        cache.write(1, 2, 12)
    expect("host memory", world.fake.registered(), cache.held() + 2 * GRANULARITY)


@pytest.mark.guard
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_block_comes_back(world: World, layout: str) -> None:
    cache = make(world, layout)
    cache.write(*range(BLOCKS))
    cache.swap()


@pytest.mark.guard
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_the_kv_cache_alone(world: World, layout: str) -> None:
    cache = filled(world, layout)
    for _ in range(2):
        cache.keep()
        cache.backend.discard(("kv_cache",))
        world.expect_asleep(*cache.memory)
        world.expect_awake(*cache.weights)
        cache.backend.resume(["kv_cache"])
        cache.expect_restored()
        cache.backend.drop_kv()
        cache.write(7)


@pytest.mark.guard
@pytest.mark.parametrize("pitch", ["", "too large for one call", "and no batches"])
def test_rows_that_are_too_far_apart_for_one_call(world: World, pitch: str) -> None:
    cache = filled(world)
    if pitch:
        module().MOST_PITCH = 999
        cache.backend.copies._runtime._has_batches = pitch != "and no batches"
    cache.swap()
    done = copies(world)
    expect("rows", done["cudaMemcpy2DAsync"] > 0, not pitch)
    expect("batches", done["cudaMemcpyBatchAsync"] > 0, pitch == "too large for one call")


@pytest.mark.guard
def test_consecutive_blocks_of_all_layers_are_one_copy(world: World) -> None:
    cache = filled(world)
    module().PIECE = GRANULARITY
    cache.keep()
    expect("copies", copies(world)["cudaMemcpy2DAsync"], len(module().ranges_of(SCATTERED)))
    cache.backend.suspend(1)
    cache.expect_restored()
    expect("copies back", copies(world)["cudaMemcpy2DAsync"], 2 * 5)


@pytest.mark.guard
@pytest.mark.parametrize("seed", range(20))
def test_memory_is_covered_once(world: World, seed: int) -> None:
    """Of random regions and blocks, cut to pieces of random sizes: each byte, and no other."""
    world.use_plugin()
    kept, chance = module(), random.Random(seed)  # noqa: S311
    regions: list[tuple[int, int, int]] = []
    address, number = 1 << 40, 12
    for _ in range(chance.randint(1, 4)):
        size = chance.randint(1, 60)
        stride = size + chance.choice((0, 0, 9))
        step = stride * number + chance.choice((0, 0, 0, 5))
        for _ in range(chance.randint(1, 4)):
            regions.append((address, size, stride))
            address += step + chance.choice((0, 0, 0, 7))
        address += chance.choice((0, 13))
    chance.shuffle(regions)
    blocks = sorted(chance.sample(range(number), chance.randint(1, number)))
    wanted = sorted(
        start + block * stride + byte
        for start, size, stride in regions
        for block in blocks
        for byte in range(size)
    )
    got: list[int] = []
    todo = [
        rows
        for one in kept.series_of(regions)
        for first, count in kept.ranges_of(blocks)
        for rows in one.rows(first, count)
    ]
    while todo:
        left = chance.randint(1, 400)
        first, *rest = todo.pop().cut(left)
        assert 0 < first.width * first.height <= left
        todo += rest
        got += [
            first.address + row * first.pitch + byte
            for row in range(first.height)
            for byte in range(first.width)
        ]
    expect("bytes", sorted(got), wanted)


# ---- the order of a sleep and of a wake-up ----


@pytest.mark.guard
@pytest.mark.parametrize("call", ["suspend", "discard"])
def test_copies_run_beside_the_rest_of_a_sleep(world: World, call: str) -> None:
    """Digests are computed and weights unmapped before anything waits for copies of blocks."""
    cache = filled(world)
    under_way: list[int] = []
    digest = cache.backend.copies._digest

    def noted(*block: Any) -> None:
        under_way.append(world.fake.work_in_flight())
        digest(*block)

    cache.backend.copies._digest = noted
    cache.keep()
    begun = world.fake.work_in_flight()
    assert begun > 0, "the copies have ended already"
    if call == "suspend":
        cache.backend.suspend(1)
    else:
        cache.backend.discard(("kv_cache",))
    expect("copies under way at each digest", under_way, [begun] * 2)
    names = [line.split("(")[0] for line in world.fake.trace().splitlines()]
    issued = max(i for i, name in enumerate(names) if name in COPYING)
    unmaps = [i for i, name in enumerate(names) if name == "cuMemUnmap"]
    expect("blocks unmapped", len(unmaps), 3 if call == "suspend" else 1)
    # Those to wait for are the last of the streams' waits before the KV cache is unmapped.
    waits = [i for i, name in enumerate(names) if name == "cudaStreamSynchronize"]
    last = max(i for i in waits if i < unmaps[-1])
    assert issued < last
    expect("weights unmapped by then", sum(i < last for i in unmaps), len(unmaps) - 1)
    expect("waits for the device", "cudaDeviceSynchronize" in names[issued:last], False)
    cache.expect_restored()


@pytest.mark.guard
def test_keeping_waits_for_the_device(world: World) -> None:
    cache = filled(world)
    for block in (*cache.memory, *cache.weights):
        world.fake.begin_work(block.address, block.size)
    cache.swap()


@pytest.mark.guard
def test_a_restoration_waits_once(world: World) -> None:
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    cache.backend.resume()
    world.fake.forget_calls()
    cache.backend.restore_kv()
    names = [line.split("(")[0] for line in world.fake.trace().splitlines()]
    issued = max(i for i, name in enumerate(names) if name in COPYING)
    waits = [i for i, name in enumerate(names) if name == "cudaStreamSynchronize" and i > issued]
    expect("streams waited for after the copies", len(waits), 2)
    cache.expect_content()


@pytest.mark.guard
def test_a_sleep_without_blocks_waits_for_the_device(world: World) -> None:
    """Also where an earlier one had kept some, or was to."""
    cache = filled(world)
    cache.swap()
    cache.keep()
    cache.backend.drop_kv()
    for block in (*cache.memory, *cache.weights):
        world.fake.begin_work(block.address, block.size)
    cache.backend.suspend(1)
    cache.backend.resume()
    cache.keep([])
    expect("kept", cache.backend.kept_kv(), (0, 0))
    for block in (*cache.memory, *cache.weights):
        world.fake.begin_work(block.address, block.size)
    cache.backend.suspend(1)
    cache.backend.resume()
    expect("memory given up in use", world.fake.violations(), 0)


# ---- levels, tags, repetitions ----


@pytest.mark.guard
def test_a_level_2_sleep_drops_them_and_their_memory(world: World) -> None:
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(2)
    expect("kept", cache.backend.kept_kv(), (0, 0))
    expect("registered host memory", world.fake.registered(), 0)
    expect("memory given up in use", world.fake.violations(), 0)
    cache.backend.resume()
    world.fake.forget_calls()
    cache.backend.restore_kv()
    expect("copies", sum(copies(world).values()), 0)


@pytest.mark.guard
def test_a_level_2_sleep_of_what_sleeps_drops_them(world: World) -> None:
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    cache.backend.suspend(2)
    expect("kept", cache.backend.kept_kv(), (0, 0))
    expect("host memory for the KV cache", cache.held(), 0)
    cache.backend.resume()
    world.expect_awake(*cache.weights)


@pytest.mark.guard
def test_sleeping_twice_keeps_them(world: World) -> None:
    cache = filled(world)
    cache.keep()
    cache.backend.discard(("kv_cache",))
    cache.backend.discard(("kv_cache",))
    cache.backend.suspend(1)
    cache.backend.suspend(1)
    expect("kept", cache.backend.kept_kv(), cache.size())
    expect("physical memory asleep", world.fake.alive().physical, 0)
    cache.expect_restored()


@pytest.mark.guard
def test_keeping_what_sleeps_is_refused(world: World) -> None:
    """And what is kept stays: its memory cannot be read any more."""
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    assert "asleep" in refusal(lambda: cache.keep([1]))
    expect("kept", cache.backend.kept_kv(), cache.size())
    cache.expect_restored()


@pytest.mark.guard
@pytest.mark.parametrize("first", ["weights", "kv_cache"])
def test_a_wake_up_by_tags(world: World, first: str) -> None:
    cache = filled(world)
    for _ in range(2):
        cache.keep()
        cache.backend.suspend(1)
        cache.backend.resume([first])
        if first == "weights":
            assert "asleep" in refusal(cache.backend.restore_kv)
            expect("kept", cache.backend.kept_kv(), cache.size())
            cache.backend.resume(["kv_cache"])
        cache.backend.restore_kv()
        expect("whether weights changed", cache.backend.weights_changed(), False)
        cache.expect_content()
        cache.expect_restored()
        cache.backend.drop_kv()


@pytest.mark.guard
def test_a_second_restoration_copies_nothing(world: World) -> None:
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    cache.expect_restored()
    cache.write(*SCATTERED)
    cache.backend.restore_kv()
    cache.expect_content()


@pytest.mark.guard
@pytest.mark.parametrize("call", ["suspend", "discard"])
def test_a_wake_up_that_is_taken_back(world: World, call: str) -> None:
    """As where another rank cannot wake: what was restored sleeps again without being kept anew."""
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    cache.expect_restored()
    if call == "suspend":
        cache.backend.suspend(1)
    else:
        cache.backend.discard(("kv_cache",))
    expect("kept", cache.backend.kept_kv(), cache.size())
    cache.expect_restored()


@pytest.mark.guard
def test_a_wake_up_that_is_refused(world: World) -> None:
    """The memory for the KV cache is another's: all is asleep, with its blocks."""
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    world.fake.set_capacity(2 * GRANULARITY)
    assert "out of memory" in refusal(cache.backend.resume)
    assert "asleep" in refusal(cache.backend.restore_kv)
    world.fake.set_capacity(0)
    cache.expect_restored()


@pytest.mark.guard
def test_dropping_is_for_good(world: World) -> None:
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    for _ in range(2):
        cache.backend.drop_kv()
        expect("kept", cache.backend.kept_kv(), (0, 0))
    cache.backend.resume()
    world.fake.forget_calls()
    cache.backend.restore_kv()
    expect("copies", sum(copies(world).values()), 0)


@pytest.mark.guard
def test_blocks_that_there_are_not(world: World) -> None:
    cache = filled(world)
    for blocks in ([BLOCKS], [-1, 2], [3, BLOCKS + 5]):
        text = refusal(functools.partial(cache.keep, blocks))
        assert f"blocks 0 to {BLOCKS - 1}" in text
    expect("kept", cache.backend.kept_kv(), (0, 0))


@pytest.mark.guard
def test_a_region_that_does_not_sleep(world: World) -> None:
    cache = filled(world)
    cache.regions["other"] = world.torch.zeros((BLOCKS, 64), dtype=world.torch.int8)
    assert "other" in refusal(cache.keep)


@pytest.mark.guard
@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("asleep", [False, True])
def test_a_kv_cache_that_was_freed(world: World, other: bool, asleep: bool) -> None:
    """Nothing is copied to its address, where there may be another block now."""
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    if not asleep:
        cache.backend.resume()
    elif not hasattr(world.allocator, "in_hand"):
        pytest.skip("an untouched allocator cannot free what sleeps")
    address = cache.memory[0].address
    world.free(cache.memory[0])
    if asleep:
        cache.backend.resume()
    if other:
        cache.memory[0] = world.block("kv_cache")
        expect("the address of the new block", cache.memory[0].address, address)
    assert refusal(cache.backend.restore_kv)
    cache.backend.drop_kv()
    if other:
        world.expect_awake(cache.memory[0], bytes_of=("kv_cache",))


# ---- host memory ----


@pytest.mark.guard
def test_the_room_on_the_host(world: World) -> None:
    cache = make(world)
    block = cache.per_block
    copies_of_weights = 2 * GRANULARITY
    world.host_memory = 4 * GIB + copies_of_weights + 10 * PIECE + 100
    # Less the reserve, and the copies of weights that the first sleep takes.
    whole = 10 * PIECE // block * block
    expect("room", cache.backend.kv_room(block, None), (whole, ""))
    expect("room", cache.backend.kv_room(block, 3 * block + 1), (3 * block, ""))
    room, reason = cache.backend.kv_room(block, block - 1)
    expect("room", room, 0)
    assert "budget" in reason
    cache.backend.suspend(1)
    cache.backend.resume()
    world.host_memory = 4 * GIB + PIECE - 1
    room, reason = cache.backend.kv_room(block, None)
    expect("room", room, 0)
    assert "0.00 GiB of host memory" in reason
    # What is held counts, whatever else is available.
    world.host_memory = 64 * GIB
    cache.write(1, 2, 3)
    cache.swap()
    world.host_memory = 0
    expect("room", cache.backend.kv_room(block, None), (cache.held() // block * block, ""))
    cache.swap()


@pytest.mark.guard
def test_ranks_share_the_host_s_memory(world: World) -> None:
    cache = make(world)
    world.host_memory = 4 * GIB + 4 * (2 * GRANULARITY + 5 * PIECE)
    world.torch.distributed.is_initialized = lambda: True
    world.torch.distributed.get_world_size = lambda: 8
    world.torch.cuda.device_count = lambda: 4
    room, _ = cache.backend.kv_room(cache.per_block, None)
    expect("pieces", room // PIECE, 5 - 1)
    expect("room", room, 5 * PIECE // cache.per_block * cache.per_block)
    world.torch.distributed.get_world_size = lambda: 1
    room, _ = cache.backend.kv_room(cache.per_block, None)
    assert room > 20 * PIECE


@pytest.mark.guard
@pytest.mark.parametrize(
    ("setting", "integrated", "reason"),
    [
        ("release", False, "SLEEP_MODE_HOST_COPY=release"),
        ("auto", True, "share one memory"),
        ("keep", True, "share one memory"),
    ],
)
def test_where_nothing_can_be_kept(
    world: World, setting: str, integrated: bool, reason: str
) -> None:
    world.fake.set_attribute(INTEGRATED, int(integrated))
    cache = make(world, setting=setting)
    cache.write(1)
    room, text = cache.backend.kv_room(cache.per_block, None)
    expect("room", room, 0)
    assert reason in text
    assert reason in refusal(cache.keep)
    cache.backend.prepare_kv(GIB)
    expect("registered host memory", world.fake.registered(), 0)
    cache.backend.suspend(1)
    cache.backend.resume()
    world.expect_awake(*cache.weights)


@pytest.mark.guard
def test_too_little_host_memory(world: World) -> None:
    """Refused with the sizes; the server serves on, or sleeps without."""
    cache = filled(world)
    world.host_memory = 4 * GIB + PIECE
    text = refusal(cache.keep)
    assert "9 blocks" in text
    assert "0.00 GiB are available" in text
    expect("copies", sum(copies(world).values()), 0)
    expect("kept", cache.backend.kept_kv(), (0, 0))
    cache.expect_content()
    cache.backend.suspend(1)
    cache.backend.resume()
    world.host_memory = 64 * GIB
    cache.write(*SCATTERED)
    cache.swap()


@pytest.mark.guard
def test_host_memory_that_ends_half_way(world: World) -> None:
    cache = filled(world)
    rooms = iter([64 * GIB] * 3)
    module(COPIES).available_host_memory = lambda reserve=False: next(rooms, 0)
    assert "cannot be kept" in refusal(cache.keep)
    expect("kept", cache.backend.kept_kv(), (0, 0))
    cache.expect_content()
    cache.backend.suspend(1)
    expect("memory given up in use", world.fake.violations(), 0)
    module(COPIES).available_host_memory = lambda reserve=False: 64 * GIB
    cache.backend.resume()
    cache.write(*SCATTERED)
    cache.swap()


@pytest.mark.guard
@pytest.mark.parametrize("function", ["cudaHostRegister", "cudaMemcpy2DAsync"])
def test_a_copy_that_cannot_be_issued(world: World, function: str) -> None:
    cache = filled(world)
    world.fake.fail(function, nth=3, error=2, count=50)
    text = refusal(cache.keep)
    assert "out of memory" in text
    assert "9 blocks" in text
    world.fake.fail_nothing()
    expect("kept", cache.backend.kept_kv(), (0, 0))
    expect("physical memory", world.fake.alive().physical, 3 * GRANULARITY)
    cache.expect_content()
    cache.swap()


@pytest.mark.guard
def test_a_copy_that_fails_later(world: World) -> None:
    """The sleep ends before it unmaps the KV cache, whose blocks have their content."""
    cache = filled(world)
    cache.keep()
    # Those of the streams of weights are the first two.
    world.fake.fail("cudaStreamSynchronize", nth=3, error=700)
    assert "none is kept" in refusal(lambda: cache.backend.suspend(1))
    expect("kept", cache.backend.kept_kv(), (0, 0))
    cache.backend.resume()
    cache.backend.restore_kv()
    cache.expect_content()
    world.expect_awake(*cache.weights)
    cache.swap()


@pytest.mark.guard
def test_a_restoration_that_fails(world: World) -> None:
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    cache.backend.resume()
    for function in ("cudaMemcpy2DAsync", "cudaStreamSynchronize"):
        world.fake.fail(function, nth=3, error=2)
        assert "They stay on the host" in refusal(cache.backend.restore_kv)
        expect("kept", cache.backend.kept_kv(), cache.size())
    cache.expect_restored()


@pytest.mark.guard
def test_a_later_sleep_takes_no_host_memory(world: World) -> None:
    cache = filled(world)
    cache.swap()
    expect("held", cache.held(), -(-9 * cache.per_block // PIECE) * PIECE)
    world.fake.forget_calls()
    cache.swap()
    expect("registered by a later sleep", world.fake.calls("cudaHostRegister"), 0)
    expect("released by a later sleep", world.fake.calls("cudaHostUnregister"), 0)


@pytest.mark.guard
def test_the_report_counts_host_memory(world: World) -> None:
    cache = filled(world)
    cache.swap()
    held = sum(len(memory) for memory in cache.backend.kept_on_host())
    expect("host memory", held, world.fake.registered())
    cache.keep()
    # Whatever the budget is by then, it is there as long as it is needed.
    cache.backend.copies._pieces.clear()
    held = sum(len(memory) for memory in cache.backend.kept_on_host())
    expect("host memory", held, world.fake.registered())


@pytest.mark.guard
def test_host_memory_grows_in_the_background(world: World) -> None:
    """After a wake-up, beyond the largest use so far, and not beyond the KV cache."""
    cache = filled(world)
    module().GROWTH = 2
    cache.swap()
    cache.wait()
    size = 9 * cache.per_block
    expect("held", cache.held(), -(-2 * size // PIECE) * PIECE)
    cache.write(*range(BLOCKS))
    cache.swap()
    cache.wait()
    expect("held", cache.held(), -(-BLOCKS * cache.per_block // PIECE) * PIECE)


@pytest.mark.guard
def test_host_memory_does_not_grow_beyond_what_there_is(world: World) -> None:
    cache = filled(world)
    module().GROWTH = 3
    cache.keep()
    cache.backend.suspend(1)
    held = cache.held()
    world.host_memory = 4 * GIB + 2 * PIECE + 1
    cache.expect_restored()
    cache.wait()
    expect("held", cache.held(), held + 2 * PIECE)
    world.host_memory = 64 * GIB
    # ... nor beyond the server's budget, to which it shrinks.
    cache.backend.kv_room(cache.per_block, held + PIECE)
    cache.keep()
    cache.backend.suspend(1)
    cache.expect_restored()
    cache.wait()
    expect("held", cache.held(), held + 2 * PIECE)
    cache.backend.drop_kv()
    cache.backend.kv_room(cache.per_block, held + PIECE)
    expect("held", cache.held(), held + PIECE)


@pytest.mark.guard
def test_host_memory_is_prepared(world: World) -> None:
    cache = filled(world)
    begun, touch = threading.Event(), module(COPIES).touch

    def waits(*arguments: int) -> None:
        assert begun.wait(20)
        touch(*arguments)

    module(COPIES).touch = waits
    cache.backend.prepare_kv(3 * PIECE + 1)
    expect("whether it is preparing", cache.backend.is_preparing(), True)
    begun.set()
    cache.wait()
    expect("held", cache.held(), 4 * PIECE)
    cache.backend.prepare_kv(PIECE)
    cache.wait()
    expect("held", cache.held(), 4 * PIECE)
    cache.swap()


@pytest.mark.guard
def test_memory_for_weights_is_prepared_first(world: World) -> None:
    """That for the KV cache comes after it, from what is left."""
    cache = make(world, weights=3)
    world.host_memory = 4 * GIB + 3 * GRANULARITY + 5 * PIECE
    available = module(COPIES).available_host_memory
    module(COPIES).available_host_memory = lambda reserve=False: (
        available(reserve) - world.fake.registered()
    )
    cache.backend.prepare()
    cache.backend.prepare_kv(40 * PIECE)
    cache.wait()
    expect("held", cache.held(), 5 * PIECE)
    expect("registered", world.fake.registered(), 3 * GRANULARITY + 5 * PIECE)
    world.fake.forget_calls()
    cache.backend.suspend(1)
    expect("registered by a sleep", world.fake.calls("cudaHostRegister"), 0)
    cache.backend.resume()


@pytest.mark.guard
@pytest.mark.parametrize("failing", ["a thread", "cudaHostRegister", "cudaSetDevice"])
def test_a_preparation_that_fails(world: World, failing: str) -> None:
    cache = filled(world)
    thread: Any = threading.Thread
    start = thread.start

    def refused(one: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if failing == "a thread":
        thread.start = refused
    else:
        world.fake.fail(failing, nth=2, count=50)
    cache.backend.prepare_kv(5 * PIECE)
    thread.start = start
    cache.backend.copies._wait_for_preparation()
    world.fake.fail_nothing()
    cache.swap()


@pytest.mark.guard
@pytest.mark.parametrize("call", ["suspend", "keep", "room"])
def test_a_sleep_ends_the_growth(world: World, call: str) -> None:
    """It waits for the piece that is being taken, not for all of them."""
    cache = filled(world)
    copies_of: Any = module(COPIES)
    touch, begun, go = copies_of.touch, threading.Event(), threading.Event()
    touched: list[int] = []

    def waits(address: int, size: int) -> None:
        touched.append(address)
        begun.set()
        assert go.wait(10)
        touch(address, size)

    copies_of.touch = waits
    cache.backend.prepare_kv(60 * PIECE)
    assert begun.wait(10)
    threading.Timer(0.1, go.set).start()
    if call == "suspend":
        cache.backend.suspend(1)
    elif call == "keep":
        cache.keep([0])
    else:
        cache.backend.kv_room(cache.per_block, None)
    expect("whether it goes on", cache.backend.is_preparing(), False)
    assert len(touched) < 30, len(touched)
    copies_of.touch = touch


@pytest.mark.guard
def test_copies_of_weights_go_before_memory_for_the_kv_cache(world: World) -> None:
    """Else a sleep would be refused for want of memory that nothing is kept in."""
    cache = filled(world)
    cache.write(*range(BLOCKS))
    cache.swap()
    cache.weights.append(world.block())
    held, registered = cache.held(), world.fake.registered()

    def available(reserve: bool = False) -> int:
        """Half a copy as long as the KV cache's memory is held, which is most of one."""
        return GRANULARITY // 2 + registered - world.fake.registered()

    assert held > GRANULARITY // 2
    module(COPIES).available_host_memory = available
    cache.backend.suspend(1)
    cache.backend.resume()
    world.expect_awake(*cache.weights)
    expect("held", cache.held(), 0)


@pytest.mark.guard
def test_copies_of_weights_leave_what_is_kept(world: World) -> None:
    cache = filled(world)
    cache.write(*range(BLOCKS))
    cache.keep()
    cache.weights.append(world.block())
    world.host_memory = 4 * GIB
    assert "available" in refusal(lambda: cache.backend.suspend(1))
    world.host_memory = 64 * GIB
    cache.backend.suspend(1)
    cache.expect_restored()


# ---- whether the weights are the same ----


def rewritten(world: World, cache: Cache) -> None:
    """Write other weights, in place."""
    old = cache.weights[1]
    new = Block(address=old.address, size=old.size, tag=old.tag, data=old.data[::-1])
    assert new.data != old.data
    world.fill(new)
    cache.weights[1] = new


# What happens between keeping and restoring, and whether weights can have changed by it.
STORIES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "a sleep": (False, ("sleep", "wake")),
    "a sleep twice": (False, ("sleep", "sleep", "wake")),
    "a wake-up by tags": (False, ("sleep", "wake weights", "wake kv_cache")),
    "the KV cache first": (False, ("sleep", "wake kv_cache", "wake weights")),
    "the KV cache alone": (False, ("discard", "wake kv_cache")),
    "the KV cache, then all": (False, ("discard", "sleep", "wake")),
    "partly awake": (False, ("sleep", "wake weights", "sleep", "wake")),
    "a write before": (False, ("write", "sleep", "wake")),
    "a write while weights are awake": (
        True, ("sleep", "wake weights", "write", "wake kv_cache")
    ),
    "a write, and all asleep again": (
        True, ("sleep", "wake weights", "write", "sleep", "wake")
    ),
    "a write, and all awake": (True, ("sleep", "wake weights", "write", "wake")),
    "a write beside the KV cache": (True, ("discard", "write", "wake kv_cache")),
    "a write before all sleep": (True, ("discard", "write", "sleep", "wake")),
    "a block more": (True, ("discard", "malloc", "wake kv_cache")),
    "a block less": (True, ("discard", "free", "wake kv_cache")),
    "another block there": (True, ("discard", "free", "malloc", "wake kv_cache")),
    "a digest that fails": (True, ("discard", "no digests", "wake kv_cache")),
    "all digests fail": (True, ("no digests", "discard", "wake kv_cache")),
}  # fmt: skip


@pytest.mark.guard
@pytest.mark.parametrize("first", ["weights_changed", "restore_kv"])
@pytest.mark.parametrize("story", list(STORIES))
def test_whether_weights_have_changed(world: World, story: str, first: str) -> None:
    cache = filled(world)
    changed, steps = STORIES[story]
    expect("before anything is kept", cache.backend.weights_changed(), False)
    if steps[0] == "write":
        # Those of the sleep are what counts, not those of an earlier one.
        rewritten(world, cache)
    cache.keep()
    for step in steps:
        name, _, tag = step.partition(" ")
        if name == "sleep":
            cache.backend.suspend(1)
        elif name == "wake":
            cache.backend.resume([tag] if tag else None)
        elif name == "discard":
            cache.backend.discard(("kv_cache",))
        elif name == "malloc":
            cache.weights.append(world.block())
        elif name == "free":
            world.free(cache.weights.pop())
        elif step == "no digests":
            module(COPIES).digest_by_torch = lambda *block: 1 / 0
            cache.backend.copies._digest = module(COPIES).digest_by_torch
        elif step != steps[0]:
            rewritten(world, cache)
    if first == "restore_kv":
        cache.backend.restore_kv()
        cache.expect_content()
    for _ in range(2):
        expect("whether weights changed", cache.backend.weights_changed(), changed)
    cache.backend.restore_kv()
    cache.expect_content()
    cache.backend.drop_kv()
    expect("after it was dropped", cache.backend.weights_changed(), False)


@pytest.mark.guard
@pytest.mark.parametrize("changed", [False, True])
def test_weights_that_change_after_a_sleep_that_failed(world: World, changed: bool) -> None:
    """Those of that sleep are what counts: it may be repeated at any time."""
    cache = filled(world)
    cache.weights.append(world.block())
    cache.keep()
    world.host_memory = 4 * GIB
    assert "available" in refusal(lambda: cache.backend.suspend(1))
    world.host_memory = 64 * GIB
    if changed:
        rewritten(world, cache)
    cache.backend.suspend(1)
    cache.backend.resume()
    expect("whether weights changed", cache.backend.weights_changed(), changed)
    cache.expect_restored()


@pytest.mark.guard
@pytest.mark.parametrize("again", [False, True])
def test_weights_that_change_after_an_interrupt(world: World, again: bool) -> None:
    """One that comes before their digests: what is not known counts as a change."""
    cache = filled(world)
    cache.keep()
    digest = cache.backend.copies._digest

    def interrupted(*block: Any) -> None:
        raise KeyboardInterrupt

    cache.backend.copies._digest = interrupted
    with pytest.raises(KeyboardInterrupt):
        cache.backend.suspend(1)
    cache.backend.copies._digest = digest
    rewritten(world, cache)
    if again:
        cache.backend.suspend(1)
        cache.backend.resume()
    expect("whether weights changed", cache.backend.weights_changed(), True)


@pytest.mark.guard
def test_digests_are_computed_before_blocks_are_restored(world: World) -> None:
    """Beside 4 GiB of copies they took 0.07 s of an H200 longer than before them, as the memory
    and the copies of digests wait. None are, where the weights were asleep until then."""
    cache = filled(world)
    under_way: list[int] = []
    digest = cache.backend.copies._digest

    def noted(*block: Any) -> None:
        under_way.append(world.fake.work_in_flight())
        digest(*block)

    for tags in (None, ["kv_cache"]):
        cache.keep()
        if tags:
            cache.backend.discard(("kv_cache",))
        else:
            cache.backend.suspend(1)
        cache.backend.resume(tags)
        under_way.clear()
        cache.backend.copies._digest = noted
        cache.backend.restore_kv()
        cache.backend.copies._digest = digest
        expect("digests", len(under_way), 2 if tags else 0)
        expect("copies under way", sum(under_way), 0)
        expect("whether weights changed", cache.backend.weights_changed(), False)
        cache.backend.drop_kv()


# ---- failures and interrupts ----


def settle(cache: Cache) -> None:
    """Everything works from here on, and nothing is left of it."""
    cache.world.fake.fail_nothing()
    cache.backend.resume()
    cache.world.expect_awake(*cache.weights)
    # A handle whose release failed is released when PyTorch allocates or frees next.
    cache.world.free(cache.world.block())
    cache.write(*FEW)
    cache.swap()
    cache.close()


def after_trouble(cache: Cache) -> None:
    """As an engine does after a call that failed: all awake, and blocks whole or dropped.

    Blocks that were never unmapped have their content; others have it if they are kept.
    """
    cache.world.fake.fail_nothing()
    records = cache.world.allocator.pointer_to_data
    asleep = any(records[block.address].is_asleep for block in cache.memory)
    whole = not asleep or cache.backend.kept_kv() == cache.size()
    cache.backend.resume()
    cache.backend.restore_kv()
    if whole:
        cache.expect_content()
    cache.world.expect_awake(*cache.weights)
    cache.backend.drop_kv()


def forget(problem: BaseException | None) -> None:
    """Let go of the frames that an exception passed, which refer to host memory."""
    while problem is not None:
        problem.__traceback__ = None
        problem = problem.__cause__ or problem.__context__


def sleep(cache: Cache, call: str) -> None:
    if call == "suspend":
        cache.backend.suspend(1)
    else:
        cache.backend.discard(("kv_cache",))


@pytest.mark.patched_only
@pytest.mark.parametrize("call", ["suspend", "discard"])
@pytest.mark.parametrize("layout", ["layers", "apart"])
def test_every_call_of_keeping_and_sleeping(world: World, layout: str, call: str) -> None:
    def prepare() -> Cache:
        return filled(world, layout, FEW)

    def operate(cache: Cache) -> None:
        cache.keep()
        sleep(cache, call)

    def check(cache: Cache, problem: Exception | None) -> None:
        assert problem is None or isinstance(problem, RuntimeError), repr(problem)
        forget(problem)
        records = world.allocator.pointer_to_data
        if any(records[block.address].is_asleep for block in cache.memory):
            # Nothing of a block that is not kept is unmapped.
            expect("kept", cache.backend.kept_kv(), cache.size())
        after_trouble(cache)
        settle(cache)

    sweep(world, prepare, operate, check)


@pytest.mark.patched_only
@pytest.mark.parametrize("call", ["suspend", "discard"])
def test_every_call_of_waking_and_restoring(world: World, call: str) -> None:
    def prepare() -> Cache:
        cache = filled(world, "apart", FEW)
        cache.keep()
        sleep(cache, call)
        return cache

    def operate(cache: Cache) -> None:
        cache.backend.resume()
        cache.backend.restore_kv()

    def check(cache: Cache, problem: Exception | None) -> None:
        expect("kept", cache.backend.kept_kv(), cache.size() if problem else (0, 0))
        forget(problem)
        cache.expect_restored()
        expect("whether weights changed", cache.backend.weights_changed(), False)
        settle(cache)

    sweep(world, prepare, operate, check)


@contextlib.contextmanager
def small(world: World) -> Iterator[None]:
    world.digested = 4 << 14
    yield


@pytest.mark.patched_only
@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("call", ["suspend", "discard"])
@pytest.mark.parametrize("state", ["first", "later"])
def test_an_interrupt_in_keeping_and_sleeping(
    world: World, state: str, call: str, part: int
) -> None:
    """Then the call goes on from there, or is taken back; blocks are whole or dropped."""

    def prepare() -> Cache:
        cache = make(world, "apart", weights=1)
        cache.write(*FEW)
        if state == "later":
            cache.swap()
        return cache

    def operate(cache: Cache) -> None:
        cache.keep()
        sleep(cache, call)

    def then_back(cache: Cache) -> None:
        expect("memory given up in use", world.fake.violations(), 0)
        after_trouble(cache)
        cache.write(*FEW)
        cache.swap()
        cache.close()

    def then_on(cache: Cache) -> None:
        kept = cache.backend.kept_kv()
        sleep(cache, call)
        expect("kept", cache.backend.kept_kv(), kept)
        if not kept[0]:
            cache.content.clear()
        cache.expect_restored()
        cache.close()

    def then_deep(cache: Cache) -> None:
        """What may be under way is waited for before host memory goes."""
        cache.backend.suspend(2)
        expect("kept", cache.backend.kept_kv(), (0, 0))
        cache.backend.copies._runtime.give_back()
        expect("memory given up in use", world.fake.violations(), 0)
        cache.backend.resume()
        cache.close()

    with small(world):
        walk(prepare, operate, then_back, then_on, then_deep, part=part, parts=5)


@pytest.mark.patched_only
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("call", ["suspend", "discard"])
def test_an_interrupt_in_waking_and_restoring(world: World, call: str, part: int) -> None:
    """Then both go on from there; or all sleeps again, and they come later."""

    def prepare() -> Cache:
        cache = make(world, "apart", weights=1)
        cache.write(*FEW)
        cache.keep()
        sleep(cache, call)
        return cache

    def operate(cache: Cache) -> None:
        cache.backend.resume()
        cache.backend.restore_kv()

    def then_on(cache: Cache) -> None:
        cache.expect_restored()
        expect("whether weights changed", cache.backend.weights_changed(), False)
        cache.close()

    def then_asleep(cache: Cache) -> None:
        cache.backend.suspend(1)
        expect("kept", cache.backend.kept_kv(), cache.size())
        expect("memory given up in use", world.fake.violations(), 0)
        cache.expect_restored()
        expect("whether weights changed", cache.backend.weights_changed(), False)
        cache.close()

    def then_deep(cache: Cache) -> None:
        cache.backend.suspend(2)
        cache.backend.copies._runtime.give_back()
        expect("memory given up in use", world.fake.violations(), 0)
        cache.backend.resume()
        cache.close()

    with small(world):
        walk(prepare, operate, then_on, then_asleep, then_deep, part=part, parts=4)


def restoration_interrupted(world: World) -> Cache:
    """A KV cache to which blocks are being copied, by a call that has ended."""
    cache = filled(world)
    cache.keep()
    cache.backend.suspend(1)
    cache.backend.resume()
    runtime = cache.backend.copies._runtime
    copy, made = runtime.copy_rows, SimpleNamespace(count=0)

    def interrupted(*arguments: Any) -> None:
        copy(*arguments)
        made.count += 1
        if made.count == 3:
            raise KeyboardInterrupt

    runtime.copy_rows = interrupted
    with pytest.raises(KeyboardInterrupt):
        cache.backend.restore_kv()
    runtime.copy_rows = copy
    assert world.fake.work_in_flight() > 0
    return cache


@pytest.mark.guard
def test_dropping_ends_the_copies_of_an_interrupted_restoration(world: World) -> None:
    """Else they would be made over what is written to the KV cache afterwards."""
    cache = restoration_interrupted(world)
    cache.backend.drop_kv()
    cache.write(*SCATTERED)
    cache.swap()


@pytest.mark.guard
def test_an_interrupted_restoration_has_its_host_memory(world: World) -> None:
    """Also where a level-2 sleep comes next and is interrupted as it begins."""
    cache = restoration_interrupted(world)
    cache.backend.copies.release_kv()
    cache.backend.resume()
    expect("memory given up in use", world.fake.violations(), 0)
    cache.backend.suspend(2)
    expect("registered host memory", world.fake.registered(), 0)
    expect("memory given up in use", world.fake.violations(), 0)


@pytest.mark.patched_only
def test_a_block_freed_while_blocks_are_kept(world: World) -> None:
    """By another thread, while its copies are issued: it is freed later, or its keeping fails."""
    cache = filled(world, "apart")
    runtime = cache.backend.copies._runtime
    copy, made = runtime.copy, SimpleNamespace(count=0)

    def freed_meanwhile(*arguments: Any) -> None:
        made.count += 1
        if made.count == 2:
            thread = threading.Thread(target=world.free, args=(cache.memory[0],))
            thread.start()
            thread.join()
        copy(*arguments)

    runtime.copy = freed_meanwhile
    problem = raised(cache.keep)
    runtime.copy = copy
    expect("copies", made.count >= 2, True)
    assert problem is None or "freed" in str(problem), problem
    cache.backend.suspend(1)
    expect("memory given up in use", world.fake.violations(), 0)
    cache.backend.resume()
    # What could not be freed at once is freed when PyTorch calls next.
    world.free(world.block())
    assert refusal(cache.backend.restore_kv)
    cache.backend.drop_kv()
    world.expect_awake(*cache.weights, cache.memory[1])


# ---- the run on a GPU ----


@pytest.mark.guard
def test_the_run_on_a_gpu_measures_on_the_stand_in(world: World) -> None:
    """tests.gpu.kv_copies: what it measures there it measures here, of less memory."""
    cache = make(world, weights=4)
    gpu: Any = importlib.import_module("tests.gpu.kv_copies")
    gpu.ROW, gpu.REGIONS = 512, 6
    size = 4 * GRANULARITY
    block = world.block("kv_cache", size)
    raw = world.torch.frombuffer(
        (ctypes.c_char * size).from_address(block.address), dtype=world.torch.int8
    )
    setup = gpu.Setup(world.torch, cache.backend, raw, world.synchronize, lambda size: (1.0, 1.0))
    gpu.regions_of.__defaults__ = (gpu.REGIONS, gpu.ROW)
    report: dict[str, Any] = {}
    gpu.measured(setup, size // 9, report)
    kinds = ["contiguous", "runs of 8", "apart"]
    expect("copies", list(report["copies"]), [*kinds, "batch", "single"])
    blocks = {report["copies"][kind]["blocks"] for kind in kinds}
    expect("blocks", blocks, {size // 9 // (gpu.REGIONS * gpu.ROW)})
    for name in ("sleep", "kv_cache"):
        expect(name, list(report[name]), ["nothing", *kinds])
    # The driver's own calls, on memory of whole handles.
    mappings = ((1, 1, "descriptor"), (3, 2, "none"), (1, 1, "fabric"))
    gpu.MAPPINGS, gpu.MIB = mappings, GRANULARITY // 2
    world.fake.driver.cuCtxSetCurrent(None)
    context = ctypes.c_void_p()
    world.fake.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    world.fake.driver.cuCtxSetCurrent(context)
    times = gpu.measure_mapping(world.fake.driver, 6 * GRANULARITY)
    expect("handles", [one["handles"] for one in times], [1, 3, 1])
    expect("failures", ["error" in one for one in times], [False, False, True])
    expect("steps", list(times[0]["later"]), ["create", "map", "access", "unmap", "release"])


@pytest.mark.guard
@pytest.mark.parametrize("seed", seeds(4))
def test_random_operations_without_trouble(world: World, seed: int) -> None:
    counts = KvFuzzer(world, seed, trouble=False).run(300)
    assert counts["restore"] > 0, counts


@pytest.mark.patched_only
@pytest.mark.parametrize("seed", seeds(6))
def test_random_operations(world: World, seed: int) -> None:
    counts = KvFuzzer(world, seed, trouble=True).run(300)
    assert counts["restore"] > 0, counts
    assert counts["failures"] > 0, counts
    assert counts["interrupts"] > 3, counts
