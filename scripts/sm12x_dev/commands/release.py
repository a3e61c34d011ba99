"""`sm12x-dev release`: make what is published of a bundle, check it, push it, and record it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import emit, reports, say
from sm12x.core import declared, files, process, text
from sm12x.core.errors import FindingsError, ToolFailedError, UsageError
from sm12x.image.bundle import record as records
from sm12x.image.engine import engines
from sm12x.recipes import evidence
from sm12x.stack.model import base as bases
from sm12x_dev import release

_folder = click.Path(path_type=Path, exists=True, file_okay=False)


@click.group()
def release_command() -> None:
    """Make what is published of a bundle, check it, push it, and record it.

    `make release DRY=1` builds a bundle, makes all that is published of it, and prints what would
    be pushed. The workflow `release` does the same without DRY, once for each machine.

    Example: sm12x-dev release make --out build/release
    """


@release_command.command("make")
@click.option("--base", "version", metavar="VERSION", help="Default: patches/default.")
@click.option("--dist", type=_folder, help="The bundle's folder. Default: dist/VERSION.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--no-image", is_flag=True, help="Publish the wheel alone.")
@click.option("--uncommitted", is_flag=True, help="For a try: the checkout may have changes.")
@reports(release.Release)
def make_command(
    version: str | None,
    dist: Path | None,
    out: Path,
    no_image: bool,
    uncommitted: bool,
    as_json: bool,
) -> None:
    """Check a finished bundle, and write wheel, ledger, audit, SBOM, notes and sums of it.

    The image's own `check` runs first. Exit code 1: the bundle is not to be published.

    Example: sm12x-dev release make --out build/release
    """
    version = bases.load(version or bases.default()).version
    folder = dist or layout.dist(version)
    engine = None if no_image else engines.find(None, say=say, may_install=False)
    faults = [*release.faults(folder, version, engine, clean=not uncommitted)]
    if faults:
        raise FindingsError(
            f"{folder} is not to be published: {text.first_of(faults, 4)}",
            next_step="correct what it says, and run this again",
        )
    record = records.read(folder)
    if engine and record:
        say(f"{record.tags[0]}: check")
        # The image's own entry point, as users run it.
        options = ("run", "--rm", "--network", "none")
        words = (engine.program, *options, record.tags[0], "check")
        process.stream(words, on_line=lambda line: say(f"  {line}"))
    with files.replacing_folder(out, release.NAME) as staged:
        made = release.make(folder, staged, engine)
    lines = [f"{out}: {made.tag} for {made.machine}, {made.mode} mode"]
    lines += [f"  {sha256[:12]}  {name}" for name, sha256 in made.files.items()]
    emit(as_json, made, "\n".join(lines) + "\n")


@release_command.command("push")
@click.argument("folder", type=_folder)
@click.option("--to", "repository", required=True, help="HOST/OWNER/NAME of the images.")
@click.option("--dry-run", is_flag=True, help="Print the commands.")
def push_command(folder: Path, repository: str, dry_run: bool) -> None:
    """Push the image of a machine's part, and write its digest into release.json.

    Example: sm12x-dev release push build/release --to HOST/OWNER/vllm-sm12x --dry-run
    """
    part = release.read(folder)
    commands = release.push_words(part, release.require_repository(repository))
    if not part.image:
        raise UsageError(f"{folder} has no image", next_step="make it again without --no-image")
    engine = engines.find(None, say=say, may_install=False)
    _run(commands, engine.program, dry_run)
    if dry_run:
        return
    name = commands[-1][-1]
    digest = engine.digest(name)
    if not digest:
        raise ToolFailedError(
            f"{engine.name} gives no digest of {name}", next_step=f"`{engine.name} image inspect`"
        )
    declared.write_json(folder / release.NAME, dataclasses.replace(part, digest=digest))
    click.echo(digest)


@release_command.command("publish")
@click.argument("folders", type=_folder, nargs=-1, required=True)
@click.option("--to", "repository", default="", help="HOST/OWNER/NAME of the images.")
@click.option("--dry-run", is_flag=True, help="Print the commands.")
def publish_command(folders: Sequence[Path], repository: str, dry_run: bool) -> None:
    """Put the machines' images under one tag, and make the release with all their files.

    Example: sm12x-dev release publish x86_64 aarch64 --to HOST/OWNER/vllm-sm12x
    """
    parts = [release.read(folder) for folder in folders]
    if dry_run:
        # Nothing was pushed: a digest that says so.
        parts = [dataclasses.replace(one, digest=one.digest or "sha256:DIGEST") for one in parts]
    if repository:
        images = release.publish_words(parts, release.require_repository(repository))
        _run(images, Path("docker"), dry_run)
    page = Path(folders[0], "all-notes.md")
    files.write_text(page, "\n".join(Path(one, release.NOTES).read_text() for one in folders))
    paths = [
        str(folder / name) for folder, one in zip(folders, parts, strict=True) for name in one.files
    ]
    sums = [str(path) for folder in folders for path in sorted(folder.glob(f"{release.SUMS}-*"))]
    first = parts[0]
    title = f"vLLM {first.release}, stack {first.stack_id}"
    words = ["release", "create", first.tag, "--target", first.commit, "--title", title]
    _run([[*words, "--notes-file", str(page), *paths, *sums]], Path("gh"), dry_run)


def _run(commands: list[list[str]], program: Path, dry_run: bool) -> None:
    for words in commands:
        say(f"+ {shlex.join([program.name, *words])}")
        if not dry_run:
            process.stream([program, *words])


@release_command.command("record")
@click.argument("folders", type=_folder, nargs=-1, required=True)
def record_command(folders: Sequence[Path]) -> None:
    """Write a published stack into patches/released.toml, which evidence is checked against.

    Example: sm12x-dev release record x86_64 aarch64
    """
    parts = [release.read(folder) for folder in folders]
    path = layout.patches() / evidence.RELEASED
    files.write_text(path, release.published_text(parts))
    click.echo(f"{path}: {parts[0].tag}; commit it")
