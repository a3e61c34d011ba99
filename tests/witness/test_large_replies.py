"""A reply too large for shared memory, which a socket carries, is not lost on its way.

vLLM marks the slot of such a reply as read before its payload has come.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import RANKS, Gpus, isolated

rig.use_tree()

LIMIT = 60
# The shared memory of a reply has 24 MiB.
SIZE = 25 << 20

pytestmark = pytest.mark.usefixtures("vllm_executor")


def bulk(executor: Any, value: str, size: int = SIZE, timeout: float | None = LIMIT) -> None:
    """Every rank's reply to a call, in the order of the ranks."""
    replies = executor.collective_rpc("bulk", timeout, args=(value, size))
    assert [(rank, name) for rank, name, _ in replies] == [(n, value) for n in range(RANKS)]
    for rank, _, payload in replies:
        assert len(payload) == size
        assert payload[0] == payload[-1] == rank


def echoes(executor: Any, value: str) -> bool:
    expected = [(rank, value) for rank in range(RANKS)]
    return bool(executor.collective_rpc("echo", timeout=LIMIT, args=(value,)) == expected)


@pytest.mark.guard
@isolated(LIMIT)
def test_a_payload_that_is_slow_to_come_is_waited_for(gpus: Gpus) -> None:
    """0.8 s: longer than a look at one rank's queue may take."""
    with rig.executor(gpus) as executor:
        for rank in range(RANKS - 1):
            gpus.delay_payload(rank, 0.8)
        bulk(executor, "first", timeout=None)
        bulk(executor, "second")
        assert echoes(executor, "third")


@isolated(LIMIT)
def test_a_payload_that_comes_after_the_time_limit_answers_no_later_call(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        gpus.delay_payload(1, 2)
        future = executor.collective_rpc("bulk", 0.01, args=("first", SIZE), non_block=True)
        gpus.until_called(1, "notice")
        with contextlib.suppress(TimeoutError):
            future.result()
        gpus.delay_payload(1, 0)
        bulk(executor, "second")
        assert echoes(executor, "third")


@pytest.mark.guard
@isolated(LIMIT)
def test_late_replies_are_in_the_order_of_the_ranks(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        for rank, seconds in enumerate((1.2, 0, 0.7, 0)):
            gpus.late(rank, "echo", seconds)
        assert echoes(executor, "first")
        assert echoes(executor, "second")


@isolated(LIMIT)
def test_a_rank_that_dies_on_the_way_ends_the_call(gpus: Gpus) -> None:
    """Its payload never comes, and no time limit ends the wait."""
    with rig.executor(gpus) as executor:
        gpus.delay_payload(2, 2 * LIMIT)
        future = executor.collective_rpc("bulk", args=("first", SIZE), non_block=True)
        gpus.until_called(2, "bulk")
        executor.workers[2].proc.kill()
        with pytest.raises(RuntimeError, match="died"):
            future.result()


# -- a rank that died ---------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["sleep", "wake_up", "collective_rpc"])
@isolated(LIMIT)
def test_after_a_rank_died_every_call_says_so(gpus: Gpus, call: str) -> None:
    with rig.executor(gpus) as executor:
        arguments = {"sleep": (1,), "wake_up": (), "collective_rpc": ("echo", None, ("x",))}
        if call == "wake_up":
            executor.sleep(1)
        gpus.die(1, "echo" if call == "collective_rpc" else call)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="worker process died"):
                getattr(executor, call)(*arguments[call])
