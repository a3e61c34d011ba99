"""`sm12x-dev memory`: what vLLM in the image says of the recipes' weights and KV caches."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import click

from sm12x import layout
from sm12x.commands import say
from sm12x.core import declared
from sm12x.core.errors import FindingsError
from sm12x.image import planned as image
from sm12x.recipes import load, options, planned
from sm12x.recipes.model import Recipe
from sm12x.recipes.planned import Planned
from sm12x.recipes.render import Rendered, render

_CONFIGS = "tests/image/configs"


@click.command()
@click.argument("names", metavar="[RECIPE]...", nargs=-1)
@click.option(
    "--configs",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help=f"Folder with published configurations of models (default: {_CONFIGS}).",
)
def memory_command(names: tuple[str, ...], configs: Path | None) -> None:
    """Write recipes/memory/ for recipes whose model's configuration is there.

    It runs in the image that `sm12x bundle` left; recipes blocked on its release are passed over.

    Example: sm12x-dev memory gpt-oss-120b-rtx-pro-6000
    """
    recipes = [load.load(load.find(name)) for name in names]
    refused = []
    for recipe in recipes or load.load_all(layout.recipes()).values():
        if recipe.sm12x is None or (not names and recipe.blocked_on(layout.release())):
            continue
        rendered = render(recipe, settings={}, environ={}, solo=False)
        folder = _folder(rendered.serve or (), configs or layout.root() / _CONFIGS)
        if folder is None:
            continue
        if why := _write(recipe, rendered, folder, recipe.sm12x.hardware[0]):
            refused.append(f"{recipe.key}: {why}")
        else:
            click.echo(f"{planned.place(recipe).relative_to(layout.root())}: written")
    if refused:
        raise FindingsError(
            f"no figures: {'; '.join(refused)}",
            next_step="correct the recipe, or leave its terms in its file",
        )


def _folder(words: Sequence[str], configs: Path) -> Path | None:
    """Return the configuration of the model served by ``words``; None where none is there."""
    name = PurePosixPath(options.model(words)).name if words else ""
    folder = configs / name
    return folder if name and (folder / "config.json").is_file() else None


def _write(recipe: Recipe, rendered: Rendered, folder: Path, card: str) -> str:
    """Write the figures of a recipe, and return why there are none."""
    (answer,) = image.ask(folder, rendered.serve or (), rendered.vllm_env, card, say=say)
    figures = answer.figures
    if figures is None or figures.cache is None or answer.doubts:
        return answer.failure or "; ".join(answer.doubts) or "it has no KV cache"
    stage = figures.largest
    declared.write_json(
        planned.place(recipe),
        Planned(
            release=answer.release,
            stack=answer.stack,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            card=card,
            arguments=rendered.serve or (),
            max_model_len=figures.max_model_len,
            weights=stage.held,
            loaded=stage.loaded,
            limit=figures.limit,
            max_num_seqs=figures.max_num_seqs,
            kv=figures.cache.at_start,
            token=figures.cache.token,
            block=figures.cache.block,
            states=figures.cache.states,
        ),
    )
    return ""
