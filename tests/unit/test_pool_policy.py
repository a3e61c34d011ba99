"""The pool's policy: nobody starves, nothing thrashes. Both bounds of its docstring, played."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sm12x.pool import policy
from sm12x.pool.policy import Ledger, Rules, View

RULES = Rules(most_residency=1e9, least_residency=0.0)
SWAP, DRAIN = 0.5, 4.0
EPSILON = 1e-6


def view(name: str, *gpus: int, **more: object) -> View:
    return replace(View(name=name, gpus=frozenset(gpus or (0,)), swap_seconds=SWAP), **more)  # type: ignore[arg-type]


def decide(
    now: float, *views: View, rules: Rules = RULES, ledger: Ledger | None = None
) -> policy.Decision:
    return policy.decide(now, views, rules, ledger or Ledger(rules=rules))


@dataclass(order=True)
class Request:
    arrival: float
    model: str = field(compare=False)
    service: float = field(compare=False)
    priority: int = field(compare=False, default=0)
    wait: float = field(compare=False, default=-1.0)


class Played:
    """Models, GPUs and requests in a time of their own; a swap takes SWAP after its drain."""

    def __init__(self, gpus: dict[str, frozenset[int]], rules: Rules = RULES) -> None:
        self.rules = rules
        self.ledger = Ledger(rules=rules)
        self.views = {
            name: View(name=name, gpus=its, swap_seconds=SWAP) for name, its in gpus.items()
        }
        self.queues: dict[str, list[Request]] = {name: [] for name in gpus}
        self.events: list[tuple[float, int, str, object]] = []
        self.count = 0
        self.swaps: list[tuple[float, policy.Swap]] = []
        self.now = 0.0

    def at(self, time: float, kind: str, what: object = None) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, kind, what))

    def change(self, name: str, **more: object) -> None:
        self.views[name] = replace(self.views[name], **more)  # type: ignore[arg-type]

    def admit(self, request: Request) -> None:
        request.wait = self.now - request.arrival
        self.change(request.model, running=self.views[request.model].running + 1)
        self.at(self.now + request.service, "end", request)

    def queued(self, name: str) -> None:
        queue = self.queues[name]
        self.change(
            name,
            held=len(queue),
            waiting_since=queue[0].arrival if queue else None,
            priority=max((one.priority for one in queue), default=0),
        )

    def play(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.at(request.arrival, "arrival", request)
        draining: list[policy.Swap] = []
        while self.events:
            self.now, _, kind, what = heapq.heappop(self.events)
            if isinstance(what, Request):
                seen = self.views[what.model]
                if kind == "arrival" and seen.awake and not seen.changing:
                    self.admit(what)
                elif kind == "arrival":
                    self.queues[what.model].append(what)
                    self.queued(what.model)
                else:
                    self.change(what.model, running=seen.running - 1, used=self.now)
            elif isinstance(what, policy.Swap):
                for name in what.victims:
                    self.change(name, awake=False, changing=False)
                gpus = frozenset().union(*(self.views[name].gpus for name in what.victims))
                if what.target:
                    gpus |= self.views[what.target].gpus
                    self.change(what.target, awake=True, changing=False, awake_since=self.now)
                    for request in self.queues[what.target]:
                        self.admit(request)
                    self.queues[what.target].clear()
                    self.queued(what.target)
                self.ledger.spend(gpus, self.now, SWAP)
                self.swaps.append((self.now, what))
                awake = [one for one in self.views.values() if one.awake]
                assert all(
                    not one.gpus & other.gpus
                    for one in awake
                    for other in awake
                    if one is not other
                )
            for swap in [*draining]:
                if not any(self.views[name].running for name in swap.victims):
                    draining.remove(swap)
                    self.at(self.now + SWAP, "swapped", swap)
            decision = policy.decide(self.now, [*self.views.values()], self.rules, self.ledger)
            for swap in decision.swaps:
                for name in (*swap.victims, *([swap.target] if swap.target else [])):
                    assert not self.views[name].changing
                    self.change(name, changing=True)
                draining.append(swap)
                self.at(self.now, "look")
            if decision.again is not None:
                assert decision.again >= self.now
                self.at(max(decision.again, self.now + 1e-9), "look")


def requests(models: int) -> st.SearchStrategy[list[Request]]:
    return st.lists(
        st.builds(
            Request,
            arrival=st.floats(0, 60),
            model=st.sampled_from([f"m{number}" for number in range(models)]),
            service=st.floats(0, DRAIN),
            priority=st.integers(0, 9),
        ),
        min_size=1,
        max_size=60,
    )


def residency(rules: Rules = RULES) -> float:
    return rules.residency(SWAP)


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 5).flatmap(lambda n: st.tuples(st.just(n), requests(n))))
def test_nobody_waits_longer_than_the_bound(case: tuple[int, list[Request]]) -> None:
    number, sent = case
    played = Played({f"m{one}": frozenset({0, 1}) for one in range(number)})
    played.play(sent)
    turn = residency() + SWAP + DRAIN
    most = RULES.boost_seconds + (number - 1) * turn + DRAIN + SWAP
    assert all(0 <= request.wait <= most + EPSILON for request in sent)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_nobody_starves_where_gpu_sets_overlap_in_part(data: st.DataObject) -> None:
    sets = data.draw(st.lists(st.frozensets(st.integers(0, 3), min_size=1), min_size=2, max_size=5))
    sent = data.draw(requests(len(sets)))
    played = Played({f"m{one}": gpus for one, gpus in enumerate(sets)})
    played.play(sent)
    turn = residency() + SWAP + DRAIN
    most = RULES.boost_seconds + len(sets) * turn + DRAIN + SWAP
    assert all(0 <= request.wait <= most + EPSILON for request in sent)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["m0", "m1", "m2"]), st.floats(0, 3)), min_size=2, max_size=200
    ),
    st.sampled_from([0.0, 1.0, 3.0, 5.0]),
)
def test_swaps_take_no_more_than_their_share_of_time(
    gaps: list[tuple[str, float]], burst: float
) -> None:
    rules = replace(RULES, burst_swaps=burst)
    played = Played({name: frozenset({0}) for name in ("m0", "m1", "m2")}, rules)
    at, sent = 0.0, []
    for model, gap in gaps:
        at += gap
        sent.append(Request(arrival=at, model=model, service=0.0))
    played.play(sent)
    for begin, (first, _) in enumerate(played.swaps):
        for end in range(begin + 1, len(played.swaps)):
            # The first of the window is one that it begins with.
            span, lost = played.swaps[end][0] - first, (end - begin) * SWAP
            allowed = span / (rules.residency_swaps + 1) + burst * SWAP
            assert lost <= allowed + EPSILON


def test_alternating_requests_do_not_thrash() -> None:
    played = Played({"m0": frozenset({0}), "m1": frozenset({0})})
    sent = [Request(arrival=0.1 * n, model=f"m{n % 2}", service=0.01) for n in range(20_000)]
    played.play(sent)
    span = played.now
    assert len(played.swaps) * SWAP <= span / 11 + RULES.burst_swaps * SWAP + SWAP
    assert len(played.swaps) >= span / (12 * SWAP)


def test_an_idle_model_gives_way_at_once_while_its_gpu_has_time_to_lose() -> None:
    awake = view("a", awake=True, awake_since=99.9)
    waits = view("b", waiting_since=100.0, held=1)
    ledger = Ledger(rules=RULES)
    assert decide(100.0, awake, waits, ledger=ledger).swaps == (
        policy.Swap(target="b", victims=("a",)),
    )
    for _ in range(3):
        ledger.spend([0], 100.0, SWAP)
    decision = decide(100.0, awake, waits, ledger=ledger)
    assert decision.swaps == ()
    assert decision.again == pytest.approx(99.9 + residency())


def test_a_busy_model_stays_for_its_residency() -> None:
    awake = view("a", awake=True, awake_since=98.0, running=3)
    waits = view("b", waiting_since=90.0, held=1)
    decision = decide(100.0, awake, waits)
    assert decision.swaps == ()
    assert decision.again == pytest.approx(98.0 + residency())
    assert decide(103.0, awake, waits).swaps


def test_the_older_request_comes_first_unless_priority_counts_for_more() -> None:
    old, young = view("old", waiting_since=10.0, held=1), view("young", waiting_since=12.0, held=1)
    assert decide(20.0, old, young).swaps[0].target == "old"
    ahead = replace(young, priority=3)
    assert decide(20.0, old, ahead).swaps[0].target == "young"
    # All priority counts for no more than the boost.
    old = replace(old, waiting_since=12.0 - RULES.boost_seconds - 0.1)
    assert decide(20.0, old, replace(young, priority=9)).swaps[0].target == "old"


def test_independent_gpu_sets_swap_at_the_same_time() -> None:
    views = [
        view("a", 0, awake=True),
        view("b", 0, waiting_since=1.0, held=1),
        view("c", 1, awake=True),
        view("d", 1, waiting_since=2.0, held=1),
    ]
    swaps = decide(1000.0, *views).swaps
    assert {(swap.target, swap.victims) for swap in swaps} == {("b", ("a",)), ("d", ("c",))}


def test_a_model_on_two_gpus_is_not_overtaken_on_one_of_them() -> None:
    views = [
        view("one", 0, awake=True, awake_since=999.0, running=1),
        view("both", 0, 1, waiting_since=1.0, held=1),
        view("two", 1, waiting_since=2.0, held=1),
    ]
    assert decide(1000.0, *views).swaps == ()


def test_pinned_models_stay_and_their_peers_do_not_block_others() -> None:
    views = [
        view("pinned", 0, awake=True, fixed=True),
        view("waits", 0, 1, waiting_since=1.0, held=1),
        view("other", 1, waiting_since=2.0, held=1),
    ]
    assert [swap.target for swap in decide(1000.0, *views).swaps] == ["other"]


def test_an_idle_timeout_puts_to_sleep_and_is_put_off_by_use() -> None:
    idle = view("a", awake=True, awake_since=0.0, used=50.0, idle_seconds=60.0)
    assert decide(100.0, idle).again == pytest.approx(110.0)
    assert decide(110.0, idle).swaps == (policy.Swap(target="", victims=("a",)),)
    assert decide(110.0, replace(idle, running=1)).swaps == ()
    assert decide(110.0, replace(idle, fixed=True)).swaps == ()


def test_an_ended_server_starts_again_only_where_it_displaces_no_request() -> None:
    ended = view("ended", spare=True, blocked_until=5.0)
    assert decide(4.0, ended).again == pytest.approx(5.0)
    assert decide(6.0, ended).swaps == (policy.Swap(target="ended", victims=()),)
    busy = view("busy", awake=True, running=1)
    assert decide(1000.0, ended, busy).swaps == ()
    assert decide(1000.0, ended, replace(busy, running=0)).swaps == (
        policy.Swap(target="ended", victims=("busy",)),
    )


def test_a_failed_model_is_tried_again_later_and_blocks_nobody_until_then() -> None:
    failed = view("failed", waiting_since=1.0, held=1, blocked_until=50.0)
    other = view("other", waiting_since=2.0, held=1)
    decision = decide(10.0, failed, other)
    assert [swap.target for swap in decision.swaps] == ["other"]
    assert decision.again == pytest.approx(50.0)


def test_retry_after_counts_the_turns_before() -> None:
    views = [
        view("a", awake=True, awake_since=99.0, running=1),
        view("b", waiting_since=90.0, held=1),
        view("c", waiting_since=95.0, held=1),
    ]
    first = policy.wait_estimate("b", 100.0, views, RULES)
    second = policy.wait_estimate("c", 100.0, views, RULES)
    assert first == pytest.approx(residency() - 1.0 + SWAP)
    assert second == pytest.approx(first + residency() + SWAP)
