"""The summary at the end of `sm12x bundle`: as text, and as JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm12x.audit.report import AuditReport
from sm12x.core import text as texts
from sm12x.image.bundle.record import AUDIT_TEXT, Record
from sm12x.image.engine.engine import Engine
from sm12x.stack.model import base as bases
from sm12x.wheel import flashinfer as ahead
from sm12x.wheel.ledger import Ledger
from sm12x.wheel.selection import Offer

# How code runs, in the order that is shown; audit.txt says what each means.
_KINDS = ("native", "ptx", "none", "lto", "unknown")


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A finished bundle. ``unchanged``: nothing was built, all that ``record`` names was there.

    ``offer`` is what full mode would add to a quick bundle.
    """

    record: Record
    ledger: Ledger
    audit: AuditReport
    folder: Path
    engine: Engine
    unchanged: bool
    offer: Offer | None = None


def text(bundle: Bundle, recipes: Sequence[str] = (), *, details: bool = False) -> str:
    """Return the summary; with ``details`` every patch, module and library.

    ``recipes`` are the names of those that can be served.
    """
    record, ledger = bundle.record, bundle.ledger
    content = [_patches(ledger), modules(ledger)] if details else [_in_short(ledger)]
    content += [_code(bundle, details=details), _figures(bundle)]
    parts = [
        _head(record, unchanged=bundle.unchanged),
        *(content if details else ["\n".join(content)]),
        _full(bundle.offer, record) if bundle.offer else "",
        _flashinfer(record),
        _output(record, bundle.folder, details=details),
        _next(bundle, recipes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


@dataclass(frozen=True, kw_only=True)
class BundleReport(Record):
    """The result of `sm12x bundle --json`: the record, where it lies, and what full mode adds."""

    folder: Path
    unchanged: bool
    full: Offer | None = None


def _head(record: Record, *, unchanged: bool) -> str:
    how = "nothing has changed since it was built" if unchanged else "built"
    return (
        f"vLLM {record.version} + stack {record.stack_id}, {record.mode} mode, {record.machine}, "
        f"{record.arch_list}: {how}"
    )


def _patched(ledger: Ledger) -> str:
    count, paths = len(ledger.patches), len(ledger.files)
    return f"Patched: {texts.counted(count, 'patch')}, {texts.counted(paths, 'file')} of the wheel"


def _in_short(ledger: Ledger) -> str:
    """Return patches and modules in a line or two each."""
    compiled = [entry for entry in ledger.libraries if entry.origin == "compiled"]
    names = ", ".join(PurePosixPath(entry.path).name.partition(".")[0] for entry in compiled)
    lines = [
        _patched(ledger),
        _wrapped(f"Compiled here for {ledger.arch_list}: {names or 'nothing'}", indent=0),
    ]
    if idle := _idle(ledger):
        lines.append(f"Native code of {texts.counted(len(idle), 'patch')} is not in effect")
    if lost := sum(len(entry.lost) for entry in compiled):
        lines.append(f"{texts.counted(lost, 'op')} of the official modules are missing")
    if ledger.replaced:
        lines.append(f"Compiled with {', '.join(ledger.replaced)} (--accept-patch-level)")
    return "\n".join(lines)


def _patches(ledger: Ledger) -> str:
    lines = [_patched(ledger)]
    for patch in ledger.patches:
        native = f"; its native code: {patch.native}" if patch.native else ""
        lines += [f"  {patch.name}", _wrapped(patch.subject)]
        lines.append(_wrapped(f"now: {patch.state}{native}"))
        lines.append(_wrapped(f"upstream: {patch.upstream}"))
    return "\n".join(lines)


def modules(ledger: Ledger) -> str:
    """List the compiled modules, the official ones with the reason, and the missing ops."""
    compiled = [entry for entry in ledger.libraries if entry.origin == "compiled"]
    rows = [
        [
            entry.path,
            texts.size(entry.size),
            f"official {texts.size(entry.official_size)}" if entry.official_size else "new",
            f"{len(entry.ops)} ops" if entry.ops else "",
        ]
        for entry in compiled
    ]
    count = texts.counted(len(compiled), "module") if compiled else "nothing"
    lines = [f"Compiled here for {ledger.arch_list}: {count}"]
    lines += [texts.columns(rows, indent=2)] if rows else []
    reasons: dict[str, list[str]] = {}
    for entry in ledger.libraries:
        if entry.reason:
            reasons.setdefault(entry.reason, []).append(entry.path)
    lines += ["Kept from the official wheel"] if reasons else []
    for reason, paths in reasons.items():
        lines.append(_wrapped(f"{', '.join(paths)}: {reason}", indent=2))
    if ledger.replaced:
        lines.append(f"Compiled with {', '.join(ledger.replaced)} (--accept-patch-level)")
    for entry in compiled:
        if entry.lost:
            what = f"{entry.path} lacks {texts.counted(len(entry.lost), 'op')}"
            lines.append(_wrapped(f"{what}: {', '.join(entry.lost)}", indent=2))
    if idle := _idle(ledger):
        remedy = "compiled by make bundle BUILD=full" if ledger.mode == "quick" else "see above"
        lines.append(f"Patches whose native code is not in effect, or only in part ({remedy})")
        lines += [f"  {name}" for name in idle]
    return "\n".join(lines)


def _idle(ledger: Ledger) -> list[str]:
    return [patch.name for patch in ledger.patches if patch.native.startswith("not ")]


def _code(bundle: Bundle, *, details: bool) -> str:
    """Return how many units run how on each device; audit.txt has each library."""
    lines = ["Machine code of the wheel, in translation units"]
    for device in bundle.audit.devices:
        totals: Counter[str] = Counter()
        for library in bundle.audit.libraries:
            if library.runs:
                totals.update(library.runs[device].units)
        parts = ", ".join(f"{totals[kind]} {kind}" for kind in _KINDS if totals[kind])
        lines.append(f"  all on {device}: {parts} of {totals.total()}")
    if details:
        lines.append(f"  each library, and what that means: {bundle.folder / AUDIT_TEXT}")
    return "\n".join(lines)


def _figures(bundle: Bundle) -> str:
    record = bundle.record
    image = f", image {texts.size(record.image_size)}" if record.tags else ""
    lines = [f"Sizes: wheel {texts.size(record.wheel_size)}{image}"]
    if not bundle.unchanged:
        steps = [f"{name} {texts.duration(value)}" for name, value in record.seconds.items()]
        whole = texts.duration(sum(record.seconds.values()))
        lines.append(f"Times: {', '.join(steps)}; together {whole}")
    return "\n".join(lines)


def _full(offer: Offer, record: Record) -> str:
    """Render what full mode would add to this bundle, and how long it takes here."""
    first, *rest = offer.steps
    count = texts.counted(len(first.modules), "more module", "more modules")
    later = "; more where further sources are given" if rest else ""
    return f"Full mode compiles {count}, {offer.figures}{later}\n  {_bundle(record, 'BUILD=full')}"


def _bundle(record: Record, words: str) -> str:
    """The command for another bundle of this base."""
    base = f"BASE={record.version} " if record.version != bases.default() else ""
    return f"make bundle {base}{words}"


def _flashinfer(record: Record) -> str:
    """Say whether a server's first start compiles kernels, and how to avoid that."""
    entries = bases.load(record.version).flashinfer
    if not entries or not record.tags:
        return ""
    count = texts.counted(len(entries), "module")
    if record.flashinfer:
        return f"FlashInfer: {count} compiled ahead of time for {ahead.targets(record.flashinfer)}"
    seconds = texts.duration(sum(module.cpu_seconds for module in entries))
    return (
        f"FlashInfer: {count} that recipes need can be compiled ahead of time ({seconds} of CPU);\n"
        "  else the first start of a server compiles what it uses\n"
        f"  {_bundle(record, 'ARGS=--flashinfer')}"
    )


def _output(record: Record, folder: Path, *, details: bool) -> str:
    lines = [
        "Output",
        f"  {folder}/{record.wheel}",
        "  beside it: ledger.json, audit.json, audit.txt",
    ]
    if record.tags:
        lines += [f"  image {tag}" for tag in record.tags]
    if record.tags and details:
        lines.append(f"  image id {record.image_id[:12]}, made with {record.engine}")
    if details:
        lines.append(f"  base image {record.base_image}, {record.base_digest}")
    else:
        lines.append("  each patch and module: sm12x bundle --details")
    return "\n".join(lines)


def _next(bundle: Bundle, recipes: Sequence[str]) -> str:
    record = bundle.record
    if not record.tags:
        return f"Next\n  pip install {shlex.quote(f'{bundle.folder}/{record.wheel}')}"
    image, folder = record.tags[0], str(bundle.folder)
    lines = [
        "Next",
        "  check the image, no GPU needed:",
        f"    {bundle.engine.run_hint(image, 'check', folder=folder)}",
        "  see its recipes:",
        f"    {bundle.engine.run_hint(image, folder=folder)}",
    ]
    if recipes:
        hint = bundle.engine.run_hint(image, recipes[0], gpus=True, folder=folder)
        lines += ["  serve, on a machine with the GPUs:"]
        lines += [f"    {line}" for line in hint.splitlines()]
    return "\n".join(lines)


def _wrapped(words: str, *, indent: int = 4) -> str:
    first = " " * indent
    return texts.paragraph(words, first=first, rest=f"{first}  ")
