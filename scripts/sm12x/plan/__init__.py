"""Does it fit? Memory plans of recipes and checkpoints, per GPU and per machine.

``make`` plans servers on hardware, and which of several that take turns may be awake together;
``check`` says what a recipe's plan finds wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sm12x.core.declared import shown
from sm12x.core.errors import UsageError
from sm12x.plan import budget as budgets
from sm12x.plan import host
from sm12x.plan.budget import (
    DOES_NOT_FIT,
    FITS,
    UNKNOWN,
    Budget,
    Deployment,
    Hardware,
)
from sm12x.plan.figures import Against
from sm12x.plan.host import HostNeed
from sm12x.plan.server import from_recipe, members
from sm12x.recipes.model import Recipe

_ANY = "any"
# The sleeping peer of a recipe that is planned alone.
_PEER = "a peer like it"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Servers on the same GPUs; amounts are GiB with a lower and an upper end.

    ``host`` is the machine's memory at the moment of a swap, when all that can sleep are asleep.
    ``peer`` says that a server was planned with one sleeping peer taken to be like itself.
    ``against`` is the comparison with a log of the one server.
    """

    schema: Literal[1] = 1
    hardware: Hardware
    servers: tuple[Deployment, ...]
    peer: Annotated[bool, Field(alias="assumed_peer")]
    rows: Annotated[tuple[Row, ...], Field(alias="combinations")]
    host: HostNeed
    cuts: tuple[str, ...]
    warnings: tuple[str, ...]
    against: Against | None = None

    @property
    def needed(self) -> tuple[Row, ...]:
        """The rows that must fit."""
        return tuple(row for row in self.rows if row.needed)

    @shown
    def verdict(self) -> str:
        verdicts = {row.verdict for row in self.needed} | {self.host.verdict}
        if DOES_NOT_FIT in verdicts or self.too_few:
            return DOES_NOT_FIT
        return UNKNOWN if UNKNOWN in {row.verdict for row in self.needed} else FITS

    @property
    def too_few(self) -> tuple[Deployment, ...]:
        """Servers that need more GPUs than the machine has."""
        have = self.hardware.gpus
        return tuple(one for one in self.servers if have is not None and one.gpus > have)


def make(hardware: Hardware, servers: Sequence[Deployment], *, peer: bool = True) -> Plan:
    """Plan ``servers`` on ``hardware``.

    A single server that can sleep is meant to take turns: unless ``peer`` is false, it is planned
    beside one sleeping peer with the same residue and the same weights.
    """
    lone = len(servers) == 1
    assumed = peer and lone and servers[0].sleep > 0
    all_of_them = list(servers)
    if assumed:
        all_of_them.append(dataclasses.replace(servers[0], name=_PEER))
    combinations = combine(hardware, all_of_them)
    if assumed:
        combinations = tuple(row for row in combinations if row.awake in ((), (servers[0].name,)))
    elif lone:
        combinations = tuple(row for row in combinations if row.awake)
    asleep = [server for server in all_of_them if server.sleep] if not lone or assumed else []
    found: list[str] = []
    for server in servers:
        rest = [one for one in all_of_them if one.name != server.name and one.sleep]
        found += budgets.cuts(hardware, [server], rest)
    swap = host.need(asleep, hardware)
    if swap.verdict == DOES_NOT_FIT:
        found.append(
            f"host copies: {swap.copies} of {swap.ram:.0f} GiB: let one sleep at level 2, which "
            "keeps no copy, or stop it"
        )
    return Plan(
        hardware=hardware,
        servers=tuple(servers),
        peer=assumed,
        rows=combinations,
        host=swap,
        cuts=tuple(dict.fromkeys(found)),
        warnings=tuple(_warnings(hardware, servers)),
    )


def _warnings(hardware: Hardware, servers: Sequence[Deployment]) -> list[str]:
    found = []
    for server in servers:
        most = budgets.most_sequences(hardware, server)
        cache = server.cache
        if most is not None and cache is not None and cache.sequences > most:
            given = "without --max-num-seqs vLLM takes" if cache.default else "--max-num-seqs is"
            found.append(
                f"{server.name} is a hybrid model: {given} {cache.sequences}, but the states of "
                f"{most} sequences at most fit, so it does not start: set --max-num-seqs {most} or "
                "less"
            )
        remark = host.loading(server, hardware)
        if remark:
            found.append(remark)
        if hardware.unified and server.copies_weights:
            wake = budgets.budget(hardware, [server], []).wake
            lacking = f", {-wake.low:.1f} GiB more than there are," if wake and wake.low < 0 else ""
            found.append(
                f"{server.name} sleeps at level 1: on unified memory the host copy takes the memory"
                f" that sleep frees. A wake-up maps everything{lacking} before that copy is freed, "
                "and can crash the machine (vllm#50011): use level 2, stop the server, or keep its "
                "weights on the GPU (--sleep-mode-release kv_cache). The stack restores block by "
                "block; that has not run on a GB10 yet"
            )
    return found


