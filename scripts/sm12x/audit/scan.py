"""Find the ELF files of a library, folder, wheel or image, and read each."""

from __future__ import annotations

import mmap
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from sm12x.audit import elf, library, tars
from sm12x.audit.model import Audit, LibraryAudit
from sm12x.core.errors import BadFileError

# inflate and sha256 release the interpreter lock; more threads than this only cost memory, since
# each holds a whole library.
_THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A file that may be a library. ``size`` is in bytes; ``audit`` reads it."""

    path: str
    size: int
    audit: Callable[[], LibraryAudit | None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a scan is about to read: files, or one image ``archive``. ``total`` is in bytes."""

    subject: str
    kind: str
    members: tuple[Member, ...] = ()
    archive: Path | None = None

    @property
    def total(self) -> int:
        if self.archive:
            return self.archive.stat().st_size
        return sum(member.size for member in self.members)


def scan(path: Path) -> Audit:
    """Audit a library, a folder, a wheel (or any other zip) or an image's tar archive.

    Raises:
        BadFileError: there is no such file, it is none of these, or the archive is damaged.
    """
    return run(plan(path))


def plan(path: Path) -> Plan:
    """List what there is to read under ``path``. Raises as ``scan`` does."""
    if not path.exists():
        raise BadFileError(
            f"{path} does not exist",
            next_step="name a shared library, a folder, a wheel or an image",
        )
    try:
        if path.is_dir():
            members = tuple(_folder(path))
            return Plan(subject=path.name or str(path), kind="directory", members=members)
        with path.open("rb") as handle:
            head = handle.read(4)
        if head == elf.MAGIC:
            member = Member(
                path=path.as_posix(),
                size=path.stat().st_size,
                audit=lambda: _file(path, path.as_posix(), alone=True),
            )
            return Plan(subject=path.name, kind="file", members=(member,))
        if zipfile.is_zipfile(path):
            return Plan(subject=path.name, kind="wheel", members=tuple(_zip(path)))
        if tars.is_tar(path):
            return Plan(subject=path.name, kind="image", archive=path)
    except (OSError, zipfile.BadZipFile) as error:
        raise BadFileError(
            f"{path} cannot be read: {error}",
            next_step="name a shared library, a folder, a wheel or an image",
        ) from None
    raise BadFileError(
        f"{path} is neither a shared library, a folder, a wheel nor an image archive",
        next_step="check that it is whole and what `file` says it is",
    )


def run(plan: Plan, *, on_progress: Callable[[int], None] | None = None) -> Audit:
    """Read what was planned, telling ``on_progress`` the bytes of each file that is done."""

    if plan.archive:
        return tars.archive(plan.archive, on_progress=on_progress)

    def one(member: Member) -> LibraryAudit | None:
        try:
            return member.audit()
        finally:
            if on_progress:
                on_progress(member.size)

    # The largest first: started last, it would leave the other cores with nothing to do.
    order = sorted(plan.members, key=lambda member: -member.size)
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        found = list(pool.map(one, order))
    return library.assemble(
        plan.subject, plan.kind, (entry for entry in found if entry is not None)
    )


def _folder(folder: Path) -> Iterator[Member]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            status = path.lstat()
            # A link's target is counted where it is.
            if not stat.S_ISREG(status.st_mode):
                continue
            label = path.relative_to(folder).as_posix()
            try:
                with path.open("rb") as handle:
                    head = handle.read(4)
            except OSError:
                head = b""
            if library.may_be(label, head):
                yield Member(
                    path=label,
                    size=status.st_size,
                    audit=partial(_file, path, label),
                )


def _file(path: Path, label: str, *, alone: bool = False) -> LibraryAudit | None:
    try:
        with path.open("rb") as handle:
            return _mapped(handle, label, alone=alone)
    except OSError as error:
        return library.unreadable(label, 0, f"it cannot be read: {error.strerror}")


def _mapped(handle: IO[bytes], label: str, *, alone: bool) -> LibraryAudit | None:
    if not os.fstat(handle.fileno()).st_size:
        return library.unreadable(label, 0, "it is empty")
    with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return library.audit(label, data, alone=alone)


def _zip(path: Path) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            try:
                with archive.open(info) as handle:
                    head = handle.read(4)
            except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError):
                head = b""
            if library.may_be(info.filename, head):
                yield Member(
                    path=info.filename,
                    size=info.file_size,
                    audit=partial(_zipped, path, info),
                )


def _zipped(path: Path, info: zipfile.ZipInfo) -> LibraryAudit | None:
    """Inflate one member in memory: unpacking a wheel to disk would take longer than reading it."""
    try:
        with zipfile.ZipFile(path) as archive:
            data = archive.read(info)
    # NotImplementedError: a compression this Python lacks; RuntimeError: an encrypted member.
    except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError) as error:
        return library.unreadable(info.filename, info.file_size, f"it cannot be unpacked: {error}")
    return library.audit(info.filename, data)
