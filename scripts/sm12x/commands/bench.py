"""`sm12x bench`: measure a live server with pinned tools, into a folder to share."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import click
from rich.markup import escape

from sm12x import layout
from sm12x.bench import exports, facts, judge, presets, redact, render, run, tools
from sm12x.bench.report import BenchReport
from sm12x.commands import Finite, ca_file_option, print_json, reports, say
from sm12x.commands.verify import secrets_of, servers_of
from sm12x.core import files, progress, text
from sm12x.core.errors import (
    BadFileError,
    FindingsError,
    Sm12xError,
    ToolMissingError,
    UnknownVerdictError,
    UsageError,
)
from sm12x.doctor.host import Host
from sm12x.recipes import load, options
from sm12x.verify import memory

_SKIPPED = ("canary", "benchy", "serve", "tools", "gsm8k", "swap")


@click.command()
@click.argument("urls", metavar="URL|FOLDER", nargs=-1, required=True)
@click.option(
    "--preset",
    type=click.Choice([*presets.load().presets]),
    default="smoke",
    show_default=True,
    help="What to run: "
    + "; ".join(f"{name}: {one.about}" for name, one in presets.load().presets.items())
    + ".",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to write; with the first steps of the same run in it, the run goes on. "
    "Default: bench-MODEL-PRESET.",
)
@click.option("--recipe", metavar="RECIPE", help="The recipe that the server runs.")
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="A setting that it was started with on top; can be repeated.",
)
@click.option("--image", default="", help="The image that it runs from: its digest and ledger.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="An earlier folder to compare with; refused across hardware, power limit, major version "
    "of a tool, or state of the prefix cache.",
)
@click.option("--swaps", type=click.IntRange(0), default=0, help="Cycles of sleep and wake-up.")
@click.option("--skip", multiple=True, type=click.Choice(_SKIPPED), help="Steps to leave out.")
@click.option("--model", "models", multiple=True, help="Model to ask. Default: the first.")
@click.option("--tokenizer", default="", help="Folder or hub name. Default: of the model.")
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Text that prompts are made of. Default: llama-benchy's book, or Python's own text.",
)
@click.option(
    "--tools",
    "wheels",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder with the tools' wheels, for a host without a package index.",
)
@click.option("--seed", type=click.IntRange(0, (1 << 32) - 1), help="Default: a new one.")
@click.option("--random-weights", is_flag=True, help="Do not judge texts.")
@click.option(
    "--gpus",
    metavar="WHICH",
    default=memory.AUTO,
    show_default=True,
    help="The server's GPUs here: auto (if it is on this machine), all, none, or 0,1.",
)
@click.option(
    "--timeout",
    type=Finite(1, 86_400),
    default=300.0,
    show_default=True,
    help="Seconds that one request of ours may take.",
)
@click.option(
    "--step-limit",
    type=Finite(1, 86_400),
    default=3600.0,
    show_default=True,
    help="Seconds that one step may take.",
)
@click.option(
    "--key-variable",
    "variables",
    metavar="NAME",
    multiple=True,
    help=f"Environment variable with the API key ({options.SLEEP_KEY} or {options.KEY}).",
)
@ca_file_option
@reports("sm12x.bench.report:BenchReport")
def command(
    urls: tuple[str, ...],
    preset: str,
    out: Path | None,
    recipe: str | None,
    overrides: tuple[str, ...],
    image: str,
    against: Path | None,
    swaps: int,
    skip: tuple[str, ...],
    models: tuple[str, ...],
    tokenizer: str,
    corpus: Path | None,
    wheels: Path | None,
    seed: int | None,
    random_weights: bool,
    gpus: str,
    timeout: float,
    step_limit: float,
    variables: tuple[str, ...],
    ca_file: Path | None,
    as_json: bool,
) -> None:
    """Measure a live server with pinned tools, and write a folder that others can check.

    llama-benchy, `vllm bench serve`, tool-eval-bench and GSM8K run in an environment of their own;
    verify's prompts are asked before and after. The folder gets bench.json, report.md, the tools'
    own files and exports for Spark Arena and local-ai-registry, without secrets, host names and
    user paths. Ctrl-C keeps what is done, and the same command goes on. With the name of such a
    folder in place of URL its report is made again. With --swaps a second URL takes turns with the
    first. Exit code 1: a step failed, or a figure is impossible.

    \b
    Example: sm12x bench http://127.0.0.1:8000 --preset depth --recipe qwen3.8-27b-nvfp4
    Example: sm12x bench bench-qwen3.8-27b-rtx --against bench-before
    """
    before = run.read(against) if against else None
    if len(urls) == 1 and Path(urls[0]).is_dir():
        folder, report = Path(urls[0]), run.read(Path(urls[0]))
        _finish(report, before, folder, as_json=as_json)
        return
    secrets = secrets_of(variables)
    servers = servers_of(urls, variables, secrets, ca_file, timeout)
    run.require_swappable(servers, swaps)
    settings_of = dict(_setting(word) for word in overrides)
    if settings_of and not recipe:
        raise UsageError("--set is for a recipe", next_step="give --recipe too, or leave it out")
    hosts = [urlsplit(server.url).hostname or "" for server in servers]
    known = load.load(load.find(recipe)) if recipe else None
    for one, model in zip(servers[1:], models[1:], strict=False):
        one.choose(model)
    server = facts.server_facts(
        servers[0], models[0] if models else "", known.model_revision if known else ""
    )
    watch = memory.watch([one.url for one in servers], gpus)
    away = any(not memory.here(host) for host in hosts)
    stack, ledger = facts.stack_facts(server.version, image, say)
    counted = run.tokenizer(tokenizer, server, known.model if known else "")
    hub = Path(os.environ.get("HF_HOME") or files.home() / ".cache" / "huggingface")
    subject = run.Subject(
        server=server,
        stack=stack,
        ledger=ledger,
        recipe=facts.recipe_facts(recipe, settings_of) if recipe else None,
        host=facts.host_facts(Host(), watch.unseen, watch.chosen),
        # What it says is of this host, which may not be the server's.
        doctor=None if away else facts.doctor_report(known),
        model_config=run.model_config([server.root, counted, known.model if known else ""], hub),
    )
    # Tools are started in folders of their own.
    out = (out or Path(f"bench-{_file_name(server.model)}-{preset}")).resolve()
    folders = {str(out): "out", str(layout.cache()): "cache"}
    redaction = redact.Redaction.here(secrets, hosts, folders)
    settings = run.Settings(
        preset=preset,
        out=out,
        seed=int.from_bytes(os.urandom(4)) if seed is None else seed,
        tokenizer=counted,
        corpus=corpus,
        image=image,
        skip=frozenset(skip),
        swaps=swaps,
        random_weights=random_weights,
        step_limit=step_limit,
        timeout=timeout,
        key=servers[0].key,
    )
    run.check_out(settings.out)
    installed = tools.install(wheels, say)
    console = progress.stderr_console()

    def tell(sentence: str) -> None:
        console.print(redaction.text(sentence), markup=False, soft_wrap=True)

    with files.locked(settings.out):
        work = run.Run(
            servers,
            settings,
            subject,
            installed,
            redaction,
            watch,
            observe=lambda doing: status.update(escape(doing)),
            tell=tell,
        )
        with console.status("") as status:
            error = work.run()
        report = work.report(stopped=error is not None)
        if isinstance(error, Sm12xError):
            error.message = redaction.text(error.message)
        if error is not None:
            _write(report, before, settings.out)
            say(f"{settings.out} keeps what is done; the same command goes on")
            raise error
        _finish(report, before, settings.out, as_json=as_json)


def _setting(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise UsageError(f"--set {word!r} is no setting", next_step="write it as KEY=VALUE")
    return key, value


def _file_name(model: str) -> str:
    name = "".join(c if c.isalnum() or c in ".-_" else "-" for c in model.rpartition("/")[2])
    return name.strip(".-").lower()[:80] or "model"


def _write(report: BenchReport, before: BenchReport | None, folder: Path) -> None:
    """Write report.md, the chart and the exports of what is there."""
    compared = []
    if before is not None:
        compared = judge.compare(report, before)
    chart = bool(render.cells(report))
    if chart:
        try:
            render.draw(report, folder / render.PICTURE)
        except ToolMissingError as error:
            chart = False
            say(f"no chart: {error.message}")
    page = render.markdown(report, compared, chart=chart)
    files.write_text(folder / render.REPORT, page)
    exports.write(report, folder)


def _finish(
    report: BenchReport, before: BenchReport | None, folder: Path, *, as_json: bool
) -> None:
    """Write all files, print the report, and raise what its verdict is."""
    try:
        _write(report, before, folder)
    except OSError as error:
        raise BadFileError(
            f"{folder} cannot be written: {error.strerror}", next_step="check the folder"
        ) from None
    if as_json:
        print_json(report)
    else:
        click.echo(render.brief(report), nl=False)
        click.echo(f"{folder}: report.md, bench.json and exports", err=True)
    bad = [one for one in report.findings if one.level == "impossible"]
    failed = [step for step in report.steps if step.state == "failed"]
    if report.verdict == "failed":
        reasons = [f"{step.name}: {step.why}" for step in failed]
        reasons += [f"{one.step}: {one.text}" for one in bad] or ["a text of the canary is garbage"]
        raise FindingsError(
            f"the benchmark failed: {text.first_of(reasons, 2)}",
            next_step=f"read {folder}/report.md and the logs in {folder}/tools",
        )
    if report.verdict != "passed":
        skipped = [f"{step.name} ({step.why})" for step in report.steps if step.state != "done"]
        raise UnknownVerdictError(
            f"the benchmark is {report.verdict}: {text.first_of(skipped, 3) or 'no step ran'}",
            next_step="it is no evidence as it is; docs/bench.md says what each step needs",
        )
