"""`sm12x fetch`: the sdist and the official wheel of a base, into the cache."""

from __future__ import annotations

import json
from pathlib import Path

import click

from sm12x import layout
from sm12x.core import transfer
from sm12x.core.errors import BadFileError
from sm12x.stack.model import base as bases

PROJECT = "vllm"


@click.command()
@click.option("--base", "version", required=True, metavar="VERSION", help="The base, e.g. 0.21.0.")
@click.option(
    "--machine",
    type=click.Choice(bases.MACHINES),
    default="x86_64",
    show_default=True,
    help="Which official wheel.",
)
@click.option(
    "--find-links",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Take the files from this folder and use no network.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the paths as JSON.")
def command(version: str, machine: str, find_links: Path | None, as_json: bool) -> None:
    """Fetch the sdist and the official wheel of a base by name, version and sha256.

    What is in the cache already is verified again and not fetched. An interrupted transfer
    resumes. The index address and the CA are those of pip and uv.

    Example: sm12x fetch --base 0.21.0 --machine aarch64
    """
    base = bases.load(version)
    if machine not in base.wheels:
        raise BadFileError(
            f"{base.folder / 'base.toml'} has no wheel.{machine}",
            next_step=f"add it, or choose one of {', '.join(base.wheels)}",
        )
    found: dict[str, str] = {}
    for kind, pinned in (("sdist", base.sdist), ("wheel", base.wheels[machine])):
        path = transfer.fetch(
            PROJECT, pinned.name, pinned.sha256, cache=layout.cache(), find_links=find_links
        )
        found[kind] = str(path)
    if as_json:
        click.echo(json.dumps({"base": base.version, "machine": machine, **found}, indent=2))
    else:
        for path_text in found.values():
            click.echo(path_text)
