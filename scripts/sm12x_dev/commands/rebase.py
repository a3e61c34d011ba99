"""`sm12x-dev rebase`: port a stack to another release."""

from __future__ import annotations

import datetime
import shlex
import tempfile
from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import find_links_option, say
from sm12x.core import progress
from sm12x.core.errors import (
    DirtyTreeError,
    PatchConflictError,
    Sm12xError,
    UnknownVerdictError,
    UsageError,
)
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Stack
from sm12x.stack.worktree import tree
from sm12x_dev import base_draft, rebase, render
from sm12x_dev.base_draft import SourceFacts
from sm12x_dev.commands.options import (
    DIRECTORY,
    JOBS,
    chosen,
    fetch,
    give_way,
    listed,
    print_findings,
    project,
    relative,
)
from sm12x_dev.rebase import Verdict
from sm12x_dev.witness import environment, witness
from sm12x_dev.worktree import export


@click.command("rebase")
@click.argument("version", metavar="VERSION")
@DIRECTORY
@click.option(
    "--from",
    "source",
    envvar="BASE",
    metavar="BASE",
    help="The base whose stack is ported; needed only where there are several.  [env: BASE]",
)
@click.option("--force", is_flag=True, help="Replace patches/VERSION: commit it first.")
@click.option(
    "--no-witness", is_flag=True, help="Run no witness: the text alone decides what is upstream."
)
@click.option("--no-lock", is_flag=True, help="Resolve no locks; witnesses then need --python.")
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Interpreter with pytest and torch; by default one is set up from the new lock.",
)
@JOBS
@find_links_option(
    help="Take sdists and wheels from this folder. Locks and witnesses' packages need the index."
)
@click.option(
    "--released",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="DATE",
    help="The release date, where the index has none: locks contain nothing newer.",
)
def rebase_command(
    version: str,
    directory: Path,
    source: str | None,
    force: bool,
    no_witness: bool,
    no_lock: bool,
    python: Path | None,
    jobs: int,
    find_links: Path | None,
    released: datetime.datetime | None,
) -> None:
    """Port a base's stack to the release VERSION, in the new folder DIR, and write patches/VERSION.

    Each patch's witness is run on the untouched release: where it is green, the fix is upstream and
    the patch is left out. git rebases the others in DIR, and stops at what it cannot merge (exit
    code 11): resolve that with git, continue with `git rebase --continue`, and export with
    `sm12x-dev refresh`. base.toml is drafted, and the report lists what a person has to check.

    Example: sm12x-dev rebase VERSION ../vllm --from BASE
    """
    base = chosen(source, option="--from")
    stack = series.load(base)
    folder = layout.patches() / version
    overrides = _require_free(folder, directory, force=force)
    if version == base.version:
        raise UsageError(
            f"the stack of {version} is on {version} already", next_step="name another release"
        )
    package = project(base)
    with progress.spinner(f"asking the index for {package} {version}"):
        files = listed(package, find_links)
    day = released.date() if released else None
    release = base_draft.release(files, version, project=package, released=day)
    archives = fetch(base, find_links), fetch(release, find_links)
    give_way()
    with tempfile.TemporaryDirectory(prefix="sm12x-rebase-") as scratch:
        old, untouched = Path(scratch) / "source", Path(scratch) / "untouched"
        for archive, target in zip(archives, (old, untouched), strict=True):
            say(f"unpacking {archive.name}")
            tree.unpack(archive, target)
        drafted = base_draft.draft(
            base,
            release,
            SourceFacts.read(untouched),
            SourceFacts.read(old),
            tree=tree.tree_id(untouched),
            overrides=overrides,
        )
        new = rebase.write_folder(base, drafted, folder)
        check = list(drafted.to_check)
        if not no_lock:
            check += rebase.write_locks(base, new, say)
        click.echo(f"{relative(str(folder))}: check these before you commit it:")
        for line in check:
            click.echo(f"  {line}")
        new = bases.parse(folder / "base.toml")
        verdicts = {} if no_witness else _verdicts(new, stack, untouched, python, jobs)
        say(f"porting {len(stack.patches)} patches in {directory}")
        tree.unpack(archives[1], directory)
        with tree.removed_on_failure(directory):
            outcome = rebase.rebase(base, stack, new, old, directory, verdicts)
            rebase.record(new, outcome, verdicts)
    _print(stack, outcome, verdicts)
    _finish(new, directory, outcome)


