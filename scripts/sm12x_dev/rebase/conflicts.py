"""Porting patches by hand: a work tree with conflict markers, resolved one patch after the other.

The tree is a repository like one that `sm12x-dev apply` makes: the untouched release tagged
"base", and a commit for each patch that is in. A patch that git cannot merge stops the port with
its conflicts in the files, as `git rebase` does; `continue_` commits the resolved files and goes
on. At the end the patches are exported into the folder of the new base.

A run may be killed at any point: each step is noted in .git before it starts.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sm12x.core import declared, files
from sm12x.core.declared import Declared
from sm12x.core.errors import DirtyTreeError
from sm12x.core.git import Repository
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.worktree import apply, tree
from sm12x_dev.rebase import base_draft, merge, porting
from sm12x_dev.rebase.merge import FileConflict
from sm12x_dev.rebase.porting import PortedStack
from sm12x_dev.worktree import export
from sm12x_dev.worktree.export import RefreshReport

_WAITING = "waiting"
_DONE = "done"
_PRESENT = "present"
_SKIPPED = "skipped"
_MIDDLE = "======="
# A commit of the files that were in the tree when a stopped run was continued.
_STOPPED = "refs/sm12x/stopped"


@dataclass(frozen=True, kw_only=True)
class PortStep(Declared):
    """A patch of the old base, by file name; ``commit`` has it there.

    ``state`` is WAITING, DONE, PRESENT or SKIPPED.
    """

    name: str
    commit: str
    state: str = _WAITING


@dataclass(frozen=True, kw_only=True)
class Stop(Declared):
    """The patch that is in conflict. ``ready`` once all of it is in the tree."""

    name: str
    ready: bool = False
    conflicts: tuple[FileConflict, ...] = ()
    markers: tuple[str, ...] = ()
    rejects: tuple[str, ...] = ()
    clean: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Port(Declared):
    """A port's progress. ``stack`` is the id of the stack in ``folder``; ``tip`` the last
    commit."""

    source: str
    version: str
    label: str
    folder: Path
    stack: str
    tip: str
    steps: tuple[PortStep, ...]
    stop: Stop | None = None

    def count(self, *states: str) -> int:
        return sum(step.state in states for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class PortReport:
    """The state of a port after a call. ``refresh`` is of the export at the end, None before.

    ``saved`` is a commit of the files that were in the tree when a stopped run was taken up.
    """

    directory: Path
    port: Port
    refresh: RefreshReport | None = None
    saved: str = ""
    dropped: tuple[str, ...] = field(default=())


def start(
    directory: Path,
    git_dir: Path,
    archive: Path,
    ported: PortedStack,
    names: Sequence[str],
    *,
    source: str,
    new: Base,
    label: str,
) -> PortReport:
    """Unpack the new release in ``directory`` and port ``names`` until the first conflict.

    Args:
        directory: must not exist yet, or be empty.
        git_dir: the repository that ``porting.port`` has copied; it is moved into ``directory``.
        archive: the sdist of the new release.
        names: the patches to port, in order; those that are upstream are not among them.
    """
    tree.unpack(archive, directory)
    shutil.move(git_dir, directory / ".git")
    repository = _repository(directory)
    stack_id = series.load(new).id
    apply.own(repository, new.version, stack_id)
    # The user's own git shows the ancestor as well.
    repository.config("merge.conflictStyle", "diff3")
    port = Port(
        source=source,
        version=new.version,
        label=label,
        folder=new.folder.absolute(),
        stack=stack_id,
        tip=ported.start,
        steps=tuple(PortStep(name=name, commit=ported.commits[name]) for name in names),
    )
    _save(directory, port)
    repository.checkout(port.tip)
    return _advance(directory, repository, port)


def _load(directory: Path) -> Port:
    """The port in ``directory``. Raises DirtyTreeError where there is none."""
    path = directory / ".git" / export.PORT
    if not path.is_file():
        raise DirtyTreeError(
            f"no patches are being ported in {directory}",
            next_step="give the folder that `sm12x-dev rebase` named",
        )
    return declared.read_json(
        Port, path, next_step="run `sm12x-dev rebase` again; the commits are in that folder"
    )


def continue_(directory: Path, *, root: Path | None, skip: bool = False) -> PortReport:
    """Commit the resolved patch, and port the others until the next conflict or to the end.

    Args:
        root: the checkout that the witnesses' paths are in.
        skip: leave the patch that is in conflict out of the new stack.

    Raises:
        DirtyTreeError: conflicts are left, nothing of the patch is in the tree, or the tree is not
            as the port left it.
        MessageError: at the end, a message lacks what it must say. Nothing is exported.
    """
    port = _load(directory)
    repository = _repository(directory)
    export.require_quiet(repository, directory)
    with files.locked(directory / ".git"):
        saved = ""
        if port.stop is not None and not port.stop.ready:
            saved = _set_back(repository, port)
            port = replace(port, stop=None)
        elif port.stop is not None and skip:
            # Commits that were made on it too.
            _set_back(repository, port)
            port = _settled(port, port.stop.name, _SKIPPED, port.tip)
        elif port.stop is not None:
            port = _committed(directory, repository, port, port.stop)
        elif skip:
            raise DirtyTreeError(
                f"no patch is in conflict in {directory}",
                next_step=f"`sm12x-dev continue {shlex.quote(str(directory))}`",
            )
        _save(directory, port)
        report = _advance(directory, repository, port)
        if report.port.stop is None:
            report = _finished(directory, repository, report.port, root)
        return replace(report, saved=saved)


def _committed(directory: Path, repository: Repository, port: Port, stop: Stop) -> Port:
    """The port with the resolved patch as a commit."""
    again = f"`sm12x-dev continue {shlex.quote(str(directory))}`"
    head = repository.resolve("HEAD")
    step = next(step for step in port.steps if step.name == stop.name)
    if head != port.tip:
        # Committed by the person, or by a run that was stopped right after.
        made = repository.commits(port.tip, "HEAD") if head else []
        if len(made) != 1 or repository.run("merge-base", port.tip, "HEAD").stdout.strip() != (
            port.tip
        ):
            raise DirtyTreeError(
                f"{directory} has {len(made)} commits since the patch {stop.name} was left for "
                "you, not one",
                next_step=f"make them one on {port.tip[:12]} (`git reset --soft`), then {again}",
            )
        left = repository.status()
        if left:
            raise DirtyTreeError(
                f"{directory} has {len(left)} changes that are not in the commit of {stop.name}",
                next_step=f"`git commit --amend` them or undo them, then {again}",
            )
        resolved = repository.tree_of("HEAD")
    else:
        _require_resolved(directory, stop, again)
        repository.run("add", "--all", ".")
        resolved = repository.write_tree()
    if resolved == repository.tree_of(port.tip):
        raise DirtyTreeError(
            f"no change of {stop.name} is in {directory}",
            next_step=f"make its changes there, or leave the patch out with `--skip`, then {again}",
        )
    commit = _commit(repository, step, resolved, port.tip)
    repository.update_ref("HEAD", commit)
    repository.read_tree(commit)
    return _settled(port, stop.name, _DONE, commit)


def _require_resolved(directory: Path, stop: Stop, again: str) -> None:
    left: list[str] = []
    for conflict in stop.conflicts:
        path = directory / conflict.path
        line = merge.unresolved(path.read_bytes(), stop.markers) if path.is_file() else 0
        if line:
            left.append(f"{conflict.path}:{line}")
    if left:
        raise DirtyTreeError(
            f"conflicts of {stop.name} are left in {directory}: {', '.join(left)}",
            next_step=f"edit them, take the markers out, then {again}",
        )
    rejects = [name for name in stop.rejects if (directory / name).exists()]
    if rejects:
        raise DirtyTreeError(
            f"{directory} still has hunks of {stop.name} that could not be placed: "
            f"{', '.join(rejects)}",
            next_step=f"put these hunks into the right files, delete the .rej files, then {again}",
        )


def _advance(directory: Path, repository: Repository, port: Port) -> PortReport:
    """Port the remaining patches until a conflict, or to the end."""
    for step in port.steps:
        if step.state != _WAITING:
            continue
        # From here until the stop is ready, the tree has no edits of the user.
        port = replace(port, stop=Stop(name=step.name))
        _save(directory, port)
        names = porting.labels(port.source, port.label, step.name)
        merged = merge.merge(repository, step.commit, port.tip, names)
        if merged.conflicts:
            return PortReport(
                directory=directory, port=_stopped(directory, repository, port, step, merged)
            )
        if merged.tree == repository.tree_of(port.tip):
            port = _settled(port, step.name, _PRESENT, port.tip)
        else:
            commit = _commit(repository, step, merged.tree, port.tip)
            repository.checkout(commit)
            repository.update_ref("HEAD", commit)
            port = _settled(port, step.name, _DONE, commit)
        _save(directory, port)
    return PortReport(directory=directory, port=port)


def _stopped(
    directory: Path, repository: Repository, port: Port, step: PortStep, merged: merge.Merge
) -> Port:
    """Leave the conflicts of a patch in the tree."""
    repository.checkout(merged.tree)
    for path, (mode, text) in merged.marked.items():
        target = directory / path
        target.write_bytes(text)
        target.chmod(0o755 if mode == "100755" else 0o644)
    rejects: list[str] = []
    for path, text in merged.rejected.items():
        target = directory / f"{path}.rej"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)
        rejects.append(f"{path}.rej")
    repository.stage_conflicts(
        {path: (merged.marked[path][0], blobs) for path, blobs in merged.stages.items()}
    )
    names = porting.labels(port.source, port.label, step.name)
    sides = [repository.blob(blob) for blobs in merged.stages.values() for blob in blobs if blob]
    # In the middle of a conflict; some texts have such a line of their own.
    middle = () if any(merge.unresolved(side, (_MIDDLE,)) for side in sides) else (_MIDDLE,)
    stop = Stop(
        name=step.name,
        ready=True,
        conflicts=merged.conflicts,
        markers=(*names.markers, *middle),
        rejects=tuple(rejects),
        clean=merged.clean,
    )
    port = replace(port, stop=stop)
    _save(directory, port)
    return port


def _finished(directory: Path, repository: Repository, port: Port, root: Path | None) -> PortReport:
    """Export the patches into the new base's folder; those that are in are dropped no more."""
    new = _folder(port)
    start = repository.resolve(f"refs/tags/{apply.BASE_TAG}")
    # A message may have been amended since.
    head = repository.resolve("HEAD")
    if start is None or head is None or repository.status():
        raise DirtyTreeError(
            f"{directory} has changes that are not committed",
            next_step="`git commit --amend` them or undo them, then run this again",
        )
    exported = export.export(repository, start, head, root=root)
    made = series.Stack.id_of(exported)
    now = series.load(new).id if series.is_readable(new) else ""
    if now not in (port.stack, made):
        raise DirtyTreeError(
            f"{new.folder} is now {f'stack {now}' if now else 'no readable stack'}, and the port "
            f"began with {port.stack}: later changes there would be undone",
            next_step="move that folder away and run `sm12x-dev rebase "
            f"{port.version} --from {port.source}` again; the resolved patches are commits in "
            f"{directory}",
        )
    report = export.replaced(new, repository, exported, rest=())
    resolved = {step.name.partition("-")[2] for step in port.steps if step.state == _DONE}
    path = new.folder / "base.toml"
    files.write_text(path, base_draft.without_dropped(path.read_text(encoding="utf-8"), resolved))
    (directory / ".git" / export.PORT).unlink()
    return PortReport(
        directory=directory,
        port=port,
        refresh=report,
        dropped=tuple(step.name for step in port.steps if step.state in (_SKIPPED, _PRESENT)),
    )


