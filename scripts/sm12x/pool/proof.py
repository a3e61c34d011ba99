"""Whether a sleep has freed its memory, and whether there is room. Pure: what was seen is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from sm12x.core.text import GIB
from sm12x.pool.engines import Rank
from sm12x.pool.gpus import MIB, GpuMemory, strangers
from sm12x.pool.state import StepError

# Of the bytes that a sleep gives back by its own account, those that NVML has to confirm.
CONFIRMED = 0.9


def freed(
    key: str,
    gpus: Collection[int],
    ranks: Sequence[Rank],
    *,
    tag: str,
    before: Mapping[int, GpuMemory] | None,
    now: Mapping[int, GpuMemory] | None,
    known: frozenset[int],
    unseen: str | None,
) -> int:
    """Return the bytes that a sleep of the model ``key`` has freed, by its ranks, else by NVML.

    Args:
        tag: what must not be awake any more: "weights" or "kv_cache".
        before: the GPUs before the sleep; None where NVML has none of it, as ``now``.
        known: processes that are no strangers.
        unseen: why NVML sees nothing, where that and no rank is no proof; None where it may be.

    Raises:
        StepError: a rank has freed nothing, NVML does not confirm it, or nothing is known.
    """
    ordered = sorted(gpus)
    if not ranks and (before is None or now is None) and unseen is not None:
        raise StepError(
            f"nothing proves that {key} has freed its memory: its server names no ranks, and "
            f"{unseen or 'NVML has no memory of its GPUs'}"
        )
    for number, rank in enumerate(ranks):
        if not rank.freed or rank.awake.get(tag):
            raise StepError(
                f"rank {number} of {key} has freed {rank.freed // MIB} MiB, and still holds "
                f"{rank.awake.get(tag, 0) // MIB} MiB of {tag}"
            )
    if ranks and len(ranks) < len(ordered):
        raise StepError(f"{key} tells of {len(ranks)} ranks on {len(ordered)} GPUs")
    sizes = [rank.freed for rank in ranks]
    if before is None or now is None:
        return sum(sizes)
    changes = [before[gpu].used - now[gpu].used for gpu in ordered]
    if len(sizes) == len(ordered):
        for gpu, size, change in zip(ordered, sizes, changes, strict=True):
            if change < CONFIRMED * size:
                others = strangers(now[gpu], known)
                raise StepError(
                    f"{key} tells of {size // MIB} MiB freed on GPU {gpu}, and NVML of "
                    f"{change // MIB}" + (f"; {others}" if others else "")
                )
    return sum(sizes) or sum(max(0, change) for change in changes)


def require_residue(
    key: str,
    gpus: Collection[int],
    own: Collection[int],
    now: Mapping[int, GpuMemory],
    most_gib: float,
) -> None:
    """Raise StepError where the processes ``own`` of a sleeping model keep more on a GPU."""
    for gpu in sorted(gpus):
        residue = sum(now[gpu].processes.get(pid, 0) for pid in own)
        if residue > most_gib * GIB:
            raise StepError(f"{key} sleeps, and keeps {residue / GIB:.1f} GiB on GPU {gpu}")


def require_room(
    key: str,
    gpus: Collection[int],
    need: Sequence[int],
    now: Mapping[int, GpuMemory],
    known: frozenset[int],
) -> None:
    """Raise StepError where a GPU lacks the bytes that its rank of ``key`` wakes up with.

    Of a model that has not told its ranks nothing is required.
    """
    if len(need) != len(gpus):
        return
    for gpu, size in zip(sorted(gpus), need, strict=True):
        if now[gpu].free < size:
            others = strangers(now[gpu], known)
            raise StepError(
                f"GPU {gpu} has {now[gpu].free // MIB} MiB free, and {key} needs {size // MIB}: "
                + (others or "no process is listed that has taken it, as in a container")
            )
