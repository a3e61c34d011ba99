"""TOML that is read key by key: each fault names its key, and no key is overlooked."""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm12x.core.errors import BadFileError

MACHINES = ("x86_64", "aarch64")


class Table:
    """A TOML table that knows its key path and remembers what was read."""

    def __init__(self, raw: Mapping[str, Any], path: Path, where: str) -> None:
        self._raw = raw
        self._path = path
        self._where = where
        self._read: set[str] = set()
        self._children: list[Table] = []

    def text(self, key: str) -> str:
        return str(self._get(key, str))

    def choice(self, key: str, known: Sequence[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise self._fault(key, f"is {value!r}, and not one of {', '.join(known)}")
        return value

    def integer(self, key: str) -> int:
        return int(self._get(key, int))

    def number(self, key: str) -> float:
        return float(self._get(key, (int, float)))

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._raw.get(key, default)
        self._read.add(key)
        if not isinstance(value, bool):
            raise self._fault(key, "is neither true nor false")
        return value

    def date(self, key: str) -> datetime.date:
        value = self._get(key, datetime.date)
        assert isinstance(value, datetime.date)  # noqa: S101 - _get has checked it
        return value

    def texts(self, key: str, *, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        if default is not None and key not in self._raw:
            return default
        values = self._get(key, list)
        if not all(isinstance(value, str) for value in values):
            raise self._fault(key, "is not a list of strings")
        return tuple(values)

    def optional_text(self, key: str) -> str:
        return self.text(key) if key in self._raw else ""

    def optional_texts(self, key: str) -> tuple[str, ...]:
        return self.texts(key) if key in self._raw else ()

    def table(self, key: str) -> Table:
        return self._child(self._get(key, dict), key)

    def tables(self, key: str) -> dict[str, Table]:
        """The sub-tables of ``key``, one a machine."""
        found: dict[str, Table] = {}
        for machine, raw in self._get(key, dict).items():
            if machine not in MACHINES:
                raise self._fault(f"{key}.{machine}", f"is not one of {', '.join(MACHINES)}")
            found[machine] = self._child(raw, f"{key}.{machine}")
        return found

    def entries(self, key: str) -> list[Table]:
        return [self._child(raw, f"{key}[{n}]") for n, raw in enumerate(self._get(key, list))]

    def optional_entries(self, key: str) -> list[Table]:
        return self.entries(key) if key in self._raw else []

    def finish(self) -> None:
        """Raise if a key was never asked for: a typing mistake must not be ignored."""
        for key in self._raw:
            if key not in self._read:
                near = difflib.get_close_matches(key, self._read, n=1)
                hint = f"; perhaps you meant {near[0]}" if near else ""
                raise self._fault(key, f"is not a known key{hint}")
        for child in self._children:
            child.finish()

    def _child(self, raw: Any, key: str) -> Table:
        if not isinstance(raw, dict):
            raise self._fault(key, "is not a table")
        child = Table(raw, self._path, f"{self._where}{key}.")
        self._children.append(child)
        return child

    def _get(self, key: str, kind: type | tuple[type, ...]) -> Any:
        if key not in self._raw:
            raise self._fault(key, "is missing")
        self._read.add(key)
        value = self._raw[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._fault(key, f"has the wrong type ({type(value).__name__})")
        return value

    def _fault(self, key: str, what: str) -> BadFileError:
        return BadFileError(
            f"{self._path}: {self._where}{key} {what}",
            next_step="mend that key; another base.toml shows the layout",
        )
