"""Since which release something is upstream: by what is known, then by halving what is between."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packaging.version import Version

from sm12x.stack.rebase import verdict
from sm12x.stack.rebase.verdict import Need


def between(releases: Sequence[str], start: str, end: str) -> list[str]:
    """Those of ``releases`` after ``start`` and before ``end``, oldest first."""
    inside = [text for text in releases if Version(start) < Version(text) < Version(end)]
    return sorted(inside, key=Version)


def first(
    candidates: Sequence[str], last: str, probe: Callable[[str], Need]
) -> tuple[str, dict[str, Need]]:
    """The first of ``candidates`` that has it, ``last`` if none does, and what each probe said.

    Takes it that a release after one that has it has it too; one on which the witness could not run
    counts as not having it.

    Args:
        candidates: releases, oldest first, all before ``last``, which has it.
    """
    said: dict[str, Need] = {}
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        said[candidates[middle]] = probe(candidates[middle])
        if said[candidates[middle]].state == verdict.UPSTREAM:
            high = middle
        else:
            low = middle + 1
    return (candidates[low] if low < len(candidates) else last), said
