"""One module per verb: parse, call, print. Nothing else in the package prints."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from sm12x.core import declared
from sm12x.core.errors import UsageError
from sm12x.core.text import CONTROL, visible

_Command = TypeVar("_Command", bound=Callable[..., Any])


find_links_option = partial(
    click.option,
    "--find-links",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)


ca_file_option = click.option(
    "--ca-file",
    type=click.Path(path_type=Path, exists=True),
    envvar="REQUESTS_CA_BUNDLE",
    help="Certificates to trust with https.",
)


class Finite(click.FloatRange):
    """A number within bounds; ``nan`` would be within any, and JSON has no ``inf``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class JsonOption(click.Option):
    """``--json`` of a command; ``kind`` is what it then prints."""

    def __init__(self, *args: Any, kind: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._kind = kind

    @property
    def kind(self) -> Any:
        return pkgutil.resolve_name(self._kind) if isinstance(self._kind, str) else self._kind


def reports(kind: Any) -> Callable[[_Command], _Command]:
    """Give a command ``--json``, with which it prints a ``kind`` by ``print_json``.

    A text is module and name, "sm12x.wheel.compile.native:NativeRecord", of what is imported only
    where it is needed.
    """
    return click.option(
        "--json", "as_json", cls=JsonOption, kind=kind, is_flag=True, help="Print JSON."
    )


def print_json(report: object) -> None:
    """Print what ``reports`` says that the command, which is the one that runs, prints."""
    options = click.get_current_context().command.params
    kind = next(one.kind for one in options if isinstance(one, JsonOption))
    click.echo(declared.to_json(report, kind), nl=False)


def say(text: str) -> None:
    """Print a line on stderr about what is being done."""
    click.echo(text, err=True)


def usable(text: str) -> str:
    """Return ``text`` unchanged: a command or file content, which escapes would alter.

    Raises UsageError where it has a control character.
    """
    if character := CONTROL.search(text):
        line = text[text.rfind("\n", 0, character.start()) + 1 :].partition("\n")[0]
        raise UsageError(
            f"a control character would be in the command: {visible(line.strip())}",
            next_step="leave it out of the settings and arguments",
        )
    return text


def emit(as_json: bool, report: object, text: str) -> None:
    """Print ``report`` as JSON where that is asked for, and as ``text`` otherwise."""
    if as_json:
        print_json(report)
    else:
        click.echo(text, nl=False)
