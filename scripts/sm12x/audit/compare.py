"""Two audit reports side by side: what a build changed for each library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.audit import report
from sm12x.audit.model import LTO, NATIVE, NONE, PTX, UNKNOWN
from sm12x.audit.report import AuditReport, LibraryReport
from sm12x.core.errors import BadFileError
from sm12x.core.text import MIB

HEADER = ("module", "native on 12.0", "native on 12.1", "through PTX", "not at all", "MiB")
_ON_120, _ON_121 = "12.0", "12.1"


def load(path: Path) -> AuditReport:
    """A report of `sm12x audit --json` that was judged for 12.0 and 12.1. Raises BadFileError."""
    step = "write it with `sm12x audit WHEEL --json --output FILE`"
    found = report.read(path, next_step=step)
    if not {_ON_120, _ON_121} <= set(found.devices):
        raise BadFileError(
            f"{path} is not an audit of 12.0 and 12.1: devices {', '.join(found.devices)}",
            next_step=step,
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """A library before and after. Keys: "size" in bytes, and "<verdict> <device>" in units.

    A library that one report does not have counts as nothing in it.
    """

    path: str
    before: Counter[str]
    after: Counter[str]


def changes(before: AuditReport, after: AuditReport) -> list[Change]:
    """Each library with device code in either report, by path, then the sums as "all"."""
    old, new = ({one.path: one for one in side.libraries} for side in (before, after))
    found = []
    total = Change(path="all", before=Counter(), after=Counter())
    for path in sorted({*old, *new}):
        pair = (old.get(path), new.get(path))
        if not any(library and sum(library.runs[_ON_120].units.values()) for library in pair):
            continue
        change = Change(path=path, before=_counts(pair[0]), after=_counts(pair[1]))
        total.before.update(change.before)
        total.after.update(change.after)
        found.append(change)
    return [*found, total]


def rows(before: AuditReport, after: AuditReport) -> list[tuple[str, ...]]:
    """One row for each entry of ``changes``, in translation units.

    Units that run differently on the two devices are shown for both, 12.0 first.
    """
    *libraries, total = changes(before, after)
    found = [(f"`{one.path}`", *_cells(one.before, one.after)) for one in libraries]
    return [*found, (total.path, *_cells(total.before, total.after))]


def _counts(library: LibraryReport | None) -> Counter[str]:
    """Units by "<verdict> <device>", and the size in bytes."""
    if library is None:
        return Counter()
    found = Counter(
        {
            f"{verdict} {device}": number
            for device in (_ON_120, _ON_121)
            for verdict, number in library.runs[device].units.items()
        }
    )
    found["size"] = library.size
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
