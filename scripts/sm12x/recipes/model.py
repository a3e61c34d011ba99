"""What a recipe file says, parsed once into frozen dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Scalar = str | int | float | bool

# `recipe_version` of the files that are read here.
RECIPE_VERSION = "1"
# The deployments that exist; "any" is for a recipe that does not depend on the device.
HARDWARE = ("rtx-pro-6000", "rtx-5090", "gb10", "any")
# measured: run by this project on that hardware. reported: run by others, the source says by whom.
# untried: written from documents, run by nobody yet.
STATES = ("measured", "reported", "untried")


@dataclass(frozen=True, kw_only=True)
class Status:
    """How far a recipe can be trusted.

    ``source`` says who ran it and where that is written. ``blocked`` is "" or what this stack
    still lacks before the recipe can serve at all.
    """

    state: str
    source: str
    blocked: str = ""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The `sm12x:` block. ``gpus`` is the number of GPUs of one machine that the recipe takes.

    ``sleep`` is the level the recipe is meant to sleep at (1 keeps the weights in host memory, 2
    discards them), 0 for a model that must stay awake.
    """

    hardware: tuple[str, ...]
    gpus: int
    sleep: int
    status: Status
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One file. ``key`` is what the user types: the file name without `.yaml`.

    ``fit`` is None in a file that has no `sm12x:` block, as other people's files have none.
    """

    key: str
    path: Path
    name: str
    container: str
    command: str
    description: str
    model: str
    defaults: Mapping[str, Scalar]
    env: Mapping[str, str]
    mods: tuple[str, ...]
    build_args: tuple[str, ...]
    cluster_only: bool
    solo_only: bool
    fit: Fit | None
