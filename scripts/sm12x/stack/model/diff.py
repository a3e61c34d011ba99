"""Unified diffs as git writes them: which files one changes, and whether people can read it.

git itself decides whether a diff applies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_INDEX = re.compile(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: \d+)?$")
_MODE = ("new file mode", "deleted file mode", "old mode", "new mode")
# What a stack that people are to read must not have.
_REFUSED = {
    ("rename ", "copy ", "similarity ", "dissimilarity "): "renames and copies are to be written "
    "out in full",
    ("Binary files", "GIT binary patch"): "binary files cannot be patched",
    ("new file mode 160000", "new mode 160000"): "a submodule cannot be patched in: it has no text",
}
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = dict(zip(b"abfnrtv", b"\a\b\f\n\r\t\v", strict=True))


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
    """Return the files of a diff; ``first_line`` is the number of ``lines[0]`` in its file.

    Raises:
        DiffError: a hunk is cut short, or the diff renames, copies or holds binary data.
    """
    starts = [n for n, line in _outside_hunks(lines, first_line) if line.startswith("diff --git ")]
    ends = [*starts, len(lines)]
    if any(line.strip() for line in lines[: ends[0]]):
        raise DiffError(first_line, f"is not part of a diff: {lines[0][:60]!r}")
    return tuple(
        _file(lines[start:end], first_line + start)
        for start, end in zip(starts, ends[1:], strict=True)
    )


def _file(lines: Sequence[str], first_line: int) -> PatchedFile:
    path, blobs, modes, hunks = _same_path(lines[0]), ("", ""), False, False
    for offset, line in _outside_hunks(lines[1:], first_line + 1):
        number = first_line + 1 + offset
        for starts, why in _REFUSED.items():
            if line.startswith(starts):
                raise DiffError(number, why)
        if match := _INDEX.match(line):
            blobs = match[1], match[2]
        elif line.startswith(("--- ", "+++ ")):
            path = _path(line, path, number)
        elif line.startswith("@@ "):
            hunks = True
        elif line.startswith(_MODE):
            modes = True
        elif line.strip():
            raise DiffError(number, f"is not part of a diff: {line[:60]!r}")
    # An added or removed empty file, and a change of mode, have no hunk.
    if not path or not (blobs[0] or modes) or not (hunks or modes):
        raise DiffError(first_line, "a file's diff has no index line or no hunk")
    # Out of the tree, or into its repository.
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in path.split("/")):
        raise DiffError(first_line, f"the path {path!r} leads out of the source tree")
    return PatchedFile(path=path, old_blob=blobs[0], new_blob=blobs[1])


def _outside_hunks(lines: Sequence[str], first_line: int) -> list[tuple[int, str]]:
    """The lines of a diff but for the bodies of its hunks, with their places from 0."""
    outside: list[tuple[int, str]] = []
    old = new = 0
    for at, line in enumerate(lines):
        if old > 0 or new > 0:
            # Mail programs drop the blank of an empty context line; git never does.
            if line[:1] not in (" ", "+", "-", "\\"):
                raise DiffError(first_line + at, "the hunk before is cut short or mangled here")
            old -= line[0] in " -"
            new -= line[0] in " +"
            if old < 0 or new < 0:
                raise DiffError(first_line + at, "the hunk has other counts than its header says")
            continue
        if line.startswith("\\"):
            continue
        outside.append((at, line))
        if line.startswith("@@ "):
            match = _HUNK.match(line)
            if match is None:
                raise DiffError(first_line + at, f"is not a hunk header: {line[:60]!r}")
            old, new = int(match[1] or 1), int(match[2] or 1)
    if old > 0 or new > 0:
        raise DiffError(first_line + len(lines), "the last hunk is cut short")
    return outside


def _same_path(line: str) -> str:
    """The path in ``diff --git a/PATH b/PATH``; "" unless both sides name the same."""
    both = line.removeprefix("diff --git ")
    half = (len(both) - 1) // 2
    old, new = _unquoted(both[:half]), _unquoted(both[half + 1 :])
    return old[2:] if old[:2] == "a/" and new[:2] == "b/" and old[2:] == new[2:] else ""


def _path(line: str, path: str, number: int) -> str:
    name = _unquoted(line[4:].rstrip("\t"))
    if name == "/dev/null":
        return path
    if not name.startswith(("a/", "b/")):
        raise DiffError(number, f"path {name!r} has no a/ or b/ in front")
    return name[2:]


def _unquoted(name: str) -> str:
    """A path as git writes it: in double quotes, C escapes and all, where it holds odd bytes."""
    if len(name) < 2 or name[0] != '"' or name[-1] != '"':
        return name

    def byte(match: re.Match[bytes]) -> bytes:
        escape = match[1]
        number = int(escape, 8) & 0xFF if len(escape) == 3 else _LETTERS.get(escape[0], escape[0])
        return bytes([number])

    body = name[1:-1].encode("utf-8", errors="surrogateescape")
    return _ESCAPE.sub(byte, body).decode("utf-8", errors="surrogateescape")
