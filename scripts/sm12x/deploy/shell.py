"""Recipes as shell scripts, for a machine or a container that has vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sm12x.deploy.container import header, live, script
from sm12x.recipes.model import Recipe


def render(recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]) -> str:
    """A script that becomes the server; ``image`` does not matter to it.

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    rendered = live(recipe, settings=settings, extra=extra)
    lines = ["#!/usr/bin/env bash", *header(recipe, "shell", settings, extra)]
    if recipe.sm12x and recipe.sm12x.pair:
        lines.append("# Outside the image set SM12X_IMAGE_ROOT to the checkout, where recipes/ is.")
    return "\n".join([*lines, "set -eu", script(rendered)]) + "\n"
