"""`sm12x plan`: does it fit, with what margin, and what to cut."""

from __future__ import annotations

import dataclasses
import itertools
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
from sm12x.core.numbers import Numbers
from sm12x.image import planned
from sm12x.plan import against, chart, host, render, server
from sm12x.plan.budget import DOES_NOT_FIT, FITS, OUTSIDE, Amount, Deployment, Hardware, Term
from sm12x.plan.figures import Answer
from sm12x.recipes import load, options
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import render as render_recipe

# The options that are vLLM's own.
_SETTINGS = {
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
@click.option(
    "--draft",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of the draft model that --speculative-config names.",
)
@click.option(
    "--tp", type=Numbers(int), help="GPUs the checkpoint is split over; 1,2,4 plans each."
)
@click.option(
    "--max-model-len", "tokens", type=Numbers(int), help="Tokens of a sequence, or several."
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
@click.option(
    "--against",
    "log",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Log of the server, for its figures beside the plan's.",
)
@click.option("--details", is_flag=True, help="Print every term's source and every combination.")
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
    draft: Path | None,
    tp: tuple[int, ...] | None,
    tokens: tuple[int, ...] | None,
    outside: float | None,
    log: Path | None,
    details: bool,
    as_json: bool,
    png: Path | None,
    **model: Any,
) -> None:
    """Say whether recipes fit in GPU and host memory, with what margin, and what to cut.

    Several recipes take turns on the same GPUs: the plan says which may be awake together. One
    recipe that sleeps is planned beside a sleeping peer like itself. Without a recipe, one line for
    each recipe. Exit code 1: a plan does not fit or, of a recipe that is named, cannot be decided;
    or a figure of the server's log is not the plan's. --alone, --outside, --against and --png need
    a RECIPE or --checkpoint.

    \b
    Example: sm12x plan deepseek-v4-flash-rtx-pro-6000-tp4 --utilization 0.85
    Example: sm12x plan --checkpoint ~/models/Qwen3-32B --tp 4 --max-model-len 32768 \\
        --max-num-seqs 16 --kv-dtype fp8 --hardware rtx-pro-6000 --outside 3
    Example: sm12x plan --checkpoint ~/models/Qwen3-32B --tp 1,2,4 --hardware rtx-pro-6000
    """
    if here and kind:
        raise click.UsageError("Give one of --hardware and --here.")
    swept = {"--tp": tp, "--max-model-len": tokens}
    if folder is None and any(value is not None for value in (draft, tp, tokens, *model.values())):
        raise click.UsageError("--tp and the settings of the model go with --checkpoint DIR.")
    chosen = _hardware(kind, here, gpus, ram)
    tried = server.share(utilization, "--utilization") if utilization is not None else None
    if not names and folder is None:
        if alone or any(value is not None for value in (outside, png, log)):
            raise click.UsageError(
                "--alone, --outside, --against and --png go with a RECIPE or --checkpoint."
            )
        given = {"hardware": kind, "gpus": gpus, "ram": ram, "utilization": utilization}
        again = ["--here"] if here else []
        again += [f"--{name} {value}" for name, value in given.items() if value is not None]
        _overview(chosen, tried, gpus, ram, as_json, again)
        return
    recipes = [one for name in names for one in server.members(load.load(load.find(name)))]
    hardware = chosen or _sized(planning.hardware_of(recipes, host.kinds()), gpus, ram)
    logged = against.read(log) if log else None
    several = any(len(values or ()) > 1 for values in swept.values())
    if several and (png is not None or logged):
        raise UsageError(
            "--png and --against are of one plan, and several are made",
            next_step="give one number for --tp and --max-model-len",
        )
    common = _Common(hardware=hardware, tried=tried, outside=outside, alone=alone)
    if folder is not None:
        question = _Question(
            folder=folder,
            draft=draft,
            recipes=recipes,
            settings=tuple(
                word
                for key, value in model.items()
                if value
                for word in (_SETTINGS[key], str(value))
            ),
            sweep={name: values for name, values in swept.items() if values},
            budgets=logged.budgets if logged else (),
        )
        answers = question.ask(hardware)
        if several:
            _sweep(question, answers, common, as_json)
            return
        plan, expected = _of_checkpoint(question, answers[0], common, logged)
    else:
        servers = [server.from_recipe(one, utilization=tried) for one in recipes]
        plan = common.plan(servers)
        expected = against.of_server(plan.servers[0], hardware)
    if logged and len(plan.servers) > 1:
        raise UsageError(
            "--against is the log of one server, and several are planned",
            next_step="plan the one recipe whose log it is",
        )
    if logged:
        plan = dataclasses.replace(plan, against=against.compare(expected, logged))
    if png is not None:
        chart.write(plan, png)
    if as_json:
        print_json(plan)
    else:
        click.echo(render.text(plan, details=details), nl=False)
        if png is not None:
            click.echo(f"{png}: written")
    if plan.verdict != FITS:
        found = planning.findings(plan)
        raise FindingsError(
            found[0],
            next_step=_next_step(plan),
        )
    against.check(plan.against)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Common:
    """What every plan of this call has in common."""

    hardware: Hardware
    tried: float | None
    outside: float | None
    alone: bool

    def plan(self, servers: Sequence[Deployment], remarks: Sequence[str] = ()) -> planning.Plan:
        if self.outside is not None:
            term = Term(
                name=OUTSIDE,
                amount=Amount.of(self.outside),
                basis="reported",
                source="--outside",
            )
            servers = [dataclasses.replace(one, outside=term) for one in servers]
        plan = planning.make(self.hardware, servers, peer=not self.alone)
        return dataclasses.replace(plan, warnings=(*plan.warnings, *remarks))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Question:
    """A model for the image to plan: with a recipe's arguments, those given here on top."""

    folder: Path
    draft: Path | None
    recipes: Sequence[Recipe]
    settings: tuple[str, ...]
    sweep: Mapping[str, Sequence[int]]
    budgets: Sequence[int]

    def ask(self, hardware: Hardware) -> tuple[Answer, ...]:
        """Return an answer for each combination of the sweep. Raises what ``planned.ask`` does."""
        if len(self.recipes) > 1:
            raise UsageError(
                "--checkpoint is the model of one server, and several are planned",
                next_step="plan the one recipe with --checkpoint, and put the figures in its file",
            )
        words: tuple[str, ...] = ()
        env: dict[str, str] = {}
        if self.recipes:
            rendered = render_recipe(self.recipes[0], settings={}, environ={}, solo=False)
            words, env = rendered.serve or (), rendered.vllm_env
        card = hardware.key
        if card not in host.kinds():
            # This machine's own GPUs.
            card = "gb10" if hardware.unified else "rtx-pro-6000"
        return planned.ask(
            self.folder,
            (*words, *self.settings),
            env,
            card,
            say=say,
            sweep=self.sweep,
            draft=self.draft,
            budgets=self.budgets,
        )

    def server(self, answer: Answer, common: _Common) -> tuple[Deployment, list[str]]:
        """Return the server with the weights and the KV cache of vLLM's answer, and remarks."""
        if answer.figures is None:
            raise FindingsError(
                f"vLLM {answer.release} does not serve {self.folder} like this: {answer.failure}",
                next_step="change the arguments, or take the figures from the server's log",
            )
        if answer.doubts:
            raise UnknownVerdictError(
                f"vLLM's figures of {self.folder} are not to be believed: {answer.doubts[0]}",
                next_step="take the figures from the server's log",
            )
        name = self.folder.resolve().name
        asked = server.from_figures(
            answer.figures,
            name,
            f"{name}: what vLLM {answer.release} ({answer.stack}) builds and plans",
            options.parse(answer.arguments),
            utilization=common.tried,
        )
        if not self.recipes:
            return asked, []
        base = server.from_recipe(self.recipes[0], utilization=common.tried)
        remarks = [
            f"the recipe says {name} {recorded.amount} GiB per GPU ({recorded.source}), vLLM "
            f"{term.amount}: planned with vLLM's"
            for name, recorded, term in (
                ("weights", base.weights, asked.weights),
                ("KV cache", base.kv, asked.kv),
            )
            if recorded and term and not _near(recorded.amount, term.amount)
        ]
        return dataclasses.replace(
            base, weights=asked.weights, kv=asked.kv, cache=asked.cache
        ), remarks


def _of_checkpoint(
    question: _Question, answer: Answer, common: _Common, logged: against.Logged | None
) -> tuple[planning.Plan, against.Expected]:
    """Return the plan of one answer, and what of it a log is compared with."""
    deployment, remarks = question.server(answer, common)
    plan = common.plan([deployment], remarks)
    if logged:
        return plan, against.of_answer(answer, logged)
    return plan, against.of_server(deployment, common.hardware)


def _sweep(question: _Question, answers: Sequence[Answer], common: _Common, as_json: bool) -> None:
    """Print a row for each combination of the sweep; those that vLLM refuses are an error."""
    plans: dict[str, planning.Plan] = {}
    refused = []
    for values, answer in zip(itertools.product(*question.sweep.values()), answers, strict=True):
        pairs = zip(question.sweep, values, strict=True)
        words = " ".join(f"{name} {value}" for name, value in pairs)
        try:
            deployment, remarks = question.server(answer, common)
            plans[words] = common.plan([deployment], remarks)
        except (FindingsError, UnknownVerdictError) as error:
            refused.append(f"{words}: {error.message}")
    if as_json:
        print_json(plans)
    elif plans:
        rows = [render.swept(plan, words) for words, plan in plans.items()]
        click.echo(render.table(rows, head=render.SWEPT), nl=False)
    if refused:
        raise FindingsError("; ".join(refused), next_step="leave these combinations out")
    bad = [words for words, plan in plans.items() if plan.verdict == DOES_NOT_FIT]
    if bad:
        raise FindingsError(
            f"{len(bad)} of {len(plans)} combinations do not fit: {', '.join(bad)}",
            next_step=f"plan one by itself: {bad[0]}",
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


def _near(recorded: Amount, term: Amount) -> bool:
    return recorded.low <= term.high * (1 + _DIFFERS) and recorded.high >= term.low * (1 - _DIFFERS)
