"""Patch 0001: a failing driver call leaves nothing behind and does not spoil later calls."""

from __future__ import annotations

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import World, expect


def test_malloc_works_after_a_failed_one(world: World) -> None:
    world.fake.set_capacity(4 * GRANULARITY)
    expect("an oversized block", world.malloc(8 * GRANULARITY), 0)
    block = world.block()
    world.expect_alive(block)
    world.expect_usable(block)


@pytest.mark.guard
def test_a_block_lives(world: World) -> None:
    block = world.block()
    world.expect_alive(block)
    world.expect_usable(block)
