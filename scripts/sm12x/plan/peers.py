"""Servers that take turns on the same GPUs: which of them may be awake together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from sm12x.core.declared import shown
from sm12x.core.errors import UsageError
from sm12x.plan import host
from sm12x.plan.budget import (
    DOES_NOT_FIT,
    FITS,
    UNKNOWN,
    Budget,
    Deployment,
    Hardware,
    budget,
)
from sm12x.plan.host import HostNeed

# Every subset is a row: 64 at most.
MOST = 6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to have the servers: who is awake, asleep, or stopped (because it cannot sleep)."""

    awake: tuple[str, ...]
    asleep: tuple[str, ...]
    stopped: tuple[str, ...]
    budget: Budget
    host: HostNeed

    @shown
    def needed(self) -> bool:
        """Whether it must fit: one is awake, alone."""
        return len(self.awake) == 1

    @shown
    def verdict(self) -> str:
        verdicts = (self.budget.verdict, self.host.verdict)
        if DOES_NOT_FIT in verdicts:
            return DOES_NOT_FIT
        # Host memory that nobody gave is said in the report; it does not undo what the GPU says.
        return UNKNOWN if self.budget.verdict == UNKNOWN else FITS


def rows(hardware: Hardware, servers: Sequence[Deployment]) -> tuple[Row, ...]:
    """Every subset that can be awake, fewest first; the first row is the moment of a swap.

    During a swap the one that was awake is asleep before the next one wakes, so all that can sleep
    have their host copies at once.
    """
    if len(servers) > MOST:
        raise UsageError(
            f"{len(servers)} recipes on the same GPUs have too many combinations",
            next_step=f"plan {MOST} at most together",
        )
    found = []
    for size in range(len(servers) + 1):
        for awake in itertools.combinations(servers, size):
            rest = [server for server in servers if server not in awake]
            asleep = [server for server in rest if server.sleep]
            found.append(
                Row(
                    awake=tuple(server.name for server in awake),
                    asleep=tuple(server.name for server in asleep),
                    stopped=tuple(server.name for server in rest if not server.sleep),
                    budget=budget(hardware, awake, asleep),
                    host=host.need(asleep, hardware),
                )
            )
    return tuple(found)
