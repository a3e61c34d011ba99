"""`sm12x patch upstream-tests`: the release's own tests on the untouched and the patched source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import print_json, reports
from sm12x.commands.patchoptions import (
    FIND_LINKS,
    base_option,
    chosen,
    fetch,
    say,
)
from sm12x.core import progress
from sm12x.core.errors import FindingsError
from sm12x.stack.model import series
from sm12x.stack.witness import upstream_run, upstream_tests, upstream_text, witness
from sm12x.stack.witness.upstream_tests import Cannot, UpstreamPlan


@dataclass(frozen=True, kw_only=True)
class UpstreamList(UpstreamPlan):
    """What `sm12x patch upstream-tests --list --json` prints."""

    base: str
    cannot: tuple[Cannot, ...]


@click.command("upstream-tests")
@click.argument("names", metavar="[FILE]...", nargs=-1)
@base_option
@click.option(
    "--list", "list_only", is_flag=True, help="Only list the tests, and which cannot run here."
)
@click.option(
    "--test-limit",
    type=click.FloatRange(min=1),
    default=upstream_run.TEST_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="For one test on one tree.",
)
@click.option(
    "--file-limit",
    type=click.FloatRange(min=1),
    default=upstream_run.FILE_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="For one test file on one tree.",
)
@FIND_LINKS
@reports(UpstreamList | upstream_tests.Report)
def upstream_command(
    names: tuple[str, ...],
    version: str | None,
    list_only: bool,
    test_limit: float,
    file_limit: float,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Run the release's own unit tests of every file that the stack changes, on both trees.

    Fails if a test is worse on the patched source than on the untouched one, first together with
    its file and then alone. FILE is a test file of the release, or a file that the stack changes;
    without one, all are run. Which tests cannot run here, and why, is in upstream-tests.toml of the
    base. Needs no GPU.

    Example: sm12x patch upstream-tests vllm/v1/engine/core.py
    """
    base = chosen(version)
    stack = series.load(base)
    suite = upstream_tests.load(base)
    archive = fetch(base, find_links)
    if list_only:
        plan = upstream_run.listed(suite, stack, archive=archive, only=names)
        if as_json:
            print_json(UpstreamList(base=base.version, cannot=suite.cannot, **vars(plan)))
        else:
            click.echo(upstream_text.listed(plan, suite), nl=False)
        _refuse(plan, worse=0)
        return
    root = layout.root()
    with progress.spinner("setting up the environment of the tests"):
        python = witness.environment(base, root=root, cache=layout.cache(), say=say)
        extra = upstream_run.packages(
            base, suite, python=python, root=root, cache=layout.cache(), say=say
        )
    report = upstream_run.run(
        base,
        stack,
        suite,
        archive=archive,
        python=python,
        extra=extra,
        only=names,
        test_seconds=test_limit,
        file_seconds=file_limit,
        on_file=lambda path, side: say(f"{path} on the {side} tree"),
        on_alone=lambda count: say(f"{count} tests differ and are run again, alone"),
    )
    if as_json:
        print_json(report)
    else:
        click.echo(upstream_text.report(report), nl=False)
    _refuse(report.plan, worse=len(report.of(upstream_tests.WORSE)))


def _refuse(plan: UpstreamPlan, *, worse: int) -> None:
    """Raise FindingsError where a test is worse, or the data does not fit the stack."""
    if worse:
        raise FindingsError(
            f"{worse} tests of the release are worse on the patched source",
            next_step="mend the patches: what the tests rely on has to stay as it is",
        )
    if plan.faults:
        raise FindingsError(
            f"the list of the release's tests has {len(plan.faults)} faults",
            next_step=f"mend them in {upstream_tests.NAME} of the base",
        )