def on(kinds: dict[str, Hardware], key: str) -> Hardware:
    """The hardware of that key. Raises UsageError."""
    if key not in kinds:
        raise UsageError(f"no hardware {key!r}", next_step=f"give one of {', '.join(kinds)}")
    return kinds[key]


def hardware_of(recipes: Sequence[Recipe], kinds: dict[str, Hardware]) -> Hardware:
    """The first hardware that all of the recipes are for. Raises UsageError if there is none."""
    common = [
        key
        for key in kinds
        if all(one.sm12x and {key, _ANY} & set(one.sm12x.hardware) for one in recipes)
    ]
    named = [key for one in recipes if one.sm12x for key in one.sm12x.hardware if key != _ANY]
    chosen = [key for key in named if key in common]
    if not chosen:
        names = ", ".join(one.key for one in recipes) or "this"
        raise UsageError(
            f"no hardware to plan {names} for: "
            + ("the recipes are for different kinds" if named else "no recipe names one"),
            next_step=f"give --hardware, one of {', '.join(kinds)}, or --here",
        )
    return kinds[chosen[0]]


def overview(
    recipes: Iterable[Recipe],
    *,
    hardware: Hardware | None = None,
    utilization: float | None = None,
) -> dict[str, Plan]:
    """A plan for each recipe by key, on the first hardware it names unless one is given.

    A recipe without a block of ours, or for any hardware, is left out where none is given.
    """
    kinds = host.kinds()
    found = {}
    for one in recipes:
        keys = [key for key in one.sm12x.hardware if key in kinds] if one.sm12x else []
        if hardware is None and not keys:
            continue
        servers = [from_recipe(each, utilization=utilization) for each in members(one)]
        found[one.key] = make(hardware or kinds[keys[0]], servers)
    return found


def check(recipe: Recipe) -> list[str]:
    """What the memory plan finds wrong with a recipe, on each hardware that it names.

    A recipe for any hardware, or without a block of ours, has no plan and no findings.
    """
    if recipe.sm12x is None:
        return []
    kinds = host.kinds()
    servers = [from_recipe(one) for one in members(recipe)]
    found: list[str] = []
    for key in recipe.sm12x.hardware:
        if key in kinds:
            found += [
                f"memory plan on {key}: {text}" for text in findings(make(kinds[key], servers))
            ]
    return found


def findings(plan: Plan) -> list[str]:
    """Why a plan does not fit or cannot tell, and harmful settings; empty if it fits."""
    found: list[str] = []
    for row in plan.needed:
        if row.budget.margin.low < 0:
            found.append(
                f"{_who(row)} is {-row.budget.margin.low:.1f} GiB over {plan.hardware.memory} GiB"
            )
        elif row.budget.verdict == UNKNOWN:
            names = ", ".join(map(str, row.budget.unknown))
            found.append(
                f"cannot tell whether {_who(row)} fits: unknown: {names} (room for "
                f"{row.budget.margin.low:.1f} GiB)"
            )
        if row.budget.margin.low >= 0 and row.budget.wake and row.budget.wake.low < 0:
            found.append(
                f"{_who(row)} wakes with {-row.budget.wake.low:.1f} GiB over "
                f"{plan.hardware.memory} GiB, as the host copy is freed last"
            )
        found += [
            f"{one.server} needs {-one.spare.low:.1f} GiB more than its budget for weights and KV "
            "cache"
            for one in row.budget.inside
            if one.spare and one.spare.low < 0
        ]
    found += [
        f"{one.name} needs {one.gpus} GPUs, there are {plan.hardware.gpus}" for one in plan.too_few
    ]
    if plan.host.verdict == DOES_NOT_FIT:
        found.append(f"host copies need {plan.host.copies} GiB, there are {plan.host.ram:.0f} GiB")
    found += [f"cut: {text}" for text in plan.cuts]
    found += [text for text in plan.warnings if "sleeps at level 1" in text]
    return found


def _who(row: Row) -> str:
    beside = f" beside sleeping {', '.join(row.asleep)}" if row.asleep else ""
    return f"{' and '.join(row.awake)}{beside}"


# Every subset is a row: 64 at most.
_MOST = 6


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination of servers: those awake, asleep, or stopped (because they cannot sleep)."""

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
        # Unknown host memory is named in the report; it does not change the GPUs' verdict.
        return UNKNOWN if self.budget.verdict == UNKNOWN else FITS


def combine(hardware: Hardware, servers: Sequence[Deployment]) -> tuple[Row, ...]:
    """Every subset that can be awake, fewest first; the first row is the moment of a swap.

    During a swap the one that was awake is asleep before the next one wakes, so all that can sleep
    have their host copies at once.
    """
    if len(servers) > _MOST:
        raise UsageError(
            f"{len(servers)} recipes on the same GPUs have too many combinations",
            next_step=f"plan {_MOST} at most together",
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
                    budget=budgets.budget(hardware, awake, asleep),
                    host=host.need(asleep, hardware),
                )
            )
    return tuple(found)
