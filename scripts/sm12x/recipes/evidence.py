"""recipes/evidence/: what makes a recipe `verified`: a run of `sm12x bench`, in figures.

`sm12x evidence add` writes the entries. A pull request adds one, and `sm12x recipe lint` refuses
what does not hold.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x import layout
from sm12x.core import declared
from sm12x.core.declared import Declared, unless_empty
from sm12x.core.errors import BadFileError
from sm12x.recipes.model import Recipe
from sm12x.stack.model import series

FOLDER = "evidence"
# Beside the bases: the stacks that were published, by `sm12x-dev release`.
RELEASED = "released.toml"
_ANY = "any"

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Speed = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Figures(Declared):
    """Headline figures, medians in tokens/s and ms; ``None`` where the preset has no such cell.

    ``prefill``, ``decode`` and ``first_token_ms`` are of one request without context,
    ``decode_most`` of all requests together at ``concurrency``, ``decode_deep`` of one request
    after ``depth`` tokens. ``tool_score`` is 0 to 100, ``gsm8k`` in percent.
    """

    prefill: _Speed
    decode: _Speed
    first_token_ms: _Speed
    decode_most: _Speed
    concurrency: Annotated[int, Field(ge=1)]
    depth: Annotated[int, Field(ge=0)] = 0
    decode_deep: _Speed | None = None
    acceptance: Annotated[float, Field(ge=0, le=1)] | None = None
    tool_score: Annotated[float, Field(ge=0, le=100)] | None = None
    gsm8k: Annotated[float, Field(ge=0, le=100)] | None = None


@dataclass(frozen=True, kw_only=True)
class Swap(Declared):
    """Sleep and wake-up in verify's limits: medians in seconds, residue in GiB on one GPU."""

    cycles: Annotated[int, Field(ge=1)]
    sleep_seconds: Annotated[float, Field(ge=0)]
    wake_seconds: Annotated[float, Field(ge=0)]
    residue_gib: Annotated[float, Field(ge=0)] | None


@dataclass(frozen=True, kw_only=True)
class Evidence(Declared):
    """One run of a recipe on hardware. Hashes are sha256 in hex.

    ``runs_sha256`` is of what the recipe runs; ``bench_sha256`` of the folder's bench.json, which
    ``url`` has. ``gpus`` are those of one machine. ``doctor`` are its checks that failed or warned.
    ``patches``: name and sha256 of each patch in the ledger, which make the stack id.
    """

    schema: Literal[1] = 1
    recipe: str
    runs_sha256: _Sha256
    overrides: dict[str, str]
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    release: str
    stack_id: Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
    mode: Literal["quick", "full"]
    ledger_sha256: _Sha256
    patches: dict[str, _Sha256]
    image_digest: str
    hardware: str
    gpus: Annotated[int, Field(ge=1)]
    machines: Annotated[int, Field(ge=1)]
    gpu: str
    driver: str
    power_limit: float | None
    preset: str
    tools: dict[str, str]
    figures: Figures
    swap: Swap | None
    doctor: tuple[str, ...]
    bench_sha256: _Sha256
    url: Annotated[str, unless_empty] = ""

    def summary(self) -> str:
        """Return date, hardware and figures in one line."""
        figures = self.figures
        power = f" at {self.power_limit:.0f} W" if self.power_limit else ""
        count = f"{self.machines} x {self.gpus}" if self.machines > 1 else f"{self.gpus}"
        return (
            f"{self.date}, {count} x {self.gpu}{power}: prefill {figures.prefill:,.0f} t/s, "
            f"decode {figures.decode:,.1f} t/s, {figures.decode_most:,.0f} t/s at concurrency "
            f"{figures.concurrency}"
        )


@dataclass(frozen=True, kw_only=True)
class Published(Declared):
    """A stack that was published: ``ledgers`` is machine and mode -> sha256 of its ledger."""

    release: str
    stack_id: str
    date: str
    ledgers: dict[str, _Sha256]


