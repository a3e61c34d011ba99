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
# verified: run by this project on that hardware, on a date, with evidence. reported: run by others,
# the source says by whom. untested: written from documents, run by nobody that is known.
STATES = ("verified", "reported", "untested")
# measured: by this project. reported: by others. estimated: computed, the source says from what.
BASES = ("measured", "reported", "estimated")
# The level of a recipe that must stay awake, as it stands in the file.
NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class MemoryTerm:
    """One term of the memory budget, in GiB on each GPU (on GB10: of each machine).

    ``gib`` is the value to plan with, the upper end where the source gives a range; ``low`` is the
    lower end then, and equal to ``gib`` otherwise. ``basis`` is one of BASES.
    """

    gib: float
    low: float
    basis: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a server takes of each GPU. A term that nobody has measured or computed is None.

    ``weights`` and ``kv`` lie inside vLLM's budget (utilization x memory), ``outside`` does not
    count against it, ``sleep_residue`` is what the server still holds while it sleeps.
    """

    weights: MemoryTerm | None = None
    kv: MemoryTerm | None = None
    outside: MemoryTerm | None = None
    sleep_residue: MemoryTerm | None = None


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """``level`` is 1 (weights kept in host memory), 2 (discarded), or 0: never, for ``reason``."""

    level: int
    reason: str = ""

    def __str__(self) -> str:
        return f"level {self.level}" if self.level else NEVER


@dataclass(frozen=True, kw_only=True)
class Status:
    """How far a recipe can be trusted.

    ``state`` is one of STATES; ``date`` (ISO) and ``evidence`` belong to verified, ``source`` says
    who ran it, or what it was written from. ``blocked`` is "" or what this stack still lacks before
    the recipe can serve at all.
    """

    state: str
    source: str
    date: str = ""
    evidence: str = ""
    blocked: str = ""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The `sm12x:` block. ``gpus`` counts the GPUs the recipe takes on each of its ``machines``.

    ``pair`` is () or the keys of two recipes that take turns on the same GPUs; they stand in the
    same folder.
    """

    hardware: tuple[str, ...]
    gpus: int
    machines: int
    memory: Memory
    sleep: Sleep
    status: Status
    pair: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One file. ``key`` is what the user types: the file name without `.yaml`.

    ``sm12x`` is None in a file that has no block of ours, as other people's files have none.
    ``model_revision`` is a commit of the model's repository, "" when the file names none.
    """

    key: str
    path: Path
    name: str
    container: str
    command: str
    description: str
    model: str
    model_revision: str
    defaults: Mapping[str, Scalar]
    env: Mapping[str, str]
    mods: tuple[str, ...]
    build_args: tuple[str, ...]
    cluster_only: bool
    solo_only: bool
    sm12x: Block | None
    # Where each key of the top level, of `defaults`, `env` and `sm12x` stands: "sm12x.sleep" -> 12.
    lines: Mapping[str, int]
