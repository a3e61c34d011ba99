"""The image's description of itself: help, recipes, docker commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from sm12x import layout
from sm12x.core.errors import UsageError
from sm12x.deploy import local
from sm12x.deploy.container import containers
from sm12x.recipes import evidence
from sm12x.recipes.model import Memory, MemoryTerm, Recipe
from sm12x.wheel.ledger import Ledger, PatchEntry

_KINDS = {
    "native": "native",
    "mixed": "in part native",
    "ptx": "through PTX compiled at start",
    "none": "not at all",
    "host": "without device code",
}
_MODES = {
    "quick": "quick: the official wheel with patched Python and what the stack changes in C++",
    "full": "full: every module that can be is compiled from source",
}


def help_text(ledger: Ledger, recipes: Mapping[str, Recipe], image: str) -> str:
    """Return the answer to `docker run IMAGE`. ``image`` stands in the commands."""
    devices = (
        ("12.0", [library.sm120 for library in ledger.libraries]),
        ("12.1", [library.sm121 for library in ledger.libraries]),
    )
    lines = [
        f"vLLM {ledger.base_version} for SM12x GPUs (12.0: RTX PRO 6000, RTX 50; 12.1: GB10)",
        "",
        "What it can do",
        "  RECIPE [key=value ...] [-- vLLM arguments]   serve a model",
        "  recipes [RECIPE]                             the recipes, or one with its settings",
        "  check [--json] [--quick]                     check the image, with or without a GPU",
        "  patches                                      the patches, and what is in effect of each",
        "  health                                       ask the server in this container",
        "  plan [RECIPE] [--help] [-- vLLM arguments]   the memory that the model in /model needs",
        "  pool RECIPE ... + RECIPE ...                 one address for models that take turns",
        "  verify URL [URL] [--help]                    test sleep and wake-up of live servers",
        "  bench URL [--help]                           measure a live server, into a folder",
        "  COMMAND ...                                  run as given: vllm serve ..., bash",
        "",
        *recipe_list(recipes),
        "",
        "Commands to copy",
        f"  docker run --rm {image} check",
    ]
    for recipe in _servable_first(recipes):
        if recipe.blocked_on(layout.release()):
            lines.append(f"  docker run --rm {image} recipes {recipe.key}")
        else:
            lines += ["  " + line for line in _command(recipe, image)]
    lines += [
        "",
        "What it is",
        f"  stack  {ledger.stack_id}, {len(ledger.patches)} patches",
        f"  mode   {_MODES.get(ledger.mode, ledger.mode)}",
        f"  for    {ledger.machine}, Python {ledger.python}",
        *_compiled(ledger),
        *(
            f"  on {device}, of {len(kinds)} libraries: {_machine_code(kinds)}"
            for device, kinds in devices
        ),
    ]
    return "\n".join(lines)


def patches_text(ledger: Ledger) -> str:
    """Return the answer to `docker run IMAGE patches`."""
    lines = [f"Stack {ledger.stack_id} on vLLM {ledger.base_version}"]
    for patch in ledger.patches:
        lines += [f"  {patch.name}: {patch.subject} ({_state(patch)})"]
        lines += [f"    upstream: {patch.upstream}"]
    return "\n".join(lines)


def _servable_first(recipes: Mapping[str, Recipe]) -> list[Recipe]:
    return sorted(recipes.values(), key=lambda recipe: bool(recipe.blocked_on(layout.release())))


def _compiled(ledger: Ledger) -> list[str]:
    """The modules compiled for this image, and the ops that it lacks."""
    entries = [entry for entry in ledger.libraries if entry.origin == "compiled"]
    names = ", ".join(PurePosixPath(entry.path).name for entry in entries)
    lines = [f"  code   compiled for {ledger.arch_list}: {names}"] if entries else []
    if ledger.replaced:
        lines.append(f"  source {', '.join(ledger.replaced)}")
    lost = sum(len(entry.lost) for entry in entries)
    if lost:
        lines.append(f"  ops    {lost} are missing: those of kernels for other GPUs")
    return lines


def _state(patch: PatchEntry) -> str:
    return f"{patch.state}; its native code: {patch.native}" if patch.native else patch.state


def _machine_code(kinds: Sequence[str]) -> str:
    """Count the libraries by how they run on one device, from the ledger's audit."""
    counted = Counter(kinds)
    counts = [f"{counted[kind]} {text}" for kind, text in _KINDS.items() if counted[kind]]
    other = sum(number for kind, number in counted.items() if kind not in _KINDS)
    return "; ".join([*counts, *([f"{other} unknown"] if other else [])])


