"""Which model is served next: a function of what is known now. No I/O, and the clock is given.

With k the ``residency_swaps``, S the seconds of a swap, R = k x S the residency and D the limit of
a drain, and requests that end within D:

* A GPU spends at most 1 / (k + 1) of its time, and ``burst_swaps`` x S once, in swaps.
* A request of one of N models on the same GPUs waits at most ``boost_seconds`` + (N - 1) x (R + S +
  D) + D + S for its model to be awake: the last two are of the swap that has begun when it comes.

The first, because each displacement either comes after R, or takes S out of a bucket that is filled
at 1 / (k + 1) and holds ``burst_swaps`` x S. The second, because turns are given by the age of the
oldest request, and one that is older by ``boost_seconds`` cannot be overtaken: each other model has
one turn before it, and its queue is empty after that. ``tests/unit/test_pool_policy.py`` plays
both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of the policy; times in seconds."""

    residency_swaps: float = 10.0
    least_residency: float = 0.5
    most_residency: float = 120.0
    burst_swaps: float = 3.0
    priority_seconds: float = 1.0
    boost_seconds: float = 10.0

    def residency(self, swap_seconds: float) -> float:
        """Return the seconds that a model stays, whose swap took ``swap_seconds``."""
        most = max(self.least_residency, self.most_residency)
        return min(most, max(self.least_residency, self.residency_swaps * swap_seconds))


@dataclass(frozen=True, kw_only=True)
class View:
    """One model as the policy sees it; times are of the clock that gives ``now``.

    Attributes:
        changing: a swap of it is in progress.
        waiting_since: when the oldest request came that waits, or was frozen in flight, or when a
            person asked for the model; None without any.
        priority: the highest of the requests that wait, 0 for none.
        running: requests in flight.
        held: requests that wait.
        awake_since: when it was last woken up.
        used: when its last request ended.
        swap_seconds: how long its last swap took, or an estimate.
        fixed: it never sleeps, or is pinned: what is awake stays.
        blocked_until: it is not to be tried before, after a failure.
        idle_seconds: it goes to sleep after so many without a request; None for never.
        spare: it may be started again where that displaces no request, after it had ended.
    """

    name: str
    gpus: frozenset[int]
    awake: bool = False
    changing: bool = False
    waiting_since: float | None = None
    priority: int = 0
    running: int = 0
    held: int = 0
    awake_since: float = 0.0
    used: float = 0.0
    swap_seconds: float = 1.0
    fixed: bool = False
    blocked_until: float = 0.0
    idle_seconds: float | None = None
    spare: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight and nothing waits."""
        return not self.running and not self.held


@dataclass(kw_only=True)
class Ledger:
    """The seconds that each GPU may still lose in swaps of idle models, as a bucket that fills."""

    rules: Rules
    _levels: dict[int, tuple[float, float]] = field(default_factory=dict)

    def _level(self, gpu: int, now: float, swap_seconds: float) -> float:
        most = self.rules.burst_swaps * swap_seconds
        level, at = self._levels.get(gpu, (most, now))
        return min(most, level + (now - at) / (self.rules.residency_swaps + 1))

    def ready(self, gpus: Iterable[int], now: float, swap_seconds: float) -> float:
        """Return when each of ``gpus`` has ``swap_seconds`` to lose: ``now``, or later."""
        if self.rules.burst_swaps < 1:
            return float("inf")
        lacking = [swap_seconds - self._level(gpu, now, swap_seconds) for gpu in gpus]
        return now + max(0.0, *lacking) * (self.rules.residency_swaps + 1) if lacking else now

    def spend(self, gpus: Iterable[int], now: float, swap_seconds: float) -> None:
        """Take the seconds of a swap out of each bucket; it may be overdrawn."""
        for gpu in gpus:
            self._levels[gpu] = (self._level(gpu, now, swap_seconds) - swap_seconds, now)


@dataclass(frozen=True, kw_only=True)
class Swap:
    """``target`` is to be woken up after ``victims`` sleep; "" where they only go to sleep."""

    target: str
    victims: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Swaps to begin now, and when to ask again; None where only an event changes the answer."""

    swaps: tuple[Swap, ...]
    again: float | None


