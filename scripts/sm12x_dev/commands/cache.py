"""`sm12x-dev cache`: list and delete the environments that tests have installed."""

from __future__ import annotations

import click

from sm12x import layout
from sm12x.commands import print_json, reports
from sm12x.core import text
from sm12x.core.errors import BadFileError
from sm12x.stack.model import base as bases
from sm12x_dev.witness import environment
from sm12x_dev.witness.environment import Environment


@click.group()
def cache_command() -> None:
    """List or clear the witnesses' environments (about 4 GiB for each base).

    Example: sm12x-dev cache list
    """


@cache_command.command("list")
@reports(list[Environment])
def list_command(as_json: bool) -> None:
    """Print each environment with its size and the base whose lock it was made of.

    Example: sm12x-dev cache list --json
    """
    entries = _found()
    if as_json:
        print_json(entries)
        return
    for one in entries:
        click.echo(f"{text.size(one.size):>10}  {_use(one)}  {one.path}")
    total = text.size(sum(one.size for one in entries))
    click.echo(f"{total:>10}  in {text.counted(len(entries), 'environment')}")


@cache_command.command("clear")
@click.option("--all", "everything", is_flag=True, help="Also those that a base uses.")
@click.option("--dry-run", is_flag=True, help="Delete nothing; list what would be deleted.")
@reports(list[Environment])
def clear_command(everything: bool, dry_run: bool, as_json: bool) -> None:
    """Delete environments that match no lock in patches/, and what killed runs left.

    A deleted environment is installed again when it is needed. `uv cache clean` frees the files
    that uv's own cache shares with it.

    Example: sm12x-dev cache clear --all
    """
    gone = [one for one in _found() if everything or not one.bases]
    for one in gone:
        if not dry_run:
            environment.remove(one)
        if not as_json:
            verb = "would delete" if dry_run else "deleted"
            click.echo(f"{verb} {one.path} ({text.size(one.size)})")
    if as_json:
        print_json(gone)
    elif not gone:
        click.echo("nothing to delete")


def _found() -> list[Environment]:
    releases = []
    for version in bases.versions():
        try:
            releases.append(bases.load(version))
        except BadFileError as error:
            # The environment of this base would count as unused.
            raise BadFileError(
                f"which environment {version} uses is not known: {error.message}",
                next_step=error.next_step,
            ) from None
    return environment.environments(releases, root=layout.root(), cache=layout.cache())


def _use(one: Environment) -> str:
    if one.bases:
        return f"for {', '.join(one.bases)}"
    return "of a killed run" if one.path.name.startswith(".") else "not used"
