"""`sm12x-dev base`: the releases a stack is kept for, and the state of the patches on others."""

from __future__ import annotations

from datetime import date
from functools import partial
from pathlib import Path

import click
from packaging.version import Version

from sm12x import layout
from sm12x.commands import emit, find_links_option, reports, say
from sm12x.core import listing, progress
from sm12x.core import text as texts
from sm12x.core.errors import FindingsError, UnknownVerdictError
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x_dev import advisories
from sm12x_dev.commands.options import fetch, give_way
from sm12x_dev.rebase import newest, render, status
from sm12x_dev.rebase.base_draft import Release
from sm12x_dev.rebase.newest import NewestReport, PatchTrial


@click.group()
def base_command() -> None:
    """Show the state of the patches on each release, and which release is the newest.

    Example: sm12x-dev base status
    """


@base_command.command("status")
@reports(dict[str, dict[str, status.Cell]])
def status_command(as_json: bool) -> None:
    """Print patch by release: applied, needed, upstream, conflict, follows or unknown.

    Covers the bases in patches/ and the releases that `sm12x-dev rebase` was run for.

    Example: sm12x-dev base status --json
    """
    known = [bases.load(version) for version in bases.versions()]
    recorded = status.read(layout.patches() / status.NAME)
    found = status.table(known, recorded)
    cells = {
        patch: dict(zip(found.releases, row, strict=True)) for patch, row in found.rows.items()
    }
    emit(as_json, cells, render.table(found))
    for base in known:
        if not series.is_readable(base):
            say(
                f"warning: the patches of {base.version} cannot be read, and its column lacks "
                f"them; `sm12x-dev check --base {base.version}` says why"
            )
    for line in status.contradictions(known, recorded):
        say(
            f"warning: {line}; run `sm12x-dev rebase` for that release again, or correct the "
            "[[dropped]] entry of that base"
        )


@base_command.command("check")
@click.option(
    "--from",
    "sources",
    multiple=True,
    metavar="BASE",
    help="Try the patches of this base; can be repeated. Default: those of every base, unless the "
    "newest release is a base.",
)
@find_links_option(help="Take the releases from this folder and use no network.")
@reports(NewestReport)
def check_command(sources: tuple[str, ...], find_links: Path | None, as_json: bool) -> None:
    """Compare the newest release on the package index with the bases, and try the patches on it.

    Each patch is applied or merged as `sm12x-dev rebase` does it; no witness runs and nothing is
    written. The exit status is 1 when the default base is more than one release behind. Then the
    locks are looked up for known advisories, as `sm12x-dev base advisories` does; not with
    --find-links, which uses no network: a line says so.

    Example: sm12x-dev base check --json
    """
    default = bases.default()
    known = [bases.load(version) for version in bases.versions()]
    chosen = [bases.load(version) for version in dict.fromkeys(sources)]
    project = bases.load(default).sdist.name.rpartition("-")[0]
    with progress.spinner(f"asking the index for {project}"):
        listed = listing.of_folder(project, find_links) if find_links else listing.of_index(project)
    found = newest.find(listed, project)
    if not chosen and found.version not in bases.versions():
        chosen = known
    trials = _attempts(chosen, known, found, find_links)
    report = newest.compare(listed, found, known, default=default, project=project, trials=trials)
    emit(as_json, report, newest.text(report))
    if not report.current:
        behind = texts.counted(report.default.behind, "release")
        raise FindingsError(
            f"the default base {default} is {behind} behind {project} {report.newest}, more than "
            f"{report.allowed}",
            next_step=f'{_next(report)}; CONTRIBUTING.md, "Stay current", has the routine',
        )
    if find_links:
        say("advisories: not looked up, as --find-links uses no network")
        return
    looked_up = _look_up(known, "pypi")
    click.echo(advisories.render(looked_up), nl=False, err=as_json)
    _judge(looked_up)


@base_command.command("advisories")
@click.option(
    "--service",
    type=click.Choice(["pypi", "osv"]),
    default="pypi",
    show_default=True,
    help="Where pip-audit asks.",
)
@reports(advisories.AdvisoryReport)
def advisories_command(service: str, as_json: bool) -> None:
    """Look the locks of every base and of the tools up for known advisories, with pip-audit.

    patches/advisories.toml has those that are accepted, with a reason and the day on which that is
    to be read again. Exit code 1: an advisory is not accepted, or an accepted entry is stale. Exit
    code 16: what could not be looked up, so that there is no verdict.

    Example: sm12x-dev base advisories --json
    """
    known = [bases.load(version) for version in bases.versions()]
    report = _look_up(known, service)
    emit(as_json, report, advisories.render(report))
    _judge(report)


def _look_up(known: list[Base], service: str) -> advisories.AdvisoryReport:
    with progress.spinner("asking for advisories of the locks"):
        return advisories.look_up(
            advisories.locks(known),
            advisories.load(layout.patches() / advisories.NAME),
            partial(advisories.ask_pip_audit, service=service),
            today=date.today(),
        )


def _judge(report: advisories.AdvisoryReport) -> None:
    """Raise FindingsError for what is open or stale, UnknownVerdictError for what was not seen."""
    found = [f"{one.package} {one.ids[0]}" for one in report.open] + list(report.stale)
    if found:
        raise FindingsError(
            f"{texts.counted(len(found), 'advisory', 'advisories')} to act on: "
            f"{texts.first_of(found, 4)}",
            next_step="pin a version with a fix (`make lock`), or read the advisory and state in "
            f"patches/{advisories.NAME} why it is accepted, and until when",
        )
    if report.unseen:
        raise UnknownVerdictError(
            f"{len(report.unseen)} of {report.pins} pins were not looked up"
            + (f": {report.why}" if report.why else ""),
            next_step="run it where pypi.org's JSON pages or, with --service osv, api.osv.dev can "
            "be reached",
        )


def _next(report: NewestReport) -> str:
    last = report.last
    if last.behind <= report.allowed and not last.default:
        return f"write {last.version} into patches/default once recipes and a GPU run show it works"
    return f"`sm12x-dev rebase {report.newest} --from {last.version}`"


def _attempts(
    chosen: list[Base], known: list[Base], found: Release, find_links: Path | None
) -> list[PatchTrial]:
    """What the patches of each base that is older than ``found`` would do on it."""
    older = [base for base in chosen if Version(base.version) < Version(found.version)]
    if not older:
        return []
    target = fetch(found, find_links)
    give_way()
    there = newest.recorded(found.version, known, status.read(layout.patches() / status.NAME))
    trials: list[PatchTrial] = []
    for base in older:
        stack = series.load(base)
        say(f"trying {texts.counted(len(stack.patches), 'patch', 'patches')} of {base.version}")
        trials += newest.attempt(
            base, stack, fetch(base, find_links), target, found, there, root=layout.root()
        )
    return trials
