"""The wheel of either mode: check the parts against each other, make the ledger, write the wheel.

Every module of the official wheel is either replaced by one compiled here or kept, with its reason.
"""

from __future__ import annotations

import dataclasses
import platform
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm12x.audit import scan
from sm12x.audit.model import LibraryAudit
from sm12x.core import declared, files, lockfile
from sm12x.core.errors import BadFileError, HashMismatchError
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Stack
from sm12x.wheel import ledger, selection
from sm12x.wheel.assemble import torch_ops, wheel
from sm12x.wheel.assemble.torch_ops import Registered
from sm12x.wheel.compile import cmake, native
from sm12x.wheel.compile.native import NativeRecord
from sm12x.wheel.ledger import Ledger
from sm12x.wheel.source import patched as sources
from sm12x.wheel.source.patched import SourceRecord

_LEDGER = "ledger.json"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The inputs of the wheel. ``python`` and its ``purelib`` have the build requirements."""

    base: Base
    machine: str
    official: Path
    source: Path
    native: Path
    python: Path
    purelib: Path


def build(
    parts: Parts, out: Path, *, on_phase: Callable[[str], None] | None = None
) -> tuple[Path, Ledger]:
    """Write the wheel and, beside it, ledger.json into ``out``. Returns its path and the ledger.

    Raises:
        HashMismatchError: the official wheel is not the pinned one.
        BadFileError: source, native modules and stack are not of one build.
        BuildFailedError: a patch changes a file that the official wheel lacks, or a module
            compiled here does not load, or offers less than the official one.
    """

    def phase(name: str) -> None:
        if on_phase:
            on_phase(name)

    phase("checking the parts")
    stack = series.load(parts.base)
    record = sources.read(parts.source)
    compiled = native.read(parts.native)
    _check(parts, stack, record, compiled)
    official = wheel.inspect(parts.official)
    version = ledger.wheel_version(parts.base.version, stack.id, compiled.mode)
    changed = wheel.changes(official, parts.source, record, parts.native, compiled, version)
    phase("reading machine code")
    audits = _audit(parts)
    phase("listing torch ops")
    registered, lost = _ops(parts, compiled, audits)
    wheel_ledger = ledger.Ledger(
        base_version=parts.base.version,
        sdist=parts.base.sdist.name,
        sdist_sha256=parts.base.sdist.sha256,
        official_wheel=parts.base.wheels[parts.machine].name,
        official_wheel_sha256=parts.base.wheels[parts.machine].sha256,
        stack_id=stack.id,
        patches=tuple(_patches(parts.base, stack, record, compiled)),
        mode=compiled.mode,
        machine=parts.machine,
        python=parts.base.python,
        arch_list=compiled.arch_list,
        cmake_archs=compiled.cmake_archs,
        compiler=compiled.compiler,
        nvcc=compiled.nvcc,
        files=tuple(change.entry() for change in changed),
        libraries=tuple(_libraries(parts, audits, compiled, registered, lost)),
        lock_sha256=files.sha256(parts.base.lock_path(parts.machine)),
        dependencies=lockfile.read(parts.base.lock_path(parts.machine)).versions,
        overrides=tuple(
            ledger.OverrideEntry(**_shared(each, ledger.OverrideEntry))
            for each in parts.base.overrides_on(parts.machine)
        ),
        extras=extras(parts.base),
        sources=compiled.sources,
    )
    phase("writing the wheel")
    target = out / wheel.name(official, parts.base.version, version, compiled)
    wheel.write(official, target, changed, wheel_ledger)
    declared.write_json(out / _LEDGER, wheel_ledger)
    return target, wheel_ledger


def extras(base: Base) -> tuple[ledger.ExtraEntry, ...]:
    """Return the release's extras that the lock has, for the ledger."""
    return tuple(ledger.ExtraEntry(**_shared(one, ledger.ExtraEntry)) for one in base.extras)


def _shared(entry: object, kind: type) -> dict[str, Any]:
    """Return the fields of ``entry`` that a ``kind`` has too."""
    return {field.name: getattr(entry, field.name) for field in dataclasses.fields(kind)}


