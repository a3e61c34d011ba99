"""SLEEP_MODE_RECLAIM_SEGMENTS=0: a load keeps its unused segments until the pool is left."""

from __future__ import annotations

import os

import pytest
from tests.witness.caching import Caching, Rig
from tests.witness.test_segment_reclaim import CAP, load, pools
from tests.witness.world import GIB


def peak(rig: Rig, setting: str) -> int:
    """The bytes mapped at most, with an allocator that is made with this setting."""
    os.environ["SLEEP_MODE_RECLAIM_SEGMENTS"] = setting
    rig.cumem.CuMemAllocator.instance = None
    rig.allocator = rig.cumem.CuMemAllocator.get_instance()
    with rig.allocator.use_memory_pool("weights"):
        kept = load(rig, 20)
        assert (pools(rig) > 1) == (setting == "1"), f"{pools(rig)} pools"
    assert rig.mapped() == sum(tensor.numel() for tensor in kept), "the pool's end gives back all"
    return rig.peak


def on(rig: Rig) -> None:
    assert peak(rig, "1") < 8 * GIB


def off(rig: Rig) -> None:
    assert peak(rig, "0") > 10 * GIB


def test_unused_segments_go_back(caching: Caching) -> None:
    caching.run(__file__, "on", CAP)


@pytest.mark.guard
def test_switched_off_they_stay(caching: Caching) -> None:
    caching.run(__file__, "off", CAP)
