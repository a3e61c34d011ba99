"""Porting patches to the source of another release, one on top of the other, through git.

A patch that applies exactly is taken as it is. Otherwise git merges it file by file, with the text
it was written for as the common ancestor; what merges without a conflict is exported anew and then
applies exactly. The folders are only read.

A patch that conflicts is left out, and those after it are tried without it. Each is also tried on
a tree in which every conflict before it is decided for the patches: one that merges there waits for
the others, and has no conflict of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sm12x.core.git import Repository
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev.rebase import merge
from sm12x_dev.rebase.merge import FileConflict, Labels
from sm12x_dev.worktree import export

APPLIES = "applies"
MERGES = "merges"
PRESENT = "present"
FOLLOWS = "follows"
CONFLICT = "conflict"
STATES = (APPLIES, MERGES, PRESENT, FOLLOWS, CONFLICT)
# Where a copy of the repository keeps the patches as commits of the release they were made for.
_PATCH_REF = "refs/sm12x/patch"


@dataclass(frozen=True, kw_only=True)
class PortResult:
    """The outcome for one patch's text.

    ``state`` is "applies", "merges" (at other lines, or into other surroundings), "present" (the
    release has all of it), "follows" (it merges once the patches in ``follows``, which are in
    conflict and change the same files, are in) or "conflict". ``conflicts`` are those that stay
    when every conflict before is decided for the patches.
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
class PortedStack:
    """``exported`` are the patch files of the new stack, in order; ``tree`` the untouched id.

    ``start`` is the commit of the untouched release, ``commits`` those of the patches on their own
    release, by name; both are in the copy of the repository, where one was asked for.
    """

    results: tuple[PortResult, ...]
    exported: dict[str, bytes]
    tree: str
    start: str
    commits: dict[str, str] = field(default_factory=dict)


def port(
    base: Base,
    stack: Stack,
    source: Path,
    target: Path,
    *,
    leave_out: Callable[[Patch], bool],
    root: Path | None,
    label: str,
    copy: Path | None = None,
) -> PortedStack:
    """Try the patches of ``stack`` on ``target``, the untouched source of another release.

    Args:
        source: the untouched source of ``base``.
        leave_out: patches that the new stack leaves out; their text is tried as well.
        root: the checkout that the witnesses' paths are in.
        label: what to call the new release in the texts of a conflict.
        copy: where to put the repository, for those in conflict to be resolved in; made only if
            there are any.

    Raises:
        DirtyTreeError: ``source`` is not the untouched source of ``base``.
        StackConflictError: the stack does not apply to its own base.
        MessageError: the message of a patch lacks what it must say.
    """
    with tree.scratch(source) as git:
        start = apply.commit_base(base, stack, git, source, None)
        report, last = apply.try_stack(base, stack, git, start)
        if not report.ok:
            raise apply.StackConflictError(report)
        made = iter(git.commits(start, last))
        commits = {
            result.name: next(made) for result in report.results if result.state == apply.APPLIED
        }
        # The same objects, another folder: git finds each patch's own text for the merge.
        fresh = Repository(git_dir=git.git_dir, work_tree=target.absolute())
        fresh.add_all()
        untouched = fresh.write_tree()
        first = fresh.commit_tree(untouched, f"{label}\n")
        tips = _Tips(real=first, favoured=first)
        done: list[PortResult] = []
        for patch in stack.patches:
            # A patch that its own base has already has no commit to port.
            commit = commits.get(patch.name)
            if commit is None:
                done.append(PortResult(patch=patch, state=PRESENT))
                continue
            names = labels(base.version, label, patch.name)
            result, fits = _try(fresh, patch, commit, tips, done, names)
            done.append(result)
            if not leave_out(patch):
                tips = fits
        exported = export.export(fresh, first, tips.real, root=root)
        if copy is not None and any(not one.taken and one.state != PRESENT for one in done):
            for number, commit in enumerate(commits.values(), start=1):
                fresh.update_ref(f"{_PATCH_REF}/{number}", commit)
            fresh.update_ref(f"refs/tags/{apply.BASE_TAG}", first)
            fresh.update_ref(f"refs/heads/{apply.BRANCH}", first)
            fresh.pack()
            shutil.copytree(fresh.git_dir, copy)
    return PortedStack(
        results=tuple(done), exported=exported, tree=untouched, start=first, commits=commits
    )


def labels(source: str, release: str, name: str) -> Labels:
    """How the sides of a conflict are called."""
    return Labels(ours=release, base=f"{source}, before the patch", theirs=name)


@dataclass(frozen=True, kw_only=True)
class _Tips:
    """Commits: with the patches that merge, and with all, their conflicts decided for them."""

    real: str
    favoured: str


def _try(
    git: Repository,
    patch: Patch,
    commit: str,
    tips: _Tips,
    before: Sequence[PortResult],
    names: Labels,
) -> tuple[PortResult, _Tips]:
    """The state of a patch, and the tips with it on."""

    def on(tip: str, tree_id: str) -> str:
        if tree_id == git.tree_of(tip):
            return tip
        return git.commit_tree(tree_id, patch.message, parent=tip, author=patch.author)

    git.read_tree(tips.real)
    exact = git.apply_cached(patch.content(), check_only=True)
    if exact.ok and not exact.offsets:
        git.apply_cached(patch.content())
        taken = on(tips.real, git.write_tree())
        favoured = taken
        if tips.favoured != tips.real:
            favoured = on(tips.favoured, merge.merge(git, commit, tips.favoured, names).favoured)
        return PortResult(patch=patch, state=APPLIES), _Tips(real=taken, favoured=favoured)
    merged = merge.merge(git, commit, tips.real, names)
    best = merged
    if tips.favoured != tips.real:
        best = merge.merge(git, commit, tips.favoured, names)
    favoured = on(tips.favoured, best.favoured)
    if not merged.conflicts:
        present = merged.tree == git.tree_of(tips.real)
        state = PRESENT if present else MERGES
        return PortResult(patch=patch, state=state), _Tips(
            real=on(tips.real, merged.tree), favoured=favoured
        )
    paths = {file.path for file in patch.files}
    earlier = tuple(
        one.patch.name
        for one in before
        if one.state in (CONFLICT, FOLLOWS) and {file.path for file in one.patch.files} & paths
    )
    return (
        PortResult(
            patch=patch,
            state=CONFLICT if best.conflicts else FOLLOWS,
            conflicts=best.conflicts,
            clean=best.clean,
            follows=earlier,
        ),
        _Tips(real=tips.real, favoured=favoured),
    )
