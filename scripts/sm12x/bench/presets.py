"""data/bench/bench.toml: what a preset runs, and the peaks of cards."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x.core import declared
from sm12x.core.declared import Declared

_Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class Serve(Declared):
    """A run of `vllm bench serve`: random prompts of ``input`` tokens, ``output`` tokens each."""

    prompts: _Count
    concurrency: _Count
    input: _Count
    output: _Count


@dataclass(frozen=True, kw_only=True)
class Preset(Declared):
    """What is run; sizes are in tokens.

    ``depths`` is the context before the prompt. With ``prefix_caching`` it is sent before, so that
    the prompt finds it in the server's cache. ``gsm8k`` is a number of questions, 0 for none.
    """

    about: str
    prompt: _Count
    output: _Count
    depths: tuple[Annotated[int, Field(ge=0)], ...]
    concurrency: tuple[_Count, ...]
    runs: _Count
    prefix_caching: bool
    serve: Serve
    tools: bool = False
    gsm8k: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True, kw_only=True)
class Card(Declared):
    """Peaks of a card whose name contains ``name``.

    ``teraops`` are 10^12 dense operations per second in its narrowest format, ``gigabytes`` 10^9
    bytes of memory per second.
    """

    name: str
    teraops: Annotated[float, Field(gt=0)]
    gigabytes: Annotated[float, Field(gt=0)]
    source: str


@dataclass(frozen=True, kw_only=True)
class Settings(Declared):
    """All of it. ``tools``: distribution -> module."""

    schema: Literal[1]
    tools: Annotated[Mapping[str, str], Field(alias="tool")]
    presets: Annotated[Mapping[str, Preset], Field(alias="preset")]
    cards: Annotated[tuple[Card, ...], Field(alias="card")]

    def card(self, name: str) -> Card | None:
        return next((card for card in self.cards if card.name in name), None)


def folder() -> Path:
    """Return the folder of the settings and of the tools' lock."""
    return Path(__file__).resolve().parents[1] / "data" / "bench"


@functools.cache
def load() -> Settings:
    """Read the settings. Raises BadFileError."""
    path = folder() / "bench.toml"
    return declared.read_toml(Settings, path, next_step="restore the file, or reinstall sm12x")
