"""`sm12x verify`: put live servers to sleep, wake them up, and check times, memory, answers."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.markup import escape

from sm12x.commands import Finite, ca_file_option, print_json, reports
from sm12x.core import declared, files, picture, progress, text
from sm12x.core.errors import (
    INTERRUPTED,
    BadFileError,
    FindingsError,
    Sm12xError,
    UnknownVerdictError,
    UsageError,
    of_system,
)
from sm12x.recipes import options
from sm12x.verify import client as clients
from sm12x.verify import cycles, memory, render
from sm12x.verify.report import Limits, VerifyReport, limits

_Command = TypeVar("_Command", bound=Callable[..., Any])

_NAMES = ("A", "B")
# Variables that hold a secret, and the characters from which on such a value is one: in a shorter
# one a report could not be read any more.
_SECRET, _LEAST = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)S?$", re.IGNORECASE), 6
_SUFFIXES = (".json", ".md", ".png")
# CPU seconds that writing the files may take each time. A report that takes longer is written less
# often, so that writing stays a small share of the run's time.
_WRITE_WITHIN, _WRITING = 0.1, 0.05


def _limits(command: _Command) -> _Command:
    """An option for each limit."""
    for name, default, meaning in reversed(list(limits())):
        command = click.option(
            f"--{name.replace('_', '-')}",
            name,
            type=Finite(0, 1 if name.startswith("min_") else None),
            default=default,
            show_default=True,
            metavar="X",
            help=f"A limit: {meaning}.",
        )(command)
    return command


@click.command()
@click.argument("urls", metavar="URL [URL]", nargs=-1)
@click.option(
    "--cycles",
    "count",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Number of cycles, each a sleep and a wake-up.",
)
@click.option(
    "--level",
    type=click.IntRange(1, 2),
    default=1,
    show_default=True,
    help="Level of sleep; 2 loads the weights again (/collective_rpc).",
)
@click.option(
    "--requests",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Requests before the cycles, and again after them.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="Requests in flight at a time.",
)
@click.option(
    "--model", "models", multiple=True, help="Model to ask; a second time for the second server."
)
@click.option(
    "--gpus",
    metavar="WHICH",
    default=memory.AUTO,
    show_default=True,
    help="GPUs whose memory to measure: auto (if the server is on this machine), all, none, or "
    "0,1.",
)
@click.option(
    "--random-weights", is_flag=True, help="Compare texts, but do not check them for garbage."
)
@click.option(
    "--conversation",
    type=click.IntRange(0, 10_000_000),
    default=0,
    metavar="TOKENS",
    help="After the cycles measure a conversation of so many tokens over a swap, and a stream that "
    "mode=keep freezes.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Go on where requests run, or it cannot be seen whether any do: a sleep aborts them.",
)
@click.option(
    "--timeout",
    type=Finite(1, 86_400),
    default=300.0,
    show_default=True,
    help="Seconds that one call may take.",
)
@click.option(
    "--key-variable",
    "variables",
    metavar="NAME",
    multiple=True,
    help=f"Environment variable with the API key ({options.SLEEP_KEY}, which the sleep "
    f"routes may ask for, or {options.KEY}); a second time for the second server.",
)
@ca_file_option
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="Write the report: .json, .md or .png by its suffix. Can be repeated. .json and .md are "
    "also updated during the run.",
)
@reports("sm12x.verify.report:VerifyReport")
@_limits
def command(
    urls: tuple[str, ...],
    count: int,
    level: int,
    requests: int,
    concurrency: int,
    models: tuple[str, ...],
    gpus: str,
    random_weights: bool,
    conversation: int,
    force: bool,
    timeout: float,
    variables: tuple[str, ...],
    ca_file: Path | None,
    save: tuple[Path, ...],
    as_json: bool,
    **chosen: float,
) -> None:
    """Put a live server to sleep and wake it up repeatedly, and check times, memory and answers.

    Measures times, GPU memory awake and asleep and how it grows, and speed; compares greedy text
    before and after; looks for garbage; sends many requests at a time. Two servers take turns on
    their GPUs. Every server is left as it was found, awake or asleep. A sleep aborts the requests
    that run: keep users away. The API key is taken from VLLM_SLEEP_API_KEY or VLLM_API_KEY. Exit
    code 1: a limit was exceeded.

    \b
    Example: sm12x verify http://127.0.0.1:8000 --cycles 20 --save verify.json --save verify.md
    Example: sm12x verify http://127.0.0.1:8000 http://127.0.0.1:8001
    """
    secrets = secrets_of(variables)
    servers = servers_of(urls, variables, secrets, ca_file, timeout)
    if len(models) > len(servers):
        raise UsageError(
            f"--model is given {len(models)} times for {text.counted(len(servers), 'server')}",
            next_step="give it once for each server, in their order",
        )
    if conversation and level != 1:
        raise UsageError(
            "--conversation is of level 1: level 2 discards what a conversation belongs to",
            next_step="leave --level out, or --conversation",
        )
    settings = cycles.Settings(
        cycles=count,
        level=level,
        requests=requests,
        concurrency=concurrency,
        models=models,
        random_weights=random_weights,
        force=force,
        conversation=conversation,
        limits=Limits(**chosen),
    )
    saved = _Files(save)
    watch = memory.watch([server.url for server in servers], gpus)
    console = progress.stderr_console()
    shown = 0

    def tell(sentence: str) -> None:
        console.print(text.without(sentence, secrets), markup=False, soft_wrap=True)

    def redacted() -> VerifyReport:
        # A server may echo what it is sent in any field: this is what is saved and printed.
        return text.without(run.report(), secrets)

    def observe(doing: str) -> None:
        nonlocal shown
        status.update(escape(doing))
        report = redacted()
        done = [turn for turn in report.turns if turn.answer_seconds is not None]
        for turn in done[shown:]:
            tell(render.line(turn))
        shown = len(done)
        saved.write(report)

    run = cycles.Run(servers, settings, watch, observe=observe, tell=tell)
    # On a terminal the current step is below the lines of the turns.
    with console.status("") as status:
        error = run.run()
    report = redacted()
    faults = saved.write(report, last=True)
    try:
        if as_json:
            print_json(report)
        elif report.servers:
            click.echo(render.text(report), nl=False)
    except BrokenPipeError:
        # The reader left; the exit code still has the verdict.
        text.discard_stdout()
    for path in save:
        fault = faults.get(path)
        outcome = f"not written: {fault.strerror or fault}" if fault else "written"
        click.echo(f"{path}: {outcome}", err=True)
    _leave(report, error or next(map(_not_written, faults.items()), None), secrets)


def secrets_of(variables: Sequence[str]) -> dict[str, str]:
    """Return the keys and tokens of the environment, each with its variable's name."""
    return {
        value: name
        for name, given in os.environ.items()
        if len(value := given.strip()) >= _LEAST and (name in variables or _SECRET.search(name))
    }


