"""recipes/memory/: what vLLM's own code says of recipes, and the command that writes it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.unit.test_plan_figures import answer

from sm12x import layout
from sm12x.core import declared
from sm12x.core.errors import FindingsError
from sm12x.core.text import GIB
from sm12x.image import planned as image
from sm12x.plan.figures import Answer
from sm12x.recipes import load, planned
from sm12x.recipes.lint import lint
from sm12x.recipes.planned import Planned
from sm12x.recipes.render import arguments
from sm12x_dev.commands.memory import memory_command

NAME = "deepseek-v4-flash-rtx-pro-6000-tp4"


def figures(**changes: Any) -> Planned:
    plain = Planned(
        release="0.33.0",
        stack="0123abcd",
        date="2026-11-29",
        card="rtx-pro-6000",
        arguments=(),
        max_model_len=8192,
        weights=40 * GIB,
        loaded=None,
        limit=131072,
        max_num_seqs=256,
        kv=5 * GIB,
        token=65536.0,
        block=1 << 20,
        states=False,
    )
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that leaves its KV cache out, as its own file."""
    lines = (layout.recipes() / "smoke.yaml").read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith("sm12x:"))
    path = tmp_path / "mine.yaml"
    path.write_text("".join(lines[:at]) + BLOCK)
    return path


BLOCK = """sm12x:
  hardware: [rtx-pro-6000]
  gpus: 1
  sleep: {level: never, reason: test}
  memory:
    weights: {gib: 39, basis: reported, source: a log}
  status: {state: untested, source: test}
"""


def keep(path: Path, **changes: Any) -> None:
    (path.parent / "memory").mkdir(exist_ok=True)
    declared.write_json(path.parent / "memory" / f"{path.stem}.json", figures(**changes))


def test_a_recipe_gets_the_terms_that_it_leaves_out(recipe: Path) -> None:
    keep(recipe)
    block = load.load(recipe).sm12x
    assert block is not None
    assert block.memory.kv is not None
    assert (block.memory.kv.gib, block.memory.kv.basis) == (5, "estimated")
    assert block.memory.weights is not None
    assert block.memory.weights.source == "a log"


def test_a_recipe_without_figures_stays_as_it_is(recipe: Path) -> None:
    block = load.load(recipe).sm12x
    assert block is not None
    assert block.memory.kv is None


@pytest.mark.parametrize(
    ("loaded", "low", "high"), [(None, 40, 40.56), (42 * GIB, 40, 42), (30 * GIB, 30, 40)]
)
def test_weights_are_a_range_from_building_to_conversion(
    loaded: int | None, low: float, high: float
) -> None:
    weights = figures(loaded=loaded).memory.weights
    assert weights is not None
    assert (weights.low, weights.gib) == (low, high)


def test_damaged_figures_are_a_fault_of_the_recipe(recipe: Path) -> None:
    keep(recipe)
    (recipe.parent / "memory" / "mine.json").write_text("{")
    _, faults = load.inspect(recipe)
    assert len(faults) == 1
    assert "sm12x-dev memory" in faults[0].next_step


def test_figures_of_other_arguments_are_warned_of(recipe: Path) -> None:
    keep(recipe)
    assert any("sm12x-dev memory" in str(one) for one in lint(recipe)[1])
    keep(recipe, arguments=arguments(load.load(recipe)))
    assert not any("sm12x-dev memory" in str(one) for one in lint(recipe)[1])


def test_committed_figures_are_those_of_the_recipes_arguments() -> None:
    for path in (layout.recipes() / "memory").glob("*.json"):
        recipe = load.load(layout.recipes() / f"{path.stem}.yaml")
        kept = planned.read(recipe)
        assert kept is not None
        assert kept.arguments == arguments(recipe)


@pytest.fixture
def checkout(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the one recipe, whose model's configuration is there."""
    monkeypatch.setattr(layout, "root", lambda: recipe.parent)
    monkeypatch.setattr(layout, "recipes", lambda: recipe.parent)
    (recipe.parent / "configs" / "sm12x-tiny").mkdir(parents=True)
    (recipe.parent / "configs" / "sm12x-tiny" / "config.json").write_text("{}")
    return recipe


def written(checkout: Path, given: Answer, monkeypatch: pytest.MonkeyPatch) -> Exception | None:
    monkeypatch.setattr(image, "ask", lambda *words, **options: (given,))
    words = ["--configs", str(checkout.parent / "configs")]
    error = CliRunner().invoke(memory_command, words).exception
    return error if isinstance(error, Exception) else None


def test_the_command_writes_what_the_image_says(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert written(checkout, answer(), monkeypatch) is None
    kept = planned.read(load.load(checkout))
    assert kept is not None
    assert (kept.weights, kept.loaded, kept.max_model_len) == (11 * GIB, 12 * GIB, 32768)
    assert (kept.limit, kept.token, kept.block) == (131072, 131072.0, 2 << 20)
    assert kept.arguments == arguments(load.load(checkout))


@pytest.mark.parametrize(
    "change", [{"failure": "no such model", "figures": None}, {"doubts": ("?",)}]
)
def test_the_command_writes_no_refusal_and_no_doubt(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    error = written(checkout, dataclasses.replace(answer(), **change), monkeypatch)
    assert isinstance(error, FindingsError)
    assert not (checkout.parent / "memory").exists()
