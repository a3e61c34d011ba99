"""Unified diffs as git writes them: files, hunks, and whether a hunk fits a file's text.

git itself decides whether a patch applies; this module only explains the result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_INDEX = re.compile(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)(?: (\d+))?$")


_ESCAPE = re.compile(rb"\\([0-7]{3})|\\(.)|([^\\]+)", re.DOTALL)
_LETTERS = {
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"n": b"\n",
    b"r": b"\r",
    b"t": b"\t",
    b"v": b"\v",
}


class DiffError(ValueError):
    """A malformed diff. ``line`` counts from 1 in the text that was parsed."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One hunk. ``line`` is where its header stands in the patch file; starts count from 1."""

    header: str
    line: int
    old_start: int
    new_start: int
    lines: tuple[str, ...]

    @property
    def expects(self) -> tuple[str, ...]:
        """The text the patch looks for."""
        return tuple(line[1:] for line in self.lines if line[0] in " -")

    @property
    def leaves(self) -> tuple[str, ...]:
        """The text the patch leaves behind."""
        return tuple(line[1:] for line in self.lines if line[0] in " +")


@dataclass(frozen=True, kw_only=True)
class PatchedFile:
    """One file of a patch. ``old_blob`` and ``new_blob`` are git ids, all zeros for "no file".

    Both are "" where only the file's mode changes.
    """

    path: str
    old_blob: str
    new_blob: str
    hunks: tuple[Hunk, ...]

    @property
    def added(self) -> bool:
        return self.old_blob != "" and not self.old_blob.strip("0")


@dataclass(frozen=True, kw_only=True)
class HunkState:
    """The result of comparing a hunk with a text.

    ``state`` is "applies", "offset" (the text stands ``moved`` lines further down), "in base" (what
    it would leave is already there) or "conflict"; ``start`` is the line, from 1, where ``has``,
    the nearest text of the file, begins.
    """

    hunk: Hunk
    state: str
    moved: int = 0
    start: int = 0
    has: tuple[str, ...] = ()


def parse(lines: Sequence[str], *, first_line: int = 1) -> tuple[PatchedFile, ...]:
    """Read the files of a diff; ``first_line`` is the number of ``lines[0]`` in its file.

    Raises:
        DiffError: a hunk is cut short, or the diff renames, copies or holds binary data, which a
            stack that people are to read must not.
    """
    files: list[PatchedFile] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("diff --git "):
            if lines[at].strip():
                raise DiffError(first_line + at, f"is not part of a diff: {lines[at][:60]!r}")
            at += 1
            continue
        start = at
        path = _same_path(lines[at])
        blobs: tuple[str, str] | None = None
        modes = False
        hunks: list[Hunk] = []
        at += 1
        while at < len(lines) and not lines[at].startswith("diff --git "):
            line = lines[at]
            if match := _INDEX.match(line):
                blobs = match[1], match[2]
            elif line.startswith(("--- ", "+++ ")):
                path = _path(line, path, first_line + at)
            elif line.startswith("@@ "):
                hunk, at = _hunk(lines, at, first_line)
                hunks.append(hunk)
                continue
            elif line.startswith(("rename ", "copy ", "similarity ", "dissimilarity ")):
                raise DiffError(first_line + at, "renames and copies are to be written out in full")
            elif line.startswith(("Binary files", "GIT binary patch")):
                raise DiffError(first_line + at, "binary files cannot be patched")
            elif line.startswith(("new file mode 160000", "new mode 160000")):
                raise DiffError(first_line + at, "a submodule cannot be patched in: it has no text")
            elif line.startswith(("new file mode", "deleted file mode", "old mode", "new mode")):
                modes = True
            elif line.strip():
                raise DiffError(first_line + at, f"is not part of a diff: {line[:60]!r}")
            at += 1
        # An added or removed empty file, and a change of mode, have no hunk.
        if not path or (blobs is None and not modes) or not (hunks or modes):
            raise DiffError(first_line + start, "a file's diff has no index line or no hunk")
        if _leads_out(path):
            raise DiffError(first_line + start, f"the path {path!r} leads out of the source tree")
        blobs = blobs or ("", "")
        files.append(
            PatchedFile(path=path, old_blob=blobs[0], new_blob=blobs[1], hunks=tuple(hunks))
        )
    return tuple(files)


