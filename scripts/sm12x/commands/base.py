"""`sm12x base`: the releases a stack is kept for, and how the patches stand on others."""

from __future__ import annotations

import click

from sm12x import layout
from sm12x.commands import print_json, reports
from sm12x.commands.patchoptions import say
from sm12x.stack.model import base as bases
from sm12x.stack.rebase import render, status


@click.group()
def command() -> None:
    """Show how the patches stand on each release.

    Example: sm12x base status
    """


@command.command("status")
@reports(dict[str, dict[str, status.Cell]])
def status_command(as_json: bool) -> None:
    """Print patch by release: needed, applied, upstream, conflict, or unknown.

    Covers the bases in patches/ and the releases that `sm12x patch rebase` was run for.

    Example: sm12x base status --json
    """
    known = [bases.load(version) for version in bases.versions()]
    recorded = status.read(layout.patches() / status.NAME)
    found = status.table(known, recorded)
    if as_json:
        print_json(render.table_data(found))
    else:
        click.echo(render.table(found), nl=False)
    for line in status.contradictions(known, recorded):
        say(f"warning: {line}; run `sm12x patch rebase` there again, or mend the [[dropped]]")
