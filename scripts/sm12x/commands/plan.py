"""`sm12x plan`: does it fit, with what margin, and what to cut."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from sm12x import layout
from sm12x import plan as planning
from sm12x.commands import Finite, print_json, reports, say
from sm12x.core.errors import FindingsError, UnknownVerdictError, UsageError
from sm12x.image import planned
from sm12x.plan import chart, host, render, server
from sm12x.plan.budget import DOES_NOT_FIT, FITS, OUTSIDE, Amount, Deployment, Hardware, Term
from sm12x.recipes import load, options
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import render as render_recipe

# The options that are vLLM's own.
_SETTINGS = {
    "tp": "--tensor-parallel-size",
    "tokens": "--max-model-len",
    "sequences": "--max-num-seqs",
    "chunk": "--max-num-batched-tokens",
    "kv_dtype": "--kv-cache-dtype",
    "block": "--block-size",
}
_DIFFERS = 0.1
# Larger figures are mistakes; GiB, and what a checkpoint is served with.
_MOST_GIB = 1e6
_MOST = 10**9


@click.command()
@click.argument("names", metavar="[RECIPE]...", nargs=-1)
@click.option("--hardware", "kind", metavar="KIND", help="rtx-pro-6000, rtx-5090 or gb10.")
@click.option("--here", is_flag=True, help="The GPUs and the memory of this machine (NVML).")
@click.option("--gpus", type=click.IntRange(1), help="GPUs in the machine.")
@click.option("--ram", type=Finite(0, _MOST_GIB), metavar="GIB", help="Host memory of the machine.")
@click.option(
    "--utilization", metavar="X", help="--gpu-memory-utilization to try instead of the recipe's."
)
@click.option("--alone", is_flag=True, help="Plan a recipe that sleeps without a sleeping peer.")
@click.option(
    "--checkpoint",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of a model: vLLM in the image says weights and KV cache.",
)
@click.option("--tp", type=click.IntRange(1, _MOST), help="GPUs the checkpoint is split over.")
@click.option(
    "--max-model-len", "tokens", type=click.IntRange(1, _MOST), help="Tokens of a sequence."
)
@click.option(
    "--max-num-seqs",
    "sequences",
    type=click.IntRange(1, _MOST),
    help="Sequences of --max-model-len tokens each (default: 1).",
)
@click.option(
    "--max-num-batched-tokens", "chunk", type=click.IntRange(1, _MOST), help="Tokens a step reads."
)
@click.option("--kv-dtype", metavar="DTYPE", help="vLLM's --kv-cache-dtype.")
@click.option("--block-size", "block", type=click.IntRange(1, _MOST), help="vLLM's --block-size.")
@click.option(
    "--outside",
    type=Finite(0, _MOST_GIB),
    metavar="GIB",
    help="Memory outside vLLM's budget, on one GPU.",
)
@reports(planning.Plan | dict[str, planning.Plan])
@click.option(
    "--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the plan into this file."
)
def command(
    names: tuple[str, ...],
    kind: str | None,
    here: bool,
    gpus: int | None,
    ram: float | None,
    utilization: str | None,
    alone: bool,
    folder: Path | None,
    outside: float | None,
    as_json: bool,
    png: Path | None,
    **model: Any,
) -> None:
    """Say whether recipes fit in GPU and host memory, with what margin, and what to cut.

    Several recipes take turns on the same GPUs: the plan says which may be awake together. One
    recipe that sleeps is planned beside a sleeping peer like itself. Without a recipe, one line for
    each recipe. Exit code 1: a plan does not fit or, of a recipe that is named, cannot be decided.
    --alone, --outside and --png need a RECIPE or --checkpoint.

    \b
    Example: sm12x plan deepseek-v4-flash-rtx-pro-6000-tp4 --utilization 0.85
    Example: sm12x plan --checkpoint ~/models/Qwen3-32B --tp 4 --max-model-len 32768 \\
        --max-num-seqs 16 --kv-dtype fp8 --hardware rtx-pro-6000 --outside 3
    """
    if here and kind:
        raise click.UsageError("Give one of --hardware and --here.")
    if folder is None and any(value is not None for value in model.values()):
        raise click.UsageError("--tp and the settings of the KV cache go with --checkpoint DIR.")
    chosen = _hardware(kind, here, gpus, ram)
    tried = server.share(utilization, "--utilization") if utilization is not None else None
    if not names and folder is None:
        if alone or outside is not None or png is not None:
            raise click.UsageError("--alone, --outside and --png go with a RECIPE or --checkpoint.")
        given = {"hardware": kind, "gpus": gpus, "ram": ram, "utilization": utilization}
        again = ["--here"] if here else []
        again += [f"--{name} {value}" for name, value in given.items() if value is not None]
        _overview(chosen, tried, gpus, ram, as_json, again)
        return
    recipes = [one for name in names for one in server.members(load.load(load.find(name)))]
    hardware = chosen or _sized(planning.hardware_of(recipes, host.kinds()), gpus, ram)
    servers = [server.from_recipe(one, utilization=tried) for one in recipes]
    remarks: list[str] = []
    if folder is not None:
        settings = {_SETTINGS[key]: value for key, value in model.items()}
        deployment, remarks = _from_checkpoint(folder, recipes, servers, hardware, tried, settings)
        servers = [deployment]
    if outside is not None:
        term = Term(
            name=OUTSIDE,
            amount=Amount.of(outside),
            basis="reported",
            source="--outside",
        )
        servers = [dataclasses.replace(one, outside=term) for one in servers]
    plan = planning.make(hardware, servers, peer=not alone)
    plan = dataclasses.replace(plan, warnings=(*plan.warnings, *remarks))
    if png is not None:
        chart.write(plan, png)
    if as_json:
        print_json(plan)
    else:
        click.echo(render.text(plan), nl=False)
        if png is not None:
            click.echo(f"{png}: written")
    if plan.verdict != FITS:
        found = planning.findings(plan)
        raise FindingsError(
            found[0],
            next_step=_next_step(plan),
        )


def _next_step(plan: planning.Plan) -> str:
    if plan.cuts:
        return f"apply the first cut: {plan.cuts[0]}"
    if plan.too_few:
        return "plan for a machine with as many GPUs, or a recipe for fewer"
    if any(row.budget.wake and row.budget.wake.low < 0 for row in plan.rows):
        return "sleep at level 2, or keep the weights: --sleep-mode-release kv_cache"
    return "measure the unknown terms and put them in the recipe; outside the budget: --outside GIB"


def _hardware(kind: str | None, here: bool, gpus: int | None, ram: float | None) -> Hardware | None:
    if here:
        return _sized(host.here(), gpus, ram)
    return _sized(planning.on(host.kinds(), kind), gpus, ram) if kind else None


def _sized(hardware: Hardware, gpus: int | None, ram: float | None) -> Hardware:
    return dataclasses.replace(
        hardware,
        gpus=gpus if gpus is not None else hardware.gpus,
        ram=ram if ram is not None else hardware.ram,
    )


def _overview(
    chosen: Hardware | None,
    tried: float | None,
    gpus: int | None,
    ram: float | None,
    as_json: bool,
    again: Sequence[str],
) -> None:
    """Print a line for each recipe. ``again`` are the options with which a plan is the same."""
    plans = planning.overview(
        load.load_all(layout.recipes()).values(), hardware=chosen, utilization=tried
    )
    plans = {
        key: planning.make(_sized(plan.hardware, gpus, ram), plan.servers)
        for key, plan in plans.items()
    }
    if as_json:
        print_json(plans)
    else:
        rows = [render.summary(plan, key) for key, plan in plans.items()]
        columns = shutil.get_terminal_size((render.OVERVIEW, 0)).columns
        click.echo(render.table(rows, width=columns), nl=False)
    bad = [key for key, plan in plans.items() if plan.verdict == DOES_NOT_FIT]
    if bad:
        raise FindingsError(
            f"{len(bad)} of {len(plans)} recipes do not fit: {', '.join(bad)}",
            next_step=f"run `{' '.join(('sm12x plan', shlex.quote(bad[0]), *again))}`",
        )


def _from_checkpoint(
    folder: Path,
    recipes: list[Recipe],
    servers: list[Deployment],
    hardware: Hardware,
    tried: float | None,
    settings: Mapping[str, object],
) -> tuple[Deployment, list[str]]:
    """The server with the weights and the KV cache that vLLM gives the model, and remarks."""
    if len(servers) > 1:
        raise UsageError(
            "--checkpoint is the model of one server, and several are planned",
            next_step="plan the one recipe with --checkpoint, and put the figures in its file",
        )
    words: tuple[str, ...] = ()
    env: dict[str, str] = {}
    if recipes:
        rendered = render_recipe(recipes[0], settings={}, environ={}, solo=False)
        words = rendered.serve or ()
        env = rendered.vllm_env
    more = [word for key, value in settings.items() if value for word in (key, str(value))]
    card = hardware.key
    if card not in host.kinds():
        # This machine's own GPUs.
        card = "gb10" if hardware.unified else "rtx-pro-6000"
    answer = planned.ask(folder, (*words, *more), env, card, say=say)
    if answer.figures is None:
        raise FindingsError(
            f"vLLM {answer.release} does not serve {folder} like this: {answer.failure}",
            next_step="change the arguments, or take the figures from the server's log",
        )
    if answer.doubts:
        raise UnknownVerdictError(
            f"vLLM's figures of {folder} are not to be believed: {answer.doubts[0]}",
            next_step="take the figures from the server's log",
        )
    given = options.parse((*words, *more))
    figures = answer.figures
    source = f"{answer.model}: what vLLM {answer.release} ({answer.stack}) builds and plans"
    weights, kv, states = server.from_figures(
        figures,
        source,
        sequences=options.integer(given.get("max-num-seqs", "")),
        graphs="enforce-eager" not in given,
    )
    remarks = []
    base = servers[0] if servers else None
    if base is None:
        base = Deployment(
            name=folder.resolve().name,
            utilization=tried if tried is not None else figures.utilization,
            gpus=figures.gpus,
            machines=1,
            sleep=0,
            weights=None,
            kv=None,
            outside=None,
            residue=None,
        )
    for name, recorded, term in (("weights", base.weights, weights), ("KV cache", base.kv, kv)):
        if recorded and not _near(recorded.amount, term.amount):
            remarks.append(
                f"the recipe says {name} {recorded.amount} GiB per GPU ({recorded.source}), vLLM "
                f"{term.amount}: planned with vLLM's"
            )
    return dataclasses.replace(base, weights=weights, kv=kv, states=states), remarks


def _near(recorded: Amount, term: Amount) -> bool:
    return recorded.low <= term.high * (1 + _DIFFERS) and recorded.high >= term.low * (1 - _DIFFERS)