def servers_of(
    urls: Sequence[str],
    variables: Sequence[str],
    secrets: Mapping[str, str],
    ca: Path | None,
    timeout: float,
) -> list[clients.Server]:
    """Return the servers at ``urls``, each with its key. Raises UsageError."""
    if not 1 <= len(urls) <= len(_NAMES):
        raise click.UsageError(
            f"Give the address of one server, or of two that take turns; {len(urls)} are given."
        )
    bases = [clients.base_url(url) for url in urls]
    if len(set(bases)) < len(bases):
        raise UsageError(f"both servers are {bases[0]}", next_step="give two different addresses")
    if len(variables) > len(bases):
        raise UsageError(
            f"--key-variable is given {len(variables)} times for "
            f"{text.counted(len(bases), 'server')}",
            next_step="give it once for both servers, or once for each",
        )
    servers = []
    # One variable is for both servers.
    candidates = (options.SLEEP_KEY, options.KEY)
    default = next(filter(os.environ.get, candidates), options.KEY)
    named = (*variables, *variables[-1:]) or (default,) * len(bases)
    for name, base, variable in zip(_NAMES, bases, named, strict=False):
        key = os.environ.get(variable, "")
        if variables and not key:
            raise UsageError(
                f"{variable} is not set", next_step="set that variable to the server's API key"
            )
        access = clients.Access(
            key=clients.checked_key(key, variable),
            variable=variable,
            secrets=secrets,
            ca=str(ca) if ca else "",
            timeout=timeout,
        )
        servers.append(clients.Server(name, base, access))
    return servers


class _Files:
    """The files that the report is written to, during the run and at its end."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._next = 0.0
        for path in paths:
            if path.suffix not in _SUFFIXES:
                raise UsageError(
                    f"--save {path}: the suffix {path.suffix!r} is not that of a report",
                    next_step=f"end it in {text.either(_SUFFIXES)}",
                )
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise BadFileError(
                    f"--save {path}: {path.parent} is not a writable folder",
                    next_step="make it, or give another path",
                )
            if path.suffix == ".png":
                picture.figure(render.PICTURE)

    def write(self, report: VerifyReport, *, last: bool = False) -> dict[Path, OSError]:
        """Write the files; returns the error of each file that cannot be written."""
        now, begun = time.monotonic(), time.process_time()
        if not last and now < self._next:
            return {}
        faults = {}
        for path in self._paths:
            try:
                if path.suffix == ".json":
                    files.write_output(path, declared.to_json(report))
                elif path.suffix == ".md":
                    files.write_output(path, render.markdown(report))
                elif last:
                    render.draw(report, path)
            except OSError as error:
                faults[path] = error
        taken = time.process_time() - begun
        self._next = now + taken / _WRITING if taken > _WRITE_WITHIN else now
        return faults


def _not_written(fault: tuple[Path, OSError]) -> Sm12xError:
    """Return the error of an output by its own path, not by that of a temporary file."""
    path, error = fault
    named = of_system(OSError(error.errno, error.strerror or str(error), str(path)))
    return named or BadFileError(
        f"{path} cannot be written: {error}", next_step="give another path"
    )


def _leave(report: VerifyReport, error: BaseException | None, secrets: Mapping[str, str]) -> None:
    """Raise the error that ended the run, or the findings; exit at once after an interrupt."""
    if isinstance(error, KeyboardInterrupt) and report.stopped:
        sentences = [f"interrupted at: {report.stopped.during}", *report.left]
        click.echo("; ".join(sentences), err=True)
        sys.stdout.flush()
        # Past the threads of requests that a hanging server does not answer.
        os._exit(INTERRUPTED)
    if isinstance(error, Sm12xError):
        error.message = text.without(error.message, secrets)
        error.next_step = text.without(error.next_step, secrets)
    if error is not None:
        raise error
    bad = [one for one in report.checks if one.verdict == "breach"]
    if report.verdict == "breached":
        options = ", ".join(dict.fromkeys(one.option for one in bad if one.option))
        raise FindingsError(
            f"{text.counted(len(bad), 'check')} failed: {bad[0].server} {bad[0].check}: "
            f"{bad[0].text}",
            next_step="docs/verify.md says what each means"
            + (f"; options for limits: {options}" if options else ""),
        )
    if report.verdict == "unknown":
        raise UnknownVerdictError(
            "the answers after a wake-up could not be compared: no prompt had the same text twice "
            "before the first sleep, or none was compared",
            next_step="run it again without other users, with 2 cycles or more",
        )
