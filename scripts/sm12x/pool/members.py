"""One model of a pool: its server, its state as last told, and the requests that wait for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from sm12x.pool import canaries, state
from sm12x.pool.config import Spec
from sm12x.pool.engines import Engine, Rank
from sm12x.pool.state import Phase

# Seconds that a first swap is taken to need.
FIRST_SWAP = 1.0


class RefusalError(Exception):
    """A request that is not served: its status, why, and when to come again (seconds)."""

    def __init__(self, status: int, code: str, text: str, retry: float | None = None) -> None:
        super().__init__(text)
        self.status, self.code, self.text, self.retry = status, code, text, retry


class Ticket:
    """One request's place: it waits, or counts as in flight, until ``Rotation.leave``."""

    __slots__ = ("admitted", "future", "member", "priority", "since", "size", "waited")

    def __init__(self, member: Member, since: float, priority: int) -> None:
        self.member = member
        self.since = since
        self.priority = priority
        self.size = 0
        self.admitted = False
        self.waited = 0.0
        self.future: asyncio.Future[None] | None = None


@dataclass(kw_only=True, eq=False)
class Member:
    """One model: its server, its state as last told, and its queue.

    Attributes:
        changing: a swap of it is in progress.
        lock: held by what changes the server.
        asked: when the server was last asked for its state, in seconds of the wall clock.
        need: bytes that each rank wakes up with, as its last sleep told.
        frozen_since: when requests in flight were frozen.
    """

    spec: Spec
    engine: Engine
    rung: str
    phase: Phase = Phase.UNKNOWN
    reason: str = ""
    changing: bool = False
    pinned: bool = False
    spare: bool = False
    wanted_since: float | None = None
    frozen_since: float | None = None
    awake_since: float = 0.0
    used: float = 0.0
    asked: float = 0.0
    swap_seconds: float = FIRST_SWAP
    measured: bool = False
    failures: int = 0
    blocked_until: float = 0.0
    running: int = 0
    held_bytes: int = 0
    freezes: bool = True
    queue: dict[Ticket, None] = field(default_factory=dict)
    ranks: tuple[Rank, ...] = ()
    need: tuple[int, ...] = ()
    names: tuple[dict[str, Any], ...] = ()
    canary: canaries.Record | None = None
    last_swap: dict[str, Any] | None = None
    drained: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> str:
        return self.spec.key

    @property
    def gpus(self) -> frozenset[int]:
        """The GPUs that it takes turns on: none for a model that never sleeps."""
        return self.spec.gpus if self.spec.sleeps else frozenset()

    @property
    def served(self) -> str:
        """The name that its server has for it."""
        if self.spec.served:
            return self.spec.served[0]
        return str(self.names[0]["id"]) if self.names else self.key

    @property
    def holds(self) -> bool:
        """Whether it is awake on its GPUs, or about to be or to sleep."""
        return self.phase in (Phase.AWAKE, Phase.DRAINING, Phase.WAKING, Phase.STARTING)

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.STOPPED

    @property
    def is_found(self) -> bool:
        """Whether its server was found awake, and is not served yet."""
        return self.phase is Phase.WAKING

    def move(self, phase: Phase) -> None:
        """Change the state. Raises ForbiddenMoveError."""
        self.phase = state.require_move(self.phase, phase)

    def shown(self, now: float) -> dict[str, Any]:
        """Return the model as `GET /pool` has it; ``now`` by the clock of the rotation."""
        return {
            "model": self.key,
            "served": self.served,
            "aliases": list(self.spec.config.aliases),
            "state": self.phase.value,
            "why": self.reason,
            "asked_at": self.asked,
            "gpus": sorted(self.spec.gpus),
            "rung": self.rung,
            "pinned": self.pinned,
            "never_sleeps": not self.spec.sleeps,
            "awake_seconds": now - self.awake_since if self.phase is Phase.AWAKE else None,
            "running": self.running,
            "waiting": len(self.queue),
            "waiting_bytes": self.held_bytes,
            "oldest_seconds": now - next(iter(self.queue)).since if self.queue else 0.0,
            "swap_seconds": self.swap_seconds,
            "failures": self.failures,
            "ranks": [
                {
                    "asleep_bytes": dict(one.asleep),
                    "awake_bytes": dict(one.awake),
                    "host_copy_bytes": one.host,
                }
                for one in self.ranks
            ],
            "canary": self.canary.kind if self.canary else None,
            "last_swap": self.last_swap,
        }
