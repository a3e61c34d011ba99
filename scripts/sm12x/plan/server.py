"""A recipe as the planner sees it: its utilization and the terms of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sm12x.core.errors import UsageError
from sm12x.core.text import GIB
from sm12x.plan.budget import (
    BASES,
    KV,
    OUTSIDE,
    RESIDUE,
    WEIGHTS,
    Amount,
    Cache,
    Deployment,
    Term,
)
from sm12x.plan.figures import Figures
from sm12x.recipes import load, options, planned, render
from sm12x.recipes.model import Memory, MemoryTerm, Recipe
from sm12x.recipes.planned import CONVERSION, Planned

# What vLLM takes where a command names none.
DEFAULT_UTILIZATION = 0.92


def from_recipe(recipe: Recipe, *, utilization: float | None = None) -> Deployment:
    """Raises UsageError if its utilization is no share, BadFileError if it cannot be rendered."""
    block = recipe.sm12x
    memory = block.memory if block else Memory()
    given = options.parse(render.arguments(recipe))
    level = block.sleep.level if block else 0
    keeps_weights = level == 1 and given.get("sleep-mode-release") == "kv_cache"
    weights, residue = _term(WEIGHTS, memory.weights), _term(RESIDUE, memory.sleep_residue)
    figures = planned.read(recipe)
    return Deployment(
        name=recipe.key,
        utilization=share(given.get("gpu-memory-utilization"), recipe.key)
        if utilization is None
        else utilization,
        gpus=block.gpus if block else 1,
        machines=block.machines if block else 1,
        sleep=level,
        weights=weights,
        kv=_term(KV, memory.kv),
        outside=_term(OUTSIDE, memory.outside),
        residue=_with_weights(residue, weights) if keeps_weights else residue,
        keeps_weights=keeps_weights,
        keeps_kv=level == 1 and "sleep-keep-kv" in given,
        kv_budget=_gib(given.get("sleep-kv-host-memory"), recipe.key),
        cache=_cache(figures, given, figures.kv, figures.token, figures.block, figures.states)
        if figures
        else None,
    )


def from_figures(
    figures: Figures,
    name: str,
    source: str,
    given: Mapping[str, str],
    *,
    utilization: float | None = None,
) -> Deployment:
    """Return the server of a model that the release has planned with the arguments ``given``.

    The KV cache holds --max-num-seqs of --max-model-len, one where ``given`` says none, from all at
    rest to all being read.
    """
    cache, kv = figures.cache, (0.0, 0.0)
    if cache is not None:
        others = (options.integer(given.get("max-num-seqs", "")) or 1) - 1
        kv = (
            cache.at_start + others * cache.token * figures.max_model_len,
            float(cache.at_start + others * cache.request),
        )
    stage = figures.largest
    most = stage.most if stage.loaded is not None else stage.most * CONVERSION

    def term(name: str, low: float, high: float) -> Term:
        amount = Amount(low=low / GIB, high=high / GIB)
        return Term(name=name, amount=amount, basis="estimated", source=source)

    return Deployment(
        name=name,
        utilization=figures.utilization if utilization is None else utilization,
        gpus=figures.gpus,
        machines=1,
        sleep=0,
        weights=term(WEIGHTS, stage.most, most),
        kv=term(KV, *kv),
        outside=None,
        residue=None,
        cache=_cache(figures, given, cache.at_start, cache.token, cache.block, cache.states)
        if cache
        else None,
    )


def _gib(text: str | None, name: str) -> float | None:
    """Return so many GiB of --sleep-kv-host-memory. Raises UsageError if they are none."""
    if text is None:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise UsageError(
            f"{name}: --sleep-kv-host-memory {text} is no number of GiB",
            next_step="give a number above 0, or leave the option out",
        )
    return gib


def _cache(
    figures: Figures | Planned,
    given: Mapping[str, str],
    start: int,
    token: float,
    block: int,
    states: bool,
) -> Cache:
    """Return the KV cache of a server; ``start``, ``token`` and ``block`` are in bytes."""
    return Cache(
        start=start / GIB,
        token=token / GIB,
        length=figures.max_model_len,
        limit=figures.limit,
        sequences=figures.max_num_seqs,
        default="max-num-seqs" not in given,
        block=block / GIB if states and _graphs(given) else None,
    )


def _graphs(given: Mapping[str, str]) -> bool:
    """Without CUDA graphs vLLM starts with fewer blocks than sequences."""
    return "enforce-eager" not in given


def members(recipe: Recipe) -> tuple[Recipe, ...]:
    """The recipe, or those that take turns if it is a pool. Raises BadFileError."""
    return tuple(load.pool(recipe)) or (recipe,)


def share(text: str | None, where: str) -> float:
    """A --gpu-memory-utilization. Raises UsageError if it is not more than 0 and at most 1."""
    if text is None:
        return DEFAULT_UTILIZATION
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise UsageError(
            f"{where}: {text!r} is not a --gpu-memory-utilization",
            next_step="give a share of the GPU's memory such as 0.70",
        )
    return value


def _with_weights(residue: Term | None, weights: Term | None) -> Term | None:
    """Residue plus weights after a sleep of the KV cache alone; None where one is not known."""
    if residue is None or weights is None:
        return None
    return replace(
        residue,
        amount=residue.amount + weights.amount,
        basis=max(residue.basis, weights.basis, key=BASES.index),
        source=f"{residue.source}; the weights stay (--sleep-mode-release kv_cache)",
    )


def _term(name: str, given: MemoryTerm | None) -> Term | None:
    if given is None:
        return None
    return Term(
        name=name,
        amount=Amount(low=given.low, high=given.gib),
        basis=given.basis,
        source=" ".join(given.source.split()),
    )
