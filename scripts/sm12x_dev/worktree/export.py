"""Exporting a folder's commits back into the patches of a base, byte for byte reproducibly."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import files
from sm12x.core.errors import DirtyTreeError, FindingsError
from sm12x.core.git import Repository
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.model.patchfile import MessageFault
from sm12x.stack.model.series import Stack
from sm12x.stack.worktree import apply, tree
from sm12x.stack.worktree.apply import ApplyReport
from sm12x_dev.worktree import lint
from sm12x_dev.worktree.repository import (
    BASE_TAG,
    BRANCH,
    REST_KEY,
    STACK_KEY,
    UPSTREAM_KEY,
    make_repository,
)

# Every default that depends on git's version or settings is set explicitly.
_FORMAT = (
    # The commit's id changes with every rebase; the patch does not.
    "--zero-commit",
    # Would be the version of git.
    "--no-signature",
    # Its width and its bars depend on the terminal and on the version.
    "--no-stat",
    # Abbreviated ids grow with the number of objects in the repository.
    "--full-index",
    # "[PATCH 2/5]" would change every file whenever a patch is added.
    "--no-numbered",
    "--subject-prefix=PATCH",
    # Readable subjects and names: UTF-8, not encoded words.
    "--no-encode-email-headers",
    # A rename says nothing about the text it carries along.
    "--no-renames",
    # What follows has the default values of git, whatever the repository's settings say.
    "--unified=3",
    "--inter-hunk-context=0",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "-O/dev/null",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-attach",
    "--no-thread",
    "--no-cover-letter",
    "--no-base",
    "--no-notes",
    "--no-signoff",
    "--no-from",
    "--no-to",
    "--no-cc",
    "--no-add-header",
    "--suffix=.patch",
    "--filename-max-length=64",
)
_SETTINGS = (
    "-c",
    "diff.suppressBlankEmpty=false",
    "-c",
    "i18n.logOutputEncoding=UTF-8",
    "-c",
    "log.mailmap=false",
)
# Left in .git during an unfinished git operation: HEAD is not the whole stack then.
_UNFINISHED = (
    *("rebase-merge", "rebase-apply", "sequencer"),
    *("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD"),
)


@dataclass(frozen=True, kw_only=True)
class RefreshReport:
    """The outcome for each file of a base's folder, by name, and the new stack id."""

    stack_id: str
    unchanged: tuple[str, ...]
    rewritten: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]


class MessageError(FindingsError):
    """Commits that cannot be exported; ``findings`` lists all their faults."""

    def __init__(
        self,
        findings: Sequence[MessageFault],
        *,
        next_step: str = "correct the commit (`git commit --amend`, `git rebase -i base`)",
    ) -> None:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__(
            f"{findings[0].path.name}:{findings[0].line}: {findings[0].message}{more}; nothing was "
            "written",
            next_step=next_step,
        )
        self.findings = tuple(findings)


def open_repository(base: Base, directory: Path, *, current: bool = True) -> Repository:
    """The repository that ``apply`` left in ``directory``, seen to be of this base.

    Args:
        current: whether the patches in the base's folder have to be those it was made from.

    Raises:
        DirtyTreeError: there is none, it is of another base or of another state of the stack, HEAD
            is not its branch, or a git operation is unfinished.
        BadFileError: the base's folder cannot be read as a stack.
    """
    tree.require_directory(directory)
    again = f"make one with `sm12x-dev apply --base {base.version} --unpack NEW_DIR`"
    git_dir = directory / ".git"
    repository = Repository(git_dir=git_dir.absolute(), work_tree=directory.absolute())
    start = repository.resolve(f"refs/tags/{BASE_TAG}") if git_dir.is_dir() else None
    if start is None:
        raise DirtyTreeError(
            f"{directory} is not a folder that `sm12x-dev apply` made a repository of",
            next_step=again,
        )
    if repository.tree_of(start) != base.sdist.tree:
        raise DirtyTreeError(
            f"the commit tagged {BASE_TAG} in {directory} is not the untouched source of "
            f"{base.version}",
            next_step=f"give the base it was made from, or {again}",
        )
    require_quiet(repository, directory)
    if current:
        _require_current(base, repository, directory)
    return repository


