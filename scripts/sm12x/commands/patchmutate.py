"""`sm12x patch mutate`: each mutation of the patched source has to turn a witness red."""

from __future__ import annotations

from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import print_json, reports
from sm12x.commands.patchoptions import (
    FIND_LINKS,
    JOBS,
    base_option,
    chosen,
    fetch,
    say,
)
from sm12x.core import progress
from sm12x.core.errors import FindingsError
from sm12x.stack.model import series
from sm12x.stack.witness import mutate, mutations, witness
from sm12x.stack.witness.mutate import MutantOutcome


@click.command("mutate")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@base_option
@click.option(
    "--auto",
    type=click.IntRange(min=1),
    metavar="N",
    help="Instead of the mutations that are kept: N for each patch, out of the lines that it adds.",
)
@click.option("--seed", default=0, show_default=True, help="Which N are chosen.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=mutate.TIME_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="For one witness on one mutation.",
)
@JOBS
@FIND_LINKS
@reports(mutate.MutationReport)
def mutate_command(
    names: tuple[str, ...],
    version: str | None,
    auto: int | None,
    seed: int,
    time_limit: float,
    jobs: int,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Mutate lines of the patched source, and see whether the patch's witnesses turn red.

    A mutation is an entry of mutations.toml of the base: a text of the patched source and what
    replaces it. One that every witness of its patch survives fails the run, and so does one whose
    text is not there (stale) or that could not be judged. With --auto lines are left out or negated
    by a rule instead, and a survivor is for you to judge: a line without a witness, or one that
    makes no difference. NAME is a patch's file name or number; without one, all are run.

    Example: sm12x patch mutate 0001
    """
    base = chosen(version)
    stack = series.load(base)
    patches = [stack.get(name) for name in names] if names else list(stack.patches)
    if not auto:
        mutate.require(base)
    archive = fetch(base, find_links)
    root = layout.root()
    with progress.spinner("setting up the witnesses' environment"):
        python = witness.environment(base, root=root, cache=layout.cache(), say=say)
    report = mutate.run(
        base,
        stack,
        patches,
        archive=archive,
        python=python,
        root=root,
        auto=auto or 0,
        seed=seed,
        seconds=time_limit,
        jobs=jobs,
        on_outcome=_said,
    )
    if as_json:
        print_json(report)
    else:
        click.echo(mutate.text(report), nl=False)
    if auto or report.ok:
        return
    bad = len(report.outcomes) - report.count(mutate.KILLED) + len(report.findings)
    raise FindingsError(
        f"{bad} mutations turned no witness red",
        next_step="write the test that asks for the line, or remove the line; where the text is "
        f"stale, mend {mutations.NAME} of the base",
    )


def _said(outcome: MutantOutcome, left: int) -> None:
    say(f"{outcome.state}: {outcome.patch}, {outcome.file}, {outcome.label} ({left} left)")
