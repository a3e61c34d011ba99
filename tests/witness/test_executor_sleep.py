"""A failed sleep or wake-up leaves executor and scheduler agreeing with the workers.

Witness of the patch "executor and scheduler agree with the workers after a failed sleep or wake".
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import FULL, RANKS, SIZES, Gpus, isolated

rig.use_tree()

LIMIT = 30
ASLEEP = [0] * RANKS
AWAKE = [FULL] * RANKS
# A peer that holds this much leaves no room for the weights.
MOST = rig.CAPACITY - 20
ORIGINAL = [1000 + rank for rank in range(RANKS)]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    rig.prepare()


@pytest.fixture
def gpus(tmp_path: Path) -> Gpus:
    return Gpus(tmp_path / "gpus")


def echoes(value: str) -> list[tuple[int, str]]:
    return [(rank, value) for rank in range(RANKS)]


# -- replies of the workers ---------------------------------------------------------------------


@isolated(LIMIT)
def test_a_failing_rank_leaves_no_reply_for_the_next_call(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        gpus.fail(1, "echo")
        with pytest.raises(RuntimeError, match="echo was made to fail"):
            executor.collective_rpc("echo", args=("first",))
        assert executor.collective_rpc("echo", args=("second",)) == echoes("second")


@isolated(LIMIT)
def test_the_error_names_every_rank_that_failed(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        gpus.fail(1, "echo")
        gpus.fail(3, "echo")
        with pytest.raises(RuntimeError) as caught:
            executor.collective_rpc("echo", args=("x",))
        assert "rank 1: echo was made to fail" in str(caught.value)
        assert "rank 3: echo was made to fail" in str(caught.value)
        assert "rank 0" not in str(caught.value)


@isolated(LIMIT)
def test_a_reply_that_came_too_late_does_not_answer_the_next_call(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        gpus.late(2, "echo", 0.6)
        with pytest.raises(TimeoutError):
            executor.collective_rpc("echo", args=("first",), timeout=0.2)
        gpus.late(2, "echo", 0)
        assert executor.collective_rpc("echo", args=("second",)) == echoes("second")


@isolated(LIMIT)
def test_a_rank_slower_than_the_grace_does_not_answer_the_next_call(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor import multiproc_executor

    monkeypatch.setattr(multiproc_executor, "REPLY_GRACE_SECONDS", 0.2, raising=False)
    with rig.executor(gpus) as executor:
        gpus.fail(0, "echo")
        gpus.late(3, "echo", 1.0)
        with pytest.raises(RuntimeError, match="echo was made to fail"):
            executor.collective_rpc("echo", args=("first",))
        gpus.late(3, "echo", 0)
        assert executor.collective_rpc("echo", args=("second",)) == echoes("second")


@pytest.mark.guard
@isolated(LIMIT)
def test_a_rank_that_hangs_does_not_hide_the_failure_of_another(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor import multiproc_executor

    monkeypatch.setattr(multiproc_executor, "REPLY_GRACE_SECONDS", 0.2, raising=False)
    with rig.executor(gpus) as executor:
        gpus.fail(0, "echo")
        gpus.late(3, "echo", 5)
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="echo was made to fail"):
            executor.collective_rpc("echo", args=("first",))
        assert time.monotonic() - begun < 4


@isolated(LIMIT)
def test_a_failing_future_leaves_the_one_behind_it_alone(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        gpus.fail(0, "echo")
        first = executor.collective_rpc("echo", args=("first",), non_block=True)
        second = executor.collective_rpc("echo", args=("second",), non_block=True)
        assert second.result() == echoes("second")
        with pytest.raises(RuntimeError, match="echo was made to fail"):
            first.result()


@pytest.mark.guard
@isolated(LIMIT)
def test_a_call_that_one_rank_answers_waits_for_that_rank_alone(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        gpus.fail(2, "echo")
        with pytest.raises(RuntimeError, match="echo was made to fail"):
            executor.collective_rpc("echo", args=("first",), unique_reply_rank=2)
        answer = executor.collective_rpc("echo", args=("second",), unique_reply_rank=2)
        assert answer == (2, "second")
        assert executor.collective_rpc("echo", args=("third",)) == echoes("third")


# -- the executor's view ------------------------------------------------------------------------


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
        assert not executor.is_sleeping
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
        assert not executor.is_sleeping
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
        assert not executor.is_sleeping
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
def test_what_is_awake_is_not_woken_again(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        executor.wake_up(["weights"])
        executor.wake_up()
        assert gpus.calls(0, "wake_up") == ["wake_up weights", "wake_up kv_cache"]
        executor.sleep(1)
        executor.wake_up(["weights"])
        executor.wake_up(["weights", "kv_cache"])
        assert not executor.is_sleeping


@isolated(LIMIT)
def test_a_tag_named_twice_is_woken_once(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        executor.wake_up(["weights", "weights", "kv_cache"])
        assert not executor.is_sleeping
        assert gpus.used() == AWAKE


# -- the scheduler's view -----------------------------------------------------------------------


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


@isolated(LIMIT)
def test_a_cache_that_could_not_be_reset_fails_the_sleep_and_not_the_engine(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        for rank in range(RANKS):
            gpus.late(rank, "execute_model", 0.1)
        engine.ask("in flight")
        gpus.until_called(0, "execute_model")
        gpus.fail(1, "reset_encoder_cache")
        with pytest.raises(Exception, match="reset_encoder_cache was made to fail"):
            engine.call("sleep", 1, "wait")
        assert engine.answer("in flight") == [rig.TOKEN] * 3
        engine.call("wake_up")
        assert engine.generates("after")


@isolated(LIMIT)
def test_a_data_parallel_engine_does_not_resume_while_memory_is_asleep() -> None:
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import DPEngineCoreProc

    def refuse(*args: Any) -> NoReturn:
        raise AssertionError("the scheduler was resumed, or the other engines asked to")

    core = object.__new__(DPEngineCoreProc)
    core.pending_pause = core.engines_running = core.ignore_start_dp_wave = False
    core.model_executor = SimpleNamespace(is_sleeping=True, sleeping_tags={"kv_cache"})
    core.scheduler = SimpleNamespace(
        pause_state=PauseState.PAUSED_NEW, set_pause_state=refuse, has_unfinished_requests=refuse
    )
    core.resume_scheduler()
    assert core.is_scheduler_paused()
