"""The scheduler runs nothing while memory is asleep on any rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import FULL, RANKS, Gpus, isolated

rig.use_tree()

LIMIT = 40
ASLEEP = [0] * RANKS
AWAKE = [FULL] * RANKS
# A peer that holds this much leaves no room for the weights.
MOST = rig.CAPACITY - 20
ORIGINAL = [1000 + rank for rank in range(RANKS)]

pytestmark = pytest.mark.usefixtures("vllm_executor")


@pytest.mark.guard
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@isolated(LIMIT)
def test_an_engine_sleeps_wakes_and_generates(gpus: Gpus, mode: str) -> None:
    with rig.engine(gpus) as engine:
        assert engine.generates("before")
        for level in (1, 2, 0):
            engine.call("sleep", level, mode)
            assert engine.call("is_sleeping")
            assert gpus.used() == (ASLEEP if level else AWAKE)
            if level == 2:
                # Who names the rest in a second call has loaded the weights.
                engine.call("wake_up", ["weights"])
                engine.call("wake_up", ["kv_cache"])
            else:
                engine.call("wake_up", ["scheduling"] if level == 0 else None)
            assert not engine.call("is_sleeping")
            assert engine.generates(f"after {level}")


@pytest.mark.parametrize("mode", ["abort", "wait"])
@isolated(LIMIT)
def test_an_engine_survives_a_sleep_that_failed_on_one_rank(gpus: Gpus, mode: str) -> None:
    with rig.engine(gpus) as engine:
        # With "wait" the sleep itself happens later, when this request is done.
        for rank in range(RANKS):
            gpus.late(rank, "execute_model", 0.1)
        engine.ask("in flight")
        gpus.until_called(0, "execute_model")
        gpus.fail(2, "sleep")
        with pytest.raises(Exception, match="sleep was made to fail"):
            engine.call("sleep", 1, mode)
        engine.answer("in flight")
        assert engine.call("is_sleeping")
        engine.call("wake_up")
        assert not engine.call("is_sleeping")
        assert engine.generates("after")
        assert engine.weights() == ORIGINAL


@isolated(LIMIT)
def test_an_engine_can_repeat_a_sleep_that_failed_on_one_rank(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        gpus.fail(2, "sleep")
        with pytest.raises(Exception, match="sleep was made to fail"):
            engine.call("sleep", 1)
        engine.call("sleep", 1)
        assert gpus.used() == ASLEEP
        engine.call("wake_up")
        assert engine.weights() == ORIGINAL
        assert engine.generates("after")


@isolated(LIMIT)
def test_requests_wait_until_a_wake_up_has_succeeded_on_every_rank(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 1)
        engine.ask("while asleep")
        gpus.peer(2, MOST)
        for _ in range(2):
            with pytest.raises(Exception, match="rank 2: CUDA Error: out of memory"):
                engine.call("wake_up")
            assert engine.call("is_sleeping")
            assert gpus.used() == ASLEEP
        assert gpus.calls(0, "execute_model") == []
        gpus.peer(2, 0)
        engine.call("wake_up")
        assert not engine.call("is_sleeping")
        assert engine.answer("while asleep") == [rig.TOKEN] * 3
        assert engine.weights() == ORIGINAL


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("wake_up", (["weights"],)),
        ("wake_up", (["nonsense"],)),
        ("wake_up", (["scheduling"],)),
        ("wake_up", ([],)),
        ("resume_scheduler", ()),
    ],
)
@isolated(LIMIT)
def test_nothing_runs_while_memory_is_asleep(
    gpus: Gpus, call: str, arguments: tuple[Any, ...]
) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 1)
        engine.ask("while asleep")
        engine.call(call, *arguments)
        assert engine.call("is_sleeping")
        time.sleep(0.3)
        assert gpus.calls(0, "execute_model") == []
        engine.call("wake_up")
        assert not engine.call("is_sleeping")
        assert engine.answer("while asleep") == [rig.TOKEN] * 3


@isolated(LIMIT)
def test_a_sleep_that_a_wake_up_overtook_does_not_come_true_later(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        for rank in range(RANKS):
            gpus.late(rank, "execute_model", 0.3)
        engine.ask("in flight")
        gpus.until_called(0, "execute_model")
        sleep = engine.begin("sleep", 1, "wait")
        engine.call("wake_up")
        assert engine.answer("in flight") == [rig.TOKEN] * 3
        with pytest.raises(Exception, match="overtaken"):
            sleep.result()
        assert engine.generates("after")
