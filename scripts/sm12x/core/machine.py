"""What this process may use of the machine: processors, free memory, compilers that fit there."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from sm12x.core.files import kernel_text
from sm12x.core.text import GIB

# Of memory.stat, in control groups of version 2 and 1: the kernel's page cache, which it gives up
# when memory is needed.
_KEPT_FILES = ("active_file", "inactive_file")
# A group without a limit says "max", or in version 1 the largest number of pages there can be.
_NO_LIMIT = 1 << 60


# GiB of one compiler of CUDA kernels at a server's first start: FlashInfer's take 3 to 8
# (flashinfer-ai/flashinfer#3634). Where the GPU takes its memory from the same place (GB10), and
# weights fill it, the upper end.
_COMPILER_GIB, _UNIFIED_COMPILER_GIB = 4.0, 8.0


def compiler_gib(*, unified: bool) -> float:
    """Return the GiB to reserve for one compiler of CUDA kernels."""
    return _UNIFIED_COMPILER_GIB if unified else _COMPILER_GIB


def compilers(*, cores: int, available: int, unified: bool) -> int:
    """Return how many compilers of CUDA kernels may run at a time (MAX_JOBS), at least one.

    Args:
        available: bytes that can be had on the machine.
        unified: whether the GPU takes its memory from the same place.
    """
    return fitting(cores=cores, available=available, each_gib=compiler_gib(unified=unified))


def fitting(*, cores: int, available: int, each_gib: float) -> int:
    """Return how many processes of ``each_gib`` GiB fit in ``available`` bytes, one per core."""
    return max(1, min(cores, int(available / GIB / each_gib)))


def cores(root: Path = Path("/")) -> int:
    """Return the number of processors for this process, by CPU affinity and control group quota."""
    ours = len(os.sched_getaffinity(0))
    groups = root / "sys/fs/cgroup"
    quota, period = (*_words(groups / "cpu.max"), "", "")[:2]
    if not period:
        (quota,) = _words(groups / "cpu/cpu.cfs_quota_us") or ("",)
        (period,) = _words(groups / "cpu/cpu.cfs_period_us") or ("",)
    # No limit is "max", or -1 in version 1.
    if quota.isdecimal() and period.isdecimal() and int(period):
        return max(1, min(ours, math.ceil(int(quota) / int(period))))
    return ours


def available(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be had without swapping; None where the kernel does not say.

    In a container the group is the container's own.
    """
    return min(_free(root), default=None)


def _free(root: Path) -> Iterator[int]:
    for words in map(str.split, kernel_text(root / "proc/meminfo").splitlines()):
        if words[:1] == ["MemAvailable:"]:
            yield int(words[1]) * 1024
    groups = root / "sys/fs/cgroup"
    for folder, limit, used in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        most, now = kernel_text(folder / limit).strip(), kernel_text(folder / used).strip()
        if most.isdecimal() and now.isdecimal() and int(most) < _NO_LIMIT:
            stat = map(str.split, kernel_text(folder / "memory.stat").splitlines())
            kept = sum(int(words[1]) for words in stat if words[:1] and words[0] in _KEPT_FILES)
            yield max(int(most) - int(now) + kept, 0)


def _words(path: Path) -> tuple[str, ...]:
    return tuple(kernel_text(path).split())
