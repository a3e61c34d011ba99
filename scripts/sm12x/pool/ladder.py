"""How each model leaves its GPUs, by the memory of GPUs and host. Pure: the figures are given.

The rungs, from the quickest swap to the slowest: ``kv_cache`` leaves the weights on the GPU,
``level_1`` copies them to host memory, ``level_2`` discards them, ``stop`` ends the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sm12x.core.errors import UsageError

# GiB of each GPU that no model is given: what the driver takes, and what figures leave out.
MARGIN = 1.0


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a model takes, in GiB on each of its GPUs; None where that is not known.

    ``rungs`` are those it may take, the quickest first; none for one that never sleeps.
    """

    name: str
    gpus: frozenset[int]
    rungs: tuple[str, ...]
    awake: float | None = None
    weights: float | None = None
    residue: float | None = None

    def asleep(self, rung: str) -> float | None:
        """Return GiB on each GPU on a rung."""
        if rung == "stop":
            return 0.0
        if self.residue is None:
            return None
        if rung != "kv_cache":
            return self.residue
        return None if self.weights is None else self.weights + self.residue

    def copies(self, rung: str) -> float | None:
        """Return GiB of host memory on a rung, of all GPUs."""
        if rung != "level_1":
            return 0.0
        return None if self.weights is None else self.weights * len(self.gpus)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """The rung of each model that sleeps, and remarks on what is not known."""

    rungs: Mapping[str, str]
    remarks: tuple[str, ...] = field(default=())


def choose(needs: Sequence[Need], *, gpu_gib: float | None, ram_gib: float | None) -> Ladder:
    """Return the quickest rungs with which each model fits while the others sleep.

    Where a figure is not known, a model takes level 1, or the first rung that it has.

    Raises:
        UsageError: no choice of rungs fits on a GPU, or in the host's memory.
    """
    blind = [
        need.name
        for need in needs
        if need.awake is None or (need.rungs and need.asleep("kv_cache") is None)
    ]
    if gpu_gib is None or blind:
        why = (
            f"the memory of {', '.join(blind)} is not known (memory: awake, weights, residue)"
            if blind
            else "the memory of the GPUs is not known (machine: gpu_gib)"
        )
        rungs = {
            need.name: "level_1" if "level_1" in need.rungs else need.rungs[0]
            for need in needs
            if need.rungs
        }
        return Ladder(rungs=rungs, remarks=(f"{why}: whether the pool fits is not checked",))
    left = {need.name: list(need.rungs) for need in needs if need.rungs}
    # One rung down for the model that frees most with it, until all fit.
    while excess := _over(needs, left, gpu_gib):
        tight = {gpu for gpu, _ in excess}
        lower = [
            need
            for need in needs
            if need.gpus & tight and len(left.get(need.name, ())) > 1 and _gain(need, left) > 0
        ]
        if not lower:
            gpu, gib = max(excess, key=lambda one: one[1])
            raise UsageError(
                f"the pool cannot fit: GPU {gpu} needs {gib:.1f} GiB more than its {gpu_gib:.1f} "
                "while one model is awake and the others are as far asleep as they may be",
                next_step="give models other GPUs, less gpu_memory_utilization, or `sleep: auto`",
            )
        heaviest = max(lower, key=lambda need: (_gain(need, left), need.name))
        left[heaviest.name].pop(0)
    while ram_gib is not None and (copies := _copies(needs, left)) > ram_gib:
        lower = [
            need
            for need in needs
            if need.name in left and left[need.name][0] == "level_1" and len(left[need.name]) > 1
        ]
        if not lower:
            raise UsageError(
                f"the pool cannot fit: the host copies of sleeping models need {copies:.1f} GiB, "
                f"and the host has {ram_gib:.1f}",
                next_step="let one stop (`sleep: stop`), or leave it out",
            )
        heaviest = max(lower, key=lambda need: ((need.weights or 0.0) * len(need.gpus), need.name))
        left[heaviest.name].pop(0)
    return Ladder(rungs={name: rungs[0] for name, rungs in left.items()})


def _gain(need: Need, left: Mapping[str, Sequence[str]]) -> float:
    """Return the GiB on each GPU that the next rung frees beyond the present one."""
    now, then = (need.asleep(rung) or 0.0 for rung in left[need.name][:2])
    return now - then


def _over(
    needs: Sequence[Need], left: Mapping[str, Sequence[str]], gpu_gib: float
) -> list[tuple[int, float]]:
    """Return each GPU that does not suffice, and the GiB that lack there at worst."""
    excess = []
    for gpu in sorted({gpu for need in needs for gpu in need.gpus}):
        here = [need for need in needs if gpu in need.gpus]
        always = sum(need.awake or 0.0 for need in here if not need.rungs)
        turns = [need for need in here if need.rungs]
        asleep = {need.name: need.asleep(left[need.name][0]) or 0.0 for need in turns}
        most = max(
            ((one.awake or 0.0) + sum(asleep.values()) - asleep[one.name] for one in turns),
            default=0.0,
        )
        if always + most + MARGIN > gpu_gib:
            excess.append((gpu, always + most + MARGIN - gpu_gib))
    return excess


def _copies(needs: Sequence[Need], left: Mapping[str, Sequence[str]]) -> float:
    """Return the GiB of host copies while all sleep, as in the middle of a swap."""
    return sum(need.copies(left[need.name][0]) or 0.0 for need in needs if need.name in left)


def narrowed(need: Need, chosen: str) -> Need:
    """Return ``need`` with the rungs that a setting leaves."""
    return need if chosen == "auto" else replace(need, rungs=(chosen,))
