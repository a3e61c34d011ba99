"""Where a block has several chunks, as on ROCm: all of them are mapped, or none."""

from __future__ import annotations

import random

import pytest
from tests.fakecuda.standin import Alive
from tests.witness.test_allocator_churn import OPERATIONS, SEEDS, Churn
from tests.witness.world import CHUNK, EMPTY, Block, World, expect, sweep

OFFLOAD = ("weights",)


def blocks_of_chunks(world: World) -> list[Block]:
    world.use_rocm()
    return [world.block("weights", 3 * CHUNK), world.block("kv_cache", 2 * CHUNK)]


def expect_held(world: World, *blocks: Block) -> None:
    """The driver holds the chunks of these blocks, which are awake."""
    chunks = sum(block.size // CHUNK for block in blocks)
    expect(
        "what the driver holds",
        world.fake.alive(),
        Alive(
            handles=chunks,
            mappings=chunks,
            reservations=len(blocks),
            physical=chunks * CHUNK,
        ),
    )
    expect("the records", world.records(), {block.address for block in blocks})
    world.expect_awake(*blocks)


def test_every_call_of_malloc(world: World) -> None:
    def operate(blocks: list[Block]) -> None:
        world.allocator.current_tag = "weights"
        address = world.malloc(3 * CHUNK)
        if address:
            blocks.append(Block(address=address, size=3 * CHUNK, tag="kv_cache", data=b""))

    def check(blocks: list[Block], problem: Exception | None) -> None:
        expect("what it raised", problem, None)
        expect_held(world, *blocks)
        blocks.append(world.block("weights", 3 * CHUNK))
        expect_held(world, *blocks)

    sweep(world, lambda: blocks_of_chunks(world), operate, check)


def test_every_call_of_free(world: World) -> None:
    def operate(blocks: list[Block]) -> None:
        world.free(blocks.pop(0))

    def check(blocks: list[Block], problem: Exception | None) -> None:
        expect("what it raised", problem, None)
        blocks.append(world.block("weights", 3 * CHUNK))
        expect_held(world, *blocks)

    sweep(world, lambda: blocks_of_chunks(world), operate, check, error=700)


def test_every_call_of_sleep(world: World) -> None:
    def operate(blocks: list[Block]) -> None:
        world.allocator.sleep(OFFLOAD)

    def check(blocks: list[Block], problem: Exception | None) -> None:
        if problem is not None:
            world.allocator.sleep(OFFLOAD)
        world.expect_asleep(*blocks)
        world.allocator.wake_up()
        expect_held(world, *blocks)

    sweep(world, lambda: blocks_of_chunks(world), operate, check)


def test_every_call_of_wake_up(world: World) -> None:
    def prepare() -> list[Block]:
        blocks = blocks_of_chunks(world)
        world.allocator.sleep(OFFLOAD)
        return blocks

    def operate(blocks: list[Block]) -> None:
        world.allocator.wake_up()

    def check(blocks: list[Block], problem: Exception | None) -> None:
        if problem is not None:
            expect("physical memory", world.fake.alive().physical, 0)
            world.allocator.wake_up()
        expect_held(world, *blocks)

    sweep(world, prepare, operate, check)


def test_an_unmap_that_fails_keeps_the_bytes_of_every_chunk(world: World) -> None:
    block = blocks_of_chunks(world)[0]
    handle = world.allocator.pointer_to_data[block.address].handle

    def state() -> int:
        return len(world.records())

    def operate(_: int) -> None:
        world.cumem.unmap_and_release(handle)

    def check(_: int, problem: Exception | None) -> None:
        if problem is not None:
            world.expect_awake(block)
        operate(0)
        expect("physical memory", world.fake.alive().physical, 2 * CHUNK)

    sweep(world, state, operate, check)


def test_chunks_that_stay_mapped_are_given_back_later(world: World) -> None:
    world.use_rocm()
    address = world.malloc(3 * CHUNK)
    world.fake.fail("cuMemUnmap", count=1_000_000)
    world.free_raw(address, 3 * CHUNK)
    world.fake.fail_nothing()
    for _ in range(2):
        # One handle is tried again per operation as long as one fails.
        world.free_raw(world.malloc(CHUNK), CHUNK)
    expect("what the driver holds", world.fake.alive(), EMPTY)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_churn_of_chunks(world: World, seed: int) -> None:
    world.use_rocm()
    Churn(world, random.Random(seed), chunks=True).run(OPERATIONS)  # noqa: S311


@pytest.mark.guard
def test_blocks_live(world: World) -> None:
    blocks = blocks_of_chunks(world)
    expect_held(world, *blocks)
    world.allocator.sleep(OFFLOAD)
    expect("physical memory asleep", world.fake.alive().physical, 0)
    world.allocator.wake_up()
    expect_held(world, *blocks)
    for block in blocks:
        world.free(block)
    expect("what the driver holds in the end", world.fake.alive(), EMPTY)
