"""Applying the stack: strictly, every patch tried and reported, and all of it or nothing.

The patches are tried on a scratch repository. Only when every one has applied does git write the
files that differ. A folder in which it was stopped there says so at the next call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core.errors import DirtyTreeError, NoSpaceError, PatchConflictError, ToolFailedError
from sm12x.core.git import Repository
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import tree

APPLIED = "applied"
UPSTREAM = "upstream"
_OFFSET = "offset"
_CONFLICT = "conflict"


@dataclass(frozen=True, kw_only=True)
class PatchResult:
    """The outcome of one patch.

    ``state`` is "applied", "upstream" (the base has it already; nothing was done), "offset" (it
    would apply at other lines, which is not accepted) or "conflict". ``follows`` names patches that
    failed before it and touch the same files: this failure may be theirs. ``messages`` are git's.
    """

    name: str
    subject: str
    state: str
    files: tuple[str, ...]
    follows: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.state in (APPLIED, UPSTREAM)


@dataclass(frozen=True, kw_only=True)
class ApplyReport:
    """The outcome of a whole stack. ``tree`` is the git tree id of the patched source."""

    base_version: str
    stack_id: str
    results: tuple[PatchResult, ...]
    changed: tuple[str, ...]
    tree: str

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)


class StackConflictError(PatchConflictError):
    """At least one patch did not apply; ``report`` has the outcome of each."""

    def __init__(self, report: ApplyReport, *, next_step: str = "") -> None:
        failed = [result for result in report.results if not result.ok]
        first = failed[0]
        names = [result.name for result in report.results]
        before = names[names.index(first.name) - 1] if first.name != names[0] else "0"
        version = report.base_version
        where = "".join(f": {message}" for message in first.messages[:1])
        super().__init__(
            f"{len(failed)} of {len(report.results)} patches of {report.base_version} do not "
            f"apply; the first is {first.name} ({first.state}{where}); nothing was changed",
            next_step=next_step
            or f"`sm12x-dev apply --base {version} --unpack NEW_DIR --up-to {before}` "
            "makes a tree with the patches before it: make its change there, then `sm12x-dev new "
            f"--base {version} NEW_DIR --like patches/{version}/{first.name}` puts the new patch "
            "in its place",
        )
        self.report = report


def apply(base: Base, stack: Stack, directory: Path) -> ApplyReport:
    """Apply the stack to ``directory``, the unpacked sdist of the base.

    Raises:
        DirtyTreeError: ``directory`` is not the untouched source, and nothing is changed; or a file
            could not be written, and it is half applied.
        StackConflictError: a patch does not apply. Nothing is changed.
        NoSpaceError: the disk is full.
    """
    with tree.scratch(directory) as git:
        start = commit_base(base, stack, git, directory)
        report, tip = try_stack(base, stack, git, start)
        write(git, directory, start, tip)
    return report


def write(git: Repository, directory: Path, start: str, tip: str) -> None:
    """Make the files of ``directory``, which are those of ``start``, the ones of ``tip``."""
    git.read_tree(start)
    git.run("update-index", "-q", "--refresh", check=False)
    try:
        git.run("read-tree", "-m", "-u", start, tip)
    except (NoSpaceError, ToolFailedError) as error:
        kind = NoSpaceError if isinstance(error, NoSpaceError) else DirtyTreeError
        raise kind(
            f"{directory} is half applied: {error.message}",
            next_step="unpack the sdist in another folder (`sm12x-dev apply --base VERSION "
            "--unpack NEW_DIR`)",
        ) from error


def commit_base(base: Base, stack: Stack, git: Repository, directory: Path) -> str:
    """Commit the index of ``git`` as the base, after seeing that it is the untouched source."""
    tree_id = git.write_tree()
    if tree_id != base.sdist.tree:
        raise tree.explain(base, stack, directory, git.index_entries())
    return git.commit_tree(tree_id, f"{base.sdist.name}\n\nsha256 {base.sdist.sha256}\n")


def try_stack(
    base: Base,
    stack: Stack,
    git: Repository,
    commit: str,
    *,
    accept_offset: bool = False,
) -> tuple[ApplyReport, str]:
    """Try every patch on ``commit``, one commit for each that applies; no file is changed.

    Args:
        accept_offset: take a patch whose text stands at other lines; only for one that is
            exported anew from the commit this makes.

    Returns:
        The report, and the last commit made.

    Raises:
        StackConflictError: a patch does not apply; it has the report.
    """
    git.read_tree(commit)
    tip = commit
    results: list[PatchResult] = []
    for patch in stack.patches:
        result = _try(patch, git, results, accept_offset=accept_offset)
        if result.state == APPLIED:
            tip = git.commit_tree(git.write_tree(), patch.message, parent=tip, author=patch.author)
        results.append(result)
    report = ApplyReport(
        base_version=base.version,
        stack_id=stack.id,
        results=tuple(results),
        changed=tuple(git.changed(commit, tip)),
        tree=git.tree_of(tip),
    )
    if not report.ok:
        raise StackConflictError(report)
    return report, tip


def _try(
    patch: Patch, git: Repository, before: Sequence[PatchResult], *, accept_offset: bool
) -> PatchResult:
    content = patch.content()
    files = tuple(file.path for file in patch.files)
    forward = git.apply_cached(content, check_only=True)
    if forward.ok and (accept_offset or not forward.offsets):
        git.apply_cached(content)
        return PatchResult(name=patch.name, subject=patch.subject, state=APPLIED, files=files)
    # Upstream's lines may have moved since: where the text stands does not matter here.
    if git.apply_cached(content, check_only=True, reverse=True).ok:
        return PatchResult(name=patch.name, subject=patch.subject, state=UPSTREAM, files=files)
    return PatchResult(
        name=patch.name,
        subject=patch.subject,
        state=_OFFSET if forward.ok else _CONFLICT,
        files=files,
        follows=tuple(
            earlier.name for earlier in before if not earlier.ok and set(earlier.files) & set(files)
        ),
        messages=forward.errors or forward.offsets,
    )
