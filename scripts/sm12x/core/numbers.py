"""Numbers with commas between them, as options of several commands take them."""

from __future__ import annotations

from typing import Any

import click

_MOST = 1 << 50


class Numbers(click.ParamType[Any]):
    """One number or several, greater than 0: "1,2,4"."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            numbers = tuple(self._kind(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 1,2,4", param, ctx)
        if not all(0 < number < _MOST for number in numbers):
            self.fail(f"{value!r} has a number out of range", param, ctx)
        return numbers
