"""Porting a stack to another release, with `git rebase --onto` in a work tree.

A patch is left out where its witnesses are green on the untouched release, or where the release has
all of its text. git ports the others; what it cannot merge is resolved and continued with git.
"""

from __future__ import annotations

import platform
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import files, lockfile, process
from sm12x.core.errors import Sm12xError
from sm12x.core.git import Repository
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base, Dropped
from sm12x.stack.model.series import Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev import base_draft, lock
from sm12x_dev.base_draft import Draft
from sm12x_dev.witness import junit
from sm12x_dev.witness.pytests import Run
from sm12x_dev.worktree import export
from sm12x_dev.worktree.repository import BASE_TAG, BRANCH, own

UPSTREAM = "upstream"
NEEDED = "needed"
UNKNOWN = "unknown"
# Data of a base that is written by hand: a first version is better than none.
_COPIED = ("audit-policy.toml",)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether an untouched release needs a patch, by the witnesses of the patch.

    ``state`` is UPSTREAM where every test passes, NEEDED where one fails, else UNKNOWN. ``green``
    are the tests that pass, ``broken`` the controls that do not, as pytest ids; ``why`` says what
    the state rests on.
    """

    state: str
    why: str
    green: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()


def judge(runs: Sequence[Run]) -> Verdict:
    """Return the verdict of ``runs`` of a patch's witnesses on an untouched release."""
    tests = [
        (f"{run.witness.split('::')[0]}::{test.name}", test) for run in runs for test in run.tests
    ]
    broken = [name for name, test in tests if test.guard and test.outcome != junit.PASSED]
    own = {name: test.outcome for name, test in tests if not test.guard}
    green = [name for name, outcome in own.items() if outcome == junit.PASSED]
    red = [name for name, outcome in own.items() if outcome == junit.FAILED]
    problems = [run.problem.split("\n")[0] for run in runs if run.problem]
    if red:
        state, why = NEEDED, f"{len(red)} of {len(own)} red"
    elif own and len(green) == len(own) and not problems and not broken:
        state, why = UPSTREAM, f"{len(green)} of {len(own)} green"
    else:
        faults = [*problems, *(f"the control {name} fails" for name in broken)]
        state, why = UNKNOWN, (faults or ["its witness did not run to its end"])[0]
    return Verdict(state=state, why=why, green=tuple(green), broken=tuple(broken))


def write_folder(base: Base, drafted: Draft, folder: Path) -> Base:
    """Write the folder of a new base, with an empty series; what is there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.patch"):
        path.unlink()
    files.write_text(folder / "base.toml", drafted.text)
    files.write_text(folder / "series", export.header(base))
    for name in _COPIED:
        if (base.folder / name).is_file():
            shutil.copyfile(base.folder / name, folder / name)
    return bases.parse(folder / "base.toml")


def write_locks(base: Base, new: Base, say: Callable[[str], None]) -> list[str]:
    """Write the locks of ``new`` into its folder, and return what a person must check.

    The toolkit of base.toml becomes the one that the release's torch asks for, and the witnesses'
    packages those of the lock. A machine whose lock cannot be made keeps none.
    """
    check: list[str] = []
    path = new.folder / "base.toml"
    torch: Mapping[str, str] = {}
    for machine in new.locks:
        say(f"resolving the lock for {machine}")
        try:
            torch = torch or lock.resolve(new, machine, [f"torch=={new.toolchain.torch}"])
            text = path.read_text(encoding="utf-8")
            files.write_text(path, base_draft.amended(text, cuda=torch.get("cuda-toolkit")))
            new = bases.parse(path)
            locks = lock.make(new, machine)
        except Sm12xError as error:
            check.append(f"lock.{machine}: {error.message}")
            continue
        files.write_text(new.lock_path(machine), locks.closure)
        files.write_text(new.build_lock_path(machine), locks.build)
        check += [f"lock.{machine}: {fault}" for fault in lock.verify(new, machine, locks)]
    here = platform.machine()
    if new.lock_path(here).is_file() and base.lock_path(here).is_file():
        old, now = lockfile.read(base.lock_path(here)), lockfile.read(new.lock_path(here))
        packages = base_draft.witness_packages(base.witness.packages, old, now, torch)
        text = path.read_text(encoding="utf-8")
        files.write_text(path, base_draft.amended(text, packages=packages))
    return check


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the stack in the work tree.

    ``dropped`` are the patches left out, ``stopped`` the subject of the one that git could not
    merge ("" where git is done) and ``conflicts`` the files that have to be resolved.
    """

    dropped: tuple[Dropped, ...]
    stopped: str = ""
    conflicts: tuple[str, ...] = ()


