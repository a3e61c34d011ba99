"""What units cost, by base.toml, and how long all take. A unit is one file that is compiled."""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Collection

from sm12x.stack.model.base import Base

# The cost of a unit without an entry in base.toml: one with torch's headers.
DEFAULT_SECONDS = 60.0
DEFAULT_GIB = 3.1
# GiB for the system and the linker, beside the compilers.
RESERVE_GIB = 1.0


def cost(base: Base, source: str, *, at_most_gib: float = DEFAULT_GIB) -> tuple[float, float]:
    """Return seconds of CPU and GiB at its peak of a source file: by the first entry that matches.

    ``*`` of an entry matches across folders. ``at_most_gib`` is what no unit of its module exceeds.
    """
    for unit in base.units:
        if fnmatch.fnmatchcase(source, f"*{unit.match}"):
            return unit.cpu_seconds, unit.peak_gib
    return DEFAULT_SECONDS, min(DEFAULT_GIB, at_most_gib)


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
