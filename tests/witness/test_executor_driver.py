"""Random calls of sleep and wake_up on ranks that fail, hang or die at random.

After every call, what the executor and the engine say is compared with what the ranks hold. A run
of more steps, or from another seed: SM12X_DRIVER_STEPS, SM12X_DRIVER_SEED.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import CAPACITY, FULL, RANKS, SIZES, Gpus, isolated

rig.use_tree()

STEPS = int(os.environ.get("SM12X_DRIVER_STEPS", "60"))
SEED = int(os.environ.get("SM12X_DRIVER_SEED", "0"))
# A step takes 0.1 s, one in which a rank hangs up to 5 s, on a busy machine more.
LIMIT = 60 + 4 * STEPS
OPERATIONS = ("sleep", "wake_up", "after_wake_up")
TAGS = (None, None, ["weights"], ["kv_cache"], ["weights", "kv_cache"], ["nonsense"])

pytestmark = pytest.mark.usefixtures("vllm_executor")


class Faults:
    """What is wrong with the ranks during one call."""

    def __init__(self, gpus: Gpus, choose: random.Random) -> None:
        self.gpus = gpus
        self.choose = choose
        self.hanging: set[int] = set()

    @contextlib.contextmanager
    def during_a_call(self) -> Iterator[None]:
        """No fault in half of the calls; failures and peers end with it, hanging ranks go on."""
        choose, gpus = self.choose, self.gpus
        if choose.random() < 0.5:
            for rank in choose.sample(range(RANKS), choose.choice((1, 1, 2, 4))):
                kind = choose.choice(("fail", "fail", "peer", "hang"))
                if kind == "fail":
                    gpus.fail(rank, choose.choice(OPERATIONS))
                elif kind == "peer":
                    gpus.peer(rank, choose.randint(1, CAPACITY))
                elif choose.random() < 0.5:
                    gpus.hang(rank, choose.choice(("sleep", "wake_up")))
                    self.hanging.add(rank)
        yield
        for rank in range(RANKS):
            gpus.peer(rank, 0)
            for operation in OPERATIONS:
                gpus.fail(rank, operation, times=0)
        if choose.random() < 0.6:
            self.end()

    def end(self) -> None:
        for rank in self.hanging:
            self.gpus.let_go(rank, "sleep", "wake_up")
        self.hanging.clear()


def settled(gpus: Gpus) -> list[set[str]]:
    """The tags that each rank has mapped, once no rank works on a call any more."""
    time.sleep(0.05)
    held = gpus.used()
    return [{tag for tag in SIZES if used == FULL or used == SIZES[tag]} for used in held]


def check_record(executor: Any, gpus: Gpus) -> None:
    """The executor's record is true on every rank, but for what it says is unsettled."""
    unsettled: frozenset[str] = getattr(executor, "unsettled_tags", frozenset())
    for rank, mapped in enumerate(settled(gpus)):
        awake = set(SIZES) - executor.sleeping_tags
        assert awake <= mapped, f"rank {rank} holds {mapped}, recorded as awake: {awake}"
        asleep = executor.sleeping_tags - unsettled
        assert not asleep & mapped, f"rank {rank} holds {mapped}, recorded as asleep: {asleep}"
    discarded = getattr(executor, "weights_discarded", False)
    assert executor.is_sleeping == bool(executor.sleeping_tags or discarded)


