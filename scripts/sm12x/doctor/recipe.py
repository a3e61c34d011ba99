"""A recipe's needs against what the host has."""

from __future__ import annotations

import shlex

from sm12x.core.errors import Sm12xError
from sm12x.core.text import GIB, counted, size
from sm12x.doctor import serving
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.memory import available
from sm12x.doctor.model import BAD, OK, UNKNOWN, WARN, Diagnosis, Finding, HostFacts, Unseen
from sm12x.recipes import options, render
from sm12x.recipes.model import Block, Recipe

_ANY = "any"
# The level that copies the weights to host memory.
_HOST_COPY = 1


def needs(recipe: Recipe, facts: HostFacts, knowledge: Knowledge) -> list[Diagnosis]:
    block = recipe.sm12x
    if block is None:
        seen = f"could not see what {recipe.key} needs: it has no sm12x block"
        return [knowledge.diagnosis("recipe.needs", Finding(UNKNOWN, seen))]
    findings = [_gpus(recipe.key, block, facts, knowledge)]
    sleeping = _host_memory(recipe.key, block, facts, knowledge)
    return [
        *findings,
        *([sleeping] if sleeping else []),
        *_utilization(recipe, facts, knowledge),
        *_segments(recipe, block, facts, knowledge),
    ]


def _utilization(recipe: Recipe, facts: HostFacts, knowledge: Knowledge) -> list[Diagnosis]:
    """Check the share of unified memory that vLLM takes: other programs have only the rest."""
    if not facts.unified:
        return []
    value = options.parse(_words(recipe)).get("gpu-memory-utilization", "")
    most = knowledge.thresholds.unified_utilization
    try:
        share = float(value)
    except ValueError:
        return []
    if share <= most:
        return []
    seen = (
        f"{recipe.key} takes --gpu-memory-utilization {value} of unified memory, more than {most}"
    )
    values = {"recipe": shlex.quote(recipe.key), "most": most}
    finding = Finding(WARN, seen, fix=("render",), values=values)
    return [knowledge.diagnosis("recipe.utilization", finding)]


def _segments(
    recipe: Recipe, block: Block, facts: HostFacts, knowledge: Knowledge
) -> list[Diagnosis]:
    """Report expandable segments that the recipe turns on for several GPUs."""
    name = "env.expandable-segments"
    setting = serving.expandable(recipe.env)
    disabled = "disable-custom-all-reduce" in options.parse(_words(recipe))
    # Its kernels reach the GPUs of one machine only.
    if not setting or disabled or block.gpus < 2 or serving.cured(facts, name, knowledge):
        return []
    seen = f"{recipe.key} sets {setting} and runs on {block.gpus} GPUs of a machine"
    return [knowledge.diagnosis(name, Finding(WARN, seen, fix=("instead",)))]


def _words(recipe: Recipe) -> tuple[str, ...]:
    """The words of its server's command with the defaults; none where it does not say."""
    try:
        return render.arguments(recipe)
    except Sm12xError:
        # `sm12x recipe lint` says what is wrong with it.
        return ()


def _plan(key: str, severity: str, seen: str, sources: tuple[str, ...] = ()) -> Finding:
    values = {"recipe": shlex.quote(key)}
    return Finding(severity, seen, fix=("plan",), values=values, sources=sources)


def _gpus(key: str, block: Block, facts: HostFacts, knowledge: Knowledge) -> Diagnosis:
    name = "recipe.needs"
    hardware = f"{block.gpus} x {' or '.join(block.hardware)}"
    each = f" on each of {block.machines} machines" if block.machines > 1 else ""
    if isinstance(facts.gpus, Unseen):
        seen = f"{key} needs {hardware}{each}; could not see the GPUs: {facts.gpus.why}"
        return knowledge.diagnosis(name, Finding(UNKNOWN, seen))
    anything = _ANY in block.hardware
    # A slice of a card in MIG mode has neither its memory nor its name.
    fitting = [
        gpu for gpu in facts.gpus if anything or (gpu.hardware in block.hardware and not gpu.split)
    ]
    if len(fitting) < block.gpus:
        seen = f"{key} needs {hardware}{each}; of those {len(fitting)} are here"
        return knowledge.diagnosis(name, Finding(BAD, seen, fix=("list",)))
    memory = block.memory
    terms = [term.gib for term in (memory.weights, memory.kv, memory.outside) if term]
    sizes = [gpu.memory_total for gpu in fitting if gpu.memory_total]
    if terms and sizes and sum(terms) * GIB > min(sizes):
        seen = f"{key} takes {sum(terms):.1f} GiB of each GPU, the smallest has {size(min(sizes))}"
        return knowledge.diagnosis(name, _plan(key, BAD, seen))
    here = counted(len(fitting), "fitting GPU")
    return knowledge.diagnosis(name, Finding(OK, f"{key} needs {hardware}{each}: {here} here"))


def _host_memory(
    key: str, block: Block, facts: HostFacts, knowledge: Knowledge
) -> Diagnosis | None:
    name = "recipe.needs"
    if block.sleep.level != _HOST_COPY:
        return None
    if facts.unified:
        seen = f"{key} sleeps at level 1, whose host copy takes from the same memory here"
        sources = knowledge.checks["gpu.unified"].sources
        return knowledge.diagnosis(name, _plan(key, WARN, seen, sources))
    weights = block.memory.weights
    if weights is None or isinstance(facts.memory.info, Unseen):
        seen = f"could not see what {key} keeps in host memory while asleep"
        return knowledge.diagnosis(name, _plan(key, UNKNOWN, seen))
    copy = weights.gib * block.gpus * GIB
    free = available(facts)
    seen = f"{key} keeps {size(copy)} in host memory while asleep, {size(free)} are available"
    finding = _plan(key, BAD, seen) if copy > free else Finding(OK, seen)
    return knowledge.diagnosis(name, finding)
