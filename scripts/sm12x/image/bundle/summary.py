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
from sm12x.image.engine.engine import Engine, Layer
from sm12x.stack.model import base as bases
from sm12x.wheel import flashinfer as ahead
from sm12x.wheel.ledger import Ledger
from sm12x.wheel.selection import Offer

# Layers below this add up to one line.
_SMALL = 10 * texts.MIB

_MEANING = {
    "native": "runs as compiled for the device",
    "ptx": "compiled by the driver at the first start, kept in its cache",
    "none": "code for other GPUs only: calling it fails; audit.txt says why that is accepted",
    "lto": "LTO-IR alone: runs only where the library links it at run time",
    "unknown": "could not be read",
}
# What made a layer, by a word of its instruction, the first that fits.
_LAYER_NAMES = (
    ("apt-get install", "Debian packages: Python, g++"),
    ("requirements.lock --", "the release's locked closure: torch, CUDA libraries"),
    ("--requirement /opt/sm12x/requirements.lock", "the locked closure: torch, CUDA libraries"),
    ("sm12x build toolchain", "CUDA_HOME: nvcc and its tools"),
    ("/flashinfer/data/aot", "FlashInfer's modules, compiled ahead of time"),
    ("/wheel/*.whl", "the patched vLLM wheel"),
    ("sm12x build stand-in", "the sm12x package, the stand-in libcuda"),
    ("ADD file", "base image"),
    ("ADD", "base image"),
)


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
    """Return the summary; with ``details`` every patch, module, library and layer.

    ``recipes`` are the names of those that can be served.
    """
    record, ledger = bundle.record, bundle.ledger
    full = bundle.offer
    parts = [
        _head(record, unchanged=bundle.unchanged),
        _patches(ledger) if details else "",
        modules(ledger) if details else _in_short(bundle),
        _code(bundle) if details else "",
        _full(full, record, bundle.audit) if full and details else "",
        _full_in_short(full, record) if full and not details else "",
        _flashinfer(record),
        _sizes(record) if details else "",
        _times(record) if details and not bundle.unchanged else "",
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


def _in_short(bundle: Bundle) -> str:
    """Return patches, modules, machine code, sizes and times, in a line or two each."""
    record, ledger = bundle.record, bundle.ledger
    patches = texts.counted(len(ledger.patches), "patch")
    compiled = [entry for entry in ledger.libraries if entry.origin == "compiled"]
    names = ", ".join(PurePosixPath(entry.path).name.partition(".")[0] for entry in compiled)
    lines = [
        f"Patched: {patches}, {texts.counted(len(ledger.files), 'file')} of the wheel",
        _wrapped(f"Compiled here for {ledger.arch_list}: {names or 'nothing'}", indent=0),
    ]
    if idle := _idle(ledger):
        lines.append(f"Native code of {texts.counted(len(idle), 'patch')} is not in effect")
    if lost := sum(len(entry.lost) for entry in compiled):
        lines.append(f"{texts.counted(lost, 'op')} of the official modules are missing")
    if ledger.replaced:
        lines.append(f"Compiled with {', '.join(ledger.replaced)} (--accept-patch-level)")
    lines.append("Machine code of the wheel, in translation units")
    lines += _totals(bundle.audit)
    sizes = [f"wheel {texts.size(record.wheel_size)}"]
    sizes += [f"image {texts.size(record.image_size)}"] if record.tags else []
    lines.append(f"Sizes: {', '.join(sizes)}")
    if not bundle.unchanged:
        lines.append(f"Times: {_seconds(record)}")
    return "\n".join(lines)


def _patches(ledger: Ledger) -> str:
    count, files = len(ledger.patches), len(ledger.files)
    lines = [
        f"Patched: {texts.counted(count, 'patch')}, {texts.counted(files, 'file')} of the wheel"
    ]
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


def _totals(audit: AuditReport) -> list[str]:
    """Return for each device how many units run how."""
    lines = []
    for device in audit.devices:
        totals: Counter[str] = Counter()
        for library in audit.libraries:
            if library.runs:
                totals.update(library.runs[device].units)
        parts = ", ".join(f"{totals[kind]} {kind}" for kind in _MEANING if totals[kind])
        lines.append(f"  all on {device}: {parts} of {totals.total()}")
    return lines


def _code(bundle: Bundle) -> str:
    """Return how the machine code runs; audit.txt beside the wheel has each library."""
    lines = ["Machine code of the wheel, in translation units", *_totals(bundle.audit)]
    lines += [f"  {kind:<8}{meaning}" for kind, meaning in _MEANING.items()]
    return "\n".join([*lines, f"  each library: {bundle.folder / AUDIT_TEXT}"])


def _full(offer: Offer, record: Record, audit: AuditReport) -> str:
    """Render what full mode would add to this bundle, and how long it takes here."""
    lines = [f"What full mode adds, in {offer.figures}"]
    libraries = {library.path: library for library in audit.libraries}
    for step in offer.steps:
        paths = ", ".join(step.modules)
        if step.sources:
            fetched = [name for name in step.sources if name not in step.given_only]
            where = [f"{' and '.join(fetched)} (from git, or --source NAME=DIR)"] if fetched else []
            where += [f"{name} (--source {name}=DIR alone)" for name in step.given_only]
            more = f"with {' and '.join(where)} also "
            lines.append(_wrapped(f"{more}{paths}: about {step.minutes:.0f} min in all", indent=2))
        else:
            lines.append(_wrapped(f"code for {record.arch_list} in {paths}", indent=2))
        units = [libraries[path].runs for path in step.modules if path in libraries]
        for device in audit.devices:
            ptx = sum(runs[device].units["ptx"] for runs in units if runs)
            none = sum(runs[device].units["none"] for runs in units if runs)
            note = f"on {device} {ptx} of their units go through PTX now, {none} not at all"
            lines += [_wrapped(note)] if ptx or none else []
    if offer.against:
        lines.append(_wrapped(f"auto does not choose full mode here: {offer.against}", indent=2))
    lines.append(f"  {_bundle(record, 'BUILD=full')}")
    return "\n".join(lines)


def _full_in_short(offer: Offer, record: Record) -> str:
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


def _sizes(record: Record) -> str:
    lines = ["Sizes", f"  {texts.size(record.wheel_size):>9}  wheel"]
    if record.tags:
        lines.append(f"  {texts.size(record.image_size):>9}  image, of which")
        small = 0
        for layer in record.layers:
            if layer.size < _SMALL:
                small += layer.size
            else:
                lines.append(f"  {texts.size(layer.size):>9}    {_layer_name(layer)}")
        if small:
            lines.append(f"  {texts.size(small):>9}    all other layers")
    return "\n".join(lines)


def _times(record: Record) -> str:
    lines = ["Times", f"  {_seconds(record)}"]
    ran = [
        f"{name} {texts.duration(value)}"
        for name, value in record.stage_seconds.items()
        if value is not None and value >= 0.1
    ]
    cached = [name for name, value in record.stage_seconds.items() if value is None]
    if ran:
        lines.append(f"  stages that ran: {', '.join(ran)}")
    if cached:
        lines.append(f"  from the layer cache: {', '.join(cached)}")
    return "\n".join(lines)


def _seconds(record: Record) -> str:
    shown = ", ".join(f"{name} {texts.duration(value)}" for name, value in record.seconds.items())
    return f"{shown}; together {texts.duration(sum(record.seconds.values()))}"


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
        lines.append("  each patch, module and layer: sm12x bundle --details")
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


def _layer_name(layer: Layer) -> str:
    for word, name in _LAYER_NAMES:
        if word in layer.made_by:
            return name
    words = " ".join(layer.made_by.removeprefix("/bin/sh -c ").split())
    return words[:60] or "base image"


def _wrapped(words: str, *, indent: int = 4) -> str:
    first = " " * indent
    return texts.paragraph(words, first=first, rest=f"{first}  ")
