"""`sm12x overlay`: the stack's Python patches for an image that others made."""

from __future__ import annotations

from pathlib import Path

import click

from sm12x.commands import emit, reports, say
from sm12x.core import progress
from sm12x.image import overlay
from sm12x.image.engine import engines
from sm12x.stack.model import base as bases
from sm12x.stack.model import series


@click.command()
@click.argument("image")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("sm12x-overlay"),
    show_default=True,
    help="Folder for the patched files; an earlier overlay there is replaced.",
)
@click.option(
    "--base",
    "version",
    metavar="VERSION",
    help="Base whose patches to apply. Default: the release in the image.",
)
@click.option("--engine", type=click.Choice(engines.NAMES), help="The engine that has the image.")
@reports(overlay.OverlayRecord)
def command(image: str, out: Path, version: str | None, engine: str | None, as_json: bool) -> None:
    """Patch the Python files of IMAGE, and print the lines that mount them over its own.

    The files are copied from the image, and the patches apply to them strictly. Native code of
    IMAGE stays unpatched: only `sm12x bundle` compiles it.

    Example: sm12x overlay vllm/vllm-openai:v0.33.0 --out /srv/overlay
    """
    runner = engines.find(engine, say=say, may_install=False)
    with progress.spinner(f"looking into {image}"):
        release = version or overlay.look(runner, image).release
        stack = series.load(bases.load(release))
        installed = overlay.look(runner, image, overlay.python_files(stack))
    files = overlay.patch(stack, installed.files, source=image)
    if not files:
        click.echo(f"{image} has every Python patch of stack {stack.id} in it: nothing to mount")
        return
    for name, paths in overlay.native_halves(stack).items():
        say(
            f"{name}: only its Python part; {', '.join(paths)} is native code, which the image "
            f"keeps"
        )
    record = overlay.write(files, installed, stack, image, out)
    docker, nomad = overlay.volume_lines(record, out, root=installed.root)
    emit(
        as_json,
        record,
        f"{len(files)} files of vLLM {installed.version} patched with stack {stack.id} "
        f"under {out}\n\ndocker run, before the image's name:\n{docker}\n"
        f"Nomad, for a specification rendered with --to nomad-overlay, or in a task's config:\n"
        f"{nomad}",
    )
