"""The states of a model, and the steps of a swap: what may follow what. No I/O and no clock."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """The state of a model, as its server has last told it."""

    # Not asked yet, or a call had no answer.
    UNKNOWN = "unknown"
    # No server runs: it has not been started, or has ended.
    STOPPED = "stopped"
    STARTING = "starting"
    AWAKE = "awake"
    # Requests in flight end, later ones are held.
    DRAINING = "draining"
    FALLING = "falling asleep"
    ASLEEP = "asleep"
    # Awake by its own account, or about to be, and not served before its canary.
    WAKING = "waking"
    # Taken out: its answers were wrong, or nobody could tell its state.
    OUT = "out"


# What a server tells when it is asked may be any of the settled states.
SETTLED = frozenset({Phase.UNKNOWN, Phase.STOPPED, Phase.AWAKE, Phase.ASLEEP, Phase.OUT})
_LOST = frozenset({Phase.UNKNOWN, Phase.STOPPED, Phase.OUT})

FOLLOWING: Mapping[Phase, frozenset[Phase]] = {
    Phase.UNKNOWN: SETTLED | {Phase.STARTING, Phase.WAKING, Phase.FALLING},
    Phase.STOPPED: _LOST | {Phase.STARTING},
    # A started server is not served before its canary.
    Phase.STARTING: _LOST | {Phase.WAKING},
    Phase.AWAKE: _LOST | {Phase.DRAINING, Phase.FALLING, Phase.ASLEEP},
    Phase.DRAINING: _LOST | {Phase.AWAKE, Phase.FALLING},
    Phase.FALLING: _LOST | {Phase.AWAKE, Phase.ASLEEP},
    Phase.ASLEEP: _LOST | {Phase.WAKING, Phase.AWAKE},
    Phase.WAKING: _LOST | {Phase.AWAKE, Phase.ASLEEP, Phase.FALLING},
    # Back after a person, or another canary, has found it well.
    Phase.OUT: SETTLED | {Phase.FALLING, Phase.WAKING, Phase.STARTING},
}


class ForbiddenMoveError(Exception):
    """A state that cannot follow the one before: a defect of the pool."""


def require_move(before: Phase, after: Phase) -> Phase:
    """Return ``after``. Raises ForbiddenMoveError where it cannot follow ``before``."""
    if after is not before and after not in FOLLOWING[before]:
        raise ForbiddenMoveError(f"{before} cannot become {after}")
    return after


class StepError(Exception):
    """A step of a swap that failed. ``out`` names the model to take out for it."""

    def __init__(self, text: str, *, out: str = "") -> None:
        super().__init__(text)
        self.out = out


class Step(StrEnum):
    """A step of a swap. RESTORE wakes again what the swap had put to sleep."""

    DRAIN = "drain"
    SLEEP = "sleep"
    PROVE = "prove"
    WAKE = "wake"
    CANARY = "canary"
    # Puts the model that was to serve back to sleep.
    RETREAT = "retreat"
    RESTORE = "restore"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


ENDS = frozenset({Step.DONE, Step.CANCELLED, Step.FAILED})

# The step after one that succeeded, and after one that did not.
_NEXT: Mapping[Step, tuple[Step, Step]] = {
    # A drain that takes too long ends the swap, and no request.
    Step.DRAIN: (Step.SLEEP, Step.CANCELLED),
    Step.SLEEP: (Step.PROVE, Step.RESTORE),
    Step.PROVE: (Step.WAKE, Step.RESTORE),
    Step.WAKE: (Step.CANARY, Step.RETREAT),
    Step.CANARY: (Step.DONE, Step.RETREAT),
    Step.RETREAT: (Step.RESTORE, Step.RESTORE),
    Step.RESTORE: (Step.FAILED, Step.FAILED),
}


def following(step: Step, *, well: bool, wakes: bool) -> Step:
    """Return the step after ``step``, which ended ``well`` or not.

    ``wakes`` is false where models are only put to sleep. Raises KeyError after an end.
    """
    if step is Step.PROVE and well and not wakes:
        return Step.DONE
    return _NEXT[step][0 if well else 1]
