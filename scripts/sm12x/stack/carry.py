"""Carrying patches to the source of another release, one on top of the other, through git.

A patch that applies exactly is taken as it is. Otherwise git merges it file by file, with the text
it was written for as the common ancestor; what merges without a conflict is exported anew and then
applies exactly. The folders are only read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm12x.core.git import Repository
from sm12x.stack import apply, merge, refresh, tree
from sm12x.stack.base import Base
from sm12x.stack.merge import Region
from sm12x.stack.series import Patch, Stack

APPLIES = "applies"
MERGES = "merges"
PRESENT = "present"
CONFLICT = "conflict"


@dataclass(frozen=True, kw_only=True)
class FileConflict:
    """A file that git could not merge.

    ``why`` is "" where ``regions`` tell; otherwise what keeps it from being merged at all.
    ``candidates`` are files of the new release that have the name of one that is gone.
    """

    path: str
    why: str
    regions: tuple[Region, ...] = ()
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What became of one patch's text.

    ``state`` is "applies", "merges" (at other lines, or into other surroundings), "present" (the
    release has all of it) or "conflict". ``follows`` names patches that were not taken and change
    the same files: this conflict may be theirs.
    """

    patch: Patch
    state: str
    conflicts: tuple[FileConflict, ...] = ()
    clean: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()

    @property
    def taken(self) -> bool:
        return self.state in (APPLIES, MERGES)


@dataclass(frozen=True, kw_only=True)
class CarryReport:
    """``exported`` are the patch files of the new stack, in order; ``tree`` the untouched id."""

    carried: tuple[Carried, ...]
    exported: dict[str, bytes]
    tree: str


def carry(
    base: Base,
    stack: Stack,
    source: Path,
    target: Path,
    *,
    leave_out: Callable[[Patch], bool],
    root: Path | None,
    label: str,
    on_patch: Callable[[Patch], None] | None = None,
) -> CarryReport:
    """Try the patches of ``stack`` on ``target``, the untouched source of another release.

    Args:
        source: the untouched source of ``base``.
        leave_out: patches that the new stack does not want; their text is looked at all the same.
        root: the checkout that the witnesses' paths are in.
        label: what to call the new release in the texts of a conflict.

    Raises:
        DirtyTreeError: ``source`` is not the untouched source of ``base``.
        StackConflictError: the stack does not apply to its own base.
        MessageError: the message of a patch lacks what it must say.
    """
    with tree.scratch(source) as git:
        start = apply.commit_base(base, stack, git, source, None)
        report, _ = apply.try_stack(base, stack, git, start)
        if not report.ok:
            raise apply.StackConflictError(report)
        # The same objects, another folder: git finds each patch's own text for the merge.
        fresh = Repository(git_dir=git.git_dir, work_tree=target.absolute())
        fresh.add_all()
        untouched = fresh.write_tree()
        first = tip = fresh.commit_tree(untouched, f"{label}\n")
        done: list[Carried] = []
        for patch in stack.patches:
            if on_patch:
                on_patch(patch)
            result, tree_id = _try(fresh, patch, tip, done, label)
            done.append(result)
            if result.taken and not leave_out(patch):
                tip = fresh.commit_tree(tree_id, patch.message, parent=tip, author=patch.author)
        exported = refresh.export(fresh, first, tip, root=root)
    return CarryReport(carried=tuple(done), exported=exported, tree=untouched)


def _try(
    git: Repository, patch: Patch, tip: str, before: Sequence[Carried], label: str
) -> tuple[Carried, str]:
    """The state of a patch on ``tip``, and the tree with it on where it is taken."""
    git.read_tree(tip)
    content = patch.content()
    outcome = git.apply_cached(content, check_only=True)
    if outcome.ok and not outcome.offsets:
        git.apply_cached(content)
        return Carried(patch=patch, state=APPLIES), git.write_tree()
    merged = git.apply_cached(content, three_way=True)
    unmerged = git.unmerged()
    if merged.ok and not unmerged:
        result = git.write_tree()
        state = PRESENT if result == git.tree_of(tip) else MERGES
        return Carried(patch=patch, state=state), result
    conflicts = [
        FileConflict(path=path, why="", regions=_regions(git, patch, path, stages, label))
        if all(stages)
        else FileConflict(path=path, why=_one_sided(stages))
        for path, stages in unmerged.items()
    ]
    git.read_tree(tip)
    if not unmerged:
        # git stops at the first file that is not there; each is asked for by itself.
        conflicts = _each(git, patch, tip, label)
    paths = {conflict.path for conflict in conflicts}
    return (
        Carried(
            patch=patch,
            state=CONFLICT,
            conflicts=tuple(conflicts),
            clean=tuple(file.path for file in patch.files if file.path not in paths),
            follows=tuple(
                earlier.patch.name
                for earlier in before
                if not earlier.taken
                and {file.path for file in earlier.patch.files} & {f.path for f in patch.files}
            ),
        ),
        "",
    )


def _each(git: Repository, patch: Patch, tip: str, label: str) -> list[FileConflict]:
    entries = git.index_entries()
    found: list[FileConflict] = []
    for file in patch.files:
        if file.path not in entries and not file.added:
            name = PurePosixPath(file.path).name
            found.append(
                FileConflict(
                    path=file.path,
                    why="there is no such file in this release",
                    candidates=tuple(p for p in entries if PurePosixPath(p).name == name),
                )
            )
            continue
        git.read_tree(tip)
        outcome = git.apply_cached(patch.content(), three_way=True, include=(file.path,))
        for path, stages in git.unmerged().items():
            regions = _regions(git, patch, path, stages, label) if all(stages) else ()
            why = "" if regions else _one_sided(stages)
            found.append(FileConflict(path=path, why=why, regions=regions))
        if not outcome.ok and not git.unmerged():
            found.append(FileConflict(path=file.path, why="; ".join(outcome.errors)))
    git.read_tree(tip)
    return found


def _regions(
    git: Repository, patch: Patch, path: str, stages: Sequence[str], label: str
) -> tuple[Region, ...]:
    """The places of a file where both the release and the patch changed the same text."""
    texts = [git.text(blob) for blob in stages]
    with tempfile.TemporaryDirectory(prefix="sm12x-merge-") as name:
        paths = [Path(name) / side for side in ("base", "ours", "theirs")]
        for target, text in zip(paths, texts, strict=True):
            target.write_text(text, encoding="utf-8", newline="")
        merged = git.merge_file(paths[1], paths[0], paths[2], marker=merge.MARKER)
    hunks = next((file.hunks for file in patch.files if file.path == path), ())
    return merge.regions(merged, texts[1], texts[2], hunks)


def _one_sided(stages: Sequence[str]) -> str:
    base, ours, theirs = (bool(stage) for stage in stages)
    if not base:
        return "the patch adds this file, and the release has another of that name"
    if not ours:
        return "there is no such file in this release"
    return "the patch removes this file, and the release has changed it" if not theirs else ""
