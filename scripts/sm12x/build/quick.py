"""Quick mode, end to end: check the parts against each other, make the ledger, write the wheel."""

from __future__ import annotations

import platform
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm12x.audit import scan
from sm12x.audit.model import LibraryAudit
from sm12x.build import cmake, ledger, library, native, ops, wheel
from sm12x.build import source as sources
from sm12x.build.native import NativeRecord
from sm12x.build.ops import Registered
from sm12x.build.source import SourceRecord
from sm12x.core import files, lockfile
from sm12x.core.errors import BadFileError, HashMismatchError
from sm12x.stack import series
from sm12x.stack.base import Base
from sm12x.stack.series import Stack

MODE = "quick"
LEDGER = "ledger.json"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the wheel is made of. ``python`` and its ``purelib`` have the build requirements."""

    base: Base
    machine: str
    official: Path
    source: Path
    native: Path
    python: Path
    purelib: Path


def build(
    parts: Parts, out: Path, *, on_phase: Callable[[str], None] | None = None
) -> tuple[Path, ledger.Ledger]:
    """Write the wheel and, beside it, ledger.json into ``out``. Returns its path and the ledger.

    Raises:
        HashMismatchError: the official wheel is not the pinned one.
        BadFileError: source, native modules and stack are not of one build.
        BuildFailedError: a patch cannot be carried by the official wheel, or a module compiled here
            does not load, or offers less than the official one.
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
    version = f"{parts.base.version}+sm12x.{stack.id}"
    changed = wheel.changes(official, parts.source, record, parts.native, compiled, version)
    phase("reading machine code")
    audits = _audit(parts)
    phase("listing torch ops")
    registered = _ops(parts, compiled, audits)
    made = ledger.Ledger(
        base_version=parts.base.version,
        sdist=parts.base.sdist.name,
        sdist_sha256=parts.base.sdist.sha256,
        official_wheel=parts.base.wheels[parts.machine].name,
        official_wheel_sha256=parts.base.wheels[parts.machine].sha256,
        stack_id=stack.id,
        patches=tuple(_patches(stack, record)),
        mode=MODE,
        machine=parts.machine,
        python=parts.base.python,
        arch_list=compiled.arch_list,
        cmake_archs=compiled.cmake_archs,
        compiler=compiled.compiler,
        nvcc=compiled.nvcc,
        files=tuple(change.entry() for change in changed),
        libraries=tuple(_libraries(audits, compiled, registered)),
        lock_sha256=files.sha256(parts.base.lock_path(parts.machine)),
        dependencies=lockfile.read(parts.base.lock_path(parts.machine)).versions,
    )
    phase("writing the wheel")
    target = out / wheel.name(official, parts.base.version, version, compiled)
    wheel.write(official, target, changed, made)
    files.write_text(out / LEDGER, made.to_json())
    return target, made


def _check(parts: Parts, stack: Stack, record: SourceRecord, compiled: NativeRecord) -> None:
    base = parts.base
    if parts.machine not in base.wheels:
        known = ", ".join(sorted(base.wheels))
        raise BadFileError(
            f"base {base.version} has no official wheel for {parts.machine} (it has: {known})",
            next_step="pass one of these as --machine",
        )
    if parts.machine != platform.machine():
        raise BadFileError(
            f"a wheel for {parts.machine} cannot be made on {platform.machine()}: "
            "its modules are loaded to list what they register",
            next_step=f"run the build on {parts.machine}",
        )
    pinned = base.wheels[parts.machine]
    found = files.sha256(parts.official)
    if found != pinned.sha256:
        raise HashMismatchError(
            f"{parts.official} has sha256 {found}, base.toml pins {pinned.sha256}",
            next_step=f"fetch {pinned.name} again with `sm12x fetch`",
        )
    if record.base_version != base.version or record.stack_id != stack.id:
        raise BadFileError(
            f"{parts.source} is {record.base_version} with stack {record.stack_id}, "
            f"wanted is {base.version} with stack {stack.id}",
            next_step="make it again with `sm12x build source`",
        )
    sources.verify(parts.source, record.files)
    targets = {module.target for module in compiled.modules}
    targets |= {kept.target for kept in compiled.kept}
    missing = set(sources.read_touched(parts.source).targets) - targets
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
        machine = library.read(path).machine
        if machine != parts.machine:
            raise BadFileError(
                f"{path} is for {machine}, the wheel is for {parts.machine}",
                next_step=f"run the build on {parts.machine}",
            )


def _audit(parts: Parts) -> Mapping[str, LibraryAudit]:
    """Every library of the wheel to be: the official ones, overlaid with those compiled here."""
    theirs = scan.scan(parts.official).libraries
    ours = scan.scan(parts.native).libraries
    return {audit.path: audit for audit in (*theirs, *ours)}


def _ops(
    parts: Parts, compiled: NativeRecord, audits: Mapping[str, LibraryAudit]
) -> Mapping[str, Registered]:
    python = parts.base.python
    with (
        tempfile.TemporaryDirectory(prefix="sm12x-official-") as folder,
        zipfile.ZipFile(parts.official) as archive,
    ):
        names = set(archive.namelist())
        paths = [path for path in audits if path in names and ops.loads_on(path, python)]
        for path in paths:
            archive.extract(path, folder)
        official = ops.find(Path(folder), paths, python=parts.python, purelib=parts.purelib)
    mine = [module.path for module in compiled.modules]
    ours = ops.find(parts.native, mine, python=parts.python, purelib=parts.purelib)
    for path, found in ours.items():
        if path in official:
            ops.require_all(path, found, official[path])
    return {**official, **ours}


def _libraries(
    audits: Mapping[str, LibraryAudit],
    compiled: NativeRecord,
    registered: Mapping[str, Registered],
) -> Iterable[ledger.LibraryEntry]:
    mine = {module.path for module in compiled.modules}
    for path, audit in sorted(audits.items()):
        yield ledger.LibraryEntry(
            path=path,
            sha256=audit.sha256,
            size=audit.size,
            origin="compiled" if path in mine else "official",
            sm120=audit.sm120,
            sm121=audit.sm121,
            ops=registered[path].ops if path in registered else (),
        )


def _patches(stack: Stack, record: SourceRecord) -> Iterable[ledger.PatchEntry]:
    for patch in stack.patches:
        yield ledger.PatchEntry(
            name=patch.name,
            subject=patch.subject,
            upstream=patch.upstream,
            drop_when=patch.drop_when,
            witness=patch.witness,
            sha256=patch.sha256,
            state=record.states[patch.name],
        )
