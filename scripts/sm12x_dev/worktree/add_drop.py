"""Adding a patch to the end of a stack, and dropping one from it."""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from sm12x.core import process
from sm12x.core.errors import BadFileError, DirtyTreeError, UsageError
from sm12x.core.git import Signature
from sm12x.core.text import WIDTH, paragraph
from sm12x.stack.model import patchfile
from sm12x.stack.model.base import Base
from sm12x.stack.model.patchfile import Message, MessageFault
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev.worktree import export, lint
from sm12x_dev.worktree.export import MessageError, RefreshReport
from sm12x_dev.worktree.repository import BASE_TAG

_CORRECT = "correct --subject, --body or a trailer's option, and run this again"
# What a list's item or an indented line begins with, and the name of a trailer in the body.
_INDENT = re.compile(r"\s*(?:(?:[-*+]|[0-9]+[.)])\s+)?")
_TRAILER = re.compile(r"[A-Z][A-Za-z]*(?:-[A-Za-z]+)+: ")


@dataclass(frozen=True, kw_only=True)
class NewReport:
    """The new patch's file name, the files it changes, and the effect on the base's folder.

    ``missing`` are files of the patch it was made like that it does not change.
    """

    name: str
    files: tuple[str, ...]
    refresh: RefreshReport
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DropReport:
    """``orphans`` are witnesses that no remaining patch names."""

    dropped: str
    orphans: tuple[str, ...]
    refresh: RefreshReport


def message(
    *, subject: str, body: str, upstream: Sequence[str], drop_when: str, witness: Sequence[str]
) -> str:
    """A commit message with the trailers a patch must have; long lines of the body are wrapped."""
    trailers = [
        *(f"Upstream: {value}" for value in upstream),
        f"Drop-when: {drop_when}",
        *(f"Witness: {value}" for value in witness),
    ]
    text = "\n".join(map(_wrapped, body.strip("\n").split("\n")))
    return "\n\n".join((subject.strip(), text, "\n".join(trailers))) + "\n"


def _wrapped(line: str) -> str:
    """A line of the body, or several where it is too long: an item of a list hangs."""
    match = _INDENT.match(line)
    first = match[0] if match else ""
    rest = " " if _TRAILER.match(line) else " " * len(first)
    return paragraph(line[len(first) :], first=first, rest=rest) if len(line) > WIDTH else line


def checked(text: str, *, root: Path, like: Patch | None = None) -> Message:
    """The parts of a commit message. Raises MessageError for one that lacks what it must say."""
    lines = text.rstrip("\n").split("\n")
    parts = patchfile.split(lines[0], lines[1:], first_line=2)
    faults = lint.faults_of(parts, subject_line=1, root=root)
    if not faults:
        return parts
    where, step = Path("message"), _CORRECT
    if like is not None:
        who = shlex.quote(f"{like.author.name} <{like.author.email}>")
        where = Path(f"message of {like.name}")
        step = f"{lint.INSTEAD}, with --author {who} to keep its author"
    raise MessageError(
        [MessageFault(path=where, line=n, message=fault) for n, fault in faults], next_step=step
    )


def missing(model: Patch, changed: Sequence[str]) -> tuple[str, ...]:
    """Files of ``model`` that are not among ``changed``, and that none of their name is there for.

    `git apply --reject` leaves no .rej file for a file that it cannot find.
    """
    old = {file.path for file in model.files}
    moved = {PurePosixPath(path).name for path in changed if path not in old}
    return tuple(
        file.path
        for file in model.files
        if file.path not in changed and PurePosixPath(file.path).name not in moved
    )


