"""What the executor asks its workers for: which level, which tags, for how long."""

from __future__ import annotations

import time

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import FULL, RANKS, SIZES, Gpus, isolated

rig.use_tree()

LIMIT = 40
ASLEEP = [0] * RANKS
AWAKE = [FULL] * RANKS
ORIGINAL = [1000 + rank for rank in range(RANKS)]

pytestmark = pytest.mark.usefixtures("vllm_executor")


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_a_rollback_has_the_level_of_the_sleep_before(gpus: Gpus, level: int) -> None:
    """At level 1 it would copy to the host what a level 2 sleep has discarded."""
    with rig.executor(gpus) as executor:
        executor.sleep(level)
        gpus.fail(1, "after_wake_up")
        with pytest.raises(RuntimeError, match="after_wake_up was made to fail"):
            executor.wake_up()
        assert gpus.used() == ASLEEP
        assert gpus.calls(0, "sleep") == [f"sleep {level}"] * 2
        # All ranks are known to sleep: none is asked again.
        executor.sleep(level)
        assert gpus.calls(0, "sleep") == [f"sleep {level}"] * 2


@isolated(LIMIT)
def test_a_rollback_of_offloaded_weights_discards_nothing(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        executor.wake_up(["kv_cache"])
        # Level 2 is for what is awake, which is the KV cache alone.
        executor.sleep(2)
        gpus.fail(1, "after_wake_up")
        with pytest.raises(RuntimeError, match="after_wake_up was made to fail"):
            executor.wake_up()
        executor.wake_up()
        assert executor.collective_rpc("weights") == ORIGINAL


@isolated(LIMIT)
def test_a_failed_second_stage_gives_the_memory_of_the_cache_back(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        executor.wake_up(["weights"])
        gpus.fail(1, "after_wake_up")
        with pytest.raises(RuntimeError, match="after_wake_up was made to fail"):
            executor.wake_up(["kv_cache"])
        assert gpus.used() == [SIZES["weights"]] * RANKS
        executor.wake_up(["kv_cache"])
        assert executor.collective_rpc("weights") == ORIGINAL
        assert gpus.used() == AWAKE


@isolated(LIMIT)
def test_both_tags_wake_what_is_asleep_of_them(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.discard(("kv_cache",))
        executor.wake_up(["weights", "kv_cache"])
        assert not executor.is_sleeping
        assert gpus.used() == AWAKE
        executor.sleep(1)
        executor.wake_up(["weights"])
        executor.wake_up(["weights", "kv_cache", "nonsense"])
        assert not executor.is_sleeping
        assert gpus.used() == AWAKE
        assert executor.collective_rpc("weights") == ORIGINAL


@isolated(LIMIT)
def test_what_succeeded_is_settled(gpus: Gpus) -> None:
    """No rank is asked again for a sleep that all have had."""
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        gpus.fail(1, "wake_up")
        gpus.fail(2, "sleep")
        with pytest.raises(RuntimeError, match="wake_up was made to fail"):
            executor.wake_up()
        assert executor.sleeping_tags == executor.unsettled_tags == set(SIZES)
        executor.wake_up(["weights"])
        assert executor.sleeping_tags == executor.unsettled_tags == {"kv_cache"}
        executor.wake_up(["kv_cache"])
        assert not executor.sleeping_tags | executor.unsettled_tags
        executor.sleep(1)
        asked = gpus.calls(0, "sleep")
        executor.sleep(1)
        assert gpus.calls(0, "sleep") == asked
        executor.wake_up()
        executor.wake_up()
        assert executor.collective_rpc("weights") == ORIGINAL


@isolated(LIMIT)
def test_the_time_limit_is_a_setting(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SLEEP_TIMEOUT_SECONDS", "0.5")
    with rig.executor(gpus) as executor:
        gpus.hang(1, "sleep")
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="1"):
            executor.sleep(1)
        assert time.monotonic() - begin < LIMIT / 2
