"""`sm12x bundle`: fetch, patch, compile, audit, package."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.markup import escape

from sm12x import layout
from sm12x.commands import find_links_option, print_json, reports
from sm12x.core import progress
from sm12x.image.bundle import decide, make, summary
from sm12x.image.engine import engines
from sm12x.recipes import load as recipes
from sm12x.stack.model import base as bases
from sm12x.wheel import selection

# Without a terminal a phase says which step it is at at most once in so many seconds.
_EVERY = 30.0


class _Report:
    """Phases and remarks on stderr; on a terminal, the current step in one moving line."""

    def __init__(self) -> None:
        self._console = progress.stderr_console()

    def say(self, text: str) -> None:
        self._console.print(escape(text), soft_wrap=True)

    @contextmanager
    def phase(self, label: str, *, live: bool = True) -> Iterator[Callable[[str], None]]:
        start = time.monotonic()
        if live and self._console.is_terminal:
            with self._console.status(escape(label)) as status:
                yield lambda text: status.update(escape(f"{label}: {text[:90]}"))
        else:
            self.say(f"{label} ...")
            due = start + _EVERY

            def note(text: str) -> None:
                nonlocal due
                now = time.monotonic()
                if now >= due:
                    due = now + _EVERY
                    self.say(f"{label}: {text} ({(now - start) / 60:.0f} min)")

            yield note
        self.say(f"{label}: {time.monotonic() - start:.1f} s")


@click.command()
@click.option(
    "--base", "version", metavar="VERSION", help="The base. Default: the one patches/default names."
)
@click.option(
    "--arch-list",
    help="Targets as TORCH_CUDA_ARCH_LIST has them. Default: the base's, such as 12.0a;12.1a.",
)
@click.option(
    "--build",
    type=click.Choice(selection.WANTED),
    default=selection.AUTO,
    show_default=True,
    help="quick: the official wheel, patched, with the C++ modules that the stack changes and that "
    "compile quickly; full: every native module compiled here; auto: full where that takes under "
    "20 minutes on this machine.",
)
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="NAME=DIR",
    help="A third-party source for a full build, such as qutlass=../qutlass. Can be repeated.",
)
@click.option(
    "--accept-patch-level",
    "patch_levels",
    multiple=True,
    metavar="NAME",
    help="Take the --source folder of NAME though it is another patch level of the pinned minor "
    "release, such as CUTLASS v4.7.0 for v4.7.1. The ledger names it.",
)
@click.option(
    "--flashinfer/--no-flashinfer",
    default=None,
    help="Compile the FlashInfer modules that the recipes need ahead of time, not at a server's "
    "first start. Default: in full mode.",
)
@click.option(
    "--platform",
    metavar="OS/ARCH",
    help="What the image runs on: linux/amd64 or linux/arm64. Default: this machine's.",
)
@click.option(
    "--engine",
    type=click.Choice(engines.NAMES),
    help="Container engine. Default: the first that can build; buildah is installed if none is.",
)
@click.option(
    "--base-image",
    metavar="REF",
    help="Image to start from instead of the base's own: a Debian 13 of your own.",
)
@click.option(
    "--base-image-only",
    is_flag=True,
    help="Only make the base image, with debootstrap, and stop.",
)
@find_links_option(
    help="Take the release's files from this folder, and wheels of the locks that are in it."
)
@click.option(
    "--twice",
    is_flag=True,
    help="Build the wheel a second time without caches, and fail unless the bytes are the same.",
)
@click.option("--no-image", is_flag=True, help="Stop at the wheel, the ledger and the audit.")
@click.option("--details", is_flag=True, help="End with every patch, module and layer.")
@reports(summary.BundleReport)
def command(
    version: str | None,
    base_image_only: bool,
    no_image: bool,
    details: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Build the image: fetch, patch, compile, audit, package.

    Leaves dist/VERSION/ with the wheel, its ledger and its audit, and the image
    vllm-sm12x:VERSION-STACK. Interrupted, it resumes; with nothing changed it takes seconds.

    \b
    Examples:
      sm12x bundle --base 0.33.0 --engine buildah
      sm12x bundle --base 0.33.0 --build full --source qutlass=../qutlass
    """
    options = decide.Options(version=version or bases.default(), image=not no_image, **given)
    report = _Report()
    if base_image_only:
        root, engine_used = decide.make_base_image(options, report)
        click.echo(f"{root.reference}  {root.digest}  ({engine_used.description})")
        return
    bundle = make.run(options, report)
    if as_json:
        print_json(
            summary.BundleReport(
                **vars(bundle.record),
                folder=bundle.folder,
                unchanged=bundle.unchanged,
                full=bundle.offer,
            )
        )
        return
    click.echo(summary.text(bundle, _servable(bundle.record.version), details=details), nl=False)


def _servable(release: str) -> list[str]:
    """Return the recipes that the stack of ``release`` can serve today, verified ones first."""
    ready = [
        (recipe.sm12x.status.state != "verified", recipe.key)
        for recipe in recipes.load_all(layout.recipes()).values()
        if recipe.sm12x and not recipe.sm12x.status.blocked_on(release)
    ]
    return [key for _, key in sorted(ready)]