def rebase(
    base: Base,
    stack: Stack,
    new: Base,
    source: Path,
    directory: Path,
    verdicts: Mapping[str, Verdict],
) -> Outcome:
    """Make ``directory`` a repository of ``new``, and port the patches of ``stack`` there.

    As ``apply`` leaves it: the untouched release is tagged "base", and the branch has the patches.

    Args:
        source: the untouched source of ``base``.
        directory: that of ``new``.
        verdicts: by the patches' names, of those whose witnesses were run.

    Raises:
        DirtyTreeError: ``source`` is not the untouched source of ``base``.
        StackConflictError: the stack does not apply to its own base.
    """
    with tree.scratch(source) as git:
        start = apply.commit_base(base, stack, git, source)
        report, tip = apply.try_stack(base, stack, git, start)
        names = [one.name for one in report.results if one.state == apply.APPLIED]
        commits = dict(zip(names, git.commits(start, tip), strict=True))
        # The same objects, another folder.
        git = Repository(git_dir=git.git_dir, work_tree=directory.absolute())
        git.add_all()
        release = git.commit_tree(git.write_tree(), f"{new.sdist.name}\n")
        dropped = _left_out(git, stack, new, verdicts)
        git.read_tree(release)
        git.update_ref(f"refs/tags/{BASE_TAG}", release)
        git.update_ref(f"refs/heads/{BRANCH}", tip)
        git.run("update-ref", "--no-deref", "HEAD", release)
        own(git, new.version, series.load(new).id)
        git.config("merge.conflictStyle", "diff3")
        # A line of a message that begins with # is no comment.
        git.config("commit.cleanup", "scissors")
        git.pack()
        shutil.copytree(git.git_dir, directory / ".git")
    gone = {entry.patch for entry in dropped}
    todo = directory / ".git/sm12x-todo"
    lines = [f"pick {commit} {name}\n" for name, commit in commits.items() if name not in gone]
    todo.write_text("".join(lines) or "noop\n")
    git = Repository(git_dir=(directory / ".git").absolute(), work_tree=directory.absolute())
    words = ("rebase", "--quiet", "--interactive", "--onto", release, start, BRANCH)
    environment = {
        "GIT_SEQUENCE_EDITOR": f"cp {shlex.quote(str(todo.absolute()))}",
        # Of commits that are read for their author and their text alone.
        "GIT_COMMITTER_NAME": "sm12x",
        "GIT_COMMITTER_EMAIL": "sm12x@localhost",
    }
    done = git.run(*words, check=False, env=environment)
    if done.returncode == 0:
        return Outcome(dropped=dropped)
    stopped = git.run("log", "-1", "--format=%s", "REBASE_HEAD", check=False).stdout.strip()
    if not stopped:
        raise process.failed(done)
    unmerged = git.run("diff", "--name-only", "--diff-filter=U", "-z").stdout.split("\0")
    return Outcome(dropped=dropped, stopped=stopped, conflicts=tuple(filter(None, unmerged)))


def _left_out(
    git: Repository, stack: Stack, new: Base, verdicts: Mapping[str, Verdict]
) -> tuple[Dropped, ...]:
    """The patches of ``stack`` that the release in the index does not need, and why.

    They are undone from the last to the first: text of one may be changed by a later one.
    """
    where = f"on the untouched {new.version}"
    dropped: list[Dropped] = []
    for patch in reversed(stack.patches):
        verdict = verdicts.get(patch.name)
        undone = git.apply_cached(patch.content(), check_only=True, reverse=True).ok
        if undone:
            git.apply_cached(patch.content(), reverse=True)
        if verdict and verdict.state == UPSTREAM:
            why = f"its witness: {verdict.why} {where}"
        elif undone and not (verdict and verdict.state == NEEDED):
            why = f"all of its text is {where}"
        else:
            continue
        dropped.append(Dropped(patch=patch.name, state="upstream", since=new.version, why=why))
    return tuple(reversed(dropped))


def record(new: Base, outcome: Outcome, verdicts: Mapping[str, Verdict]) -> None:
    """Write into base.toml which patches are left out, and how the others' tests end untouched."""
    gone = {entry.patch for entry in outcome.dropped}
    kept = [one for name, one in verdicts.items() if name not in gone and one.state == NEEDED]
    path = new.folder / "base.toml"
    text = base_draft.amended(
        path.read_text(encoding="utf-8"),
        dropped=outcome.dropped,
        # Patches share witnesses.
        upstream=list(dict.fromkeys(name for one in kept for name in one.green)),
        needed=list(dict.fromkeys(name for one in kept for name in one.broken)),
    )
    files.write_text(path, text)
