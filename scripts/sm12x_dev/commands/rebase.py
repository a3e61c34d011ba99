"""`sm12x-dev rebase`: port a stack to another release."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import emit, find_links_option, reports, say
from sm12x.core import listing, progress
from sm12x.core.errors import BadFileError, PatchConflictError, Sm12xError
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.worktree import tree
from sm12x_dev.commands.options import DIRECTORY, JOBS, chosen, fetch, give_way, print_findings
from sm12x_dev.rebase import base_draft, conflicts, rebase, render, status, verdict
from sm12x_dev.rebase.base_draft import Release
from sm12x_dev.rebase.rebase import RebaseReport
from sm12x_dev.witness import witness
from sm12x_dev.worktree import staging
from sm12x_dev.worktree.export import MessageError


@click.command("rebase")
@click.argument("version", metavar="VERSION")
@click.option(
    "--from",
    "source",
    envvar="BASE",
    metavar="BASE",
    help="The base whose stack is ported; needed only where there are several.  [env: BASE]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where to write the folder VERSION; by default patches/ of the checkout.",
)
@click.option("--force", is_flag=True, help="Replace an existing folder: commit it first.")
@click.option(
    "--witness",
    "chosen_witnesses",
    multiple=True,
    metavar="PATH",
    help="Run only this witness. May be repeated.",
)
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
@click.option("--no-record", is_flag=True, help="Do not record the outcome in patches/status.toml.")
@find_links_option(
    help="Take the sdists from this folder. Locks and the witnesses' packages need the index."
)
@click.option(
    "--released",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="DATE",
    help="The release date, where the index has none: locks contain nothing newer.",
)
@reports(render.RebaseData)
def rebase_command(
    version: str,
    source: str | None,
    out: Path | None,
    force: bool,
    chosen_witnesses: tuple[str, ...],
    no_witness: bool,
    no_lock: bool,
    python: Path | None,
    jobs: int,
    no_record: bool,
    find_links: Path | None,
    released: datetime.datetime | None,
    as_json: bool,
) -> None:
    """Port a base's stack to the release VERSION, and write the folder of a new base.

    Each patch's witness is run on the untouched release: where it is green, the fix is upstream and
    the patch is left out; the releases in between are tried to find the first one with the fix. The
    other patches are applied, or merged by git where the lines around them have changed. What git
    cannot merge is left in a work tree, with conflict markers, for `sm12x-dev continue` (exit
    code 11); where the witnesses could not run, it is unknown which patches are needed (16).
    base.toml is drafted from the index and the source, and the report lists what a person has to
    check.

    Example: sm12x-dev rebase VERSION --from BASE
    """
    base = chosen(source, option="--from")
    stack = series.load(base)
    only = _witnesses(stack, chosen_witnesses)
    patches = layout.patches()
    target = out or patches
    staging.require_free(target / version, force=force)
    staging.require_writable(target)
    project = base.sdist.name.rpartition("-")[0]
    with progress.spinner(f"asking the index for {project} {version}"):
        listed = _listed(project, find_links, locks=not no_lock)
    before = _before(target / version, patches / version)
    found = base_draft.release(listed, version, project=project)
    found = _dated(found, released.date() if released else None, base, before)
    give_way()
    recorded = patches / status.NAME
    run = _runner(python, jobs)
    asked = rebase.RebaseRequest(
        base=base,
        stack=stack,
        found=found,
        source=fetch(base, find_links),
        target=fetch(found, find_links),
        root=layout.root(),
        out=target,
        force=force,
        known=status.read(recorded),
        overrides=before.overrides if before else (),
        run_witnesses=None if no_witness else run,
        chosen=only,
        make_locks=not no_lock,
        lock_needed=python is None,
        releases=listing.releases(listed),
        probe=_prober(project, listed, find_links, run),
        say=say,
        ports=layout.ports(),
    )
    report = rebase.rebase(asked)
    emit(as_json, render.RebaseData.of(report), render.report(report))
    if not no_record:
        _record(recorded, report)
    if report.unrun is not None:
        raise rebase.WitnessesUnrunError(report, report.unrun)
    if report.open:
        raise rebase.ConflictsLeftError(report)


@click.command("continue")
@DIRECTORY
@click.option("--skip", is_flag=True, help="Leave out the patch that is in conflict.")
@reports(render.PortData)
def continue_command(directory: Path, skip: bool, as_json: bool) -> None:
    """Continue a rebase in DIR after you have resolved the conflicts of a patch.

    The resolved patch is committed with its message, and the remaining patches are merged until the
    next conflict (exit code 11). At the end all are exported into the folder of the new base.

    Example: sm12x-dev continue DIR
    """
    try:
        report = conflicts.continue_(directory, root=layout.root(), skip=skip)
    except MessageError as error:
        print_findings(error)
        raise
    emit(as_json, render.PortData.of(report), render.ported(report))
    stop = report.port.stop
    if stop is not None:
        raise PatchConflictError(
            f"{stop.name} does not merge into {report.port.version}",
            next_step="resolve the conflicts above, then `sm12x-dev continue "
            f"{rebase.quote(directory)}`",
        )


def _record(path: Path, report: RebaseReport) -> None:
    """Add the outcome to the record; print a line on stderr if the record cannot be written."""
    try:
        stacks = {v: series.read(bases.load(v))[0] for v in bases.versions()}
        known = {v: names for v, names in stacks.items() if v == report.source}
        status.record(path, rebase.records(report), known)
    except (BadFileError, OSError) as error:
        why = error.message if isinstance(error, BadFileError) else error.strerror or error
        say(
            f"warning: the outcome is not recorded in {path}: {why}; correct that and run "
            "this again, or add --no-record"
        )


def _listed(
    project: str, find_links: Path | None, *, locks: bool
) -> tuple[listing.ListedFile, ...]:
    """All files of ``project``; with ``locks`` also what only the index knows of a folder's."""
    if find_links is None:
        return listing.of_index(project)
    here = listing.of_folder(project, find_links)
    if not locks:
        return here
    try:
        return listing.completed(here, listing.of_index(project))
    except Sm12xError as error:
        say(f"the release date of {project} is not known: {error.message}")
        return here


