"""The memory budget of one GPU: its awake servers, and the residue of its sleeping peers.

    utilization x memory + outside + residue of every sleeping peer <= memory

vLLM fills utilization x memory with weights, activations and as much KV cache as is left. What it
takes outside that budget (workspaces, private pools) and what a sleeping peer still holds come on
top. Amounts are GiB on one GPU, with a lower and an upper end; a verdict holds at the worst end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from sm12x.core.declared import shown

FITS, DOES_NOT_FIT, UNKNOWN = "fits", "does not fit", "cannot tell"
BUDGET, OUTSIDE, SYSTEM = "budget", "outside the budget", "operating system"
RESIDUE, COPY = "sleep residue", "host copy"
WEIGHTS, KV = "weights", "KV cache"
# Bases from the firmest to the weakest; a verdict is as good as the weakest of its terms.
BASES = ("exact", "measured", "reported", "estimated")


@dataclass(frozen=True, kw_only=True)
class Amount:
    """GiB, somewhere between ``low`` and ``high``."""

    low: float
    high: float

    @classmethod
    def of(cls, value: float) -> Self:
        return cls(low=value, high=value)

    def __add__(self, other: Amount) -> Amount:
        return Amount(low=self.low + other.low, high=self.high + other.high)

    def __mul__(self, factor: float) -> Amount:
        return Amount(low=self.low * factor, high=self.high * factor)

    def __str__(self) -> str:
        low, high = f"{self.low:.1f}", f"{self.high:.1f}"
        return low if low == high else f"{low}-{high}"


@dataclass(frozen=True, kw_only=True)
class Term:
    """One amount, how it is known (one of BASES) and from where. ``of`` is the server, if any."""

    name: str
    amount: Amount
    basis: str
    source: str
    of: str = ""


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """A term that is neither measured nor computed."""

    name: str
    of: str

    def __str__(self) -> str:
        return f"{self.name} of {self.of}"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine's GPUs. ``memory`` is of one GPU, as CUDA reports it, in GiB.

    ``unified``: CPU and GPU share that memory; ``system`` is then what the operating system needs
    of it. ``multiprocessors`` of one GPU, ``gpus`` and ``ram`` (GiB) are None where they are not
    known.
    """

    key: str
    name: str
    capability: str
    memory: Amount
    basis: str
    source: str
    unified: bool = False
    system: Term | None = None
    multiprocessors: int | None = None
    gpus: int | None = None
    ram: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cache:
    """What the release says of a model's KV cache; sizes are GiB on one GPU.

    vLLM starts with no less than ``start``, for one request of ``length`` tokens, and ``token`` is
    what one more takes, up to the model's ``limit``. A sequence of a hybrid model takes a block of
    ``block`` for its states, None of others. ``sequences`` is the --max-num-seqs that is planned,
    which is vLLM's own where it is ``default``.
    """

    start: float
    token: float
    length: int
    limit: int
    sequences: int
    default: bool
    block: float | None = None

    def context(self, room: float) -> int:
        """Return the largest --max-model-len in ``room`` GiB of KV cache; 0 for none."""
        if self.token <= 0:
            return self.limit if room >= self.start else 0
        more = math.floor((room - self.start) / self.token)
        return max(0, min(self.limit, self.length + more))


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """One deployment as the planner sees it; the terms are of one GPU, None where not known.

    ``gpus`` counts the GPUs on each of ``machines``. ``sleep`` is the level, 0 for never. Where it
    ``keeps_weights``, level 1 releases the KV cache alone, and the weights are in ``residue``. With
    ``keeps_kv`` its sleep copies the KV cache to the host: ``kv_budget`` GiB a machine at most,
    where that is set. ``cache`` is None where the release has not been asked.
    """

    name: str
    utilization: float
    gpus: int
    machines: int
    sleep: int
    weights: Term | None
    kv: Term | None
    outside: Term | None
    residue: Term | None
    cache: Cache | None = None
    keeps_weights: bool = False
    keeps_kv: bool = False
    kv_budget: float | None = None

    @property
    def copies_weights(self) -> bool:
        """Whether its sleep copies the weights to the host."""
        return self.sleep == 1 and not self.keeps_weights


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The terms that one awake server must fit into its budget. ``spare`` is the room left over.

    Of a range of KV cache the lower end must fit: vLLM uses all memory that is left, up to the
    upper end and beyond, and queues requests where the cache is too small. ``least`` is the
    smallest utilization,
    rounded up to 0.01, that holds weights and that much KV cache. Activations and CUDA graphs left
    out: ``context`` is the largest --max-model-len with which vLLM starts, ``requests`` how many of
    the planned length run at once, and ``most_sequences`` the largest --max-num-seqs of a hybrid
    model for which there can be states.
    """

    server: str
    budget: Amount
    weights: Amount | None
    kv: Amount | None
    spare: Amount | None
    least: float | None
    context: int | None
    requests: float | None
    most_sequences: int | None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """``terms`` against ``memory``. ``margin.low`` is what is left at the worst end, less than 0 if
    that does not fit. ``unknown`` names terms that are neither measured nor computed; they count as
    0 in ``margin``. ``largest`` is the largest utilization, rounded down to 0.01, that fits at the
    worst end: of the one awake server, or of all awake servers together. ``wake`` is what is left
    on unified memory when the awake have just woken: everything is mapped again, and the host
    copies of their weights are still there (vllm#50011); None where there are no such copies."""

    memory: Amount
    terms: tuple[Term, ...]
    unknown: tuple[Unknown, ...]
    margin: Amount
    inside: tuple[Inside, ...]
    largest: float
    wake: Amount | None

    @shown
    def verdict(self) -> str:
        if self.wake and self.wake.low < 0:
            return DOES_NOT_FIT
        if self.margin.low < 0 or any(one.spare and one.spare.low < 0 for one in self.inside):
            return DOES_NOT_FIT
        return UNKNOWN if self.unknown else FITS

    @shown
    def total(self) -> Amount:
        """The sum of the terms, at the smaller and the larger memory of the hardware."""
        return Amount(
            low=sum(term.amount.low for term in self.terms),
            high=sum(term.amount.high for term in self.terms),
        )

    @shown
    def basis(self) -> str:
        """The weakest basis among the terms."""
        return _weakest([term.basis for term in self.terms])


def _weakest(bases: Sequence[str]) -> str:
    return max(bases, key=BASES.index, default=BASES[0])


def budget(hardware: Hardware, awake: Sequence[Deployment], asleep: Sequence[Deployment]) -> Budget:
    """The budget of the GPU that all of ``awake`` and ``asleep`` share.

    On unified memory the operating system and the level-1 copies of the sleeping lie in it too.
    """
    outer: list[Term] = []
    unknown: list[Unknown] = []

    def take(term: Term | None, name: str, server: Deployment) -> None:
        if term is None:
            unknown.append(Unknown(name=name, of=server.name))
        else:
            outer.append(dataclasses.replace(term, name=name, of=server.name))

    for server in awake:
        take(server.outside, OUTSIDE, server)
    for server in asleep:
        take(server.residue, RESIDUE, server)
        if hardware.unified and server.copies_weights:
            take(server.weights, COPY, server)
    if hardware.system:
        outer.append(hardware.system)
    used = sum(server.utilization for server in awake)
    fixed = Amount(
        low=sum(term.amount.low for term in outer), high=sum(term.amount.high for term in outer)
    )
    worst, best = hardware.memory.low, hardware.memory.high
    margin = Amount(low=worst * (1 - used) - fixed.high, high=best * (1 - used) - fixed.low)
    copied = [server.weights.amount for server in awake if server.copies_weights and server.weights]
    return Budget(
        memory=hardware.memory,
        terms=(*(_share(hardware, server) for server in awake), *outer),
        unknown=tuple(unknown),
        margin=margin,
        inside=tuple(_inside(hardware, server) for server in awake),
        largest=max(0.0, floor(1 - fixed.high / worst)),
        wake=Amount(
            low=margin.low - sum(one.high for one in copied),
            high=margin.high - sum(one.low for one in copied),
        )
        if hardware.unified and copied
        else None,
    )


def _share(hardware: Hardware, server: Deployment) -> Term:
    return Term(
        name=BUDGET,
        amount=hardware.memory * server.utilization,
        basis=hardware.basis,
        source=f"--gpu-memory-utilization {server.utilization:g} x {hardware.memory} GiB",
        of=server.name,
    )


def _inside(hardware: Hardware, server: Deployment) -> Inside:
    share = hardware.memory * server.utilization
    kv = server.kv.amount.low if server.kv else 0.0
    need = server.weights.amount + Amount.of(kv) if server.weights else None
    room = _room(hardware, server)
    cache = server.cache
    return Inside(
        server=server.name,
        budget=share,
        weights=server.weights.amount if server.weights else None,
        kv=server.kv.amount if server.kv else None,
        spare=Amount(low=share.low - need.high, high=share.high - need.low) if need else None,
        least=ceiling(need.high / hardware.memory.low) if need else None,
        context=cache.context(room) if cache and room is not None else None,
        requests=round(max(0.0, room) / cache.start, 1)
        if cache and cache.start and room is not None
        else None,
        most_sequences=most_sequences(hardware, server),
    )


def most_sequences(hardware: Hardware, server: Deployment) -> int | None:
    """The blocks of states that fit beside the weights; None where the model has no states."""
    room = _room(hardware, server)
    if server.cache is None or server.cache.block is None or room is None:
        return None
    return max(0, math.floor(room / server.cache.block))


def _room(hardware: Hardware, server: Deployment) -> float | None:
    """Return the GiB of its budget that the weights leave at the worst end; None: not known."""
    if server.weights is None:
        return None
    return hardware.memory.low * server.utilization - server.weights.amount.high


def floor(share: float) -> float:
    """Rounded down to 0.01, except for the rounding error of a division."""
    return math.floor(share * 100 + 1e-9) / 100


def ceiling(share: float) -> float:
    """Rounded up to 0.01."""
    return math.ceil(share * 100 - 1e-9) / 100


def cuts(
    hardware: Hardware, awake: Sequence[Deployment], asleep: Sequence[Deployment]
) -> list[str]:
    """What to cut where the budget does not fit, the cheapest first; empty where it fits."""
    found = budget(hardware, awake, asleep)
    if found.verdict != DOES_NOT_FIT:
        return []
    whose = awake[0].name if len(awake) == 1 else "the awake servers together"
    used = sum(server.utilization for server in awake)
    least = sum(one.least or 0 for one in found.inside)
    lines: list[str] = []
    if least > found.largest:
        short = (least - found.largest) * found.memory.low
        kv = sum(one.kv.low for one in found.inside if one.kv)
        or_cut = f", or cut {short:.1f} GiB of KV cache (--max-model-len x --max-num-seqs)"
        lines.append(
            f"no utilization fits: {whose} needs at least {least:.2f} for weights and KV cache, and"
            f" at most {found.largest:.2f} leaves room for the rest: use more GPUs"
            + (or_cut if kv >= short else "")
        )
    elif found.margin.low < 0:
        known = all(one.least for one in found.inside)
        lines.append(
            f"the budget of {whose}: utilization {used:.2f} -> {found.largest:.2f} frees "
            f"{(used - found.largest) * found.memory.low:.1f} GiB, "
            + ("which still holds weights and KV cache" if known else "if the weights still fit")
        )
    else:
        for one in found.inside:
            if one.spare and one.spare.low < 0:
                what = "weights and KV cache" if one.kv else "weights"
                lines.append(
                    f"{one.server}: {what} need {-one.spare.low:.1f} GiB more than {one.budget} "
                    f"GiB: raise its utilization to {one.least:.2f}"
                    + (f", or give --max-model-len {one.context}" if one.context else "")
                )
    over = -found.margin.low
    for server in asleep:
        held = server.residue.amount.high if server.residue else 0.0
        if hardware.unified and server.copies_weights and server.weights:
            held += server.weights.amount.high
        if over > 0 and held > 0:
            enough = "" if held >= over else ", which is not enough alone"
            lines.append(f"stop {server.name} instead of letting it sleep: {held:.1f} GiB{enough}")
    return lines
