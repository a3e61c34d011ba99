"""Two audit reports side by side: what a build changed for each library."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm12x.audit.model import LTO, NATIVE, NONE, PTX, UNKNOWN
from sm12x.audit.report import SCHEMA
from sm12x.core.errors import BadFileError
from sm12x.core.text import MIB

HEADER = ("module", "native on 12.0", "native on 12.1", "through PTX", "not at all", "MiB")
_ON_120, _ON_121 = "12.0", "12.1"


def load(path: Path) -> dict[str, Any]:
    """A report of `sm12x audit --json` that was judged for 12.0 and 12.1. Raises BadFileError."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']!r}")
        if not {_ON_120, _ON_121} <= set(found["devices"]):
            raise ValueError(f"devices {found['devices']!r}")
        found["subject"]
        for library in found["libraries"]:
            _units(library, _ON_120), library["path"], library["size"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise BadFileError(
            f"{path} is not an audit of 12.0 and 12.1: {error}",
            next_step="write it with `sm12x audit WHEEL --json --output FILE`",
        ) from None
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """A library before and after. Keys: "size" in bytes, and "<verdict> <device>" in units.

    A library that one report does not have counts as nothing in it.
    """

    path: str
    before: Counter[str]
    after: Counter[str]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Each library with device code in either report, by path, then the sums as "all"."""
    old, new = _libraries(before), _libraries(after)
    found = []
    total = Change(path="all", before=Counter(), after=Counter())
    for path in sorted({*old, *new}):
        pair = (old.get(path), new.get(path))
        if not any(library and _total(library) for library in pair):
            continue
        change = Change(path=path, before=_counts(pair[0]), after=_counts(pair[1]))
        total.before.update(change.before)
        total.after.update(change.after)
        found.append(change)
    return [*found, total]


def rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row for each entry of ``changes``, in translation units.

    Units that run differently on the two devices are shown for both, 12.0 first.
    """
    *libraries, total = changes(before, after)
    found = [(f"`{one.path}`", *_cells(one.before, one.after)) for one in libraries]
    return [*found, (total.path, *_cells(total.before, total.after))]


def _libraries(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {library["path"]: library for library in report["libraries"]}


def _units(library: Mapping[str, Any], device: str) -> Mapping[str, int]:
    units: Mapping[str, int] = library["runs"][device]["units"]
    return units


def _total(library: Mapping[str, Any]) -> int:
    return sum(_units(library, _ON_120).values())


def _counts(library: Mapping[str, Any] | None) -> Counter[str]:
    """Units by "<verdict> <device>", and the size in bytes."""
    if library is None:
        return Counter()
    found = Counter(
        {
            f"{verdict} {device}": number
            for device in (_ON_120, _ON_121)
            for verdict, number in _units(library, device).items()
        }
    )
    found["size"] = library["size"]
    return found


def _cells(before: Counter[str], after: Counter[str]) -> Sequence[str]:
    def shown(counts: Counter[str], *verdicts: str) -> str:
        both = [
            str(sum(counts[f"{verdict} {device}"] for verdict in verdicts))
            for device in (_ON_120, _ON_121)
        ]
        return "/".join(dict.fromkeys(both))

    def change(*verdicts: str) -> str:
        return _arrow(shown(before, *verdicts), shown(after, *verdicts))

    def native(device: str) -> str:
        return _arrow(str(before[f"{NATIVE} {device}"]), str(after[f"{NATIVE} {device}"]))

    sizes = [f"{counts['size'] / MIB:.1f}" for counts in (before, after)]
    return (
        native(_ON_120),
        native(_ON_121),
        change(PTX),
        change(LTO, NONE, UNKNOWN),
        _arrow(*sizes),
    )


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"
