"""What units cost, and how many compile at a time: ninja's pools, by memory as it was measured.

A unit is one file that a compiler turns into one object. Its cost is known from base.toml.
"""

from __future__ import annotations

import fnmatch
import heapq
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

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
    """Return seconds of CPU and GiB at its peak of a source file: by the first entry that matches.

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


@dataclass(frozen=True, kw_only=True)
class Pools:
    """ninja's pools: ``depths`` by name, and the pool of each unit by the name of its object."""

    depths: Mapping[str, int]
    of: Mapping[str, str]


def pools(units: Collection[Unit], memory_gib: float) -> Pools:
    """Divide units into pools whose compilers, all running, fit in ``memory_gib`` together.

    Units of about the same memory (within a factor of two) share a pool. Each pool has room for
    one unit; the rest is divided by work, so that the pools end at about the same time.
    """
    groups: dict[int, list[Unit]] = {}
    for unit in units:
        groups.setdefault(math.ceil(math.log2(max(unit.peak_gib, 0.125))), []).append(unit)
    peaks = {key: max(unit.peak_gib for unit in group) for key, group in groups.items()}
    if sum(peaks.values()) > memory_gib:
        depth = max(1, int(memory_gib / max(peaks.values())))
        return Pools(depths={"all": depth}, of={unit.name: "all" for unit in units})
    spare = memory_gib - sum(peaks.values())
    work = {
        key: sum(unit.cpu_seconds * unit.peak_gib for unit in group)
        for key, group in groups.items()
    }
    total = sum(work.values()) or 1.0
    return Pools(
        depths={
            f"gib{key}": 1 + int(spare * work[key] / total / max(peaks[key], 0.01))
            for key in sorted(groups)
        },
        of={unit.name: f"gib{key}" for key, group in groups.items() for unit in group},
    )


def makespan(units: Collection[tuple[float, float]], *, cores: int, memory_gib: float) -> float:
    """Return seconds until all ``units`` (seconds, GiB) are compiled, the heaviest first."""
    now, used = 0.0, 0.0
    running: list[tuple[float, float]] = []

    def heaviest_first(unit: tuple[float, float]) -> float:
        # The larger share, of cores or of memory, runs out first.
        return -unit[0] * max(1 / cores, unit[1] / memory_gib)

    for seconds, gib in sorted(units, key=heaviest_first):
        while running and (len(running) >= cores or used + gib > memory_gib):
            now, freed = heapq.heappop(running)
            used -= freed
        heapq.heappush(running, (now + seconds, gib))
        used += gib
    return max((end for end, _ in running), default=now)
