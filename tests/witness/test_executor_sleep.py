"""A failed sleep or wake_up leaves the executor with a true record of what its ranks hold."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import FULL, RANKS, SIZES, Gpus, isolated

rig.use_tree()

LIMIT = 40
ASLEEP = [0] * RANKS
AWAKE = [FULL] * RANKS
# A peer that holds this much leaves no room for the weights.
MOST = rig.CAPACITY - 20
ORIGINAL = [1000 + rank for rank in range(RANKS)]

pytestmark = pytest.mark.usefixtures("vllm_executor")


@pytest.mark.guard
@isolated(LIMIT)
def test_the_workers_are_asked_what_they_always_were(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.wake_up()
        executor.sleep(1)
        executor.sleep(1)
        assert executor.is_sleeping
        assert executor.sleeping_tags == set(SIZES)
        executor.wake_up(["nonsense"])
        executor.wake_up()
        assert not executor.is_sleeping
        executor.sleep(2)
        executor.wake_up(["weights"])
        assert executor.sleeping_tags == {"kv_cache"}
        executor.wake_up(["kv_cache"])
        assert not executor.sleeping_tags
        for rank in range(RANKS):
            assert gpus.calls(rank, "sleep", "wake_up") == [
                "sleep 1",
                "wake_up all",
                "sleep 2",
                "wake_up weights",
                "wake_up kv_cache",
            ]


@isolated(LIMIT)
def test_a_sleep_that_failed_on_one_rank_can_be_repeated(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        gpus.fail(2, "sleep")
        with pytest.raises(RuntimeError, match="sleep was made to fail"):
            executor.sleep(1)
        assert gpus.used() == [0, 0, SIZES["weights"], 0]
        assert executor.is_sleeping
        executor.sleep(1)
        assert gpus.used() == ASLEEP
        executor.wake_up()
        assert not executor.is_sleeping
        assert gpus.used() == AWAKE
        assert executor.collective_rpc("weights") == ORIGINAL


@isolated(LIMIT)
def test_a_sleep_that_failed_on_one_rank_can_be_abandoned(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        gpus.fail(2, "sleep")
        with pytest.raises(RuntimeError, match="sleep was made to fail"):
            executor.sleep(1)
        executor.wake_up()
        assert not executor.is_sleeping
        assert gpus.used() == AWAKE
        assert executor.collective_rpc("weights") == ORIGINAL


@pytest.mark.parametrize(
    ("begun", "repeated", "sent"),
    [
        (2, 1, "sleep 2"),
        pytest.param(1, 2, "sleep 2", marks=pytest.mark.guard),
        pytest.param(1, 1, "sleep 1", marks=pytest.mark.guard),
    ],
)
@isolated(LIMIT)
def test_a_repeated_sleep_keeps_what_the_first_discarded_discarded(
    gpus: Gpus, begun: int, repeated: int, sent: str
) -> None:
    with rig.executor(gpus) as executor:
        gpus.fail(2, "sleep")
        with pytest.raises(RuntimeError, match="sleep was made to fail"):
            executor.sleep(begun)
        executor.sleep(repeated)
        assert gpus.calls(2, "sleep") == [f"sleep {begun}", sent]
        assert gpus.used() == ASLEEP


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_a_wake_up_that_failed_on_one_rank_leaves_every_rank_asleep(gpus: Gpus, level: int) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(level)
        gpus.peer(2, MOST)
        with pytest.raises(RuntimeError, match="rank 2: CUDA Error: out of memory"):
            executor.wake_up()
        # The GPUs whose ranks did wake are free for the peer, as before the call.
        assert gpus.used() == ASLEEP
        assert executor.is_sleeping
        assert executor.sleeping_tags == set(SIZES)
        gpus.peer(2, 0)
        executor.wake_up()
        assert not executor.sleeping_tags
        assert gpus.used() == AWAKE
        expected = ORIGINAL if level == 1 else [rig.GARBAGE] * RANKS
        assert executor.collective_rpc("weights") == expected


@isolated(LIMIT)
def test_a_wake_up_that_failed_after_the_memory_was_back_is_undone_too(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        gpus.fail(1, "after_wake_up")
        with pytest.raises(RuntimeError, match="after_wake_up was made to fail"):
            executor.wake_up()
        assert gpus.used() == ASLEEP
        executor.wake_up()
        assert executor.collective_rpc("weights") == ORIGINAL


@pytest.mark.parametrize("then", ["wake_up", "sleep"])
@isolated(LIMIT)
def test_a_wake_up_that_could_not_be_undone_can_be_finished_either_way(
    gpus: Gpus, then: str
) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        gpus.peer(2, MOST)
        gpus.fail(0, "sleep")
        with pytest.raises(RuntimeError, match="rank 2: CUDA Error: out of memory"):
            executor.wake_up()
        assert gpus.used() == [SIZES["weights"], 0, 0, 0]
        assert executor.is_sleeping
        if then == "sleep":
            executor.sleep(1)
            assert gpus.used() == ASLEEP
        gpus.peer(2, 0)
        executor.wake_up()
        assert not executor.is_sleeping
        assert gpus.used() == AWAKE
        assert executor.collective_rpc("weights") == ORIGINAL


@isolated(LIMIT)
def test_a_second_stage_that_failed_keeps_the_weights_loaded_since(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(2)
        executor.wake_up(["weights"])
        executor.collective_rpc("load_new_weights", args=(2000,))
        gpus.peer(1, 30)
        with pytest.raises(RuntimeError, match="rank 1: CUDA Error: out of memory"):
            executor.wake_up(["kv_cache"])
        assert executor.is_sleeping
        assert executor.sleeping_tags == {"kv_cache"}
        gpus.peer(1, 0)
        executor.wake_up(["kv_cache"])
        assert not executor.sleeping_tags
        assert gpus.used() == AWAKE
        assert executor.collective_rpc("weights") == [2000 + rank for rank in range(RANKS)]


@isolated(LIMIT)
def test_a_sleep_between_the_stages_releases_what_was_woken(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(2)
        executor.wake_up(["weights"])
        executor.collective_rpc("load_new_weights", args=(2000,))
        # These weights are whole on every rank: level 1 is meant, and can be kept.
        executor.sleep(1)
        assert gpus.used() == ASLEEP
        executor.wake_up()
        assert executor.collective_rpc("weights") == [2000 + rank for rank in range(RANKS)]


@isolated(LIMIT)
def test_a_tag_named_twice_is_woken_once(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        executor.wake_up(["weights", "weights", "kv_cache"])
        assert not executor.is_sleeping
        assert gpus.used() == AWAKE


# -- a rank that hangs --------------------------------------------------------------------------


def finish(executor: Any, gpus: Gpus, *expected: int) -> None:
    """The ranks reply again: everything can be woken, and is what it was."""
    deadline = time.monotonic() + LIMIT / 2
    while executor.sleeping_tags:
        try:
            executor.wake_up()
        except Exception:
            assert time.monotonic() < deadline
    assert gpus.used() == AWAKE
    assert executor.collective_rpc("weights") == list(expected or ORIGINAL)


@pytest.mark.parametrize("failing", [1, None])
@pytest.mark.parametrize("call", ["wake_up", "sleep"])
@isolated(LIMIT)
def test_a_rank_that_hangs_in_wake_up_does_not_block_the_engine(
    gpus: Gpus, failing: int | None, call: str
) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        if failing is not None:
            gpus.fail(failing, "wake_up")
        gpus.hang(0, "wake_up", "sleep")
        with pytest.raises((RuntimeError, TimeoutError)) as caught:
            executor.wake_up()
        if failing is not None:
            assert "rank 1: wake_up was made to fail" in str(caught.value)
        assert executor.is_sleeping
        assert executor.sleeping_tags == set(SIZES)
        asked = gpus.calls(2, "wake_up", "sleep")
        not_sent = f"{call} was not sent to the workers"
        with pytest.raises((RuntimeError, TimeoutError), match=not_sent):
            getattr(executor, call)()
        assert gpus.calls(2, "wake_up", "sleep") == asked
        gpus.let_go(0, "wake_up", "sleep")
        finish(executor, gpus)


@isolated(LIMIT)
def test_a_rank_that_failed_in_wake_up_may_hang_in_the_rollback(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        gpus.fail(1, "after_wake_up")
        gpus.hang(1, "sleep")
        with pytest.raises(RuntimeError, match="rank 1: after_wake_up was made to fail"):
            executor.wake_up()
        assert gpus.used() == [0, FULL, 0, 0]
        assert executor.is_sleeping
        gpus.let_go(1, "sleep")
        finish(executor, gpus)


@isolated(LIMIT)
def test_a_rank_that_hangs_in_the_second_stage_does_not_block_the_engine(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        executor.sleep(2)
        executor.wake_up(["weights"])
        executor.collective_rpc("load_new_weights", args=(2000,))
        gpus.hang(3, "wake_up")
        with pytest.raises(TimeoutError):
            executor.wake_up(["kv_cache"])
        assert executor.sleeping_tags == {"kv_cache"}
        gpus.let_go(3, "wake_up")
        finish(executor, gpus, *(2000 + rank for rank in range(RANKS)))


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_a_rank_that_hangs_in_sleep_does_not_block_the_engine(gpus: Gpus, level: int) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        gpus.hang(2, "sleep")
        with pytest.raises(TimeoutError):
            executor.sleep(level)
        assert gpus.used() == [0, 0, FULL, 0]
        assert executor.is_sleeping
        with pytest.raises((RuntimeError, TimeoutError), match="sleep was not sent to the workers"):
            executor.sleep(level)
        gpus.let_go(2, "sleep")
        finish(executor, gpus, *(ORIGINAL if level == 1 else [rig.GARBAGE] * RANKS))


@isolated(LIMIT)
def test_an_engine_with_a_rank_that_hangs_answers(gpus: Gpus) -> None:
    rig.hurry()
    with rig.engine(gpus) as engine:
        engine.call("sleep", 1)
        gpus.fail(1, "wake_up")
        gpus.hang(0, "wake_up", "sleep")
        with pytest.raises(Exception, match="rank 1: wake_up was made to fail"):
            engine.call("wake_up")
        for call in ("wake_up", "sleep", "wake_up"):
            assert engine.call("is_sleeping")
            with pytest.raises(Exception, match="have not replied"):
                engine.call(call)
        gpus.let_go(0, "wake_up", "sleep")
        deadline = time.monotonic() + LIMIT / 2
        while engine.call("is_sleeping"):
            assert time.monotonic() < deadline
            with contextlib.suppress(Exception):
                engine.call("wake_up")
        assert engine.generates("after")


@isolated(LIMIT)
def test_an_engine_with_a_rank_that_hangs_can_be_shut_down(gpus: Gpus) -> None:
    rig.hurry()
    with rig.engine(gpus) as engine:
        engine.call("sleep", 1)
        gpus.fail(1, "wake_up")
        gpus.hang(0, "wake_up")
        with pytest.raises(Exception, match="wake_up was made to fail"):
            engine.call("wake_up")


@isolated(LIMIT)
def test_a_rank_that_dies_in_the_rollback_ends_the_call(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        gpus.fail(1, "after_wake_up")
        gpus.die(1, "sleep")
        with pytest.raises(RuntimeError, match="rank 1: after_wake_up was made to fail"):
            executor.wake_up()
        with pytest.raises(RuntimeError):
            executor.wake_up()


# -- one GPU ------------------------------------------------------------------------------------


@isolated(LIMIT)
def test_one_gpu_is_asleep_again_after_a_failed_wake_up(gpus: Gpus) -> None:
    with rig.in_process(gpus) as executor:
        executor.sleep(1)
        gpus.fail(0, "after_wake_up")
        with pytest.raises(RuntimeError, match="after_wake_up was made to fail"):
            executor.wake_up()
        assert gpus.used()[0] == 0
        assert executor.is_sleeping
        executor.wake_up()
        assert not executor.is_sleeping
        assert executor.collective_rpc("weights") == [ORIGINAL[0]]