def age(view: View, rules: Rules) -> float:
    """Return since when a model waits, for the order: earlier with priority."""
    boost = min(rules.boost_seconds, view.priority * rules.priority_seconds)
    return (view.waiting_since or 0.0) - boost


def due(victim: View, target: View, now: float, rules: Rules, ledger: Ledger) -> float:
    """Return when ``victim`` has to give way to ``target``.

    After its residency; before that where it is idle, and its GPUs have the time to lose.
    """
    full = victim.awake_since + rules.residency(victim.swap_seconds)
    if not victim.idle:
        return full
    early = ledger.ready(target.gpus | victim.gpus, now, target.swap_seconds)
    return min(full, max(early, victim.awake_since + rules.least_residency))


def decide(now: float, views: Sequence[View], rules: Rules, ledger: Ledger) -> Decision:
    """Return the swaps to begin now.

    The model whose request is the oldest comes first. One that has to wait for its GPUs keeps
    younger ones off them, so that none overtakes it, also where GPU sets overlap in part.
    """
    swaps: list[Swap] = []
    times: list[float] = []
    reserved = {gpu for view in views if view.changing for gpu in view.gpus}
    waiting = [
        view
        for view in views
        if view.waiting_since is not None and not view.awake and not view.changing
    ]
    for view in sorted(waiting, key=lambda one: (age(one, rules), one.name)):
        if view.blocked_until > now:
            times.append(view.blocked_until)
            continue
        victims = _victims(view, views)
        if any(victim.fixed for victim in victims):
            continue
        if view.gpus & reserved:
            reserved |= view.gpus
            continue
        reserved |= view.gpus
        at = max((due(victim, view, now, rules, ledger) for victim in victims), default=now)
        # A victim on further GPUs than the target's, which another swap has taken.
        if at > now:
            times.append(at)
        else:
            swaps.append(Swap(target=view.name, victims=tuple(victim.name for victim in victims)))
            reserved |= {gpu for victim in victims for gpu in victim.gpus}
    for view in views:
        if view.changing or view.gpus & reserved:
            continue
        if view.spare and not view.awake and view.waiting_since is None:
            victims = _victims(view, views)
            at = max(
                (one.awake_since + rules.residency(view.swap_seconds) for one in victims),
                default=now,
            )
            at = max(at, view.blocked_until)
            if any(not victim.idle or victim.fixed for victim in victims):
                continue
            if at > now:
                times.append(at)
            else:
                names = tuple(victim.name for victim in victims)
                swaps.append(Swap(target=view.name, victims=names))
                reserved |= view.gpus.union(*(victim.gpus for victim in victims))
        elif view.awake and view.idle and not view.fixed and view.idle_seconds is not None:
            at = max(view.used, view.awake_since) + view.idle_seconds
            if at > now:
                times.append(at)
            else:
                swaps.append(Swap(target="", victims=(view.name,)))
    return Decision(swaps=tuple(swaps), again=min(times, default=None))


def _victims(view: View, views: Sequence[View]) -> list[View]:
    return [other for other in views if other.awake and other.gpus & view.gpus]


def wait_estimate(name: str, now: float, views: Sequence[View], rules: Rules) -> float:
    """Return the seconds until the model ``name`` may be awake, for Retry-After.

    The turns before its own, each with its residency and its swap; drains are not known before.
    """
    target = next(view for view in views if view.name == name)
    before = [
        view
        for view in views
        if view.name != name
        and view.gpus & target.gpus
        and not view.awake
        and view.waiting_since is not None
        and target.waiting_since is not None
        and age(view, rules) < age(target, rules)
    ]
    seconds = sum(rules.residency(view.swap_seconds) + view.swap_seconds for view in before)
    current = [
        max(0.0, view.awake_since + rules.residency(view.swap_seconds) - now)
        for view in _victims(target, views)
    ]
    blocked = max(0.0, target.blocked_until - now)
    return max(blocked, max(current, default=0.0) + seconds) + target.swap_seconds
