"""In what order units are compiled, and how many at a time: by cores and by memory.

A unit is one file that a compiler turns into one object. What it will cost is known before from
base.toml, well enough to start the long ones first and never to start what does not fit.
"""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from sm12x.core.errors import NoSpaceError
from sm12x.stack.model.base import Base

# The cost of a unit without an entry in base.toml: one with torch's headers.
DEFAULT_SECONDS = 60.0
DEFAULT_GIB = 3.1
# GiB for the system and the linker, beside the compilers.
RESERVE_GIB = 1.0


@dataclass(frozen=True, kw_only=True)
class Unit:
    """``name`` is its object as ninja calls it, ``source`` the file as people do.

    ``cpu_seconds`` and ``peak_gib`` are what it is expected to cost.
    """

    name: str
    source: str
    target: str
    cpu_seconds: float
    peak_gib: float


def cost(base: Base, source: str, *, at_most_gib: float = DEFAULT_GIB) -> tuple[float, float]:
    """Seconds of CPU and GiB at its peak of a source file: by the first entry that matches.

    ``*`` of an entry matches across folders. ``at_most_gib`` is what no unit of its module exceeds.
    """
    for unit in base.units:
        if fnmatch.fnmatchcase(source, f"*{unit.match}"):
            return unit.cpu_seconds, unit.peak_gib
    return DEFAULT_SECONDS, min(DEFAULT_GIB, at_most_gib)


def require_memory(units: Iterable[Unit], memory_gib: float) -> None:
    """Raise NoSpaceError if the largest unit does not fit in ``memory_gib``."""
    largest = max(units, key=lambda unit: unit.peak_gib, default=None)
    if largest is not None and largest.peak_gib > memory_gib:
        raise NoSpaceError(
            f"compiling {largest.source} takes {largest.peak_gib:.1f} GiB of memory, "
            f"{memory_gib:.1f} GiB are free",
            next_step="close other programs, add swap, or build on a larger machine",
        )


@dataclass(kw_only=True)
class _Waiting:
    unit: Unit
    alone: bool = False


@dataclass(kw_only=True)
class Scheduler:
    """Decides which waiting units may start. Knows no process and no clock.

    The heaviest goes first. While it does not fit, nothing lighter passes it: otherwise it would
    wait for ever while small units keep coming. A unit that has to be alone goes before all others.
    """

    cores: int
    memory_gib: float
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _running: dict[int, _Waiting] = field(default_factory=dict)

    def wait(self, ticket: int, unit: Unit, *, alone: bool = False) -> None:
        """``unit`` wants to start; it is called ``ticket`` from here on."""
        self._running.pop(ticket, None)
        self._waiting[ticket] = _Waiting(unit=unit, alone=alone)

    def leave(self, ticket: int) -> None:
        """It has ended, or does not want to start any more."""
        self._running.pop(ticket, None)
        self._waiting.pop(ticket, None)

    def start(self) -> list[int]:
        """The tickets that start now."""
        started: list[int] = []
        order = sorted(
            self._waiting,
            key=lambda key: (
                not self._waiting[key].alone,
                -self._weight(self._waiting[key].unit),
                self._waiting[key].unit.name,
            ),
        )
        for ticket in order:
            if not self._fits(self._waiting[ticket]):
                break
            self._running[ticket] = self._waiting.pop(ticket)
            started.append(ticket)
        return started

    def is_alone(self, ticket: int) -> bool:
        """Whether it runs with nothing beside it."""
        return ticket in self._running and self._running[ticket].alone

    def waiting(self) -> list[int]:
        return list(self._waiting)

    def _weight(self, unit: Unit) -> float:
        return _weight(
            unit.cpu_seconds, unit.peak_gib, cores=self.cores, memory_gib=self.memory_gib
        )

    def _fits(self, entry: _Waiting) -> bool:
        if not self._running:
            return True
        if entry.alone or any(running.alone for running in self._running.values()):
            return False
        used = sum(running.unit.peak_gib for running in self._running.values())
        return len(self._running) < self.cores and used + entry.unit.peak_gib <= self.memory_gib


def _weight(seconds: float, gib: float, *, cores: int, memory_gib: float) -> float:
    """The share of the machine that a unit takes: its time x its share of cores or memory.

    Of the two shares the larger counts: that one runs out first.
    """
    return seconds * max(1 / cores, gib / memory_gib)


def makespan(units: Collection[tuple[float, float]], *, cores: int, memory_gib: float) -> float:
    """Seconds until all ``units`` (seconds, GiB) are compiled, in the scheduler's own order."""
    now, used = 0.0, 0.0
    running: list[tuple[float, float]] = []

    def heaviest_first(unit: tuple[float, float]) -> float:
        return -_weight(*unit, cores=cores, memory_gib=memory_gib)

    for seconds, gib in sorted(units, key=heaviest_first):
        while running and (len(running) >= cores or used + gib > memory_gib):
            now, freed = heapq.heappop(running)
            used -= freed
        heapq.heappush(running, (now + seconds, gib))
        used += gib
    return max((end for end, _ in running), default=now)