def _check(parts: Parts, stack: Stack, record: SourceRecord, compiled: NativeRecord) -> None:
    base = parts.base
    if parts.machine not in base.wheels:
        machines = ", ".join(sorted(base.wheels))
        raise BadFileError(
            f"base {base.version} has no official wheel for {parts.machine} (it has: {machines})",
            next_step="pass one of these as --machine",
        )
    pinned = base.wheels[parts.machine]
    digest = files.sha256(parts.official)
    if digest != pinned.sha256:
        raise HashMismatchError(
            f"{parts.official} has sha256 {digest}, base.toml pins {pinned.sha256}",
            next_step=f"fetch {pinned.name} again with `sm12x fetch`",
        )
    if record.base_version != base.version or record.stack_id != stack.id:
        raise BadFileError(
            f"{parts.source} is {record.base_version} with stack {record.stack_id}, but "
            f"{base.version} with stack {stack.id} is needed",
            next_step="make it again with `sm12x build source`",
        )
    sources.verify(parts.source, record.files)
    decided = {module.target for module in compiled.modules}
    decided |= {entry.target for entry in compiled.kept}
    missing = set(sources.read_touched(parts.source).targets) - decided
    if missing or compiled.inputs != cmake.inputs_hash(parts.source):
        what = f"lacks {', '.join(sorted(missing))}" if missing else "was compiled from other files"
        raise BadFileError(
            f"{parts.native} {what}", next_step="make it again with `sm12x build native`"
        )
    for module in compiled.modules:
        path = parts.native / module.path
        if not path.is_file() or files.sha256(path) != module.sha256:
            raise BadFileError(
                f"{path} is not what {native.RECORD} says",
                next_step="make it again with `sm12x build native`",
            )
        machine = native.dynamic(path).machine
        if machine != parts.machine:
            raise BadFileError(
                f"{path} is for {machine}, the wheel is for {parts.machine}",
                next_step=f"make it again with `sm12x build native --machine {parts.machine}`",
            )


def _audit(parts: Parts) -> Mapping[str, LibraryAudit]:
    """Return the official libraries, overlaid with those compiled here."""
    theirs = scan.scan(parts.official).libraries
    ours = scan.scan(parts.native).libraries
    return {audit.path: audit for audit in (*theirs, *ours)}


def _ops(
    parts: Parts, compiled: NativeRecord, audits: Mapping[str, LibraryAudit]
) -> tuple[Mapping[str, Registered], Mapping[str, tuple[str, ...]]]:
    """Return the ops of every library, and the official library's ops that ours may lack."""
    python = parts.base.python
    with (
        tempfile.TemporaryDirectory(prefix="sm12x-official-") as folder,
        zipfile.ZipFile(parts.official) as archive,
    ):
        names = set(archive.namelist())
        paths = [path for path in audits if path in names and torch_ops.loads_on(path, python)]
        for path in paths:
            archive.extract(path, folder)
        official = _registered(parts, Path(folder), paths)
    ours = _registered(parts, parts.native, [module.path for module in compiled.modules])
    elsewhere = {module.path: module.other_gpus for module in parts.base.modules}
    lost = {
        path: torch_ops.lost(path, ops, official[path], elsewhere.get(path, ()))
        for path, ops in ours.items()
        if path in official
    }
    return {**official, **ours}, lost


def _registered(parts: Parts, folder: Path, paths: Sequence[str]) -> Mapping[str, Registered]:
    """List ops by loading the libraries where this machine can, else by reading their files."""
    if parts.machine == platform.machine():
        return torch_ops.find(folder, paths, python=parts.python, purelib=parts.purelib)
    return {path: torch_ops.read(folder / path) for path in paths}


def _libraries(
    parts: Parts,
    audits: Mapping[str, LibraryAudit],
    compiled: NativeRecord,
    registered: Mapping[str, Registered],
    lost: Mapping[str, tuple[str, ...]],
) -> Iterable[ledger.LibraryEntry]:
    mine = {module.path for module in compiled.modules}
    reasons = {entry.path: entry.reason for entry in compiled.kept}
    with zipfile.ZipFile(parts.official) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    for path, audit in sorted(audits.items()):
        yield ledger.LibraryEntry(
            path=path,
            sha256=audit.sha256,
            size=audit.size,
            official_size=sizes.get(path, 0),
            origin="compiled" if path in mine else "official",
            reason=reasons.get(path, ""),
            cubins=dict(audit.cubins),
            ptx=dict(audit.ptx),
            sm120=audit.sm120,
            sm121=audit.sm121,
            ops=registered[path].ops if path in registered else (),
            ops_by=registered[path].by if path in registered else "",
            lost=lost.get(path, ()),
        )


def native_state(base: Base, paths: Iterable[str], compiled: NativeRecord) -> str:
    """Say whether the native code of a patch's ``paths`` is in effect: ``ledger.PatchEntry``."""
    targets = {module.target for module in compiled.modules}
    touched = [module.target for module in selection.touched(base, paths)]
    missing = [target for target in touched if target not in targets]
    if not touched:
        return ""
    if not missing:
        return "compiled"
    if compiled.mode == "quick":
        return "not compiled in quick mode"
    return f"not compiled: {', '.join(missing)}"


def _patches(
    base: Base, stack: Stack, record: SourceRecord, compiled: NativeRecord
) -> Iterable[ledger.PatchEntry]:
    for patch in stack.patches:
        state = record.states[patch.name]
        paths = [file.path for file in patch.files]
        yield ledger.PatchEntry(
            name=patch.name,
            subject=patch.subject,
            upstream=patch.upstream,
            drop_when=patch.drop_when,
            witness=patch.witness,
            sha256=patch.sha256,
            state=state,
            native=native_state(base, paths, compiled) if state == "applied" else "",
        )
