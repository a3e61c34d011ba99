"""The image's verb `plan`: what a model needs, from the vLLM of this image, without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from sm12x import plan as planning
from sm12x.core import declared
from sm12x.core.errors import BadFileError, FindingsError, UnknownVerdictError, UsageError
from sm12x.core.numbers import Numbers
from sm12x.core.text import GIB
from sm12x.plan import against, figures, host
from sm12x.plan.budget import Hardware
from sm12x.plan.figures import Answer, Question, Source
from sm12x.recipes import load
from sm12x.recipes.model import Recipe
from sm12x.recipes.render import render
from sm12x.runtime import planner, tensors
from sm12x.runtime.meta import Card
from sm12x.runtime.places import Places
from sm12x.wheel import ledger as ledgers

_QUANTIZATION = ("quantization_config", "compression_config")
_UNREAD = Source(tensors=None, quantized=False)
_CONFIG = "the folder of a model as its repository has it"


@click.command(name="plan")
@click.argument("recipe", required=False)
@click.option(
    "--checkpoint",
    "folders",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Folders of models (default: /model); only config files and headers of weights are read.",
)
@click.option("--draft", type=click.Path(path_type=Path), help="Folder of a draft model.")
@click.option("--card", metavar="KIND", help="The GPU: rtx-pro-6000, rtx-5090 or gb10.")
@click.option("--tp", type=Numbers(int), help="Values of --tensor-parallel-size: 1,2,4.")
@click.option("--max-model-len", "lengths", type=Numbers(int), help="Values of --max-model-len.")
@click.option("--kv-gib", "budgets", type=Numbers(float), help="Sizes of the KV cache in GiB.")
@click.option(
    "--against",
    "log",
    type=click.Path(path_type=Path),
    help="Log of a server with these arguments, for its figures beside the plan's.",
)
@click.option("--details", is_flag=True, help="Print the layers and each GPU's parts too.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(
    words: Sequence[str],
    recipe: str | None,
    folders: tuple[Path, ...],
    draft: Path | None,
    card: str | None,
    tp: tuple[int, ...] | None,
    lengths: tuple[int, ...] | None,
    budgets: tuple[float, ...] | None,
    log: Path | None,
    details: bool,
    as_json: bool,
) -> None:
    """Say what a model needs in GPU memory, as vLLM's own code has it; no GPU is needed.

    RECIPE gives vLLM's arguments; those after -- come on top: [RECIPE] [OPTIONS] [-- ARGUMENTS].

    \b
    Example: docker run --rm -v ~/models/Qwen3-32B:/model:ro IMAGE plan --tp 1,2 -- \\
        --kv-cache-dtype fp8
    """
    places = Places.of_image()
    # Everything that reads the checkpoint comes first: vLLM takes long to import.
    sources = _sources(folders or (Path("/model"),))
    logged = against.read(log) if log else None
    arguments, env, kind = _of(_recipe(recipe, places) if recipe else None, words)
    chosen = card or kind
    questions = [
        Question(
            folder=str(folder),
            arguments=(*arguments, *more),
            env=env,
            budgets=(
                *(logged.budgets if logged else ()),
                *(int(gib * GIB) for gib in budgets or ()),
            ),
            draft=str(draft.resolve()) if draft else "",
        )
        for folder in sources
        for more in sweep(tp, lengths)
    ]
    if logged and len(questions) > 1:
        raise UsageError(
            "--against is the log of one server, and several are planned",
            next_step="give one --checkpoint, and one number for --tp and --max-model-len",
        )
    ledger = ledgers.read(places.ledger)
    planner.prepare(_card(planning.on(host.kinds(), chosen)))
    answers = []
    for question in questions:
        source = sources[Path(question.folder)]
        answer = conclude(
            source.message if isinstance(source, BadFileError) else planner.ask(question),
            question,
            _UNREAD if isinstance(source, BadFileError) else source,
            release=ledger.base_version,
            stack=ledger.stack_id,
            card=chosen,
        )
        if logged:
            compared = against.compare(against.of_answer(answer, logged), logged)
            answer = dataclasses.replace(answer, against=compared)
        answers.append(answer)
        if not as_json:
            click.echo(figures.text(answer, details=details))
            if answer.against:
                click.echo(against.text(answer.against))
    if as_json:
        click.echo(declared.to_json(answers, list[Answer]), nl=False)
    if failed := [answer for answer in answers if answer.failure]:
        raise FindingsError(
            f"vLLM does not plan {failed[0].model}: {failed[0].failure}",
            next_step="change the arguments, or take the figures from the server's log",
        )
    if doubtful := [answer for answer in answers if answer.doubts]:
        raise UnknownVerdictError(
            f"the figures of {doubtful[0].model} are not to be believed: {doubtful[0].doubts[0]}",
            next_step="take the figures from the server's log",
        )
    against.check(answers[0].against)


def run(words: Sequence[str]) -> int:
    """Run the verb in this process, which ``process_environment`` is set for.

    Raises UsageError, and what ``command`` raises.
    """
    at = words.index("--") if "--" in words else len(words)
    own, arguments = list(words[:at]), tuple(words[at + 1 :])
    try:
        command.main(own, prog_name="plan", standalone_mode=False, obj=arguments)
    except click.ClickException as error:
        raise UsageError(f"plan: {error.format_message()}", next_step="plan --help") from None
    return 0


def read(folder: Path) -> Source:
    """Read what the plan needs of a checkpoint's own files.

    Raises:
        BadFileError: the folder holds no model, or a file of it is damaged.
    """
    if not (folder / tensors.CONFIG).is_file():
        adapter = (folder / "adapter_config.json").is_file()
        raise BadFileError(
            f"{folder} has no {tensors.CONFIG}" + (": it holds a LoRA adapter" if adapter else ""),
            next_step=f"give {_CONFIG}: -v DIR:/model:ro",
        )
    config = tensors.read_json(folder / tensors.CONFIG, _CONFIG)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise BadFileError(
            f"{folder / tensors.CONFIG} has no model_type: it is no model's configuration",
            next_step=f"give {_CONFIG}",
        )
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    declares = any(part.get(key) for part in parts for key in _QUANTIZATION)
    return Source(
        tensors=tensors.total(folder),
        quantized=declares or (folder / "hf_quant_config.json").is_file(),
    )


def _sources(folders: Sequence[Path]) -> dict[Path, Source | BadFileError]:
    """Return what is read of each folder. Raises BadFileError if the only one holds no model."""
    sources: dict[Path, Source | BadFileError] = {}
    for folder in folders:
        try:
            sources[folder.resolve()] = read(folder)
        except BadFileError as error:
            if len(folders) == 1:
                raise
            sources[folder.resolve()] = error
    return sources


def sweep(tp: Sequence[int] | None, lengths: Sequence[int] | None) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of each combination."""
    for size, length in itertools.product(tp or (None,), lengths or (None,)):
        first = () if size is None else ("--tensor-parallel-size", str(size))
        second = () if length is None else ("--max-model-len", str(length))
        yield (*first, *second)