@isolated(LIMIT)
def test_the_executor_knows_what_its_ranks_hold(gpus: Gpus) -> None:
    rig.hurry(sleep=1.5)
    choose = random.Random(SEED)  # noqa: S311
    faults = Faults(gpus, choose)
    weights = 1000
    with rig.executor(gpus) as executor:
        # A level 2 sleep discards the weights: whether they were loaded since, on every rank.
        whole = True
        for step in range(STEPS):
            call = choose.choice(("sleep", "wake_up", "wake_up"))
            level, tags = choose.choice((1, 1, 2)), choose.choice(TAGS)
            all_asleep = executor.sleeping_tags == set(SIZES)
            print(f"step {step}: {call} level {level} tags {tags}; record:", record(executor))
            with faults.during_a_call():
                failed: Exception | None = None
                try:
                    executor.sleep(level) if call == "sleep" else executor.wake_up(tags)
                except Exception as error:
                    failed = error
                print("  failed:", failed, "hanging:", faults.hanging, "used:", gpus.used())
                if call == "sleep" and (level == 2 or getattr(executor, "sleep_level", 0) == 2):
                    whole = False
                if not faults.hanging:
                    check_record(executor, gpus)
                    held = settled(gpus)
                    if call == "sleep" and not failed:
                        assert held == [set()] * RANKS
                    if call == "wake_up" and failed and all_asleep:
                        unsettled = getattr(executor, "unsettled_tags", None)
                        assert unsettled or held == [set()] * RANKS
            if faults.hanging:
                continue
            # No reply of a failed call answers this one.
            expected = [(rank, str(step)) for rank in range(RANKS)]
            assert executor.collective_rpc("echo", timeout=30, args=(str(step),)) == expected
            if executor.sleeping_tags:
                continue
            if not whole:
                weights = 2000 + 10 * step
                executor.collective_rpc("load_new_weights", args=(weights,))
                whole = True
            found = executor.collective_rpc("weights")
            assert found == [weights + rank for rank in range(RANKS)]
        faults.end()
        deadline = time.monotonic() + 30
        while executor.sleeping_tags:
            assert time.monotonic() < deadline
            with contextlib.suppress(Exception):
                executor.wake_up()
        assert gpus.used() == [FULL] * RANKS
        if whole:
            found = executor.collective_rpc("weights", timeout=30)
            assert found == [weights + rank for rank in range(RANKS)]
        rank = choose.randrange(RANKS)
        gpus.die(rank, "sleep")
        for _ in range(2):
            with pytest.raises((RuntimeError, TimeoutError)):
                executor.sleep(1)


def record(executor: Any) -> str:
    names = ("sleeping_tags", "unsettled_tags", "sleep_level")
    return ", ".join(f"{name} {getattr(executor, name, None)}" for name in names)


@isolated(LIMIT)
def test_an_engine_generates_only_when_its_ranks_are_awake(gpus: Gpus) -> None:
    rig.hurry(sleep=1.5)
    choose = random.Random(SEED + 1)  # noqa: S311
    faults = Faults(gpus, choose)
    with rig.engine(gpus) as engine:
        asked: list[str] = []
        for step in range(STEPS):
            call = choose.choice(("sleep", "wake_up", "wake_up", "resume_scheduler"))
            arguments: tuple[Any, ...] = ()
            if call == "sleep":
                arguments = (choose.choice((0, 1, 1, 2)), "keep")
            elif call == "wake_up":
                arguments = (choose.choice(TAGS),)
            print(f"step {step}: {call} {arguments}")
            if choose.random() < 0.3 and len(asked) < 4:
                asked.append(f"request {step}")
                engine.ask(asked[-1])
            with faults.during_a_call():
                try:
                    engine.call(call, *arguments)
                except AssertionError:
                    raise
                except Exception as error:
                    print("  failed:", error)
                asleep = engine.call("is_sleeping")
                print("  is_sleeping:", asleep, "used:", gpus.used(), "hanging:", faults.hanging)
                if not asleep:
                    assert gpus.used() == [FULL] * RANKS
            if not asleep:
                for name in asked:
                    assert engine.answer(name) == [rig.TOKEN] * 3
                asked.clear()
                assert engine.generates(f"after {step}")
        faults.end()
        deadline = time.monotonic() + 30
        while engine.call("is_sleeping"):
            assert time.monotonic() < deadline
            with contextlib.suppress(Exception):
                engine.call("wake_up")
                # Nobody minds here that a sleep of level 2 discarded the weights.
                engine.call("wake_up", ["scheduling"])
        assert gpus.used() == [FULL] * RANKS
        for name in asked:
            assert engine.answer(name) == [rig.TOKEN] * 3
        assert engine.generates("at the end")
