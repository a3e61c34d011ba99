"""What the verbs of `sm12x-dev` share: options, the base, its sdist, and printing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import find_links_option
from sm12x.core import index
from sm12x.core.errors import UnknownBaseError
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Patch, Stack
from sm12x_dev import listing
from sm12x_dev.base_draft import Release
from sm12x_dev.listing import ListedFile
from sm12x_dev.worktree.export import MessageError

_NICE = 10

FIND_LINKS = find_links_option(help="Take the sdist from this folder and use no network.")
JOBS = click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="Pytest processes at a time; each may take 2 GiB of memory.",
)
BASE = click.option(
    "--base",
    "version",
    envvar="BASE",
    metavar="VERSION",
    help="The base; needed only where there are several.  [env: BASE]",
)
DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))


def chosen(version: str | None, *, option: str = "--base") -> Base:
    """The base that was named with ``option``, or the only one there is."""
    if version is not None:
        return bases.load(version)
    names = bases.versions()
    if len(names) == 1:
        return bases.load(names[0])
    raise UnknownBaseError(
        f"there are {len(names)} bases ({', '.join(names) or 'none'}), and none was chosen",
        next_step=f"add {option} VERSION, or set BASE",
    )


def named(stack: Stack, names: Sequence[str]) -> list[Patch]:
    """The patches of these file names or numbers; all where none is given."""
    return [stack.get(name) for name in names] if names else list(stack.patches)


def give_way() -> None:
    """Lower this process's priority, for a command that takes long."""
    os.nice(_NICE)


def project(release: Base | Release) -> str:
    """Return the name of the package that is patched."""
    return release.sdist.name.rpartition("-")[0]


def listed(name: str, find_links: Path | None) -> tuple[ListedFile, ...]:
    """Return the files of the package ``name`` on the index, or in the folder ``find_links``."""
    return listing.of_folder(name, find_links) if find_links else listing.of_index(name)


def fetch(release: Base | Release, find_links: Path | None) -> Path:
    """The sdist of a base or of a release, fetched if need be."""
    sdist = release.sdist
    return index.fetch_shown(
        project(release),
        sdist.name,
        sdist.sha256,
        cache=layout.cache(),
        find_links=find_links,
    )


def print_findings(error: MessageError) -> None:
    for finding in error.findings:
        click.echo(f"{finding.path.name}:{finding.line}: {finding.message}", err=True)


def relative(text: str) -> str:
    """``text`` without the current folder where it begins with it."""
    return text.removeprefix(f"{Path.cwd()}/")
