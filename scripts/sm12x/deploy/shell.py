"""Recipes as shell scripts, for a machine or a container that has vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sm12x.deploy.container import header, live, require_known_cluster, script
from sm12x.recipes.model import Recipe


def render(recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]) -> str:
    """A script that becomes the server; ``image`` does not matter to it.

    Raises:
        UsageError: a setting that the recipe does not have.
    """
    require_known_cluster(recipe)
    rendered = live(recipe, settings=settings, extra=extra)
    lines = ["#!/usr/bin/env bash", *header(recipe, "shell", settings, extra)]
    machines = recipe.sm12x.machines if recipe.sm12x else 1
    if machines > 1 and "node_rank" in recipe.defaults:
        ranks = "1" if machines == 2 else f"1 to {machines - 1}"
        lines.append(
            f"# For the first of {machines} machines: render it for the others with node_rank="
            f"{ranks} and -- --headless."
        )
    if recipe.sm12x and recipe.sm12x.pair:
        lines.append("# Outside the image set SM12X_IMAGE_ROOT to the checkout, where recipes/ is.")
    return "\n".join([*lines, "set -eu", script(rendered)]) + "\n"
