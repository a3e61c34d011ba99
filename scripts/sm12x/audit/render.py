"""The audit as text for a person."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from sm12x.audit.model import (
    DEVICES,
    HOST,
    LTO,
    MIXED,
    NATIVE,
    NONE,
    PTX,
    UNKNOWN,
    Audit,
    Device,
    LibraryAudit,
    compiles_on,
)
from sm12x.audit.policy import Judgement
from sm12x.core import text as texts
from sm12x.core.cudaarch import CudaArch

WIDTH = texts.WIDTH
# Names of libraries without device code that are worth listing; an image has hundreds.
_LISTED = 12
# Columns of PTX, and findings, beyond which they are summed up.
_PTX_COLUMNS, _FINDINGS = 5, 40
# How many names are listed before the rest is only counted.
_FEW = 3
# Files that are nothing but code: a package of them has thousands in one folder.
_BARE = (".cubin", ".fatbin", ".ptx")
_MEANING = {
    NATIVE: "compiled for the device: runs as it is",
    PTX: "compiled by the driver at start from PTX: the first launch is slower; the driver keeps "
    "the result in its cache, so let that outlive the container",
    LTO: "LTO-IR alone: runs only if the library links it for the device at run time (nvJitLink), "
    "which the file does not tell",
    NONE: "holds code for other GPUs only: a call fails with `no kernel image is available`; a "
    "library that chooses by device may never make that call",
    MIXED: "its translation units differ: see their numbers",
    UNKNOWN: "could not be read, so nothing is known of how it runs",
}

_NO_FAILURE = (
    "A unit without code for a device fails only if it is called there; its library may never call "
    "it on 12.x."
)


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A library, or a folder's files of bare code together. ``size`` is in bytes."""

    path: str
    libraries: tuple[LibraryAudit, ...]

    @property
    def size(self) -> int:
        return sum(library.size for library in self.libraries)

    def count(self, of: Callable[[LibraryAudit], Mapping[str, int]]) -> Counter[str]:
        counts: Counter[str] = Counter()
        for library in self.libraries:
            counts.update(of(library))
        return counts

    def verdict(self, device: Device) -> str:
        verdicts = {library.verdict(device) for library in self.libraries}
        return verdicts.pop() if len(verdicts) == 1 else UNKNOWN if UNKNOWN in verdicts else MIXED


def text(
    audit: Audit,
    judgement: Judgement | None = None,
    devices: Sequence[Device] = DEVICES,
    *,
    width: int = WIDTH,
) -> str:
    """Render the report: each library's code, how it runs, what that means, the judgement."""
    shown = [entry for entry in audit.libraries if _is_shown(entry)]
    host = [entry for entry in audit.libraries if not _is_shown(entry)]
    size = sum(library.size for library in audit.libraries) / texts.MIB
    parts = [
        f"{audit.subject}: {texts.counted(len(audit.libraries), 'library')}, "
        f"{size:.0f} MiB; {len(shown)} with device code"
    ]
    if shown:
        rows = _rows(shown)
        parts.append(texts.draw(_code(rows, devices), width))
        parts.append(texts.draw(_runs(rows, devices), width))
        parts.append("\n".join(_sentence(_total(shown, device), width) for device in devices))
        parts.append(_meaning(shown, devices, width))
    if host:
        parts.append(
            _sentence(
                f"No device code: {texts.first_of([entry.path for entry in host], _LISTED)}", width
            )
        )
    faults = [f"{entry.path}: {fault}" for entry in audit.libraries for fault in entry.unknown]
    if faults:
        parts.append("\n".join(["Could not be read:", *texts.bullets(faults, width)]))
    unloadable = [f"{entry.path}: {entry.unloadable}" for entry in shown if entry.unloadable]
    if unloadable:
        parts.append("\n".join(["Cannot be loaded:", *texts.bullets(unloadable, width)]))
    own = [entry.path for entry in shown if entry.embedded]
    if own:
        label = "Code that the library selects and loads itself, each piece counted as a unit"
        parts.append(_sentence(f"{label}: {texts.first_of(own, _LISTED)}", width))
    if judgement is not None:
        parts.append(_judged(judgement, width))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _is_shown(entry: LibraryAudit) -> bool:
    return bool(entry.has_code or entry.unknown or entry.unloadable)


def _rows(libraries: Sequence[LibraryAudit]) -> list[_Row]:
    """One row per library; many files of bare code of one kind in one folder share theirs."""
    groups: dict[str, list[LibraryAudit]] = {}
    for entry in libraries:
        folder, suffix = posixpath.dirname(entry.path), posixpath.splitext(entry.path)[1]
        bare = f"{posixpath.join(folder, '*')}{suffix}" if suffix in _BARE else entry.path
        groups.setdefault(bare, []).append(entry)
    rows = []
    for name, group in groups.items():
        if len(group) > _LISTED:
            rows.append(_Row(path=f"{name} ({len(group)} files)", libraries=tuple(group)))
        else:
            rows += (_Row(path=entry.path, libraries=(entry,)) for entry in group)
    return rows