def new(
    base: Base,
    directory: Path,
    text: str,
    *,
    author: str | None,
    root: Path,
    like: Patch | None = None,
) -> NewReport:
    """Commit all changes of ``directory`` as a patch and export it at the end of the series.

    Args:
        text: the whole commit message; see ``message``.
        author: "Name <mail>"; None takes what git knows of the user.
        like: the patch of another base that this one is to do the same as.

    Raises:
        MessageError: the message lacks what it must say. Nothing was committed or written.
        DirtyTreeError: nothing has changed, or the folder is not one that ``apply`` made.
        BadFileError: no author is given or configured.
    """
    repository = export.open_repository(base, directory)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("the message is not UTF-8", next_step=_CORRECT) from None
    parts = checked(text, root=root, like=like)
    quoted = shlex.quote(str(directory))
    changes = repository.status()
    rejects = [line[3:] for line in changes if line.endswith(".rej")]
    if rejects:
        raise DirtyTreeError(
            f"{directory} still has hunks that `git apply --reject` could not apply: "
            f"{', '.join(rejects)}",
            next_step="put those hunks in by hand, delete the .rej files, and run this again",
        )
    if not changes:
        raise DirtyTreeError(
            f"nothing has changed in {directory} since its last commit",
            next_step="edit the files there, then run this again; commits already made are "
            f"exported by `sm12x-dev refresh --base {base.version} {quoted}`",
        )
    who = _signature(author or _configured(directory))
    head = repository.resolve("HEAD")
    # Ignored files (.gitignore: compiled files, caches) are not part of a patch.
    repository.run("add", "--all", ".")
    commit = repository.commit_tree(repository.write_tree(), text, parent=head, author=who)
    repository.update_ref("HEAD", commit)
    try:
        report = export.refresh(base, directory, root=root)
    except BaseException as error:
        # The files stay as edited; only the commit is taken back.
        if head is not None:
            repository.update_ref("HEAD", head)
            repository.read_tree(head)
        if isinstance(error, MessageError):
            raise MessageError(error.findings, next_step=_CORRECT) from None
        raise
    # Not the last of the series where the tree is only made up to a patch.
    number = len(repository.commits(f"refs/tags/{BASE_TAG}", commit))
    changed = tuple(repository.changed(f"{commit}~1", commit))
    return NewReport(
        name=lint.file_name(number, parts.subject),
        files=changed,
        refresh=report,
        missing=missing(like, changed) if like else (),
    )


def drop(base: Base, stack: Stack, name: str, archive: Path, *, root: Path) -> DropReport:
    """Take a patch out of the stack, if the rest still applies, and renumber what follows.

    Args:
        name: the patch's file name or number.
        archive: the sdist of the base.

    Raises:
        BadFileError: there is no such patch.
        apply.StackConflictError: a later patch needs this one. Nothing was changed.
    """
    gone = stack.get(name)
    rest = replace(stack, patches=tuple(patch for patch in stack.patches if patch is not gone))
    with tempfile.TemporaryDirectory(prefix="sm12x-drop-") as folder:
        source = Path(folder) / "source"
        tree.unpack(archive, source)
        with tree.scratch(source) as repository:
            start = apply.commit_base(base, rest, repository, source)
            try:
                # Lines move when a patch is dropped; the export has the new line numbers.
                report, tip = apply.try_stack(base, rest, repository, start, accept_offset=True)
            except apply.StackConflictError as error:
                raise apply.StackConflictError(
                    error.report,
                    next_step=f"`sm12x-dev apply --base {base.version} --unpack NEW_DIR`, take the "
                    "patch out there with `git rebase -i base`, resolve what needs it, and "
                    f"`sm12x-dev refresh --base {base.version} NEW_DIR`",
                ) from None
            if any(result.state == apply.UPSTREAM for result in report.results):
                raise DirtyTreeError(
                    "a patch that stays is in the base already: "
                    + ", ".join(r.name for r in report.results if r.state == apply.UPSTREAM),
                    next_step="drop that one first",
                )
            exported = export.export(repository, start, tip, root=root)
    remaining = {_path(witness) for patch in rest.patches for witness in patch.witnesses}
    return DropReport(
        dropped=gone.name,
        orphans=tuple(sorted({_path(witness) for witness in gone.witnesses} - remaining)),
        refresh=export.write(base, exported),
    )


def _path(witness: str) -> str:
    return witness.split("::", 1)[0]


def _configured(directory: Path) -> str | None:
    """Return the user's identity, "Name <mail>", as git is told it; None where it is not."""
    words = ("git", "-c", "user.useConfigOnly=true", "var", "GIT_AUTHOR_IDENT")
    done = process.run(words, cwd=directory, check=False)
    return done.stdout.rpartition("> ")[0] if done.returncode == 0 else None


def _signature(identity: str | None) -> Signature:
    name, _, address = (identity or "").partition(" <")
    if not name.strip() or not address.rstrip("> "):
        raise BadFileError(
            "git does not know who you are"
            if identity is None
            else f"{identity!r} is not an author",
            next_step='add --author "Name <mail@address>", or set user.name and user.email in git',
        )
    return Signature(
        name=name.strip(), email=address.rstrip("> "), date=f"{int(time.time())} +0000"
    )
