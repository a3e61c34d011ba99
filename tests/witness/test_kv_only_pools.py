"""A release of the KV cache alone is refused, too, where the cache is in no pool."""

from __future__ import annotations

import os

import pytest
from tests.witness.test_worker_sleep import WORKER
from tests.witness.weights_rig import Pooled
from tests.witness.world import World, expect, raised

pytestmark = pytest.mark.loads(WORKER)


def test_a_cache_that_no_pool_has_is_not_released(world: World) -> None:
    # An error where it is asked for, else a warning.
    os.environ["VLLM_SLEEP_REQUIRE_POOLS"] = "1"
    rig = Pooled(world)
    rig.kv_caches[0] = rig.outside(8, 8)
    error = raised(lambda: rig.worker.discard(("kv_cache",)))
    assert isinstance(error, RuntimeError), f"discard ended with {error!r}"
    expect("the cache is named", "the KV cache in GPU memory" in str(error), True)
    world.expect_alive(*rig.blocks)


@pytest.mark.guard
def test_weights_that_no_pool_has_do_not_matter(world: World) -> None:
    rig = Pooled(world)
    if not hasattr(rig.worker, "discard"):
        # The untouched release has no such call, which the test above shows to be there.
        return
    rig.register("experts", rig.torch.zeros(64, 64))
    rig.worker.discard(("kv_cache",))
    rig.worker.wake_up()
    world.expect_alive(*rig.blocks)