def _code(rows: Sequence[_Row], devices: Sequence[Device]) -> Table:
    """Tabulate cubins and PTX. A target of the 12.x family without code gets no column."""
    cubins = [row.count(lambda entry: entry.cubins) for row in rows]
    ptx = [row.count(lambda entry: entry.ptx) for row in rows]
    lto = [row.count(lambda entry: entry.lto).total() for row in rows]
    targets = sorted({name for counts in cubins for name in counts if _is_family(name)})
    virtual = sorted({name for counts in ptx for name in counts}, key=CudaArch.parse)
    named = virtual if len(virtual) <= _PTX_COLUMNS else virtual[-_PTX_COLUMNS:]
    folder = _common_folder(rows)
    table = _table("Code in each library: cubins by target, and PTX by target")
    table.add_column(_heading(folder), overflow="fold")
    for name in ("MiB", *(targets or ["12.x"]), "other"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in named or ["-"]:
        table.add_column(_ptx_heading(name, devices), justify="right", no_wrap=True)
    if named != virtual:
        table.add_column("PTX\nolder", justify="right", no_wrap=True)
    if any(lto):
        table.add_column("LTO-IR", justify="right", no_wrap=True)
    for row, code, counts, linked in zip(rows, cubins, ptx, lto, strict=True):
        family = [code[name] for name in targets] or [0]
        numbers = [*family, code.total() - sum(family), *(counts[name] for name in named or ["-"])]
        if named != virtual:
            numbers.append(counts.total() - sum(counts[name] for name in named))
        if any(lto):
            numbers.append(linked)
        table.add_row(row.path[len(folder) :], f"{row.size / texts.MIB:.1f}", *map(_dash, numbers))
    return table


def _ptx_heading(target: str, devices: Sequence[Device]) -> str:
    if target == "-":
        return "PTX"
    runs = any(compiles_on(CudaArch.parse(target), device) for device in devices)
    return f"PTX\n{target}" + ("" if runs else "\nnever")


def _common_folder(rows: Sequence[_Row]) -> str:
    """The folder that holds all of them, "" if none does: leaves room for the rest of the path."""
    folders = [posixpath.dirname(row.path) for row in rows]
    # A zip may hold "/a.so" beside "b.so".
    mixed = len({posixpath.isabs(folder) for folder in folders}) > 1
    common = "" if mixed else posixpath.commonpath(folders)
    return f"{common.rstrip('/')}/" if common else ""


def _heading(folder: str) -> str:
    return f"library under {folder}" if folder else "library"


def _is_family(target: str) -> bool:
    return target.startswith("12.")


def _runs(rows: Sequence[_Row], devices: Sequence[Device]) -> Table:
    """Verdicts, each with its numbers of translation units: native, through PTX, not at all."""
    folder = _common_folder(rows)
    table = _table("How each runs: verdict; translation units native/through PTX/not at all")
    table.add_column(_heading(folder), overflow="fold")
    for device in devices:
        table.add_column(f"on {device}", no_wrap=True)
        table.add_column("units", justify="right", no_wrap=True)
    for row in rows:
        cells: list[str] = []
        for device in devices:
            units = row.count(lambda entry, device=device: entry.units_on(device))  # type: ignore[misc]
            cells.append(row.verdict(device))
            lto = f"+{units[LTO]} LTO" if units[LTO] else ""
            counts = f"{units[NATIVE]}/{units[PTX]}/{units[NONE]}{lto}"
            cells.append("?" if any(entry.unknown for entry in row.libraries) else counts)
        table.add_row(row.path[len(folder) :], *cells)
    return table


def _total(libraries: Sequence[LibraryAudit], device: Device) -> str:
    total: Counter[str] = Counter()
    for entry in libraries:
        total.update(entry.units_on(device))
    unread = sum(bool(entry.unknown) for entry in libraries)
    rest = f"; {texts.counted(unread, 'library')} could not be read" if unread else ""
    lto = f", {total[LTO]} if linked at run time" if total[LTO] else ""
    return (
        f"On {device}: of {texts.counted(sum(total.values()), 'translation unit')} "
        f"{total[NATIVE]} run natively, {total[PTX]} through PTX{lto}, {total[NONE]} not at all"
        f"{rest}."
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
        texts.paragraph(meaning, width, first=f"{verdict:<9}", rest=" " * 9)
        for verdict, meaning in _MEANING.items()
        if verdict in seen
    )


def _judged(judgement: Judgement, width: int) -> str:
    if judgement.offenders:
        number = texts.counted(len(judgement.offenders), "finding")
        lines = [f"Policy `{judgement.name}`: not met, {number}:"]
        lines += texts.bullets(_findings(judgement), width)
        if any(offender.about_units for offender in judgement.offenders):
            lines.append(_sentence(_NO_FAILURE, width))
    else:
        lines = [f"Policy `{judgement.name}`: passed."]
    if judgement.unasked:
        note = (
            "No ledger was found: every library is judged as an official one (give --ledger FILE)."
        )
        lines.append(_sentence(note, width))
    if judgement.accepted:
        lines.append("Accepted though not native throughout:")
        lines += texts.bullets(
            (
                f"{texts.first_of(entry.paths, _LISTED)}: {entry.reason}"
                for entry in judgement.accepted
            ),
            width,
        )
    return "\n".join(lines)


def _findings(judgement: Judgement) -> list[str]:
    """Each finding; where they are many, those that say the same together."""
    if len(judgement.offenders) <= _FINDINGS:
        return [str(offender) for offender in judgement.offenders]
    groups: dict[tuple[str, str], list[str]] = {}
    for offender in judgement.offenders:
        where = f" on {offender.device}" if offender.device else ""
        groups.setdefault((where, offender.message), []).append(offender.path)
    return [
        f"{texts.counted(len(paths), 'file')}{where}: {message}: {texts.first_of(paths, _FEW)}"
        if len(paths) > 1
        else f"{paths[0]}{where}: {message}"
        for (where, message), paths in groups.items()
    ]


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _dash(number: int) -> str:
    return str(number) if number else "-"


def _sentence(words: str, width: int) -> str:
    return texts.paragraph(words, width, rest="  ")
