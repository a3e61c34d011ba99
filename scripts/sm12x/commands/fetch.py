"""`sm12x fetch`: the sdist and the official wheel of a base, into the cache."""

from __future__ import annotations

from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import find_links_option
from sm12x.core import index
from sm12x.core.errors import BadFileError
from sm12x.stack.model import base as bases

_PROJECT = "vllm"


@click.command()
@click.option("--base", "version", required=True, metavar="VERSION", help="The base, e.g. 0.33.0.")
@click.option(
    "--machine",
    type=click.Choice(bases.MACHINES),
    default="x86_64",
    show_default=True,
    help="Machine of the official wheel.",
)
@find_links_option(help="Take the files from this folder and use no network.")
def command(version: str, machine: str, find_links: Path | None) -> None:
    """Fetch the sdist and the official wheel of a base by name, version and sha256.

    Files in the cache are verified again and not fetched. An interrupted transfer resumes. The
    index address and the CA are those of pip and uv.

    Example: sm12x fetch --base 0.33.0 --machine aarch64
    """
    base = bases.load(version)
    if machine not in base.wheels:
        raise BadFileError(
            f"{base.folder / 'base.toml'} has no wheel.{machine}",
            next_step=f"add it, or choose one of {', '.join(base.wheels)}",
        )
    sdist, wheel = (
        index.fetch_shown(
            _PROJECT, pinned.name, pinned.sha256, cache=layout.cache(), find_links=find_links
        )
        for pinned in (base.sdist, base.wheels[machine])
    )
    click.echo(f"{sdist}\n{wheel}")
