"""`sm12x patch witness`: the patches' tests on the untouched and on the patched source."""

from __future__ import annotations

import sys
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
from sm12x.stack import render
from sm12x.stack.model import series
from sm12x.stack.witness import witness


@click.command("witness")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@base_option
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Interpreter with pytest and torch; by default one is set up from the base's lock.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=witness.TIME_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="For one witness on one tree.",
)
@JOBS
@FIND_LINKS
@reports(witness.WitnessReport)
def witness_command(
    names: tuple[str, ...],
    version: str | None,
    python: Path | None,
    time_limit: float,
    jobs: int,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Run the patches' witnesses: red on the untouched base, green on the patched one.

    NAME is a patch's file name or number; without one, all are run. A test that is neither, or
    that is green on the base and no guard, fails the run. Needs a C++ compiler, no GPU.

    Example: sm12x patch witness 0001
    """
    base = chosen(version)
    stack = series.load(base)
    patches = [stack.get(name) for name in names] if names else list(stack.patches)
    archive = fetch(base, find_links)
    root = layout.root()
    if python is None and patches:
        with progress.spinner("setting up the witnesses' environment"):
            python = witness.environment(base, root=root, cache=layout.cache(), say=say)
    report = witness.run(
        base,
        stack,
        patches,
        archive=archive,
        python=(python or Path(sys.executable)).absolute(),
        root=root,
        seconds=time_limit,
        jobs=jobs,
        on_run=lambda path, side: say(f"{path} on the {side} tree"),
    )
    if as_json:
        print_json(report)
    else:
        click.echo(render.witnessed(report), nl=False)
    if report.failed:
        raise FindingsError(
            f"{report.failed} of {len(report.checks)} checks failed",
            next_step="see what failed above, and what pytest said of it",
        )