def _require_free(folder: Path, directory: Path, *, force: bool) -> tuple[bases.Override, ...]:
    """The overrides of the base in ``folder``, which is to be replaced; raises DirtyTreeError."""
    if directory.exists():
        raise DirtyTreeError(f"{directory} exists", next_step="name a folder that does not")
    if not folder.exists():
        return ()
    if not force:
        raise DirtyTreeError(
            f"{folder} exists, and nothing is overwritten",
            next_step="commit it, and add --force to replace it",
        )
    if not (folder / "base.toml").is_file():
        raise DirtyTreeError(
            f"{folder} exists and is not a base's folder (it has no base.toml)",
            next_step="move it away yourself",
        )
    return bases.parse(folder / "base.toml").overrides


def _verdicts(
    new: Base, stack: Stack, untouched: Path, python: Path | None, jobs: int
) -> dict[str, Verdict]:
    """The verdict on each patch by its witnesses; raises UnknownVerdictError where none can run."""
    root = layout.root()
    paths = list(dict.fromkeys(path for patch in stack.patches for path in patch.witnesses))
    try:
        using = python or environment.environment(new, root=root, cache=layout.cache(), say=say)
        runs = witness.run_on(
            {witness.BASE: untouched},
            paths,
            python=using.absolute(),
            root=root,
            jobs=jobs,
            on_run=lambda path, _: say(f"running {path}"),
        )
    except Sm12xError as error:
        raise UnknownVerdictError(
            f"it is unknown which patches {new.version} needs: the witnesses could not run: "
            f"{error.message}",
            next_step=f"{error.next_step}; then run this again with --force (it keeps each "
            f"[[override]] of {new.folder / 'base.toml'}), with --python of an environment that "
            "has pytest and torch, or with --no-witness",
        ) from error
    return {
        patch.name: rebase.judge([runs[path, witness.BASE] for path in patch.witnesses])
        for patch in stack.patches
    }


def _print(stack: Stack, outcome: rebase.Outcome, verdicts: dict[str, Verdict]) -> None:
    reasons = {entry.patch: entry.why for entry in outcome.dropped}
    for patch in stack.patches:
        if patch.name in reasons:
            click.echo(f"{patch.name}: left out, upstream: {reasons[patch.name]}")
        elif patch.name in verdicts:
            verdict = verdicts[patch.name]
            click.echo(f"{patch.name}: {verdict.state}: {verdict.why}")


def _finish(new: Base, directory: Path, outcome: rebase.Outcome) -> None:
    """Export the patches into the new base, or say where git has stopped."""
    quoted = shlex.quote(str(directory))
    if outcome.stopped:
        conflicts = ", ".join(outcome.conflicts) or "no change is left of it"
        raise PatchConflictError(
            f"git stopped at the patch {outcome.stopped!r} in {directory}: {conflicts}",
            next_step=f"resolve it there, `git -C {quoted} add --all` and `git -C {quoted} rebase "
            "--continue` until git is done (a patch that you leave out with `--skip` gets a "
            f"[[dropped]] in patches/{new.version}/base.toml), then `sm12x-dev refresh --base "
            f"{new.version} {quoted}`",
        )
    try:
        report = export.refresh(new, directory, root=layout.root())
    except export.MessageError as error:
        print_findings(error)
        raise
    click.echo(render.refreshed(report, relative(str(new.folder))), nl=False)
    click.echo(f"next: sm12x-dev witness --base {new.version}")
