"""Random calls, large and small, on ranks that reply late, in parts, with an error or not at all.

And random sleeps, loads and weight updates of an engine that must never serve discarded weights.
A run of more steps, or from another seed: SM12X_DRIVER_STEPS, SM12X_DRIVER_SEED.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import FULL, GARBAGE, RANKS, TOKEN, Gpus, isolated

rig.use_tree()

STEPS = int(os.environ.get("SM12X_DRIVER_STEPS", "30"))
SEED = int(os.environ.get("SM12X_DRIVER_SEED", "0"))
LIMIT = 60 + 6 * STEPS
MIB = 1 << 20
# The shared memory of a reply has 24 MiB; a socket carries what is larger.
SIZES = (0, 10, 1 * MIB, 25 * MIB)
LARGE = 100 * MIB

pytestmark = pytest.mark.usefixtures("vllm_executor")


def check(replies: Any, ranks: Any, value: str, size: int) -> None:
    """The replies are those of this call, whole and in the order of the ranks."""
    assert [(rank, name) for rank, name, _ in replies] == [(rank, value) for rank in ranks]
    for rank, _, payload in replies:
        assert len(payload) == size
        assert not size or payload[0] == payload[size // 2] == payload[-1] == rank


@isolated(LIMIT)
def test_every_call_has_its_own_replies(gpus: Gpus) -> None:
    rig.hurry(grace=1.0)
    choose = random.Random(SEED)  # noqa: S311
    with rig.executor(gpus) as executor:
        for step in range(STEPS):
            size = LARGE if step % 10 == 9 else choose.choice(SIZES)
            timeout = choose.choice((None, None, 0.0, 0.3, 1.0, 30.0))
            failing = choose.sample(range(RANKS), choose.choice((0, 0, 0, 1, 2)))
            late = {rank: choose.choice((0, 0, 0.1, 0.7)) for rank in range(RANKS)}
            payload = {rank: choose.choice((0, 0, 0.2, 0.8)) for rank in range(RANKS)}
            hanging = choose.randrange(RANKS) if timeout and choose.random() < 0.2 else None
            print(f"step {step}: {size} {timeout} {failing} {late} {payload} {hanging}")
            for rank in range(RANKS):
                gpus.fail(rank, "bulk", times=1 if rank in failing else 0)
                gpus.late(rank, "bulk", late[rank])
                gpus.delay_payload(rank, payload[rank])
            if hanging is not None:
                gpus.hang(hanging, "bulk")
            ranks = list(range(RANKS))
            only = choose.choice((None, None, None, choose.randrange(RANKS)))
            if only is not None:
                ranks = [only]
            calls = choose.choice((1, 1, 3)) if not failing and hanging is None else 1
            futures = []
            for call in range(calls):
                options = {"args": (f"{step}.{call}", size), "unique_reply_rank": only}
                try:
                    futures.append(
                        executor.collective_rpc("bulk", timeout, non_block=True, **options)
                    )
                except TimeoutError:
                    # Not sent: ranks still owe the replies of an earlier step.
                    futures.append(None)
            for call, future in enumerate(futures):
                if future is None:
                    continue
                try:
                    replies = future.result()
                except TimeoutError as error:
                    assert timeout is not None
                    print("  timed out:", error)
                except RuntimeError as error:
                    print("  failed:", error)
                    assert set(failing) & set(ranks)
                else:
                    assert not set(failing) & set(ranks)
                    replies = [replies] if only is not None else replies
                    check(replies, ranks, f"{step}.{call}", size)
            if hanging is not None:
                gpus.let_go(hanging, "bulk")
            if choose.random() < 0.5:
                settle(executor, gpus, step)
        settle(executor, gpus, STEPS)


def settle(executor: Any, gpus: Gpus, step: int) -> None:
    """Once no rank is late, calls are sent, and have their own replies."""
    for rank in range(RANKS):
        gpus.fail(rank, "bulk", times=0)
        gpus.late(rank, "bulk", 0)
        gpus.delay_payload(rank, 0)
    deadline = time.monotonic() + 30
    while True:
        try:
            replies = executor.collective_rpc("bulk", 30, args=(f"after {step}", 10))
        except TimeoutError:
            assert time.monotonic() < deadline
        else:
            check(replies, range(RANKS), f"after {step}", 10)
            return


CALLS: tuple[tuple[Any, ...], ...] = (
    ("sleep", 0, "keep"),
    ("sleep", 1, "keep"),
    ("sleep", 2, "keep"),
    ("sleep", 2, "keep"),
    ("wake_up",),
    ("wake_up",),
    ("wake_up", ["weights"]),
    ("wake_up", ["kv_cache"]),
    ("wake_up", ["weights", "kv_cache"]),
    ("wake_up", ["scheduling"]),
    ("resume_scheduler",),
    ("collective_rpc", "reload_weights"),
    ("collective_rpc", "reload_weights"),
    ("collective_rpc", "start_weight_update"),
    ("collective_rpc", "start_weight_update"),
    ("collective_rpc", "update_weights", None, (6000,)),
    ("collective_rpc", "finish_weight_update"),
    ("collective_rpc", "finish_weight_update"),
    ("collective_rpc", "start_draft_weight_update"),
    ("collective_rpc", "echo", None, ("x",)),
)
FAULTS = ("sleep", "wake_up", "after_wake_up", "reload_weights", "update_weights")


@isolated(LIMIT)
def test_no_engine_serves_what_it_discarded(gpus: Gpus) -> None:
    """A wake_up by name after the weights, and the end of an update, vouch for them."""
    rig.hurry()
    choose = random.Random(SEED + 1)  # noqa: S311
    with rig.engine(gpus) as engine:
        vouched = False
        for step in range(2 * STEPS):
            call = choose.choice(CALLS)
            rank = choose.randrange(RANKS)
            fault = choose.choice(FAULTS) if choose.random() < 0.2 else ""
            if fault:
                gpus.fail(rank, fault)
            try:
                result = engine.call(*call)
            except AssertionError:
                raise
            except Exception as error:
                result = error
            if fault:
                gpus.fail(rank, fault, times=0)
            asleep = engine.call("is_sleeping")
            print(f"step {step}: {call} {fault} -> {result}; asleep: {asleep}")
            if call[0] == "sleep" and call[1] == 2:
                vouched = False
            named = call[0] == "wake_up" and call[1:] in ((["kv_cache"],), (["scheduling"],))
            vouched |= named or call[1:2] == ("finish_weight_update",)
            if call[0] in ("wake_up", "resume_scheduler") and not isinstance(result, Exception):
                assert result == (not asleep)
            if not asleep:
                assert gpus.used() == [FULL] * RANKS
                assert vouched or GARBAGE not in engine.weights()
                assert engine.generates(f"after {step}")
        with contextlib.suppress(Exception):
            engine.call("collective_rpc", "finish_weight_update")
        engine.call("wake_up")
        engine.call("collective_rpc", "reload_weights")
        assert engine.weights() == [5000 + n for n in range(RANKS)]
        engine.ask("at the end")
        assert engine.answer("at the end") == [TOKEN] * 3
