"""recipes/memory/<recipe>.json: what vLLM's own code says of a recipe's weights and KV cache.

Written by `sm12x-dev memory`; `load` gives recipes the terms that their own files leave out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sm12x.core import declared
from sm12x.core.declared import Declared
from sm12x.core.text import GIB
from sm12x.recipes.model import Memory, MemoryTerm, Recipe

FOLDER = "memory"
# Published log lines are up to so much above weights before conversion.
CONVERSION = 1.014


@dataclass(frozen=True, kw_only=True)
class Planned(Declared):
    """The largest stage's bytes on each GPU: weights after building, after conversion if that is
    known, the KV cache with which vLLM starts, a block of it and one more token, and whether each
    sequence takes a block for its states. ``arguments`` are those that were planned, and ``limit``
    is the longest context of the model itself."""

    release: str
    stack: str
    date: str
    card: str
    arguments: tuple[str, ...]
    max_model_len: int
    weights: int
    loaded: int | None
    limit: int
    max_num_seqs: int
    kv: int
    token: float
    block: int
    states: bool

    @property
    def _source(self) -> str:
        return f"what vLLM {self.release} ({self.stack}) builds for {self.card}, {self.date}"

    @property
    def memory(self) -> Memory:
        """The two terms."""
        high = self.loaded or self.weights * CONVERSION
        weights = MemoryTerm(
            low=_rounded(min(self.weights, high)),
            gib=_rounded(max(self.weights, high)),
            basis="estimated",
            source=self._source + ("" if self.loaded else "; conversion adds 1.4 % at most"),
        )
        size = _rounded(self.kv)
        kv = MemoryTerm(
            low=size,
            gib=size,
            basis="estimated",
            source=f"{self._source}: one request of {self.max_model_len} tokens",
        )
        return Memory(weights=weights, kv=kv)


def place(recipe: Recipe) -> Path:
    """Return where the figures of a recipe are."""
    return recipe.path.with_name(FOLDER) / f"{recipe.key}.json"


def read(recipe: Recipe) -> Planned | None:
    """Return a recipe's figures, None where there are none. Raises BadFileError."""
    path = place(recipe)
    if not path.is_file():
        return None
    return declared.read_json(Planned, path, next_step="make it again with `sm12x-dev memory`")


def completed(recipe: Recipe) -> Recipe:
    """Return the recipe with the terms that only its figures have. Raises BadFileError."""
    if recipe.sm12x is None or (figures := read(recipe)) is None:
        return recipe
    own, memory = recipe.sm12x.memory, figures.memory
    filled = replace(own, weights=own.weights or memory.weights, kv=own.kv or memory.kv)
    return replace(recipe, sm12x=replace(recipe.sm12x, memory=filled))


def _rounded(size: float) -> float:
    return round(size / GIB, 2)