def _folder(port: Port) -> Base:
    """The new base, which may have been moved to where bases are."""
    if (port.folder / "base.toml").is_file():
        return bases.parse(port.folder / "base.toml")
    return bases.load(port.version)


def _settled(port: Port, name: str, state: str, tip: str) -> Port:
    steps = tuple(replace(s, state=state) if s.name == name else s for s in port.steps)
    return replace(port, steps=steps, stop=None, tip=tip)


def _set_back(repository: Repository, port: Port) -> str:
    """Set the tree back to before the patch in conflict; returns a commit of its files."""
    saved = ""
    if repository.status():
        repository.run("add", "--all", ".")
        saved = repository.commit_tree(repository.write_tree(), "stopped\n", parent=port.tip)
        repository.update_ref(_STOPPED, saved)
    repository.update_ref("HEAD", port.tip)
    repository.checkout(port.tip)
    return saved


def _commit(repository: Repository, step: PortStep, tree_id: str, parent: str) -> str:
    message = repository.message(step.commit).rstrip("\n") + "\n"
    author = repository.author(step.commit)
    return repository.commit_tree(tree_id, message, parent=parent, author=author)


def _repository(directory: Path) -> Repository:
    tree.require_directory(directory)
    return Repository(git_dir=(directory / ".git").absolute(), work_tree=directory.absolute())


def _save(directory: Path, port: Port) -> None:
    declared.write_json(directory / ".git" / export.PORT, port)