@dataclass(frozen=True, kw_only=True)
class PublishedStacks(Declared):
    """``patches/released.toml``."""

    schema: Literal[1]
    stacks: Annotated[tuple[Published, ...], Field(alias="stack")] = ()


def published() -> tuple[Published, ...]:
    """Read the published stacks; none without that file. Raises BadFileError."""
    path = layout.patches() / RELEASED
    if not path.is_file():
        return ()
    return declared.read_toml(PublishedStacks, path, next_step="restore the file").stacks


def runs_sha256(recipe: Recipe) -> str:
    """Return the sha256 of what a recipe runs: not of its notes, sources and comments."""
    runs = [recipe.command, recipe.defaults, recipe.env, recipe.model, recipe.model_revision]
    return hashlib.sha256(json.dumps(runs, sort_keys=True).encode()).hexdigest()


def folder() -> Path:
    """Return recipes/evidence/."""
    return layout.recipes() / FOLDER


def read(path: Path) -> Evidence:
    """Read one entry. Raises BadFileError."""
    return declared.read_json(Evidence, path, next_step="`sm12x evidence add FOLDER` writes it")


def of(recipe: Recipe) -> list[Evidence]:
    """Return the entries that hold for what a recipe runs now, the newest first."""
    entries = []
    for path in sorted(recipe.path.parent.glob(f"{FOLDER}/{recipe.key}/*.json")):
        try:
            entry = read(path)
        except BadFileError:
            continue
        if not faults(entry, recipe):
            entries.append(entry)
    return sorted(entries, key=lambda entry: entry.date, reverse=True)


def state(recipe: Recipe, entries: Sequence[Evidence]) -> str:
    """Return the state to show of a recipe with such ``entries``."""
    block = recipe.sm12x
    if entries:
        return f"verified ({entries[0].summary()})"
    return block.status.state if block else ""


def faults(entry: Evidence, recipe: Recipe) -> list[str]:
    """List why an entry does not hold for a recipe; none where it does."""
    block = recipe.sm12x
    result = []
    if entry.recipe != recipe.key:
        result.append(f"it is of the recipe {entry.recipe}, not of {recipe.key}")
    if entry.runs_sha256 != runs_sha256(recipe):
        result.append("the recipe runs something else now: run it again, or delete the entry")
    if block is None:
        result.append("the recipe has no block sm12x, which names its hardware")
    else:
        if entry.hardware not in block.hardware and _ANY not in block.hardware:
            result.append(f"the recipe is for {' or '.join(block.hardware)}, not {entry.hardware}")
        # Those of the other machines cannot be seen from one.
        if (entry.gpus, entry.machines) != (block.gpus, block.machines):
            result.append(f"the recipe takes {block.gpus} GPUs of a machine, not {entry.gpus}")
        if block.sleep.level and entry.swap is None:
            result.append("the recipe sleeps, and no swap was measured (`sm12x bench --swaps 5`)")
    if entry.stack_id != series.id_of(entry.patches.items()):
        result.append(f"its patches do not make the stack {entry.stack_id}")
    elif why := _unknown(entry):
        result.append(why)
    return result


def _unknown(entry: Evidence) -> str:
    """Return why the stack of an entry is not one of this project; "" where it is."""
    mine = [one for one in published() if one.stack_id == entry.stack_id]
    if any(entry.ledger_sha256 in one.ledgers.values() for one in mine):
        return ""
    base = layout.patches() / entry.release
    if not layout.patches().is_dir():
        # In an image there is no checkout to compare with.
        return ""
    try:
        here = series.read_id(base) if base.is_dir() else ""
    except BadFileError:
        here = ""
    if here == entry.stack_id:
        return ""
    known = f"; patches/{entry.release} is {here}" if here else ""
    return f"no stack {entry.stack_id} of {entry.release} is published or in this checkout{known}"


def inspect(recipes: Path) -> Iterator[tuple[Path, Evidence | None, str]]:
    """Yield each entry below a folder of recipes, or None and why it cannot be read."""
    for path in sorted(recipes.glob(f"{FOLDER}/*/*")):
        try:
            yield path, read(path), ""
        except BadFileError as error:
            yield path, None, error.message