def require_quiet(repository: Repository, directory: Path) -> None:
    """Raise DirtyTreeError unless HEAD is the stack's branch and no git operation is unfinished."""
    for name in _UNFINISHED:
        if (repository.git_dir / name).exists():
            raise DirtyTreeError(
                f"a git operation in {directory} is unfinished ({name} exists)",
                next_step="finish or abort it (`git rebase --continue`, `--abort`)",
            )
    head = repository.run("symbolic-ref", "-q", "HEAD", check=False).stdout.strip()
    if head == f"refs/heads/{BRANCH}":
        return
    where = f"on {head.removeprefix('refs/heads/')}" if head else "detached"
    quoted = shlex.quote(str(directory))
    raise DirtyTreeError(
        f"HEAD of {directory} is {where}, not on the branch {BRANCH}, which is the one to "
        "export: patches that only the branch has would be removed",
        next_step=f"`git -C {quoted} switch {BRANCH}`, or to export what is checked out: "
        f"`git -C {quoted} switch -C {BRANCH}`",
    )


def _require_current(base: Base, repository: Repository, directory: Path) -> None:
    """Raise DirtyTreeError if the base's patches are not those ``directory`` was made from."""
    made_from = repository.run("config", "--get", STACK_KEY, check=False).stdout.strip()
    now = series.load(base).id
    if made_from == now:
        return
    quoted = shlex.quote(str(directory))
    raise DirtyTreeError(
        f"{directory} was made from the stack {made_from or 'of an unknown state'}, and "
        f"{base.folder} is now stack {now}: an export would undo the changes made there since",
        next_step=f"`sm12x-dev apply --base {base.version} --unpack NEW_DIR`, then bring your "
        f"commits there (`git -C NEW_DIR fetch {quoted} {BRANCH}`, `git -C NEW_DIR "
        f"cherry-pick ...`); or, with {base.folder} committed, `sm12x-dev refresh --force --base "
        f"{base.version} {quoted}`",
    )


def refresh(
    base: Base, directory: Path, *, root: Path | None, force: bool = False
) -> RefreshReport:
    """Write the commits of ``directory`` since its base into the base's folder and series.

    Patches that ``apply`` was told to leave out at the end (``up_to``) stay, after those exported;
    one of the same subject as an exported one is replaced by that.

    Args:
        root: the checkout that the witnesses' paths are in.
        force: replace the present patches even if ``directory`` was not made from them.

    Raises:
        DirtyTreeError: changes are not committed, the history is not one line from the base, or the
            base's patches have changed since ``directory`` was made.
        MessageError: a message lacks what it must say. Nothing is written.
    """
    repository = open_repository(base, directory, current=False)
    changes = repository.status()
    if changes:
        named = ", ".join(line[3:] for line in changes[:8])
        raise DirtyTreeError(
            f"{directory} has {len(changes)} uncommitted changes ({named})",
            next_step="commit them (`sm12x-dev new`, or `git commit --amend`) or undo them",
        )
    upstream = repository.run("config", "--get-all", UPSTREAM_KEY, check=False).stdout.split()
    if upstream:
        raise DirtyTreeError(
            f"{', '.join(upstream)} is in the base already and so has no commit in {directory}",
            next_step=f"`sm12x-dev drop --base {base.version} {upstream[0]}`, then apply the stack "
            "to a fresh folder",
        )
    head = repository.resolve("HEAD")
    start = repository.resolve(f"refs/tags/{BASE_TAG}")
    if head is None or start is None or repository.merges(start, head):
        raise DirtyTreeError(
            f"the history of {directory} holds a merge or no commit",
            next_step="make it one line of commits (`git rebase base`)",
        )
    # Unrelated histories have no merge base, which git calls a failure.
    if repository.run("merge-base", start, head, check=False).stdout.strip() != start:
        raise DirtyTreeError(
            f"HEAD of {directory} does not descend from the commit tagged {BASE_TAG}",
            next_step="check out the branch `stack`",
        )
    exported = export(repository, start, head, root=root)
    rest = _with_rest(base, repository, exported)
    # A run that was stopped after it had written them all has nothing to undo.
    if not force and series.load(base).id != Stack.id_of(exported):
        _require_current(base, repository, directory)
    report = write(base, exported)
    repository.run("config", "--local", "--unset-all", REST_KEY, check=False)
    for name in rest:
        repository.run("config", "--local", "--add", REST_KEY, name)
    repository.config(STACK_KEY, report.stack_id)
    return report


def _with_rest(base: Base, repository: Repository, exported: dict[str, bytes]) -> list[str]:
    """Add to ``exported`` what was left out of the tree at the end; the new names of those."""
    done = repository.run("config", "--get-all", REST_KEY, check=False)
    subjects = {name.partition("-")[2] for name in exported}
    rest: list[str] = []
    for old in done.stdout.split():
        path = base.folder / old
        tail = old.partition("-")[2]
        if tail in subjects:
            continue
        name = f"{len(exported) + 1:04d}-{tail}"
        exported[name] = path.read_bytes()
        rest.append(name)
    return rest


