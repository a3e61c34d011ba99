"""The entry point: a verb such as check or recipes, a recipe, or any other command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

from sm12x.core import process, text
from sm12x.core.errors import INTERRUPTED, FindingsError, Sm12xError, UsageError, of_system
from sm12x.recipes import load
from sm12x.recipes.model import Recipe
from sm12x.runtime import about, health, plan, serve
from sm12x.runtime.check import report
from sm12x.runtime.check.check import check
from sm12x.runtime.places import Places
from sm12x.wheel import ledger as ledgers

_WORDS = ("help", "check", "health", "recipes", "patches", "plan", "pool", "verify", "bench")

_Replace = Callable[..., NoReturn]


def main() -> NoReturn:
    text.guard_streams()
    try:
        code = dispatch(sys.argv[1:], Places.of_image())
    except Sm12xError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        # `docker run IMAGE recipes | head`: the reader left, and nothing is left to write.
        text.discard_stdout()
        code = 0
    except OSError as refused:
        known = of_system(refused)
        if known is None:
            raise
        click.echo(f"error: {known}", err=True)
        code = known.exit_code
    sys.exit(code)


def dispatch(
    arguments: Sequence[str], places: Places, *, replace: _Replace = process.replace
) -> int:
    """Run the command after the image's name, and return the exit status.

    Raises:
        UsageError: a word that is no recipe, no verb and no program.
        Sm12xError: what the verb raises.
    """
    first, *rest = arguments or ["help"]
    if first in ("help", "--help", "-h"):
        click.echo(about.help_text(ledgers.read(places.ledger), _recipes(places), _image(places)))
        return 0
    if first == "check":
        return _check(rest, places)
    if first == "health":
        verdict = health.here()
        click.echo(verdict.text)
        return verdict.code
    if first == "patches":
        click.echo(about.patches_text(ledgers.read(places.ledger)))
        return 0
    if first == "recipes":
        return _show(rest, places)
    if first == "plan":
        env = plan.process_environment(places)
        if os.environ.get("LD_LIBRARY_PATH") != env["LD_LIBRARY_PATH"]:
            replace([sys.executable, "-P", "-m", "sm12x.runtime", "plan", *rest], env=env)
        return plan.run(rest)
    if first in ("pool", "verify", "bench"):
        # Of the floors above this one, in this Python.
        module = ["sm12x.pool"] if first == "pool" else ["sm12x", first]
        words = [sys.executable, "-P", "-m", *module, *rest]
        replace(words, env=serve.identity(os.environ))
    recipe = _recipe(first, places)
    if recipe is not None:
        rendered, remarks = serve.prepare(recipe, rest, os.environ)
        remarks += serve.require_caches(places, os.environ)
        for remark in remarks:
            click.echo(f"warning: {remark}", err=True)
        env = {**serve.identity(os.environ), **rendered.env}
        resident = recipe.sm12x.memory.resident if recipe.sm12x else 0.0
        replace(rendered.argv, env={**_jobs({**os.environ, **env}, resident), **env})
    if process.which(first):
        jobs = _jobs(os.environ) if first == "vllm" else {}
        replace([first, *rest], env={**jobs, **serve.identity(os.environ)})
    known = [*_WORDS, *_names(places)]
    near = text.near(first, known, cutoff=0.5)
    if first.startswith("-"):
        step = f"vLLM's own arguments go after a recipe's name and --: RECIPE -- {first}"
    elif near:
        step = f"perhaps you meant {near}"
    else:
        step = "run the image without an argument to see what it can do"
    raise UsageError(f"{first!r} is neither a recipe, a verb nor a program here", next_step=step)


def _jobs(environ: Mapping[str, str], resident: float = 0.0) -> dict[str, str]:
    """The variable that limits compilers, and a line about it, where it is not set."""
    jobs = serve.compilers(environ, resident)
    if jobs:
        click.echo(f"note: {serve.remark(jobs)}", err=True)
    return jobs


def _check(rest: Sequence[str], places: Places) -> int:
    unknown = [word for word in rest if word not in ("--json", "--quick")]
    if unknown:
        raise UsageError(f"check takes no {unknown[0]!r}", next_step="check [--json] [--quick]")
    lines = check(places, quick="--quick" in rest)
    click.echo(report.as_json(lines) if "--json" in rest else report.as_text(lines))
    bad = any(line.state == report.FAIL for line in lines)
    return FindingsError.exit_code if bad else 0


def _show(rest: Sequence[str], places: Places) -> int:
    if not rest:
        click.echo("\n".join(about.recipe_list(_recipes(places))))
        return 0
    for word in rest:
        recipe = _recipe(word, places)
        if recipe is None:
            near = text.near(word, _names(places), cutoff=0.5)
            raise UsageError(
                f"there is no recipe {word!r}",
                next_step=f"perhaps you meant {near}" if near else "`recipes` lists them",
            )
        click.echo(about.recipe_text(recipe, _image(places)))
    return 0


def _recipe(word: str, places: Places) -> Recipe | None:
    """The recipe that a word names: one of the image, or a file that was mounted."""
    if word.endswith((".yaml", ".yml")) and Path(word).is_file():
        return load.load(Path(word))
    path = places.recipes / f"{word}.yaml"
    return load.load(path) if "/" not in word and path.is_file() else None


def _names(places: Places) -> list[str]:
    return sorted(path.stem for path in places.recipes.glob("*.yaml"))


def _recipes(places: Places) -> dict[str, Recipe]:
    return load.load_all(places.recipes)


def _image(places: Places) -> str:
    """The image's name for commands to copy: its tag, as the bundle is tagged by default."""
    ledger = ledgers.read(places.ledger)
    mode = "-quick" if ledger.mode == "quick" else ""
    return f"vllm-sm12x:{ledger.base_version}-{ledger.stack_id}{mode}"
