"""`sm12x evidence`: what makes a recipe `verified`, out of a benchmark's folder."""

from __future__ import annotations

from pathlib import Path

import click

from sm12x.bench import evidence
from sm12x.commands import emit, reports


@click.group("evidence")
def command() -> None:
    """Make evidence for a recipe of a benchmark's folder.

    Example: sm12x evidence add bench-qwen3.8-27b-rtx
    """


@command.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--recipe", default="", metavar="RECIPE", help="Default: the one the run names.")
@click.option("--url", default="", help="Where the whole folder can be fetched.")
@reports("sm12x.recipes.evidence:Evidence")
def add(folder: Path, recipe: str, url: str, as_json: bool) -> None:
    """Check a folder of `sm12x bench` against a recipe, and write the entry of a pull request.

    The run must have passed, on the recipe's hardware, with a stack of this project whose ledger is
    there; a recipe that sleeps needs --swaps. The entry goes below recipes/evidence/, and is
    committed; the folder itself is attached to the pull request. Exit code 1: the folder does not
    hold, with every reason.

    Example: sm12x evidence add bench-qwen3.8-27b-rtx --recipe qwen3.8-27b-nvfp4
    """
    path, entry = evidence.add(folder, recipe, url)
    emit(as_json, entry, f"{path}: {entry.summary()}\nNext: `sm12x recipe lint`, and commit it.\n")
