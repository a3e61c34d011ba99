"""Exporting a folder's commits back into the patches of a base, byte for byte reproducibly."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import files
from sm12x.core.errors import DirtyTreeError, FindingsError
from sm12x.core.git import Repository
from sm12x.stack import apply, mail, series, tree
from sm12x.stack.apply import ApplyReport
from sm12x.stack.base import Base
from sm12x.stack.mail import Finding
from sm12x.stack.series import Stack

# Everything a version of git or a setting could make different is said outright.
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
# Left in .git while git is in the middle of something: HEAD is not the whole stack then.
_UNFINISHED = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD")


@dataclass(frozen=True, kw_only=True)
class RefreshReport:
    """What became of the files of a base's folder, by name, and the stack id afterwards."""

    stack_id: str
    unchanged: tuple[str, ...]
    rewritten: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]


class MessageError(FindingsError):
    """Commits that cannot be exported; ``findings`` lists all that is wrong with them."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__(
            f"{findings[0].path.name}:{findings[0].line}: {findings[0].message}{more}; nothing was "
            "written",
            next_step="mend the commit's message (`git commit --amend`, `git rebase -i base`)",
        )
        self.findings = tuple(findings)


def open_repository(base: Base, directory: Path) -> Repository:
    """The repository that ``apply`` left in ``directory``, seen to be of this base.

    Raises:
        DirtyTreeError: there is none, it is of another base, or git is in the middle of something.
    """
    tree.require_directory(directory)
    again = "make one with `sm12x patch apply --unpack NEW_DIR`"
    git_dir = directory / ".git"
    repository = Repository(git_dir=git_dir.absolute(), work_tree=directory.absolute())
    start = repository.resolve(f"refs/tags/{apply.BASE_TAG}") if git_dir.is_dir() else None
    if start is None:
        raise DirtyTreeError(
            f"{directory} is not a folder that `sm12x patch apply` made a repository of",
            next_step=again,
        )
    if repository.tree_of(start) != base.sdist.tree:
        raise DirtyTreeError(
            f"the commit tagged {apply.BASE_TAG} in {directory} is not the untouched source of "
            f"{base.version}",
            next_step=f"give the base it was made from, or {again}",
        )
    for name in _UNFINISHED:
        if (git_dir / name).exists():
            raise DirtyTreeError(
                f"git is in the middle of something in {directory} ({name} is there)",
                next_step="finish it or give it up (`git rebase --continue`, `--abort`)",
            )
    return repository


def refresh(base: Base, directory: Path, *, root: Path | None) -> RefreshReport:
    """Write the commits of ``directory`` since its base into the base's folder and series.

    Args:
        root: the checkout that the witnesses' paths are in.

    Raises:
        DirtyTreeError: changes are not committed, or the history is not one line from the base.
        MessageError: a message lacks what it must say. Nothing is written.
    """
    repository = open_repository(base, directory)
    changes = repository.status()
    if changes:
        named = ", ".join(line[3:] for line in changes[:8])
        raise DirtyTreeError(
            f"{directory} has {len(changes)} uncommitted changes ({named})",
            next_step="commit them (`sm12x patch new`, or `git commit --amend`) or undo them",
        )
    kept = repository.run("config", "--get-all", apply.UPSTREAM_KEY, check=False).stdout.split()
    if kept:
        raise DirtyTreeError(
            f"{', '.join(kept)} is in the base already and so has no commit in {directory}",
            next_step=f"`sm12x patch drop {kept[0]}`, then apply the stack to a fresh folder",
        )
    head = repository.resolve("HEAD")
    start = repository.resolve(f"refs/tags/{apply.BASE_TAG}")
    if head is None or start is None or repository.merges(start, head):
        raise DirtyTreeError(
            f"the history of {directory} holds a merge or no commit",
            next_step="make it one line of commits (`git rebase base`)",
        )
    # Unrelated histories have no merge base, which git calls a failure.
    if repository.run("merge-base", start, head, check=False).stdout.strip() != start:
        raise DirtyTreeError(
            f"HEAD of {directory} does not descend from the commit tagged {apply.BASE_TAG}",
            next_step="check out the branch `stack`",
        )
    report = write(base, export(repository, start, head, root=root))
    repository.config("sm12x.stack", report.stack_id)
    return report


def export(repository: Repository, start: str, head: str, *, root: Path | None) -> dict[str, bytes]:
    """The commits after ``start`` as patch files: name -> content, in order.

    Raises:
        MessageError: a commit is empty, or its message lacks what it must say.
    """
    commits = repository.commits(start, head)
    exported: dict[str, bytes] = {}
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="sm12x-export-") as folder:
        done = repository.run(
            *_SETTINGS, "format-patch", *_FORMAT, "--always", "-o", folder, f"{start}..{head}"
        )
        paths = [Path(line) for line in done.stdout.splitlines()]
        for number, (path, commit) in enumerate(zip(paths, commits, strict=True), start=1):
            patch, faults = mail.examine(path, root=root)
            findings += faults
            exported[path.name] = path.read_bytes()
            if patch is None:
                continue
            if patch.message.strip("\n") != repository.message(commit).strip("\n"):
                fault = (
                    "the message does not survive as a mail: its first paragraph must be one line, "
                    "and no line may be `---` or begin with `diff --git `"
                )
                findings.append(Finding(path=path, line=1, message=fault))
            elif path.name != mail.file_name(number, patch.subject):
                fault = f"git names the file {path.name}, the lint expects another name"
                findings.append(Finding(path=path, line=1, message=fault))
    if findings:
        raise MessageError(findings)
    return exported


def write(base: Base, exported: dict[str, bytes]) -> RefreshReport:
    """Make the patches and the series of a base's folder exactly ``exported``.

    Files that are the same already are left alone. Killed in the middle, a second run mends it:
    new files first, then the series, then the files it no longer lists.
    """
    before = {path.name: path.read_bytes() for path in base.folder.glob("*.patch")}
    for name, content in exported.items():
        if before.get(name) != content:
            with files.replacing(base.folder / name) as temporary:
                temporary.write_bytes(content)
    text = series.header(base) + "".join(f"{name}\n" for name in exported)
    if not base.series_path.is_file() or base.series_path.read_text(encoding="utf-8") != text:
        files.write_text(base.series_path, text)
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


def round_trip(base: Base, stack: Stack, directory: Path) -> tuple[ApplyReport, list[Finding]]:
    """Apply the stack to ``directory``, export it again, and list the files that differ.

    ``directory`` is a fresh unpacked sdist, and is left patched. Raises as ``apply.apply`` does.
    """
    report = apply.apply(base, stack, directory, repository=True)
    repository = open_repository(base, directory)
    # The messages are linted by `series.check`; here only bytes count.
    exported = _raw_export(repository)
    expected = [
        patch
        for patch, result in zip(stack.patches, report.results, strict=True)
        if result.state == apply.APPLIED
    ]
    findings: list[Finding] = []
    for patch, content in zip(expected, exported, strict=True):
        old, new = patch.content().split(b"\n"), content.split(b"\n")
        if old == new:
            continue
        line = next(
            (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
            min(len(old), len(new)),
        )
        findings.append(
            Finding(
                path=patch.path,
                line=line + 1,
                message="is not what `sm12x patch refresh` writes; from here it would be "
                f"{new[line].decode(errors='replace') if line < len(new) else 'at its end'!r}",
            )
        )
    return report, findings


def _raw_export(repository: Repository) -> list[bytes]:
    with tempfile.TemporaryDirectory(prefix="sm12x-export-") as folder:
        span = f"refs/tags/{apply.BASE_TAG}..HEAD"
        done = repository.run(*_SETTINGS, "format-patch", *_FORMAT, "--always", "-o", folder, span)
        return [Path(line).read_bytes() for line in done.stdout.splitlines()]
