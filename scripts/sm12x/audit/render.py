"""The audit as text for a person."""

from __future__ import annotations

import io
import posixpath
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from sm12x.audit.model import (
    DEVICES,
    HOST,
    MIXED,
    NATIVE,
    NONE,
    PTX,
    UNKNOWN,
    Audit,
    Device,
    LibraryAudit,
)
from sm12x.audit.policy import Judgement

WIDTH = 100
_MIB = 1024**2
# Names of libraries without device code that are worth listing; an image has hundreds.
_LISTED = 12
_MEANING = {
    NATIVE: "compiled for the device: runs as it is",
    PTX: "compiled by the driver at start from PTX: the first launch is slower; the driver keeps "
    "the result in its cache, so let that outlive the container",
    NONE: "holds code for other GPUs only: calling it fails with `no kernel image is available`",
    MIXED: "its translation units differ: see their numbers",
    UNKNOWN: "could not be read, so nothing is known of how it runs",
}


def text(
    audit: Audit,
    judgement: Judgement | None = None,
    devices: Sequence[Device] = DEVICES,
    *,
    width: int = WIDTH,
) -> str:
    """The report: code in each library, how it runs, what that means, and the judgement."""
    with_code = [library for library in audit.libraries if library.loaded or library.unknown]
    host = [library for library in audit.libraries if not (library.loaded or library.unknown)]
    size = sum(library.size for library in audit.libraries) / _MIB
    parts = [
        f"{audit.subject}: {_number(len(audit.libraries), 'library', 'libraries')}, "
        f"{size:.0f} MiB; {len(with_code)} with device code"
    ]
    if with_code:
        parts.append(_draw(_code(with_code), width))
        parts.append(_draw(_runs(with_code, devices), width))
        parts.append("\n".join(_wrap(_total(with_code, device), width) for device in devices))
        parts.append(_meaning(with_code, devices, width))
    if host:
        parts.append(_wrap(f"No device code: {_names([entry.path for entry in host])}", width))
    faults = [f"{entry.path}: {fault}" for entry in audit.libraries for fault in entry.unknown]
    if faults:
        parts.append("\n".join(["Could not be read:", *_bullets(faults, width)]))
    if judgement is not None:
        parts.append(_judged(judgement, width))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _code(libraries: Sequence[LibraryAudit]) -> Table:
    """Cubins and PTX. Targets of the 12.x family that none of the libraries has get no column."""
    targets = sorted({name for entry in libraries for name in entry.cubins if _is_family(name)})
    folder = _common_folder(libraries)
    table = _table("Code in each library: cubins by target, and PTX")
    table.add_column(_heading(folder), overflow="fold")
    for name in ("MiB", *(targets or ["12.x"]), "other", "PTX"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in libraries:
        family = [entry.cubins.get(name, 0) for name in targets] or [0]
        other = sum(entry.cubins.values()) - sum(family)
        numbers = (*family, other, sum(entry.ptx.values()))
        table.add_row(entry.path[len(folder) :], f"{entry.size / _MIB:.1f}", *map(_dash, numbers))
    return table


def _common_folder(libraries: Sequence[LibraryAudit]) -> str:
    """The folder that holds all of them, "" if none does: leaves room for the rest of the path."""
    common = posixpath.commonpath([posixpath.dirname(entry.path) for entry in libraries])
    return f"{common.rstrip('/')}/" if common else ""


def _heading(folder: str) -> str:
    return f"library under {folder}" if folder else "library"


def _is_family(target: str) -> bool:
    return target.startswith("12.")


def _runs(libraries: Sequence[LibraryAudit], devices: Sequence[Device]) -> Table:
    """Verdicts, each with its numbers of translation units: native, through PTX, not at all."""
    folder = _common_folder(libraries)
    table = _table("How each runs: verdict; translation units native/through PTX/not at all")
    table.add_column(_heading(folder), overflow="fold")
    for device in devices:
        table.add_column(f"on {device}", no_wrap=True)
        table.add_column("units", justify="right", no_wrap=True)
    for entry in libraries:
        cells: list[str] = []
        for device in devices:
            units = entry.units_on(device)
            cells.append(entry.verdict(device))
            counts = f"{units[NATIVE]}/{units[PTX]}/{units[NONE]}"
            cells.append("?" if entry.unknown else counts)
        table.add_row(entry.path[len(folder) :], *cells)
    return table


def _total(libraries: Sequence[LibraryAudit], device: Device) -> str:
    total: Counter[str] = Counter()
    for entry in libraries:
        total.update(entry.units_on(device))
    unread = sum(bool(entry.unknown) for entry in libraries)
    rest = f"; {_number(unread, 'library', 'libraries')} could not be read" if unread else ""
    return (
        f"On {device}: of {_number(sum(total.values()), 'translation unit', 'translation units')} "
        f"{total[NATIVE]} run natively, {total[PTX]} through PTX, {total[NONE]} not at all{rest}."
    )


def _meaning(libraries: Sequence[LibraryAudit], devices: Sequence[Device], width: int) -> str:
    seen = {entry.verdict(device) for entry in libraries for device in devices}
    if MIXED in seen:
        seen |= {
            verdict
            for entry in libraries
            for device in devices
            for verdict, number in entry.units_on(device).items()
            if number
        }
    seen.discard(HOST)
    return "\n".join(
        _wrap(f"{verdict:<9}{meaning}", width, indent=9)
        for verdict, meaning in _MEANING.items()
        if verdict in seen
    )


def _judged(judgement: Judgement, width: int) -> str:
    if judgement.offenders:
        number = _number(len(judgement.offenders), "offence", "offences")
        lines = [f"Policy `{judgement.policy}`: broken, {number}:"]
        lines += _bullets(map(str, judgement.offenders), width)
    else:
        lines = [f"Policy `{judgement.policy}`: passed."]
    if judgement.unasked:
        told = (
            "No ledger is with it: every library counts as the official one (--ledger names one)."
        )
        lines.append(_wrap(told, width))
    if judgement.accepted:
        lines.append("Accepted though not native throughout:")
        lines += _bullets(
            (f"{_names(entry.paths)}: {entry.reason}" for entry in judgement.accepted), width
        )
    return "\n".join(lines)


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _draw(table: Table, width: int) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _dash(number: int) -> str:
    return str(number) if number else "-"


def _number(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _names(paths: Sequence[str]) -> str:
    if len(paths) <= _LISTED:
        return ", ".join(paths)
    return f"{', '.join(paths[:_LISTED])} and {len(paths) - _LISTED} more"


def _wrap(sentence: str, width: int, *, indent: int = 2) -> str:
    return textwrap.fill(sentence, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _bullets(sentences: Iterable[str], width: int) -> list[str]:
    return [_wrap(f"- {sentence}", width) for sentence in sentences]
