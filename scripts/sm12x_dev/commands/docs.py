"""`sm12x-dev docs`: generated parts of pages, a picture, Nomad specifications and schemas."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from sm12x import cli, layout
from sm12x.commands import JsonOption
from sm12x.core import declared, files, text
from sm12x.core.errors import FindingsError
from sm12x.deploy import nomad
from sm12x.pool.config import PoolConfig
from sm12x.recipes import load
from sm12x.recipes.model import Recipe
from sm12x.runtime.check.report import CheckReport
from sm12x_dev import pages

# Verbs of `sm12x` whose reports other programs read. Three more schemas are of what no verb prints:
# a recipe's file, a pool's, and the image's `check --json`.
_REPORTS = ("audit", "bench", "doctor", "plan", "verify")
_RECIPE, _POOL, _CHECK = "recipe-1.json", "pool-1.json", "check-1.json"

_WHERE = "README.md, docs, nomad-examples, schemas"


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a file is out of date.")
@click.pass_context
def docs_command(ctx: click.Context, check: bool) -> None:
    """Write the generated parts of README.md and docs/, nomad-examples/ and schemas, or check them.

    Example: sm12x-dev docs --check
    """
    stale = []
    for path, new in generated_files(ctx.find_root().command).items():
        name = path.relative_to(layout.root())
        old = path.read_text(encoding="utf-8") if path.is_file() else ""
        if old == new:
            continue
        stale.append(str(name))
        if check:
            diff = difflib.unified_diff(
                old.splitlines(), new.splitlines(), f"{name} committed", "made", lineterm=""
            )
            click.echo("\n".join(diff))
            continue
        if new:
            files.write_text(path, new)
        else:
            path.unlink()
        click.echo(f"{name}: {'written' if new else 'removed'}")
    if not stale:
        click.echo(f"{_WHERE}: up to date")
    elif check:
        raise FindingsError(f"out of date: {', '.join(stale)}", next_step="make docs")


def generated_files(root: click.Command) -> dict[Path, str]:
    """Every generated file and its text; "" for an existing file that is no longer generated.

    ``root`` is the command `sm12x-dev`, whose verbs are one of the parts.
    """
    folder, schemas = layout.root() / "nomad-examples", layout.schemas()
    leftover = dict.fromkeys([*folder.glob(f"*{nomad.SUFFIX}"), *schemas.glob("*.json")], "")
    specs = nomad.examples(load.load_all(layout.recipes()))
    texts = {path: pages.samples(path.read_text(encoding="utf-8")) for path in pages.paths()}
    return {
        **pages.rendered(texts, {**pages.PARTS, "commands": lambda: commands_table(root)}),
        layout.root() / "docs" / pages.PICTURE: pages.audit_picture(),
        **leftover,
        **{folder / name: text for name, text in specs.items()},
        schemas / _RECIPE: _json(declared.schema(Recipe)),
        schemas / _POOL: _json(declared.schema(PoolConfig)),
        schemas / _CHECK: _report_schema(CheckReport, "check --json` in the image"),
        **{
            schemas / f"{verb}-1.json": _report_schema(_printed(verb), f"sm12x {verb} --json`")
            for verb in _REPORTS
        },
    }


def commands_table(root: click.Command) -> str:
    """One row for each verb and each subcommand, with the first sentence of its help."""
    rows = []
    for name, command in (*_commands(cli.root, "sm12x"), *_commands(root, "sm12x-dev")):
        arguments = [
            one.make_metavar(click.Context(command))
            for one in command.params
            if isinstance(one, click.Argument)
        ]
        rows.append((f"`{' '.join((name, *arguments))}`", command.get_short_help_str(limit=1000)))
    return text.markdown(("command", "what it does"), rows)


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command below a group, with its full name."""
    if not isinstance(command, click.Group):
        yield name, command
        return
    context = click.Context(command)
    for verb in command.list_commands(context):
        child = command.get_command(context, verb)
        if child is not None:
            yield from _commands(child, f"{name} {verb}")


def _printed(verb: str) -> Any:
    """Return the type of what a verb of `sm12x` prints with --json."""
    for name, command in _commands(cli.root, ""):
        for option in command.params:
            if name.strip() == verb and isinstance(option, JsonOption):
                return option.kind
    raise KeyError(verb)


def _report_schema(kind: Any, command: str) -> str:
    return _json({**declared.schema(kind, "serialization"), "title": f"Report of `{command}"})


def _json(schema: Mapping[str, Any]) -> str:
    document = {"$comment": "Made by `make docs`; do not edit.", **schema}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
