"""The committed Nomad specifications: one file a recipe, made from it and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sm12x.deploy import nomad
from sm12x.recipes import load
from sm12x.recipes.model import Recipe

SUFFIX = ".nomad.hcl"
# The recipe that is also rendered for an image others made: one GPU, and its sleep was reported
# with exactly such an overlay.
OVERLAID = "qwen3.6-27b-nvfp4-rtx-pro-6000"


def rendered(recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """File name -> text, for every recipe that Nomad can run."""
    found: dict[str, str] = {}
    for key, recipe in recipes.items():
        if nomad.unfit(recipe):
            continue
        pair = recipe.sm12x.pair if recipe.sm12x else ()
        found[key + SUFFIX] = nomad.render(recipe, peers=[recipes[name] for name in pair])
    if OVERLAID in recipes:
        found[f"{OVERLAID}-overlay{SUFFIX}"] = nomad.render_overlay(recipes[OVERLAID])
    return found


def load_rendered(folder: Path) -> dict[str, str]:
    """``rendered`` of the recipes in a folder. Raises BadFileError as ``load_all`` does."""
    return rendered(load.load_all(folder))
