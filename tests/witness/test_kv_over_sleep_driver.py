"""Random requests, sleeps with random budgets and failures, on a model that knows its content.

The driver (hypothesis) draws what a server is asked for: requests that share prefixes, steps,
aborts, sleeps of either kind that keep or drop, partial and failing wake-ups. After each call every
hash in the block pool has its content, in GPU memory or on the host, no block is lost or owned
twice, and in the end every text is that of a server that never slept.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.witness import executor_rig
from tests.witness import kept_kv_rig as kv
from tests.witness.executor_rig import isolated

executor_rig.use_tree()

pytestmark = pytest.mark.usefixtures("vllm_executor")

# Runs of each variant; the limit is for a machine with two processors beside other work.
RUNS = int(os.environ.get("SM12X_SEEDS", "40"))
LIMIT = 58 + 2 * max(0, RUNS - 40)
ROOTS = [[n] * 9 + list(range(n, n + 20)) for n in range(3)]
VARIANTS: list[dict[str, Any]] = [
    {"kind": "full"},
    {"kind": "full", "drafts": 2},
    {"kind": "full", "caching": False},
    {"kind": "window"},
    {"kind": "window", "drafts": 2},
    {"kind": "state"},
    # A batch is scheduled while the one before it runs.
    {"kind": "full", "ahead": True},
    {"kind": "window", "ahead": True},
]

_ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "ask": st.tuples(
        st.sampled_from(ROOTS),
        st.integers(1, 29),
        st.lists(st.integers(0, 3), max_size=12),
        st.integers(1, 14),
    ),
    "step": st.tuples(st.integers(1, 6), st.booleans()),
    "sleep": st.tuples(
        st.sampled_from(["keep", "keep", "keep", "abort"]),
        st.sampled_from([None, ["kv_cache"]]),
        st.sampled_from([None, None, None, None, True, False]),
        st.sampled_from([10**6, 10**6, None, *range(0, 26, 2)]),
        st.sampled_from([*[""] * 6, "kv_room", "keep_kv", "sleep", "discard"]),
    ),
    "wake_up": st.tuples(
        st.sampled_from([None, None, None, None, ["weights"], ["kv_cache"], ["scheduling"]]),
        st.sampled_from([*[""] * 5, "wake_up", "restore_kv", "changed", "losing"]),
    ),
    "abort": st.tuples(st.integers(0, 20)),
    "reset": st.just(()),
    "call_workers": st.tuples(st.sampled_from(["check_health", "check_health", "execute_dummy"])),
}


def _call(*names: str) -> st.SearchStrategy[tuple[str, tuple[Any, ...]]]:
    """A call of one of these names; a name that is given twice is drawn twice as often."""
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), _ARGUMENTS[name]))


# Requests and steps before a sleep: one without KV shows nothing.
_rounds = st.tuples(
    st.lists(_call("ask"), min_size=1, max_size=3),
    _call("step").map(lambda call: [call]),
    st.lists(_call("ask", "step", "step", "abort", "reset"), max_size=3),
    _call("sleep").map(lambda call: [call]),
    st.lists(_call("wake_up", "wake_up", "ask", "sleep", "abort", "call_workers"), max_size=3),
    _call("wake_up").map(lambda call: [call]),
    st.lists(_call("step", "step", "ask"), max_size=3),
).map(lambda parts: [call for part in parts for call in part])
_calls = st.lists(_rounds, min_size=2, max_size=5).map(
    lambda rounds: [call for calls in rounds for call in calls]
)


class Driver:
    def __init__(self, rig: kv.Rig, seen: Counter[str]) -> None:
        self.rig = rig
        self.seen = seen

    @property
    def asleep(self) -> bool:
        return bool(self.rig.engine.is_sleeping())

    @property
    def keeper(self) -> Any:
        return self.rig.engine.kv_keeper

    def ask(self, root: list[int], cut: int, tail: list[int], tokens: int) -> None:
        self.rig.ask(str(len(self.rig.asked)), root[:cut] + tail, tokens)

    def step(self, times: int, wrong: bool) -> None:
        if not self.asleep:
            kv.HOST.wrong_drafts = wrong
            self.rig.step(times)

    def abort(self, index: int) -> None:
        names = sorted(self.rig.engine.scheduler.requests)
        if names:
            name = names[index % len(names)]
            self.rig.over.add(name)
            self.rig.engine.abort_requests([name])

    def sleep(
        self, mode: str, tags: list[str] | None, keep: bool | None, room: int | None, failing: str
    ) -> None:
        rig = self.rig
        kv.HOST.blocks, kv.HOST.failing = room, {failing}
        running = set(rig.running())
        before = self.keeper.kept
        refused = keep and not room and before is None and failing != "kv_room"
        expected = pytest.raises(ValueError, match="cannot be kept") if refused else None
        with expected or contextlib.suppress(kv.CallError):
            rig.sleep(mode, tags=tags, keep_kv=keep)
        if refused:
            # Nothing has changed.
            assert self.keeper.kept is before
            assert set(rig.running()) == running
            return
        kept = self.keeper.kept
        if kept is not None and before is None:
            assert len(kept.blocks) <= (room or 0)
            if kept.dropped_blocks:
                rig.check_parents()
            self.seen["part" if kept.dropped_blocks else "whole"] += 1
            self.seen["in flight"] += bool(rig.engine.batch_queue)
            self.seen["preempted"] += len(running) > len(rig.running()) > 0 and mode == "keep"
            if room == 10**6 and mode == "keep":
                assert set(rig.running()) == running
        if keep is False:
            assert kept is None
            assert not rig.cached()
            assert not rig.running()

    def wake_up(self, tags: list[str] | None, fault: str) -> None:
        kv.HOST.failing = {fault} & {"wake_up", "restore_kv"}
        kv.HOST.changed, kv.HOST.losing = fault == "changed", fault == "losing"
        kept, running, awake = self.keeper.kept, set(self.rig.running()), False
        try:
            if self.asleep:
                awake = self.rig.engine.wake_up(tags)
        except kv.CallError:
            assert fault == "wake_up"
        finally:
            kv.HOST.failing = set()
            kv.HOST.changed = kv.HOST.losing = False
        if awake:
            assert self.keeper.kept is None
        if awake and kept is not None:
            self.seen[fault or "restored"] += 1
            if not fault:
                assert set(self.rig.running()) == running

    def reset(self) -> None:
        self.rig.engine.reset_prefix_cache()

    def call_workers(self, method: str) -> None:
        kept = self.keeper.kept
        with contextlib.suppress(Exception):
            self.rig.engine.collective_rpc(method)
        assert self.keeper.kept is (kept if method == "check_health" else None)

    def end(self) -> None:
        self.wake_up(None, "")
        self.rig.finish()
        self.rig.check()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
@isolated(LIMIT)
def test_every_hash_has_its_content(variant: dict[str, Any]) -> None:
    seen: Counter[str] = Counter()
    # From what one longest request needs on: requests preempt each other.
    least = {"full": 26, "window": 40, "state": 34}[variant["kind"]]

    def run(calls: list[tuple[str, tuple[Any, ...]]], more: int) -> None:
        with kv.engine(blocks=least + more, **variant) as rig:
            driver = Driver(rig, seen)
            for name, arguments in calls:
                method: Callable[..., None] = getattr(driver, name)
                method(*arguments)
                rig.check()
            driver.end()

    settled = settings(
        max_examples=RUNS,
        deadline=None,
        database=None,
        derandomize="SM12X_SEEDS" not in os.environ,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    settled(given(_calls, st.sampled_from([0, 4, 30]))(run))()
    print(seen)
    # The driver has been where it was to look.
    wanted = {"whole", "part", "restored", "restore_kv", "losing", "changed"}
    assert (
        wanted - {"part"} <= set(seen) if variant.get("caching") is False else wanted <= set(seen)
    )
