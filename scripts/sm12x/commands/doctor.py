"""`sm12x doctor`: what on this host stops a server or corrupts its output."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import emit, reports
from sm12x.core import text
from sm12x.core.errors import FindingsError, Sm12xError, UsageError
from sm12x.doctor import examine, knowledge, report
from sm12x.doctor.host import Host
from sm12x.recipes import options
from sm12x.recipes.model import Recipe

_WIDEST = 120
_COLOURS = {"bad": "red", "warn": "yellow", "unknown": "magenta", "info": "cyan", "ok": "green"}


@click.command("doctor")
@click.argument("recipe", required=False)
@click.option("--image", "image_name", help="The bundle to compare with, by its image name.")
@click.option(
    "--audit",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Audit to compare with (audit.json). Default: that of the newest bundle in dist/.",
)
@click.option(
    "--cache",
    "caches",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder that is mounted at /cache in the image; can be repeated.",
)
@reports(report.DoctorReport)
@click.option("--explain", "check", metavar="ID", help="Explain one check.")
def command(
    recipe: str | None,
    image_name: str | None,
    audit: Path | None,
    caches: tuple[Path, ...],
    as_json: bool,
    check: str | None,
) -> None:
    """Check whether this host can run a server, and change nothing.

    Compares driver, GPUs, container engine, memory, caches, network and kernel with what the image
    and (with RECIPE) a deployment need. Every finding has its reason, its source and the commands
    that correct it. A fact that cannot be read is listed with the reason, and does not count as ok.
    The exit status is 1 when a check failed.

    Example: sm12x doctor --image vllm-sm12x:0.33.0-STACK deepseek-v4-flash-rtx-pro-6000-tp4
    """
    if audit is not None and image_name is not None:
        raise UsageError(
            "--image and --audit both say what to compare with", next_step="give one of them"
        )
    data = knowledge.load()
    if check is not None and check not in data.checks:
        hint = text.near(check, data.checks) or f"one of {', '.join(data.checks)}"
        raise UsageError(f"there is no check {check!r}", next_step=f"write {hint}")
    named, server = _recipe(recipe) if recipe else (None, {})
    facts = examine.facts(
        Host(),
        data,
        audit=audit,
        image_name=image_name,
        cache_folders=caches,
        dist=layout.bundles(),
        recipe=named,
        options=server,
    )
    findings = examine.run(facts)
    width = min(shutil.get_terminal_size((report.WIDTH, 24)).columns, _WIDEST)
    if check is not None:
        mine = [finding for finding in findings if finding.id == check]
        click.echo(report.explain(check, data.checks[check], mine, width=width), nl=False)
        return
    shown = report.text(facts, findings, width=width, paint=_paint)
    emit(as_json, report.document(facts, findings), shown)
    bad = [finding.id for finding in findings if finding.severity == "bad"]
    if bad:
        raise FindingsError(
            f"{text.counted(len(bad), 'check')} failed: {', '.join(dict.fromkeys(bad))}",
            next_step="the report above has the commands that correct it, "
            f"`sm12x doctor --explain {bad[0]}` the reason",
        )


def _recipe(name: str) -> tuple[Recipe, dict[str, str]]:
    """Return a recipe, and the options of its server; none where its command does not say."""
    # Reading recipes needs PyYAML, which a bare host may not have.
    from sm12x.recipes import load, render

    recipe = load.load(load.find(name))
    try:
        return recipe, options.parse(render.arguments(recipe))
    except Sm12xError:
        # `sm12x recipe lint` says what is wrong with it.
        return recipe, {}


def _paint(text: str, severity: str) -> str:
    """click takes the colours out again where the output is not a terminal."""
    return click.style(text, fg=_COLOURS[severity])
