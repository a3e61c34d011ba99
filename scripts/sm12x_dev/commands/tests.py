"""`sm12x-dev witness|upstream-tests`: tests on the untouched and on the patched source."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import emit, reports, say
from sm12x.core import progress
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.stack.model import series
from sm12x_dev import render
from sm12x_dev.commands.options import BASE, FIND_LINKS, JOBS, chosen, fetch, named
from sm12x_dev.witness import (
    environment,
    record,
    upstream_run,
    upstream_tests,
    witness,
)
from sm12x_dev.witness.pytests import TIME_LIMIT
from sm12x_dev.witness.upstream_tests import Cannot, UpstreamPlan

_OTHER = (
    "is of another release, other packages or other tools: every {} is run on both trees; --record "
    "makes it again"
)
_limit = partial(click.option, type=click.FloatRange(min=1), show_default=True, metavar="SECONDS")


@click.command("witness")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@BASE
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Interpreter with pytest and torch; by default one is set up from the base's lock.",
)
@click.option(
    "--both-trees", is_flag=True, help="Run every witness on both trees, whatever is recorded."
)
@click.option(
    "--record",
    "make_record",
    is_flag=True,
    help=f"Run every witness on both trees, and record what the untouched one gives in "
    f"{record.WITNESSES} of the base.",
)
@_limit("--time-limit", default=TIME_LIMIT, help="Limit for one witness on one tree.")
@JOBS
@FIND_LINKS
@reports(witness.WitnessReport)
def witness_command(
    names: tuple[str, ...],
    version: str | None,
    python: Path | None,
    both_trees: bool,
    make_record: bool,
    time_limit: float,
    jobs: int,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Run the patches' witnesses: red on the untouched base, green on the patched one.

    NAME is a patch's file name or number; without one, all are run. The run fails on any other
    outcome, and on a test that is green on the base and not a guard. Needs a C++ compiler, no GPU.

    What a witness gives on the untouched base is recorded in witness-base.json of the base, with a
    digest of all that it depends on: the release, the packages, the compiler, the witness and what
    it imports. A witness is run there only if that has changed, or if its tests have.

    Example: sm12x-dev witness --base 0.33.0 0001
    """
    if make_record and python:
        raise click.UsageError("--record is of the packages of the lock: give no --python with it")
    base = chosen(version)
    stack = series.load(base)
    patches = named(stack, names)
    archive = fetch(base, find_links)
    root = layout.root()
    conditions, baseline = "", None
    # Another Python has other packages than the record is of, and may stand in for missing locks.
    if not python:
        conditions = record.witness_conditions(base, root=root, machine=platform.machine())
    if not (python or both_trees):
        baseline = record.load(base, record.WITNESSES, "sm12x-dev witness")
    if baseline and baseline.conditions != conditions:
        say(f"{record.WITNESSES} {_OTHER.format('witness')}")
        baseline = None
    if make_record and names and not baseline:
        raise BadFileError(
            f"{record.WITNESSES} has no record of the other patches for this release, these "
            "packages and these tools",
            next_step="give --record without a NAME: it runs every witness on both trees",
        )
    if python is None and patches:
        with progress.spinner("setting up the witnesses' environment"):
            python = environment.environment(base, root=root, cache=layout.cache(), say=say)
    report = witness.run(
        base,
        stack,
        patches,
        archive=archive,
        python=(python or Path(sys.executable)).absolute(),
        root=root,
        baseline=baseline,
        record_for=conditions if make_record else "",
        seconds=time_limit,
        jobs=jobs,
        on_run=lambda path, side: say(f"{path} on the {side} tree"),
    )
    emit(as_json, report, render.witnessed(report))
    if report.failed:
        raise FindingsError(
            f"{report.failed} of {len(report.checks)} checks failed",
            next_step="see the failed checks above, with pytest's output",
        )


@dataclass(frozen=True, kw_only=True)
class UpstreamList(UpstreamPlan):
    """What `sm12x-dev upstream-tests --list --json` prints."""

    base: str
    cannot: tuple[Cannot, ...]


@click.command("upstream-tests")
@click.argument("names", metavar="[FILE]...", nargs=-1)
@BASE
@click.option(
    "--list", "list_only", is_flag=True, help="Only list the tests, and which cannot run here."
)
@click.option(
    "--record",
    "make_record",
    is_flag=True,
    help=f"Run every file on both trees, and record what the untouched one gives in "
    f"{upstream_run.RECORD} of the base.",
)
@_limit("--test-limit", default=upstream_run.TEST_LIMIT, help="Limit for one test on one tree.")
@_limit(
    "--file-limit", default=upstream_run.FILE_LIMIT, help="Limit for one test file on one tree."
)
@FIND_LINKS
@reports(UpstreamList | upstream_tests.Report)
def upstream_tests_command(
    names: tuple[str, ...],
    version: str | None,
    list_only: bool,
    make_record: bool,
    test_limit: float,
    file_limit: float,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Run the release's own unit tests of every file that the stack changes, on both trees.

    Fails if a test is worse on the patched source than on the untouched one, first together with
    its file and then alone. What a file gives on the untouched source is recorded in
    upstream-base.json of the base: it is run there only if it gives something else on the patched
    one, or if the record is of other packages or another release. FILE is a test file of the
    release, or a file that the stack changes; without one, all are run. Which tests cannot run
    here, and why, is in upstream-tests.toml of the base. Needs no GPU.

    Example: sm12x-dev upstream-tests --base 0.33.0 vllm/v1/engine/core.py
    """
    base = chosen(version)
    stack = series.load(base)
    suite = upstream_tests.load(base)
    root = layout.root()
    if make_record and (names or list_only):
        raise click.UsageError("--record is for all files: give no FILE and no --list with it")
    archive = fetch(base, find_links)
    if list_only:
        plan = upstream_run.listed(suite, stack, archive=archive, only=names)
        listed = UpstreamList(base=base.version, cannot=suite.cannot, **vars(plan))
        emit(as_json, listed, render.upstream_listed(plan, suite))
        _refuse(plan, worse=0)
        return
    conditions = upstream_run.conditions(base, suite, root=root)
    baseline = None
    if not make_record:
        baseline = record.load(base, upstream_run.RECORD, "sm12x-dev upstream-tests")
    if baseline and baseline.conditions != conditions:
        say(f"{upstream_run.RECORD} {_OTHER.format('file')}")
        baseline = None
    with progress.spinner("setting up the environment of the tests"):
        python = environment.environment(base, root=root, cache=layout.cache(), say=say)
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
        baseline=baseline,
        record_for=conditions if make_record else "",
        only=names,
        test_seconds=test_limit,
        file_seconds=file_limit,
        on_file=lambda path, side: say(f"{path} on the {side} tree"),
        on_alone=lambda count: say(f"{count} tests differ and are run again, alone"),
    )
    emit(as_json, report, render.upstream_report(report))
    _refuse(report.plan, worse=len(report.of(upstream_tests.WORSE)))


def _refuse(plan: UpstreamPlan, *, worse: int) -> None:
    """Raise FindingsError where a test is worse, or the data does not fit the stack."""
    if worse:
        raise FindingsError(
            f"{worse} tests of the release are worse on the patched source",
            next_step="correct the patches: they must keep the behaviour that these tests check",
        )
    if plan.faults:
        raise FindingsError(
            f"the list of the release's tests has {len(plan.faults)} faults",
            next_step=f"correct them in {upstream_tests.NAME} of the base",
        )
