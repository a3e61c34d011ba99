"""A recipe's needs against what the host has, and settings of a server that fail on it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from sm12x.core.text import GIB, counted, size
from sm12x.doctor.host import Unseen
from sm12x.doctor.model import Facts, Finding, bad, check, info, ok, unknown, warn
from sm12x.recipes.model import Block

_ANY = "any"
# The level that copies the weights to host memory.
_HOST_COPY = 1


@check("env.expandable-segments")
def _segments(facts: Facts) -> Iterator[Finding]:
    """Report expandable segments with several GPUs, of this shell or of the recipe."""
    gpus = len(facts.seen_gpus)
    if setting := _expandable(facts.host.env):
        found, more = (warn, f", and {gpus} GPUs") if gpus > 1 else (info, "")
        variable = setting.partition("=")[0]
        yield found(f"{setting} in this shell{more}", "unset", "instead", variable=variable)
    recipe = facts.recipe
    if recipe is None or recipe.sm12x is None or "disable-custom-all-reduce" in facts.options:
        return
    setting = _expandable(recipe.env)
    # Its kernels reach the GPUs of one machine only.
    if setting and recipe.sm12x.gpus > 1:
        seen = f"{recipe.key} sets {setting} and runs on {recipe.sm12x.gpus} GPUs of a machine"
        yield warn(seen, "instead")


def _expandable(environment: Mapping[str, str]) -> str:
    """The variable that turns expandable segments on, with its value; "" without one."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        value = environment.get(name, "")
        settings = {
            key.strip(): word.strip().lower()
            for key, _, word in (part.partition(":") for part in value.split(","))
        }
        if settings.get("expandable_segments") == "true":
            return f"{name}={value}"
    return ""


@check("recipe.utilization")
def _utilization(facts: Facts) -> Iterator[Finding]:
    """Check the share of unified memory that vLLM takes: other programs have only the rest."""
    recipe, most = facts.recipe, facts.known.thresholds.unified_utilization
    value = facts.options.get("gpu-memory-utilization", "")
    try:
        share = float(value)
    except ValueError:
        return
    if recipe and recipe.sm12x and facts.unified and share > most:
        takes = f"takes --gpu-memory-utilization {value} of unified memory, more than {most}"
        yield warn(f"{recipe.key} {takes}", "render", recipe=shlex.quote(recipe.key), most=most)


@check("recipe.settings")
def _settings(facts: Facts) -> Iterator[Finding]:
    """Report what others have met with a setting of the recipe's server on these GPUs."""
    recipe = facts.recipe
    if recipe is None or recipe.sm12x is None or not facts.options:
        return
    for report in facts.known.reports:
        model, gpus = recipe.model or recipe.key, recipe.sm12x.gpus
        if what := report.concerns(facts.options, model, gpus, unified=facts.unified):
            found = {"warn": warn, "info": info}[report.level]
            yield replace(
                found(f"{recipe.key}, {what}: {report.seen}"),
                why=report.why,
                sources=report.sources,
                commands=report.fix,
            )


@check("recipe.needs")
def _needs(facts: Facts) -> Iterator[Finding]:
    recipe = facts.recipe
    if recipe is None:
        return
    if recipe.sm12x is None:
        yield unknown(f"could not see what {recipe.key} needs: it has no sm12x block")
        return
    yield _gpus(facts, recipe.key, recipe.sm12x)
    if recipe.sm12x.sleep.level == _HOST_COPY:
        yield _host_memory(facts, recipe.key, recipe.sm12x)


def _gpus(facts: Facts, key: str, block: Block) -> Finding:
    each = f" on each of {block.machines} machines" if block.machines > 1 else ""
    needs = f"{key} needs {block.gpus} x {' or '.join(block.hardware)}{each}"
    if isinstance(facts.gpus, Unseen):
        return unknown(f"{needs}; could not see the GPUs: {facts.gpus.why}")
    # A slice of a card in MIG mode has neither its memory nor its name.
    fitting = [
        gpu
        for gpu in facts.gpus
        if _ANY in block.hardware or (gpu.hardware in block.hardware and not gpu.split)
    ]
    if len(fitting) < block.gpus:
        return bad(f"{needs}; of those {len(fitting)} are here", "list")
    memory = block.memory
    terms = [term.gib for term in (memory.weights, memory.kv, memory.outside) if term]
    sizes = [gpu.memory_total for gpu in fitting if gpu.memory_total]
    if terms and sizes and sum(terms) * GIB > min(sizes):
        seen = f"{key} takes {sum(terms):.1f} GiB of each GPU, the smallest has {size(min(sizes))}"
        return bad(seen, "plan", recipe=shlex.quote(key))
    return ok(f"{needs}: {counted(len(fitting), 'fitting GPU')} here")


def _host_memory(facts: Facts, key: str, block: Block) -> Finding:
    recipe = shlex.quote(key)
    if facts.unified:
        seen = f"{key} sleeps at level 1, whose host copy takes from the same memory here"
        sources = facts.known.checks["gpu.unified"].sources
        return replace(warn(seen, "plan", recipe=recipe), sources=sources)
    weights = block.memory.weights
    if weights is None or isinstance(facts.meminfo, Unseen):
        seen = f"could not see what {key} keeps in host memory while asleep"
        return unknown(seen, "plan", recipe=recipe)
    copy = weights.gib * block.gpus * GIB
    free = facts.available
    seen = f"{key} keeps {size(copy)} in host memory while asleep, {size(free)} are available"
    return bad(seen, "plan", recipe=recipe) if copy > free else ok(seen)
