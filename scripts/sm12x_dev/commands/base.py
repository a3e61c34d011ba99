"""`sm12x-dev base`: whether the bases are current, and their locks without open advisories."""

from __future__ import annotations

from datetime import date
from functools import partial
from pathlib import Path

import click
from packaging.version import Version

from sm12x import layout
from sm12x.commands import emit, find_links_option, reports, say
from sm12x.core import progress
from sm12x.core import text as texts
from sm12x.core.errors import FetchError, FindingsError, UnknownVerdictError
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base
from sm12x_dev import advisories, base_draft, listing, lock
from sm12x_dev.commands.options import listed, project

# How many releases there may be after the default base: one is on its way to become a base.
_ALLOWED = 1


@click.group()
def base_command() -> None:
    """Compare the bases with the newest release, and their locks with known advisories.

    Example: sm12x-dev base check
    """


@base_command.command("check")
@find_links_option(help="Take the releases from this folder and use no network.")
def check_command(find_links: Path | None) -> None:
    """Compare the bases with the newest release on the index, and their locks with base.toml.

    The exit status is 1 when the default base is more than one release behind, or when a lock
    contradicts its base.toml. Then the locks are looked up for known advisories, as `sm12x-dev base
    advisories` does; not with --find-links, which uses no network: a line says so.

    Example: sm12x-dev base check
    """
    default = bases.load(bases.default())
    every = [bases.load(version) for version in bases.versions()]
    package = project(default)
    with progress.spinner(f"asking the index for {package}"):
        files = listed(package, find_links)
    releases = listing.releases(files)
    if not releases:
        raise FetchError(
            f"the package index lists no final release of {package} with an sdist",
            next_step="check the index address in the settings of pip or uv",
        )
    newest = base_draft.release(files, releases[-1], project=package)
    click.echo(f"newest release: {package} {newest.version}, {newest.released or 'date unknown'}")
    for machine in bases.MACHINES:
        wheel = newest.wheels.get(machine)
        click.echo(f"  {machine}: {wheel.name if wheel else 'no wheel: no base can be made of it'}")
    faults = [f"{base.version}/{fault}" for base in every for fault in lock.contradictions(base)]
    for line in faults:
        click.echo(line)
    behind: dict[str, int] = {}
    for base in every:
        behind[base.version] = sum(Version(one) > Version(base.version) for one in releases)
        mark = ", the default" if base.version == default.version else ""
        later = texts.counted(behind[base.version], "release")
        click.echo(f"base {base.version}{mark}: {later} behind")
    if behind[default.version] > _ALLOWED:
        raise FindingsError(
            f"the default base {default.version} is {behind[default.version]} releases behind "
            f"{package} {newest.version}, more than {_ALLOWED}",
            next_step=f'{_next(behind, newest.version)}; CONTRIBUTING.md, "Stay current", has the '
            "routine",
        )
    if faults:
        raise FindingsError(
            f"the locks and base.toml contradict each other in {len(faults)} places, listed above",
            next_step="`make lock BASE=VERSION`, and read the difference before committing",
        )
    if find_links:
        say("advisories: not looked up, as --find-links uses no network")
        return
    report = _look_up(every, "pypi")
    click.echo(advisories.render(report), nl=False)
    _judge(report)


def _next(behind: dict[str, int], newest: str) -> str:
    last = max(behind, key=Version)
    if behind[last] <= _ALLOWED:
        return f"write {last} into patches/default once recipes and a GPU run show it works"
    return f"`sm12x-dev rebase {newest} NEW_DIR --from {last}`"


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
    every = [bases.load(version) for version in bases.versions()]
    report = _look_up(every, service)
    emit(as_json, report, advisories.render(report))
    _judge(report)


def _look_up(every: list[Base], service: str) -> advisories.AdvisoryReport:
    with progress.spinner("asking for advisories of the locks"):
        return advisories.look_up(
            advisories.locks(every),
            advisories.load(layout.patches() / advisories.NAME),
            partial(advisories.ask_pip_audit, service=service),
            today=date.today(),
        )


def _judge(report: advisories.AdvisoryReport) -> None:
    """Raise FindingsError for what is open or stale, UnknownVerdictError for what was not seen."""
    names = [f"{one.package} {one.ids[0]}" for one in report.open] + list(report.stale)
    if names:
        raise FindingsError(
            f"{texts.counted(len(names), 'advisory', 'advisories')} to act on: "
            f"{texts.first_of(names, 4)}",
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
