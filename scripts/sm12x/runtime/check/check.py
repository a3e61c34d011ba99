"""`check`: verifies the image without a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import BadFileError
from sm12x.core.progress import spinner
from sm12x.recipes import load
from sm12x.recipes.model import Recipe
from sm12x.runtime.check import compiler, content, machinecode, native, versions
from sm12x.runtime.check.report import Line, Topic
from sm12x.runtime.places import Places, require_temporary
from sm12x.wheel import ledger as ledgers


def check(places: Places, *, quick: bool = False) -> list[Line]:
    """Run every check and return all lines, passed and failed (three minutes on two cores).

    ``quick`` omits the checks that compile, nvcc and Triton's kernels: two of the three minutes.

    Raises:
        BadFileError: there is no ledger, so there is nothing to compare with, or no folder for
            temporary files.
    """
    ledger = ledgers.read(places.ledger)
    lines: list[Line] = []
    with scratch() as folder:
        with spinner("versions"):
            try:
                lines += versions.check(ledger, places.lock, versions.installed(places.site))
            except BadFileError as error:
                lines.append(versions.TOPIC.failed(error.message, error.next_step))
        with spinner("hashes of files"):
            lines += content.check(ledger, places.site)
        lines += content.check_modes(places.system)
        with spinner("machine code"):
            lines += machinecode.check(ledger, places.site)
        ask = native.prober(folder)
        driver, driver_lines = native.check_driver(places, ask, _ldconfig())
        lines += driver_lines
        with spinner("native modules"):
            lines += native.check_modules(ledger, places, driver, ask)
        if ledger.extras:
            with spinner("the extras' modules"):
                lines += native.check_extras(ledger, driver, ask)
        with spinner("FlashInfer's modules"):
            lines += machinecode.check_flashinfer(places, driver, folder)
        recipes, recipe_lines = _recipes(places.recipes)
        lines += recipe_lines
        with spinner("vLLM's argument parser on every recipe, about 20 s"):
            lines += native.check_arguments(recipes, driver, ask)
        if quick:
            reason = "nvcc and Triton's kernels were not tried (--quick)"
            return [*lines, compiler.TOPIC.noted(reason)]
        with spinner("the compiler"):
            lines += compiler.check(places, folder)
        with spinner("Triton kernels, about two minutes on two cores"):
            lines += compiler.check_kernels(places, ask)
    return lines


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for temporary files, or an error that says how to give the container one."""
    require_temporary()
    with tempfile.TemporaryDirectory(prefix="sm12x-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def _recipes(folder: Path) -> tuple[dict[str, Recipe], list[Line]]:
    topic = Topic("recipes", "correct that line")
    recipes, lines = {}, []
    for path in sorted(folder.glob("*.yaml")):
        recipe, faults = load.inspect(path)
        lines += [topic.failed(str(fault)) for fault in faults]
        if recipe and not faults:
            recipes[recipe.key] = recipe
    return recipes, lines


def _ldconfig() -> str:
    # A normal user's PATH often lacks /sbin.
    for name in ("ldconfig", "/sbin/ldconfig", "/usr/sbin/ldconfig"):
        if process.which(name):
            return process.run([name, "-p"], check=False).stdout
    return ""