def recipe_list(recipes: Mapping[str, Recipe]) -> list[str]:
    """Return a line per recipe, those that can serve first, and why the others cannot yet."""
    lines = ["Recipes"]
    for recipe in _servable_first(recipes):
        state = f" [{recipe.sm12x.status.state}]" if recipe.sm12x else ""
        lines.append(f"  {recipe.key}{state}: {recipe.description or recipe.name}")
        if why := recipe.blocked_on(layout.release()):
            lines.append(f"    cannot serve yet: {why}")
    return lines if recipes else [*lines, "  none in this image"]


def recipe_text(recipe: Recipe, image: str) -> str:
    """Describe one recipe: its status, settings and the command that runs it."""
    lines = [f"{recipe.key}: {recipe.description or recipe.name}"]
    if recipe.model:
        lines.append(f"  model    {recipe.model}")
    if recipe.sm12x:
        block = recipe.sm12x
        machines = f" on each of {block.machines} machines" if block.machines > 1 else ""
        reason = f": {block.sleep.reason}" if block.sleep.reason else ""
        status = block.status
        written = "; ".join(filter(None, (status.date, status.evidence, status.source)))
        lines += [
            f"  needs    {block.gpus} x {' or '.join(block.hardware)}{machines}",
            f"  sleep    {block.sleep}{reason}",
            *_memory(block.memory),
            f"  status   {status.state}: {written}",
            *(f"  verified {entry.summary()}" for entry in evidence.of(recipe)),
        ]
        if why := recipe.blocked_on(layout.release()):
            lines.append(f"  blocked  {why}")
        lines += [f"  note     {note}" for note in block.notes]
    lines.append("  settings (key=value, or SM12X_<KEY> in the environment)")
    lines += [f"    {key}={value}" for key, value in recipe.defaults.items()]
    lines += [f"    {key}={value}" for key, value in recipe.env.items()]
    lines += ["  run", *["    " + line for line in _command(recipe, image)]]
    return "\n".join(lines)


def _command(recipe: Recipe, image: str) -> list[str]:
    """Return the `docker run` of a recipe, one option group per line; one command per machine."""
    # What only the user knows.
    placeholders = {"master_addr": "FIRST", "revision": "COMMIT"}
    first = {
        key: placeholders[key]
        for key in placeholders
        if recipe.defaults.get(key, "x") in ("", "127.0.0.1")
    }
    try:
        parts = containers(recipe, image=image, settings=first, extra=(), shipped=True)
    except UsageError as error:
        return [error.message]
    return [line for part in parts for line in local.guarded_command(part).splitlines()]


def _memory(memory: Memory) -> list[str]:
    """One line per term that is known."""
    terms = (
        ("weights", memory.weights),
        ("KV cache", memory.kv),
        ("outside vLLM's budget", memory.outside),
        ("left while it sleeps", memory.sleep_residue),
    )
    return [
        f"  memory   {name}: {_gib(term)} GiB per GPU, {term.basis}: {term.source}"
        for name, term in terms
        if term
    ]


def _gib(term: MemoryTerm) -> str:
    return f"{term.gib:g}" if term.low == term.gib else f"{term.low:g} to {term.gib:g}"