def locate(hunk: Hunk, text: Sequence[str] | None) -> HunkState:
    """Compare ``hunk`` with the lines of a file (None: there is no such file)."""
    if text is None:
        applies = not hunk.expects
        return HunkState(hunk=hunk, state="applies" if applies else "conflict")
    expects, leaves = hunk.expects, hunk.leaves
    # "-0,0" means before the first line; otherwise an empty old side begins after its line.
    wanted = hunk.old_start - 1 if expects else hunk.old_start
    if expects and _matches(text, wanted, expects):
        return HunkState(hunk=hunk, state="applies", start=wanted + 1)
    landed = _nearest_match(text, leaves, hunk.new_start - 1)
    if landed is not None:
        return HunkState(hunk=hunk, state="in base", start=landed + 1)
    found = _nearest_match(text, expects, wanted)
    if found is not None:
        return HunkState(hunk=hunk, state="offset", moved=found - wanted, start=found + 1)
    start = _most_alike(text, expects, wanted)
    return HunkState(
        hunk=hunk,
        state="conflict",
        start=start + 1,
        has=tuple(text[start : start + max(len(expects), 1)]),
    )


def _hunk(lines: Sequence[str], at: int, first_line: int) -> tuple[Hunk, int]:
    header = lines[at]
    match = _HUNK.match(header)
    if match is None:
        raise DiffError(first_line + at, f"is not a hunk header: {header[:60]!r}")
    old_left = int(match[2] or 1)
    new_left = int(match[4] or 1)
    body: list[str] = []
    where = at
    at += 1
    while old_left > 0 or new_left > 0:
        # Mail programs drop the blank of an empty context line; git never does.
        if at == len(lines) or lines[at][:1] not in (" ", "+", "-", "\\"):
            raise DiffError(first_line + at, f"hunk {header} is cut short or mangled here")
        line = lines[at]
        if line[0] != "\\":
            old_left -= line[0] in " -"
            new_left -= line[0] in " +"
            body.append(line)
        at += 1
    if old_left < 0 or new_left < 0:
        raise DiffError(first_line + where, f"hunk {header} has other counts than its header says")
    if at < len(lines) and lines[at].startswith("\\"):
        at += 1
    return (
        Hunk(
            header=header,
            line=first_line + where,
            old_start=int(match[1]),
            new_start=int(match[3]),
            lines=tuple(body),
        ),
        at,
    )


def _same_path(line: str) -> str:
    """The path in ``diff --git a/PATH b/PATH``; "" unless both sides name the same."""
    both = line.removeprefix("diff --git ")
    half = (len(both) - 1) // 2
    old, new = _unquoted(both[:half]), _unquoted(both[half + 1 :])
    return old[2:] if old[:2] == "a/" and new[:2] == "b/" and old[2:] == new[2:] else ""


def _path(line: str, known: str, number: int) -> str:
    name = _unquoted(line[4:].rstrip("\t"))
    if name == "/dev/null":
        return known
    if not name.startswith(("a/", "b/")):
        raise DiffError(number, f"path {name!r} has no a/ or b/ in front")
    return name[2:]


def _unquoted(name: str) -> str:
    """A path as git writes it: in double quotes, C escapes and all, where it holds odd bytes."""
    if len(name) < 2 or name[0] != '"' or name[-1] != '"':
        return name
    out = bytearray()
    body = name[1:-1].encode("utf-8", errors="surrogateescape")
    for match in _ESCAPE.finditer(body):
        octal, letter, plain = match.groups()
        if octal:
            out.append(int(octal, 8) & 0xFF)
        else:
            out += _LETTERS.get(letter, letter) if letter else plain
    return out.decode("utf-8", errors="surrogateescape")


def _leads_out(path: str) -> bool:
    """Whether a path does not stay in the tree, or reaches into its repository."""
    parts = path.split("/")
    return any(part in ("", ".", "..") or part.lower() == ".git" for part in parts)


def _matches(text: Sequence[str], start: int, wanted: Sequence[str]) -> bool:
    return start >= 0 and tuple(text[start : start + len(wanted)]) == tuple(wanted)


def _nearest_match(text: Sequence[str], wanted: Sequence[str], start: int) -> int | None:
    if not wanted:
        return None
    places = (at for at in range(len(text) - len(wanted) + 1) if _matches(text, at, wanted))
    return min(places, key=lambda at: abs(at - start), default=None)


def _most_alike(text: Sequence[str], wanted: Sequence[str], start: int) -> int:
    """The place where most lines of ``wanted`` match; the nearest of equals."""

    def score(at: int) -> tuple[int, int]:
        pairs = zip(wanted, text[at : at + len(wanted)], strict=False)
        # Blank lines are alike everywhere.
        return sum(1 for a, b in pairs if a == b and a.strip()), -abs(at - start)

    return max(range(max(len(text), 1)), key=score)
