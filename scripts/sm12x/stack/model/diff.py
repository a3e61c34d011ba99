"""Unified diffs as git writes them: which files one changes, and whether people can read it.

git itself decides whether the hunks of a diff apply.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

# A file that is renamed has two names; git puts an odd one in quotes.
_FILE = re.compile(r"diff --git a/(?P<path>.+) b/(?P=path)")
_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(?: \d+)?")
_MODE = ("new file mode", "deleted file mode", "old mode", "new mode")
_HEADER = ("index ", "--- ", "+++ ", *_MODE)


class DiffError(ValueError):
    """A malformed diff. ``line`` counts from 1 in the text that was parsed."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, kw_only=True)
class PatchedFile:
    """One file of a patch. ``old_blob`` and ``new_blob`` are git ids, all zeros for "no file".

    Both are "" where only the file's mode changes.
    """

    path: str
    old_blob: str
    new_blob: str


def parse(lines: Sequence[str], *, first_line: int = 1) -> tuple[PatchedFile, ...]:
    """Return the files of a diff; ``lines[0]`` begins one, and is the line ``first_line``.

    Raises:
        DiffError: the diff renames, copies or holds binary data, or has lines that are no diff.
    """
    starts = [n for n, line in enumerate(lines) if line.startswith("diff --git ")]
    sections = itertools.pairwise([*starts, len(lines)])
    return tuple(_file(lines[start:end], first_line + start) for start, end in sections)


def _file(lines: Sequence[str], first_line: int) -> PatchedFile:
    named = _FILE.fullmatch(lines[0])
    path = named["path"] if named else ""
    # Out of the tree, or into its repository.
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in path.split("/")):
        raise DiffError(first_line, f"names no file of a source tree: {lines[0]}")
    blobs, modes, hunks = ("", ""), False, False
    for number, line in enumerate(lines[1:], start=first_line + 1):
        if line.startswith("@@ "):
            hunks = True
        elif hunks and line[:1] in (" ", "+", "-", "\\"):
            continue
        elif hunks or not line.startswith(_HEADER) or line.endswith("mode 160000"):
            raise DiffError(number, f"is no part of a diff of text: {line[:60]!r}")
        elif index := _INDEX.fullmatch(line):
            blobs = index[1], index[2]
        modes = modes or line.startswith(_MODE)
    # An added or removed empty file, and a change of mode, have no hunk.
    if not modes and not (hunks and blobs[0]):
        raise DiffError(first_line, "a file's diff has no index line or no hunk")
    return PatchedFile(path=path, old_blob=blobs[0], new_blob=blobs[1])