def conclude(
    given: figures.Figures | str,
    question: Question,
    source: Source,
    *,
    release: str,
    stack: str,
    card: str,
) -> Answer:
    """Return the answer with what speaks against it."""
    return Answer(
        release=release,
        stack=stack,
        card=card,
        model=Path(question.folder).name,
        arguments=question.arguments,
        source=source,
        figures=None if isinstance(given, str) else given,
        failure=given if isinstance(given, str) else "",
        doubts=() if isinstance(given, str) else tuple(figures.doubts(given, source)),
    )


def _of(recipe: Recipe | None, words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str], str]:
    """Return vLLM's arguments, its variables, and the kind of card."""
    known = host.kinds()
    first = next(iter(known))
    if recipe is None:
        return tuple(words), {}, first
    rendered = render(recipe, settings={}, extra=words, environ={}, solo=recipe.sm12x is None)
    if rendered.serve is None:
        raise UsageError(
            f"the arguments of {recipe.key} are not known: {rendered.unchecked}",
            next_step="give vLLM's arguments after --",
        )
    kinds = recipe.sm12x.hardware if recipe.sm12x else ()
    card = next((kind for kind in kinds if kind in known), first)
    return rendered.serve, rendered.vllm_env, card


def _recipe(word: str, places: Places) -> Recipe:
    path = Path(word) if word.endswith((".yaml", ".yml")) else places.recipes / f"{word}.yaml"
    if not path.is_file():
        raise UsageError(f"there is no recipe {word!r}", next_step="`recipes` lists them")
    return load.load(path)


def _card(kind: Hardware) -> Card:
    major, minor = map(int, kind.capability.split("."))
    return Card(
        name=f"NVIDIA {kind.name}",
        major=major,
        minor=minor,
        memory=int(kind.memory.low * GIB),
        multiprocessors=kind.multiprocessors or 0,
        integrated=kind.unified,
    )


def process_environment(places: Places) -> dict[str, str]:
    """Return the variables with which the process that plans is started.

    The stand-in for the driver goes first, so that a plan uses no GPU that is there.
    """
    folder = str(places.stand_in.parent)
    others = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders = [folder, *(other for other in others if other not in ("", folder))]
    return {**planner.ENV, "LD_LIBRARY_PATH": ":".join(folders)}
