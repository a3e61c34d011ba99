"""`sm12x docs`: the generated tables of the README."""

from __future__ import annotations

import difflib

import click

from sm12x import layout, readme
from sm12x.core import files
from sm12x.core.errors import FindingsError


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a table is out of date.")
def command(check: bool) -> None:
    """Write the generated tables of the README, or check them.

    Example: sm12x docs --check
    """
    path = layout.root() / "README.md"
    old = path.read_text(encoding="utf-8")
    new = readme.rendered(old, path)
    if old == new:
        click.echo(f"{path.name}: up to date")
        return
    if not check:
        files.write_text(path, new)
        click.echo(f"{path.name}: written")
        return
    diff = difflib.unified_diff(
        old.splitlines(), new.splitlines(), "committed", "made", lineterm=""
    )
    click.echo("\n".join(diff))
    raise FindingsError(f"{path.name} has tables that are out of date", next_step="make docs")
