"""Applying the stack: strictly, every patch tried and reported, and all of it or nothing.

The patches are tried on a scratch repository. Only when every one has applied is the folder
changed: each file by a rename, undone if anything goes wrong on the way.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sm12x.core import text as texts
from sm12x.core.errors import (
    DISK_FULL,
    BadFileError,
    DirtyTreeError,
    NoSpaceError,
    PatchConflictError,
    Sm12xError,
    of_system,
)
from sm12x.core.git import GitApplied, Repository, TreeFile
from sm12x.stack.model import diff
from sm12x.stack.model.base import Base
from sm12x.stack.model.diff import HunkState
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import tree

APPLIED = "applied"
UPSTREAM = "upstream"
_OFFSET = "offset"
_CONFLICT = "conflict"
# The commit of the untouched source in a folder that `apply` made a repository of.
BASE_TAG = "base"
BRANCH = "stack"
# git's mode of a symbolic link.
_LINK = "120000"
# How many paths an error names before it only counts.
_NAMED = 8
# Setting of that repository: the patches that have no commit there, the base having them already.
UPSTREAM_KEY = "sm12x.upstream"
# The id of the stack it was made from, and the patches of that stack that were left out of it.
STACK_KEY = "sm12x.stack"
REST_KEY = "sm12x.rest"


@dataclass(frozen=True, kw_only=True)
class RefusedFile:
    """A file that a patch does not fit: the state of each hunk, and git's message."""

    path: str
    hunks: tuple[HunkState, ...]
    exists: bool


@dataclass(frozen=True, kw_only=True)
class PatchResult:
    """The outcome of one patch.

    ``state`` is "applied", "upstream" (the base has it already; nothing was done), "offset" (it
    would apply at other lines, which is not accepted) or "conflict". ``follows`` names patches that
    failed before it and touch the same files: this failure may be theirs. ``said`` holds git's own
    error lines.
    """

    name: str
    subject: str
    state: str
    files: tuple[str, ...]
    conflicts: tuple[RefusedFile, ...] = ()
    follows: tuple[str, ...] = ()
    said: tuple[str, ...] = ()

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

    def __init__(self, report: ApplyReport) -> None:
        failed = [result for result in report.results if not result.ok]
        first = failed[0]
        names = [result.name for result in report.results]
        before = names[names.index(first.name) - 1] if first.name != names[0] else "0"
        version = report.base_version
        where = f" in {first.conflicts[0].path}" if first.conflicts else ""
        super().__init__(
            f"{len(failed)} of {len(report.results)} patches of {report.base_version} do not "
            f"apply; the first is {first.name} ({first.state}{where}); nothing was changed",
            next_step=f"`sm12x-dev apply --base {version} --unpack NEW_DIR --up-to {before}` "
            "makes a tree with the patches before it: make its change there, then `sm12x-dev new "
            f"--base {version} NEW_DIR --like patches/{version}/{first.name}` puts the new patch "
            "in its place",
        )
        self.report = report


def apply(
    base: Base,
    stack: Stack,
    directory: Path,
    *,
    repository: bool = False,
    archive: Path | None = None,
    on_patch: Callable[[Patch], None] | None = None,
    rest: Sequence[str] = (),
) -> ApplyReport:
    """Apply the stack to ``directory``, the unpacked sdist of the base.

    Args:
        rest: the names of patches at its end that are not to be applied; with ``repository`` it
            notes them, and a refresh leaves them in the series.
        repository: leave ``directory`` as a git repository with a commit tagged "base" and one
            commit per patch, to edit and to refresh from; otherwise only the files change.
        archive: the sdist, where it is at hand, to name the files of a tree that was edited.
        on_patch: called before each patch is tried.

    Raises:
        DirtyTreeError: ``directory`` is not the untouched source. Nothing is changed.
        StackConflictError: a patch does not apply. Nothing is changed.
        NoSpaceError, BadFileError: a file could not be written. Nothing is changed.
        HalfAppliedError: as above, and the changed files could not be restored.
    """
    try:
        return _apply(base, stack, directory, repository, archive, on_patch, rest)
    except OSError as error:
        raise _refused(error, directory) from error


def _apply(
    base: Base,
    stack: Stack,
    directory: Path,
    repository: bool,
    archive: Path | None,
    on_patch: Callable[[Patch], None] | None,
    rest: Sequence[str],
) -> ApplyReport:
    whole = stack
    stack = Stack(patches=tuple(patch for patch in whole.patches if patch.name not in rest))
    with tree.scratch(directory) as git:
        commit = commit_base(base, stack, git, directory, archive)
        if repository and (directory / ".git").exists():
            raise DirtyTreeError(
                f"{directory} is a git repository already, and this command would make a new one",
                next_step="add --no-repository to keep that repository, or remove its .git",
            )
        report, tip = try_stack(base, stack, git, commit, on_patch=on_patch)
        if not report.ok:
            raise StackConflictError(report)
        with tempfile.TemporaryDirectory(prefix="sm12x-apply-") as name:
            git.read_tree(tip)
            if repository:
                with (
                    _repository_for(
                        git, base, report, directory, commit, tip, whole, rest
                    ) as hidden,
                    _putting(git, Path(name), directory, report.changed),
                ):
                    hidden.rename(directory / ".git")
                left = Repository(git_dir=directory / ".git", work_tree=directory)
                # Files are the same; only their times are not known to the index yet.
                with suppress(NoSpaceError):
                    left.run("update-index", "-q", "--refresh", check=False)
            else:
                with _putting(git, Path(name), directory, report.changed):
                    pass
    return report


