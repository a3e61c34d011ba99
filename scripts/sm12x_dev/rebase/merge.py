"""Merging one commit of a stack onto another release, file by file, through git.

The text that the patch was written for is the common ancestor. A merge without conflicts is
accepted; a file that git cannot merge is left with ordinary conflict markers, for a person to
resolve.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm12x.core.declared import Declared
from sm12x.core.git import Repository, TreeFile

_REGULAR = ("100644", "100755")
# Files of one name that are looked at for one that is gone; __init__.py is everywhere.
_CANDIDATES = 4


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a conflict's three sides, after its markers."""

    ours: str
    base: str
    theirs: str

    @property
    def markers(self) -> tuple[str, ...]:
        """The lines that a conflict has and no source file does."""
        return (f"<<<<<<< {self.ours}", f"||||||| {self.base}", f">>>>>>> {self.theirs}")


@dataclass(frozen=True, kw_only=True)
class FileConflict(Declared):
    """A file that git could not merge, by its path in the new release.

    ``places`` are the lines, from 1, at which conflicts begin in the file with its markers; ``why``
    says what keeps it from being merged where there are none. ``candidates`` are files of the new
    release that have the name of one that is gone.
    """

    path: str
    why: str
    places: tuple[int, ...] = ()
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The outcome of one patch on one tree.

    ``tree`` has the merged files, and the old text of the others; in ``favoured`` every conflict is
    decided for the patch. ``marked`` are the files with their markers and their modes, ``stages``
    the blobs of ancestor, ours and theirs; ``rejected`` the hunks that could not be placed, as a
    diff, by path. ``clean`` are the paths that merged.
    """

    tree: str
    favoured: str
    conflicts: tuple[FileConflict, ...]
    clean: tuple[str, ...]
    marked: Mapping[str, tuple[str, bytes]]
    stages: Mapping[str, tuple[str, str, str]]
    rejected: Mapping[str, bytes]


def merge(git: Repository, commit: str, tip: str, labels: Labels) -> Merge:
    """Merge what ``commit`` does to its parent into ``tip``; only objects are written.

    The index of ``git`` is used, and holds ``tip`` with all that merged afterwards.
    """
    parent = f"{commit}~1"
    before, after, now = git.entries(parent), git.entries(commit), git.entries(tip)
    work = _Work(git, labels, now)
    with tempfile.TemporaryDirectory(prefix="sm12x-merge-") as name:
        work.folder = Path(name)
        for path in git.changed(parent, commit):
            work.file(path, before.get(path), after.get(path), commit)
    git.read_tree(tip)
    git.stage(work.taken)
    tree = git.write_tree()
    git.stage(work.decided)
    favoured = git.write_tree()
    git.read_tree(tree)
    return Merge(
        tree=tree,
        favoured=favoured,
        conflicts=tuple(work.conflicts),
        clean=tuple(dict.fromkeys(work.clean)),
        marked=work.marked,
        stages=work.stages,
        rejected=work.rejected,
    )


def places(text: bytes, labels: Labels) -> tuple[int, ...]:
    """The lines of ``text``, from 1, that begin a conflict."""
    start = labels.markers[0].encode()
    lines = text.split(b"\n")
    return tuple(n for n, line in enumerate(lines, start=1) if line.rstrip(b"\r") == start)


def unresolved(text: bytes, markers: Sequence[str]) -> int:
    """The first line of ``text``, from 1, that is one of ``markers``; 0 where none is left."""
    wanted = {marker.encode() for marker in markers}
    for number, line in enumerate(text.split(b"\n"), start=1):
        if line.rstrip(b"\r") in wanted:
            return number
    return 0


class _Work:
    """The results, collected file by file. ``taken`` and ``decided`` are for ``stage``."""

    def __init__(self, git: Repository, labels: Labels, now: Mapping[str, TreeFile]) -> None:
        self._git = git
        self._labels = labels
        self._now = now
        self.folder = Path()
        self.taken: dict[str, tuple[str, str]] = {}
        self.decided: dict[str, tuple[str, str]] = {}
        self.conflicts: list[FileConflict] = []
        self.clean: list[str] = []
        self.marked: dict[str, tuple[str, bytes]] = {}
        self.stages: dict[str, tuple[str, str, str]] = {}
        self.rejected: dict[str, bytes] = {}

    def file(self, path: str, before: TreeFile | None, after: TreeFile | None, commit: str) -> None:
        """Merge one file of ``commit``: ``before`` and ``after`` it, None where there is none."""
        here = self._now.get(path)
        if _same(here, before) or _same(here, after):
            if not _same(here, after):
                self.taken[path] = (after.mode, after.blob) if after else ("0", "")
            self.clean.append(path)
            return
        if here is None and before is not None:
            self._gone(path, before, after, commit)
            return
        if after is None:
            self._reject(
                path, "the patch removes this file, and the release has changed it", commit
            )
            self.decided[path] = ("0", "")
            return
        sides = [entry for entry in (before, here, after) if entry is not None]
        if here is None or any(entry.mode not in _REGULAR for entry in sides):
            self._reject(path, "it is a link, or was one", commit)
            return
        self._text(path, before, here, after, moved="")

    def _gone(self, path: str, before: TreeFile, after: TreeFile | None, commit: str) -> None:
        """A file that the release does not have: its change goes where it may have moved to."""
        name = PurePosixPath(path).name
        found = tuple(sorted(p for p in self._now if PurePosixPath(p).name == name))
        why = "there is no such file in this release"
        here = self._now[found[0]] if len(found) == 1 else None
        if after is None or here is None or {before.mode, here.mode, after.mode} - {*_REGULAR}:
            self._reject(path, why, commit, candidates=found[: _CANDIDATES + 1])
            return
        moved = f"{path} is not in this release: its change is merged in here"
        self._text(found[0], before, here, after, moved=moved)

    def _text(
        self, path: str, before: TreeFile | None, here: TreeFile, after: TreeFile, *, moved: str
    ) -> None:
        git = self._git
        empty = git.store(b"") if before is None else ""
        blobs = (before.blob if before else empty, here.blob, after.blob)
        texts = [git.blob(blob) for blob in blobs]
        merged, conflicts = self._three_way(texts, favour=False)
        mode = after.mode if before is None or after.mode != before.mode else here.mode
        if not conflicts:
            self.taken[path] = (mode, git.store(merged))
            if not moved:
                self.clean.append(path)
                return
        else:
            favoured, _ = self._three_way(texts, favour=True)
            self.decided[path] = (mode, git.store(favoured))
            self.marked[path] = (mode, merged)
            self.stages[path] = (blobs[0] if before else "", blobs[1], blobs[2])
        self.conflicts.append(
            FileConflict(path=path, why=moved, places=places(merged, self._labels))
        )

    def _three_way(self, texts: Sequence[bytes], *, favour: bool) -> tuple[bytes, bool]:
        """The merge of ancestor, ours and theirs, and whether conflicts are left in it."""
        paths = [self.folder / side for side in ("base", "ours", "theirs")]
        for target, text in zip(paths, texts, strict=True):
            target.write_bytes(text)
        labels = (self._labels.ours, self._labels.base, self._labels.theirs)
        conflicts = self._git.merge_file(
            paths[1], paths[0], paths[2], labels=labels, favour_theirs=favour
        )
        return paths[1].read_bytes(), conflicts

    def _reject(
        self, path: str, why: str, commit: str, *, candidates: tuple[str, ...] = ()
    ) -> None:
        self.rejected[path] = self._git.diff(f"{commit}~1", commit, path)
        self.conflicts.append(FileConflict(path=path, why=why, candidates=candidates))


def _same(one: TreeFile | None, other: TreeFile | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.mode, one.blob) == (other.mode, other.blob)
