"""Two audit reports side by side: what a build changed for each library, as a table and a picture.

The picture is bars of translation units, as an SVG without background and script. Its colours are
readable on white and on black; text follows the reader's colour scheme (prefers-color-scheme).
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm12x.audit import report
from sm12x.audit.model import LTO, NATIVE, NONE, PTX, UNKNOWN
from sm12x.audit.report import AuditReport, LibraryReport
from sm12x.core.errors import BadFileError
from sm12x.core.text import MIB

HEADER = ("module", "native on 12.0", "native on 12.1", "through PTX", "not at all", "MiB")
_ON_120, _ON_121 = "12.0", "12.1"


def load(path: Path) -> AuditReport:
    """Load a report of `sm12x audit --json` for 12.0 and 12.1. Raises BadFileError."""
    step = "write it with `sm12x audit WHEEL --json --output FILE`"
    audit = report.read(path, next_step=step)
    if not {_ON_120, _ON_121} <= set(audit.devices):
        raise BadFileError(
            f"{path} is not an audit of 12.0 and 12.1: devices {', '.join(audit.devices)}",
            next_step=step,
        )
    return audit


@dataclass(frozen=True, kw_only=True)
class _Change:
    """A library before and after. Keys: "size" in bytes, and "<verdict> <device>" in units.

    A library that is missing from one report counts as 0 there.
    """

    path: str
    before: Counter[str]
    after: Counter[str]


def _changes(before: AuditReport, after: AuditReport) -> list[_Change]:
    """List each library with device code in either report, by path, then the sums as "all"."""
    old, new = ({one.path: one for one in side.libraries} for side in (before, after))
    changes = []
    total = _Change(path="all", before=Counter(), after=Counter())
    for path in sorted({*old, *new}):
        pair = (old.get(path), new.get(path))
        if not any(library and sum(library.runs[_ON_120].units.values()) for library in pair):
            continue
        change = _Change(path=path, before=_counts(pair[0]), after=_counts(pair[1]))
        total.before.update(change.before)
        total.after.update(change.after)
        changes.append(change)
    return [*changes, total]


def rows(before: AuditReport, after: AuditReport) -> list[tuple[str, ...]]:
    """Return one row for each entry of ``_changes``, in translation units.

    Units that run differently on the two devices are shown for both, 12.0 first.
    """
    *libraries, total = _changes(before, after)
    table = [(f"`{one.path}`", *_cells(one.before, one.after)) for one in libraries]
    return [*table, (total.path, *_cells(total.before, total.after))]


def _counts(library: LibraryReport | None) -> Counter[str]:
    """Count units by "<verdict> <device>"; "size" is the size in bytes."""
    if library is None:
        return Counter()
    counts = Counter(
        {
            f"{verdict} {device}": number
            for device in (_ON_120, _ON_121)
            for verdict, number in library.runs[device].units.items()
        }
    )
    counts["size"] = library.size
    return counts


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


# Verdicts of a bar's part -> CSS class, label of its number, meaning.
_PARTS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    ((NATIVE,), "native", "native", "compiled for this GPU"),
    ((PTX,), "ptx", "PTX", "compiled by the driver at the first start"),
    ((LTO, NONE, UNKNOWN), "none", "none", "no code for this GPU: a call fails"),
)
_STYLE = """\
text { font-family: system-ui, -apple-system, "Segoe UI", Arial, sans-serif; font-size: 13px }
text { fill: #6e7781 }
.head { font-size: 15px; font-weight: 600 }
.small { font-size: 11px }
.native { fill: #2da44e } .ptx { fill: #d4a72c } .none { fill: #8c959f }
@media (prefers-color-scheme: light) { text { fill: #424a53 } }
@media (prefers-color-scheme: dark) { text { fill: #c9d1d9 } }"""
# Pixels.
_WIDTH = 860
_NAME, _LABEL, _BAR = 10, 175, 252
_BAR_WIDTH = 400
_BAR_HEIGHT, _LINE, _GAP = 13, 17, 9


def svg(before: AuditReport, after: AuditReport, *, title: str, made_by: str) -> str:
    """Draw the picture of two reports as ``load`` returns them.

    Both devices share a panel where every library runs alike on them, else each has its own.

    Args:
        title: the heading; the devices of a panel are added to it.
        made_by: the command that writes the file, for its first line.
    """
    changes = _changes(before, after)
    devices = ("12.0", "12.1")
    alike = all(_units(side, "12.0") == _units(side, "12.1") for side in _sides(changes))
    panels = [(devices[0], " and ".join(devices))] if alike else [(one, one) for one in devices]
    lines: list[str] = []
    top = 26
    for device, named in panels:
        lines.append(_text(_NAME, top, f"{title}, on {named}", "head"))
        for side, of in (("official", before), ("full build", after)):
            top += 16
            lines.append(_text(_NAME, top, f"{side}: {of.subject}", "small"))
        top += 22
        for _, kind, label, meaning in _PARTS:
            lines.append(_rect(_NAME, top - 10, 11, kind, height=11))
            lines.append(_text(_NAME + 18, top, f"{label}: {meaning}", "small"))
            top += 16
        top += 10
        for drawn, height in _rows(changes, device, top):
            lines += drawn
            top += height
        top += 18
    height = top - 12
    return "\n".join(
        (
            f"<!-- Made by `{html.escape(made_by)}`; do not edit. -->",
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" role="img">',
            f"<title>{html.escape(title)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            *lines,
            "</svg>\n",
        )
    )


def _rows(changes: list[_Change], device: str, top: int) -> Iterator[tuple[list[str], int]]:
    """Yield each row's elements and its height; the last one, of the sums, has no bars."""
    *libraries, total = changes
    largest = max((sum(_units(side, device)) for side in _sides(libraries)), default=1)
    for one in libraries:
        name = PurePosixPath(one.path).name.split(".", 1)[0]
        old, new = _units(one.before, device), _units(one.after, device)
        pairs = [("unchanged", old)] if old == new else [("official", old), ("full build", new)]
        drawn = [_text(_NAME, top + 11, name, "")]
        for number, (label, units) in enumerate(pairs):
            drawn += _bar(label, units, largest, top + number * _LINE)
        height = len(pairs) * _LINE + _GAP
        top += height
        yield drawn, height
    old, new = _units(total.before, device), _units(total.after, device)
    drawn = [
        _text(_NAME, top + 13, "all", ""),
        _text(_LABEL, top + 13, f"{_said(old)}  →  {_said(new)}", ""),
    ]
    yield drawn, _LINE + _GAP


def _bar(label: str, units: tuple[int, ...], largest: int, top: int) -> list[str]:
    drawn = [_text(_LABEL, top + 10, label, "small")]
    left = float(_BAR)
    for (_, kind, _, _), number in zip(_PARTS, units, strict=True):
        if number:
            width = number / largest * _BAR_WIDTH
            drawn.append(_rect(left, top, width, kind))
            left += width
    return [*drawn, _text(left + 8, top + 11, _said(units), "small")]


def _said(units: tuple[int, ...]) -> str:
    labels = [label for _, _, label, _ in _PARTS]
    return (
        ", ".join(f"{n} {label}" for n, label in zip(units, labels, strict=True) if n) or "no code"
    )


def _units(counts: Counter[str], device: str) -> tuple[int, ...]:
    """Units of each part of a bar."""
    return tuple(
        sum(counts[f"{verdict} {device}"] for verdict in verdicts) for verdicts, *_ in _PARTS
    )


def _sides(changes: list[_Change]) -> Iterator[Counter[str]]:
    for one in changes:
        yield one.before
        yield one.after


def _text(left: float, top: float, text: str, kind: str) -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{left:.1f}" y="{top:.1f}"{named}>{html.escape(text)}</text>'


def _rect(left: float, top: float, width: float, kind: str, *, height: int = _BAR_HEIGHT) -> str:
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height}"/>'
    )