def commit_base(
    base: Base, stack: Stack, git: Repository, directory: Path, archive: Path | None
) -> str:
    """Commit the index of ``git`` as the base, after seeing that it is the untouched source."""
    found = git.write_tree()
    if found != base.sdist.tree:
        raise tree.explain(base, stack, directory, git.index_entries(), archive)
    return git.commit_tree(found, f"{base.sdist.name}\n\nsha256 {base.sdist.sha256}\n")


def try_stack(
    base: Base,
    stack: Stack,
    git: Repository,
    commit: str,
    *,
    on_patch: Callable[[Patch], None] | None = None,
    accept_offset: bool = False,
) -> tuple[ApplyReport, str]:
    """Try every patch on ``commit``, one commit for each that applies; no file is changed.

    Args:
        accept_offset: take a patch whose text stands at other lines; only for one that is
            exported anew from the commit this makes.

    Returns:
        The report, and the last commit made.
    """
    git.read_tree(commit)
    tip = commit
    results: list[PatchResult] = []
    for patch in stack.patches:
        if on_patch:
            on_patch(patch)
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
        conflicts=_conflicts(patch, git, forward),
        follows=tuple(
            earlier.name for earlier in before if not earlier.ok and set(earlier.files) & set(files)
        ),
        said=forward.errors,
    )


def _conflicts(patch: Patch, git: Repository, outcome: GitApplied) -> tuple[RefusedFile, ...]:
    entries: dict[str, TreeFile] = git.index_entries()
    found: list[RefusedFile] = []
    for file in patch.files:
        entry = entries.get(file.path)
        text = git.text(entry.blob).split("\n") if entry else None
        states = tuple(diff.locate(hunk, text) for hunk in file.hunks)
        moved = any(offset.path == file.path for offset in outcome.offsets)
        clash = file.added and entry is not None
        if moved or clash or any(state.state != "applies" for state in states):
            found.append(RefusedFile(path=file.path, hunks=states, exists=entry is not None))
    return tuple(found)


@contextmanager
def _putting(
    git: Repository, scratch: Path, directory: Path, paths: Sequence[str]
) -> Iterator[None]:
    """Make ``paths`` of ``directory`` what the index of ``git`` holds, then run the block.

    All new files are written beside their targets before the first target changes, so that a full
    disk or a folder that may not be written is met while nothing has changed. If anything fails
    later, or is interrupted, every file is put back by a rename, which needs no room.

    Raises:
        HalfAppliedError: that failed, and the changed files could not be restored.
    """
    entries = git.index_entries()
    fresh = scratch / "fresh"
    git.checkout_index(fresh, [path for path in paths if path in entries])
    placing = _Placing(directory, token=scratch.name)
    try:
        for path in paths:
            placing.stage(path, fresh / path, entries[path].mode if path in entries else "")
        for path in paths:
            placing.swap(path, stays=path in entries)
        yield
    except BaseException as error:
        # Also on Ctrl-C: a tree between the two states is of no use.
        left = placing.undo()
        if left:
            raise HalfAppliedError(directory, left, error) from error
        raise
    placing.sweep()