def _dated(found: Release, given: datetime.date | None, base: Base, before: Base | None) -> Release:
    """The release with its day: the one given, what the index says, or that of ``before``."""
    if given is not None:
        return replace(found, given=given)
    # A draft keeps that of ``base`` where it is unknown: another one has been looked up.
    if found.released is None and before is not None and before.released != base.released:
        return replace(found, given=before.released)
    return found


def _before(*folders: Path) -> Base | None:
    """The first of ``folders`` that is a base's: what is being replaced, or kept."""
    for folder in folders:
        if (folder / "base.toml").is_file():
            return bases.parse(folder / "base.toml")
    return None


def _witnesses(stack: series.Stack, names: tuple[str, ...]) -> list[str] | None:
    """The witnesses to run, None for all; raises UsageError for one that no patch has."""
    if not names:
        return None
    known = {path for patch in stack.patches for path in patch.witnesses}
    found: list[str] = []
    for name in names:
        fitting = [path for path in known if name in (path, Path(path).stem, Path(path).name)]
        if not fitting:
            raise click.UsageError(
                f"No patch has a witness {name}; there are {', '.join(sorted(known))}"
            )
        found += fitting
    return found


def _runner(python: Path | None, jobs: int) -> rebase.RunWitnesses:
    def run(new: Base, paths: Sequence[str], tree: Path) -> list[witness.Run]:
        root = layout.root()
        using = python or witness.environment(new, root=root, cache=layout.cache(), say=say)
        runs = witness.run_on(
            {witness.BASE: tree},
            paths,
            python=using.absolute(),
            root=root,
            jobs=jobs,
            on_run=lambda path, _: say(f"running {path}"),
        )
        return list(runs.values())

    return run


def _prober(
    project: str,
    listed: tuple[listing.ListedFile, ...],
    find_links: Path | None,
    run: rebase.RunWitnesses,
) -> rebase.Probe:
    def probe(new: Base, patch: series.Patch, version: str) -> verdict.PatchVerdict:
        found = base_draft.release(listed, version, project=project)
        archive = fetch(found, find_links)
        with tempfile.TemporaryDirectory(prefix="sm12x-probe-") as name:
            source = Path(name) / "source"
            tree.unpack(archive, source)
            say(f"{patch.name}: checking whether {version} has the fix")
            return verdict.judge(run(new, patch.witnesses, source))

    return probe
