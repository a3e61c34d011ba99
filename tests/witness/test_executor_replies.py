"""The replies of a call that failed or timed out do not answer the next one, nor block it."""

from __future__ import annotations

import re
import time

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import RANKS, Gpus, isolated

rig.use_tree()

LIMIT = 40

pytestmark = pytest.mark.usefixtures("vllm_executor")


def echoes(value: str) -> list[tuple[int, str]]:
    return [(rank, value) for rank in range(RANKS)]


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
def test_a_rank_slower_than_the_grace_does_not_answer_the_next_call(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        gpus.fail(0, "echo")
        gpus.hang(3, "echo")
        with pytest.raises(RuntimeError, match="echo was made to fail"):
            executor.collective_rpc("echo", args=("first",))
        gpus.let_go(3, "echo")
        answer = executor.collective_rpc("echo", timeout=LIMIT, args=("second",))
        assert answer == echoes("second")


@pytest.mark.parametrize(
    ("failing", "hanging"), [pytest.param(0, 3, marks=pytest.mark.guard), (3, 0), (2, 1)]
)
@isolated(LIMIT)
def test_a_rank_that_hangs_does_not_hide_the_failure_of_another(
    gpus: Gpus, failing: int, hanging: int
) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        gpus.fail(failing, "echo")
        gpus.hang(hanging, "echo")
        with pytest.raises(RuntimeError, match="echo was made to fail"):
            executor.collective_rpc("echo", timeout=2, args=("first",))


@isolated(LIMIT)
def test_the_error_names_the_ranks_that_did_not_reply(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        gpus.hang(1, "echo")
        gpus.hang(2, "echo")
        with pytest.raises(TimeoutError, match=re.escape("[1, 2]")):
            executor.collective_rpc("echo", timeout=0.5, args=("first",))
        with pytest.raises((RuntimeError, TimeoutError), match=re.escape("[1, 2]")):
            executor.collective_rpc("check_health", timeout=0.5)


@isolated(LIMIT)
def test_the_error_names_those_that_failed_and_those_that_did_not_reply(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        gpus.hang(1, "echo")
        gpus.fail(3, "echo")
        with pytest.raises(RuntimeError) as caught:
            executor.collective_rpc("echo", timeout=2, args=("first",))
        assert "rank 3: echo was made to fail" in str(caught.value)
        assert "[1]" in str(caught.value)


@isolated(LIMIT)
def test_a_call_behind_one_that_hangs_is_not_sent(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        gpus.hang(1, "check_health")
        with pytest.raises(TimeoutError):
            executor.collective_rpc("check_health", timeout=0.2)
        for _ in range(2):
            with pytest.raises(TimeoutError, match=re.escape("ranks [1] have not replied")):
                executor.collective_rpc("echo", args=("first",))
        assert gpus.calls(0, "echo") == []
        gpus.let_go(1, "check_health")
        answer = executor.collective_rpc("echo", timeout=LIMIT, args=("second",))
        assert answer == echoes("second")
        assert executor.collective_rpc("echo", args=("third",)) == echoes("third")


@isolated(LIMIT)
def test_calls_with_a_time_limit_do_not_fill_the_queue_of_a_rank_that_hangs(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        gpus.hang(1, "echo")
        # The queue has room for ten calls.
        for n in range(14):
            with pytest.raises(TimeoutError):
                executor.collective_rpc("echo", timeout=0.1, args=(str(n),))
        gpus.let_go(1, "echo")
        answer = executor.collective_rpc("echo", timeout=LIMIT, args=("last",))
        assert answer == echoes("last")


@pytest.mark.guard
@isolated(LIMIT)
def test_a_future_may_be_asked_after_its_time_limit(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        future = executor.collective_rpc("echo", timeout=0.5, args=("x",), non_block=True)
        for rank in range(RANKS):
            gpus.until_called(rank, "echo")
        time.sleep(0.7)
        assert future.result() == echoes("x")


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
