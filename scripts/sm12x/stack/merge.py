"""Reading what `git merge-file --diff3` leaves: where two sides changed the same text."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from sm12x.stack.diff import Hunk

# Longer than any line of "=" or "<" that a source file has.
MARKER = 31


@dataclass(frozen=True, kw_only=True)
class Region:
    """One conflict of a file.

    ``has`` is the release's text, beginning at its line ``line`` (from 1); ``expects`` what the
    patch was written for, and ``leaves`` what it would put there. ``hunk`` counts from 1 in the
    patch's file, ``header`` is that hunk's.
    """

    line: int
    has: tuple[str, ...]
    expects: tuple[str, ...]
    leaves: tuple[str, ...]
    hunk: int
    header: str


def regions(merged: str, ours: str, theirs: str, hunks: Sequence[Hunk]) -> tuple[Region, ...]:
    """The conflicts in ``merged``, each with the hunk of the patch it comes from.

    Args:
        ours: the release's file.
        theirs: the file as the patch leaves it in the release it was written for.
    """
    blocks = _blocks(merged.split("\n"))
    # Resolved to one side, the merge differs from that side's file only by what the other changed
    # elsewhere: comparing the two gives the line a conflict begins at.
    in_ours = _starts(blocks, 0, ours.split("\n"))
    in_theirs = _starts(blocks, 2, theirs.split("\n"))
    found: list[Region] = []
    conflicts = [block for block in blocks if isinstance(block, _Conflict)]
    for conflict, line, place in zip(conflicts, in_ours, in_theirs, strict=True):
        has, expects, leaves = conflict.sides
        number, header = _hunk_at(hunks, place, len(leaves))
        found.append(
            Region(
                line=line,
                has=tuple(has),
                expects=tuple(expects),
                leaves=tuple(leaves),
                hunk=number,
                header=header,
            )
        )
    return tuple(found)


class _Conflict:
    def __init__(self) -> None:
        self.sides: tuple[list[str], list[str], list[str]] = ([], [], [])


def _blocks(lines: Sequence[str]) -> list[list[str] | _Conflict]:
    """The merged text as runs of lines both sides agree on, and conflicts between them."""
    blocks: list[list[str] | _Conflict] = []
    conflict: _Conflict | None = None
    side = 0
    for line in lines:
        mark = line[:MARKER]
        if conflict is None and mark == "<" * MARKER:
            conflict, side = _Conflict(), 0
            blocks.append(conflict)
        elif conflict is None:
            if not blocks or isinstance(blocks[-1], _Conflict):
                blocks.append([])
            run = blocks[-1]
            assert isinstance(run, list)  # noqa: S101 - the line above has seen to it
            run.append(line)
        elif side < 2 and mark == "|="[side] * MARKER:
            side += 1
        elif side == 2 and mark == ">" * MARKER:
            conflict = None
        else:
            conflict.sides[side].append(line)
    return blocks


def _starts(blocks: Sequence[list[str] | _Conflict], side: int, text: Sequence[str]) -> list[int]:
    """The lines of ``text``, from 1, at which the conflicts begin."""
    resolved: list[str] = []
    starts: list[int] = []
    for block in blocks:
        if isinstance(block, _Conflict):
            starts.append(len(resolved))
            resolved += block.sides[side]
        else:
            resolved += block
    matcher = difflib.SequenceMatcher(None, resolved, text, autojunk=False)
    found: list[int] = []
    for start in starts:
        at = 0
        for first, there, size in matcher.get_matching_blocks():
            if first > start:
                break
            at = there + min(start - first, size)
        found.append(at + 1)
    return found


def _hunk_at(hunks: Sequence[Hunk], line: int, count: int) -> tuple[int, str]:
    """The hunk that wrote lines ``line`` to ``line + count``, or the nearest: number and header."""

    def distance(hunk: Hunk) -> int:
        end = hunk.new_start + len(hunk.leaves)
        return max(hunk.new_start - (line + count), line - end, 0)

    if not hunks:
        return 0, ""
    best = min(range(len(hunks)), key=lambda n: distance(hunks[n]))
    return best + 1, hunks[best].header
