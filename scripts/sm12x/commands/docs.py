"""`sm12x docs`: what is committed and made from other files: the README's tables, Nomad's files."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from sm12x import layout, readme
from sm12x.core import files
from sm12x.core.errors import FindingsError
from sm12x.deploy import examples


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a file is out of date.")
def command(check: bool) -> None:
    """Write the tables of the README and nomad-examples/, or check them.

    Example: sm12x docs --check
    """
    stale = []
    for path, new in _made().items():
        name = path.relative_to(layout.root())
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if old == new:
            continue
        stale.append(str(name))
        if check:
            diff = difflib.unified_diff(
                old.splitlines(), new.splitlines(), f"{name} committed", "made", lineterm=""
            )
            click.echo("\n".join(diff))
            continue
        if new:
            files.write_text(path, new)
        else:
            path.unlink()
        click.echo(f"{name}: {'written' if new else 'removed'}")
    if not stale:
        click.echo("README.md, nomad-examples: up to date")
    elif check:
        raise FindingsError(f"out of date: {', '.join(stale)}", next_step="make docs")


def _made() -> dict[Path, str]:
    """Every generated file and its text; "" for one that is there and that nothing makes."""
    page = layout.root() / "README.md"
    folder = layout.root() / "nomad-examples"
    leftover = dict.fromkeys(folder.glob(f"*{examples.SUFFIX}"), "")
    specs = examples.load_rendered(layout.recipes())
    return {
        page: readme.rendered(page.read_text(encoding="utf-8"), page),
        **leftover,
        **{folder / name: text for name, text in specs.items()},
    }
