"""Data parallel engines whose memory is in different states do not wait for each other.

Two real engine cores in lockstep, each with two ranks: pretended GPUs 0 and 1 are those of engine
0, 2 and 3 those of engine 1. A forward pass waits for the other engine, as the experts' collectives
do.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import ENGINES, FULL, RANKS, Gpus, isolated

rig.use_tree()

LIMIT = 90
ASLEEP = [0] * RANKS
AWAKE = [FULL] * RANKS
# A peer that holds this much leaves no room for the weights.
MOST = rig.CAPACITY - 20

pytestmark = pytest.mark.usefixtures("vllm_executor")


def succeeds(answers: list[Any]) -> bool:
    return not any(isinstance(answer, BaseException) for answer in answers)


def fails_on_engine_1(answers: list[Any], why: str) -> bool:
    return succeeds(answers[:1]) and why in str(answers[1])


def runs(engines: rig.Engines) -> bool:
    """Whether both engines are awake, and either can generate."""
    awake = engines.call("is_sleeping") == [False] * ENGINES
    return awake and all(engines.generates(f"{n}", engine=n) for n in range(ENGINES))


@pytest.mark.guard
@isolated(LIMIT)
def test_data_parallel_engines_sleep_and_wake(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        assert runs(engines)
        for level in (1, 2):
            assert succeeds(engines.call("sleep", level, "abort"))
            assert gpus.used() == ASLEEP
            if level == 2:
                # Who names the rest in a second call has loaded the weights.
                assert succeeds(engines.call("wake_up", ["weights"]))
                assert succeeds(engines.call("wake_up", ["kv_cache"]))
            else:
                assert succeeds(engines.call("wake_up", None))
            assert gpus.used() == AWAKE
            assert runs(engines)


@isolated(LIMIT)
def test_an_engine_is_not_left_in_the_barrier_when_another_fails_to_wake(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        assert succeeds(engines.call("sleep", 1, "abort"))
        gpus.peer(3, MOST)
        for _ in range(2):
            assert fails_on_engine_1(engines.call("wake_up", None), "out of memory")
            assert engines.call("is_sleeping") == [True] * ENGINES
            assert gpus.used() == [FULL, FULL, 0, 0]
        gpus.peer(3, 0)
        assert succeeds(engines.call("wake_up", None))
        assert runs(engines)


@isolated(LIMIT)
def test_engines_of_which_one_failed_to_wake_can_go_back_to_sleep(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        assert succeeds(engines.call("sleep", 1, "abort"))
        gpus.peer(3, MOST)
        assert fails_on_engine_1(engines.call("wake_up", None), "out of memory")
        assert succeeds(engines.call("sleep", 1, "abort"))
        assert gpus.used() == ASLEEP
        gpus.peer(3, 0)
        assert succeeds(engines.call("wake_up", None))
        assert runs(engines)


@isolated(LIMIT)
def test_an_engine_whose_first_stage_failed_does_not_hold_up_the_second(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        assert succeeds(engines.call("sleep", 1, "abort"))
        gpus.fail(2, "wake_up")
        assert fails_on_engine_1(engines.call("wake_up", ["weights"]), "wake_up was made to fail")
        assert succeeds(engines.call("wake_up", ["kv_cache"]))
        assert engines.call("is_sleeping") == [True] * ENGINES
        assert succeeds(engines.call("wake_up", None))
        assert runs(engines)


@isolated(LIMIT)
def test_engines_do_not_resume_while_one_is_asleep(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        assert succeeds(engines.call("sleep", 1, "abort"))
        assert succeeds(engines.call("resume_scheduler"))
        assert engines.call("is_sleeping") == [True] * ENGINES
        gpus.peer(3, MOST)
        assert fails_on_engine_1(engines.call("wake_up", None), "out of memory")
        assert succeeds(engines.call("resume_scheduler"))
        assert engines.call("is_sleeping") == [True] * ENGINES
        gpus.peer(3, 0)
        assert succeeds(engines.call("wake_up", None))
        assert runs(engines)


@isolated(LIMIT)
def test_a_sleep_that_failed_on_one_engine_can_be_repeated_or_undone(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        gpus.fail(2, "sleep")
        assert fails_on_engine_1(engines.call("sleep", 1, "abort"), "sleep was made to fail")
        assert succeeds(engines.call("sleep", 1, "abort"))
        assert gpus.used() == ASLEEP
        assert succeeds(engines.call("wake_up", None))
        assert runs(engines)


@isolated(LIMIT)
def test_an_engine_that_failed_to_pause_does_not_hold_up_the_others(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        gpus.fail(2, "reset_encoder_cache")
        answers = engines.call("sleep", 1, "abort")
        assert fails_on_engine_1(answers, "reset_encoder_cache was made to fail")
        assert gpus.used() == [0, 0, FULL, FULL]
        assert succeeds(engines.call("sleep", 1, "abort"))
        assert gpus.used() == ASLEEP
        assert succeeds(engines.call("wake_up", None))
        assert runs(engines)


@isolated(LIMIT)
def test_sleeping_engines_run_no_dummy_batch(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        assert succeeds(engines.call("sleep", 1, "abort"))
        batches = gpus.calls(0, "execute_dummy_batch")
        assert succeeds(engines.call("sleep", 1, "abort"))
        assert gpus.calls(0, "execute_dummy_batch") == batches
        assert succeeds(engines.call("wake_up", None))
        assert runs(engines)