class _Placing:
    """Files that take the place of others, all of them or none.

    Each change is noted before it is made: an interrupt may come between any two lines. ``token``
    is in the name of every temporary file, and in no other's.
    """

    def __init__(self, directory: Path, *, token: str) -> None:
        self._directory = directory
        self._token = token
        self._made: list[Path] = []
        # Whether there was a file before; the numbers are for the names of temporary files.
        self._touched: dict[str, bool] = {}
        self._paths: dict[str, int] = {}

    def stage(self, path: str, source: Path, mode: str) -> None:
        """Write the new file beside its target; for ``mode`` "" only see whether one could."""
        target = self._directory / path
        for parent in reversed(target.parents):
            if not parent.exists():
                self._made.append(parent)
                parent.mkdir()
        staged = self._beside(path, "new")
        if mode == _LINK:
            staged.symlink_to(source.readlink())
            return
        with staged.open("xb") as handle:
            if mode:
                handle.write(source.read_bytes())
        if mode:
            now = target if target.exists() and not target.is_symlink() else source
            staged.chmod(_mode(now.stat().st_mode, mode))

    def swap(self, path: str, *, stays: bool) -> None:
        """Put the staged file in its place, or remove the target; the old file is kept aside."""
        target = self._directory / path
        there = os.path.lexists(target)
        self._touched[path] = there
        if there:
            kept = self._beside(path, "old")
            try:
                os.link(target, kept, follow_symlinks=False)
            except OSError as error:
                if error.errno in DISK_FULL:
                    raise
                # A file system without hard links.
                shutil.copy2(target, kept, follow_symlinks=False)
        if stays:
            self._beside(path, "new").replace(target)
        else:
            target.unlink()

    def undo(self) -> list[str]:
        """Put everything back; the paths for which that failed."""
        left: list[str] = []
        for path, there in reversed(self._touched.items()):
            try:
                _retry_if_interrupted(partial(self._back, path, there))
            except OSError:
                # Go on with the other files.
                left.append(path)
        _retry_if_interrupted(self.sweep)
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()
        return left

    def sweep(self) -> None:
        """Remove the temporary files."""
        for folder in dict.fromkeys((self._directory / path).parent for path in self._paths):
            for name in folder.glob(f".{self._token}.*"):
                with suppress(OSError):
                    name.unlink()

    def _back(self, path: str, there: bool) -> None:
        target, kept = self._directory / path, self._beside(path, "old")
        if not there:
            target.unlink(missing_ok=True)
        elif os.path.lexists(kept) and not _same(kept, target):
            kept.replace(target)

    def _beside(self, path: str, kind: str) -> Path:
        """A name for a temporary file in the target's folder: a rename is atomic there."""
        self._paths.setdefault(path, len(self._paths))
        name = f".{self._token}.{self._paths[path]}.{kind}"
        return (self._directory / path).with_name(name)


def _same(one: Path, other: Path) -> bool:
    return os.path.lexists(other) and one.lstat().st_ino == other.lstat().st_ino


def _retry_if_interrupted(step: Callable[[], None]) -> None:
    """Run ``step``, and again if a second Ctrl-C comes in its middle."""
    try:
        step()
    except KeyboardInterrupt:
        step()


def _refused(error: OSError, directory: Path) -> Sm12xError:
    """The error for a failed write before any change, or after every file was restored."""
    known = of_system(error)
    if isinstance(known, NoSpaceError):
        return NoSpaceError(
            f"{known.message}; nothing was changed in {directory}",
            next_step="free space there (for temporary folders: set TMPDIR), and run this again",
        )
    why = known.message if known else str(error)
    return BadFileError(
        f"{why}; nothing was changed in {directory}",
        next_step="check the permissions of that folder, or unpack the sdist in another one "
        "(`sm12x-dev apply --base VERSION --unpack NEW_DIR`)",
    )


class HalfAppliedError(DirtyTreeError):
    """The folder is neither untouched nor patched: its changed files could not be restored."""

    def __init__(self, directory: Path, left: Sequence[str], cause: BaseException) -> None:
        said = str(cause) or type(cause).__name__
        super().__init__(
            f"{directory} is half applied: after `{said}` these files could not be restored: "
            f"{texts.first_of(left, _NAMED)}",
            next_step="delete that folder and unpack the sdist in another one (`sm12x-dev apply "
            "--base VERSION --unpack NEW_DIR`)",
        )
        self.left = tuple(left)


def _mode(now: int, wanted: str) -> int:
    """The permissions ``now``, made executable or not as git's mode says."""
    permissions = now & 0o777
    if wanted == "100755":
        # Who may read may execute.
        return permissions | (permissions & 0o444) >> 2
    return permissions & ~0o111


def own(repository: Repository, version: str, stack_id: str) -> None:
    """Make a scratch repository that of a folder, with the settings of one that has a stack."""
    # Where the scratch tree is; the folder may be moved.
    repository.run("config", "--local", "--unset-all", "core.worktree", check=False)
    # The user's own git works here: it must not convert line ends either.
    repository.config("core.autocrlf", "false")
    repository.config("core.bare", "false")
    repository.config("sm12x.base", version)
    repository.config(STACK_KEY, stack_id)


@contextmanager
def _repository_for(
    git: Repository,
    base: Base,
    report: ApplyReport,
    directory: Path,
    commit: str,
    tip: str,
    whole: Stack,
    rest: Sequence[str],
) -> Iterator[Path]:
    """A copy of the scratch repository inside ``directory``, for the block to rename to .git."""
    git.update_ref(f"refs/heads/{BRANCH}", tip)
    git.update_ref(f"refs/tags/{BASE_TAG}", commit)
    own(git, base.version, whole.id)
    for name in rest:
        git.run("config", "--local", "--add", REST_KEY, name)
    for result in report.results:
        if result.state == UPSTREAM:
            git.run("config", "--local", "--add", UPSTREAM_KEY, result.name)
    git.pack()
    hidden = Path(tempfile.mkdtemp(dir=directory, prefix=".git-"))
    try:
        shutil.copytree(git.git_dir, hidden, dirs_exist_ok=True)
        hidden.chmod(0o755)
        yield hidden
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