def export(repository: Repository, start: str, head: str, *, root: Path | None) -> dict[str, bytes]:
    """The commits after ``start`` as patch files: name -> content, in order.

    Raises:
        MessageError: a commit is empty, or its message lacks what it must say.
    """
    commits = repository.commits(start, head)
    exported: dict[str, bytes] = {}
    findings: list[MessageFault] = []
    with tempfile.TemporaryDirectory(prefix="sm12x-export-") as folder:
        done = repository.run(
            *_SETTINGS, "format-patch", *_FORMAT, "--always", "-o", folder, f"{start}..{head}"
        )
        paths = [Path(line) for line in done.stdout.splitlines()]
        for number, (path, commit) in enumerate(zip(paths, commits, strict=True), start=1):
            patch, faults = lint.examine(path, root=root)
            findings += faults
            exported[path.name] = path.read_bytes()
            if patch is None:
                continue
            if patch.message.strip("\n") != repository.message(commit).strip("\n"):
                fault = (
                    "the message does not survive as a mail: its first paragraph must be one line, "
                    "and no line may be `---` or begin with `diff --git `"
                )
                findings.append(MessageFault(path=path, line=1, message=fault))
            elif path.name != lint.file_name(number, patch.subject):
                fault = f"git names the file {path.name}, the lint expects another name"
                findings.append(MessageFault(path=path, line=1, message=fault))
    if findings:
        raise MessageError(findings)
    return exported


def write(base: Base, exported: Mapping[str, bytes]) -> RefreshReport:
    """Make the patches and the series of a base's folder exactly ``exported``.

    Unchanged files are left alone. What a killed run left is undone by git, which has the folder.

    Raises:
        DirtyTreeError: another process is writing there.
    """
    with files.locked(base.folder):
        before = {path.name: path.read_bytes() for path in base.folder.glob("[!.]*.patch")}
        for name, content in exported.items():
            if before.get(name) != content:
                (base.folder / name).write_bytes(content)
        text = header(base) + "".join(f"{name}\n" for name in exported)
        base.series_path.write_text(text, encoding="utf-8")
        removed = sorted(before.keys() - exported.keys())
        for name in removed:
            (base.folder / name).unlink()
    both = [name for name in exported if name in before]
    return RefreshReport(
        stack_id=series.load(base).id,
        unchanged=tuple(name for name in both if before[name] == exported[name]),
        rewritten=tuple(name for name in both if before[name] != exported[name]),
        added=tuple(name for name in exported if name not in before),
        removed=tuple(removed),
    )


def header(base: Base) -> str:
    """Return the comment lines at the top of the series, newlines included."""
    if not base.series_path.is_file():
        return ""
    lines = base.series_path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#"))


def round_trip(base: Base, stack: Stack, directory: Path) -> tuple[ApplyReport, list[MessageFault]]:
    """Apply the stack to ``directory``, export it again, and list the files that differ.

    ``directory`` is a fresh unpacked sdist, and is left patched. Raises as ``make_repository``.
    """
    report = make_repository(base, stack, directory)
    repository = open_repository(base, directory)
    # The messages are linted by `lint.check`; here only bytes count.
    exported = _raw_export(repository)
    expected = [
        patch
        for patch, result in zip(stack.patches, report.results, strict=True)
        if result.state == apply.APPLIED
    ]
    findings: list[MessageFault] = []
    for patch, content in zip(expected, exported, strict=True):
        old, new = patch.content().split(b"\n"), content.split(b"\n")
        if old == new:
            continue
        line = next(
            (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
            min(len(old), len(new)),
        )
        findings.append(
            MessageFault(
                path=patch.path,
                line=line + 1,
                message="is not what `sm12x-dev refresh` writes; from here it would be "
                f"{new[line].decode(errors='replace') if line < len(new) else 'at its end'!r}",
            )
        )
    return report, findings


def _raw_export(repository: Repository) -> list[bytes]:
    with tempfile.TemporaryDirectory(prefix="sm12x-export-") as folder:
        span = f"refs/tags/{BASE_TAG}..HEAD"
        done = repository.run(*_SETTINGS, "format-patch", *_FORMAT, "--always", "-o", folder, span)
        return [Path(line).read_bytes() for line in done.stdout.splitlines()]
