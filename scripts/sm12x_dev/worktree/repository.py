"""A patched source tree as a git repository, with one commit per patch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sm12x.core.errors import DirtyTreeError
from sm12x.core.git import Repository
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Stack
from sm12x.stack.worktree import apply, tree
from sm12x.stack.worktree.apply import ApplyReport

# The commit of the untouched source.
BASE_TAG = "base"
BRANCH = "stack"
# Setting of the repository: the patches that have no commit there, the base having them already.
UPSTREAM_KEY = "sm12x.upstream"
# The id of the stack it was made from, and the patches of that stack that were left out of it.
STACK_KEY = "sm12x.stack"
REST_KEY = "sm12x.rest"


def make_repository(
    base: Base, stack: Stack, directory: Path, *, rest: Sequence[str] = ()
) -> ApplyReport:
    """Apply the stack to ``directory``, as ``apply.apply`` does, and make that a repository.

    The untouched source is the commit tagged "base"; to edit, and to refresh from.

    Args:
        rest: the names of patches at its end that are not to be applied: a refresh leaves them in
            the series.

    Raises:
        DirtyTreeError: ``directory`` is a repository already.
    """
    kept = Stack(patches=tuple(patch for patch in stack.patches if patch.name not in rest))
    with tree.scratch(directory) as git:
        start = apply.commit_base(base, kept, git, directory)
        if (directory / ".git").exists():
            raise DirtyTreeError(
                f"{directory} is a git repository already, and this command would make a new one",
                next_step="add --no-repository to keep that repository, or remove its .git",
            )
        report, tip = apply.try_stack(base, kept, git, start)
        git.update_ref(f"refs/heads/{BRANCH}", tip)
        git.update_ref(f"refs/tags/{BASE_TAG}", start)
        own(git, base.version, stack.id)
        upstream = [result.name for result in report.results if result.state == apply.UPSTREAM]
        for key, names in ((REST_KEY, rest), (UPSTREAM_KEY, upstream)):
            for name in names:
                git.run("config", "--local", "--add", key, name)
        git.pack()
        with tempfile.TemporaryDirectory(dir=directory, prefix=".git-") as hidden:
            copy = shutil.copytree(git.git_dir, Path(hidden) / "git")
            apply.write(git, directory, start, tip)
            shutil.copy2(git.git_dir / "index", copy / "index")
            copy.rename(directory / ".git")
    return report


def own(repository: Repository, version: str, stack_id: str) -> None:
    """Make a scratch repository that of a folder, with the settings of one that has a stack."""
    # Where the scratch tree is; the folder may be moved.
    repository.run("config", "--local", "--unset-all", "core.worktree", check=False)
    # The user's own git works here: it must not convert line ends either.
    repository.config("core.autocrlf", "false")
    repository.config("core.bare", "false")
    repository.config("sm12x.base", version)
    repository.config(STACK_KEY, stack_id)
