"""Find the files that hold device code in a folder, wheel or image, and read each once.

An image by name is audited through whichever container engine has it.
"""

from __future__ import annotations

import lzma
import mmap
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from sm12x.audit import library, tars
from sm12x.audit.model import Audit, LibraryAudit
from sm12x.core import process, unpack
from sm12x.core.errors import BadFileError, NoEngineError

# inflate and sha256 release the interpreter lock.
_THREADS = min(4, os.cpu_count() or 1)
# NotImplementedError: a compression this Python lacks; RuntimeError: an encrypted member; EOFError:
# a member that ends too soon.
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, NotImplementedError, RuntimeError,
    EOFError, ValueError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ArchiveMember:
    """A file that may hold code. ``size`` is in bytes, unpacked; ``packed`` is None on a disk."""

    path: str
    size: int
    open: Callable[[], IO[bytes]]
    packed: int | None = None


@dataclass(frozen=True, kw_only=True)
class ScanPlan:
    """What a scan is about to read: files, or one image ``archive``. ``total`` is in bytes.

    ``alone``: one file was asked for, and is reported whatever it holds. ``unread`` has an entry
    for each folder that could not be listed.
    """

    subject: str
    kind: str
    members: tuple[ArchiveMember, ...] = ()
    unread: tuple[LibraryAudit, ...] = ()
    archive: Path | None = None
    zip: zipfile.ZipFile | None = None
    alone: bool = False

    @property
    def total(self) -> int:
        if self.archive:
            return self.archive.stat().st_size
        return sum(member.size for member in self.members)


def scan(path: Path) -> Audit:
    """Audit a file of code, a folder, a wheel (or any other zip) or an image's tar archive.

    Raises:
        BadFileError: there is no such file, it is none of these kinds, or the archive is damaged or
            claims to unpack to more than ``unpack`` allows.
        NoSpaceError: one of the libraries does not fit in the memory that is free.
    """
    return run(plan(path))


def plan(path: Path) -> ScanPlan:
    """List the files to read under ``path``. Raises as ``scan`` does."""
    if not path.exists():
        raise BadFileError(
            f"{path} does not exist",
            next_step="name a shared library, a folder, a wheel or an image",
        )
    try:
        if path.is_dir():
            return _folder(path)
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadFileError(
                f"{path} is not a regular file: an audit needs random access to it",
                next_step="write its content to a file, and name that file",
            )
        with path.open("rb") as handle:
            head = handle.read(library.HEAD_BYTES)
        if library.may_be(path.name, head):
            member = _on_disk(path, path.as_posix(), path.stat().st_size)
            return ScanPlan(subject=path.name, kind="file", members=(member,), alone=True)
        if zipfile.is_zipfile(path):
            return _wheel(path)
    except _DAMAGE as error:
        raise BadFileError(
            f"{path} cannot be read: {error}",
            next_step="name a shared library, a folder, a wheel or an image",
        ) from None
    # Whether it is a tar is seen where it is read.
    return ScanPlan(subject=path.name, kind="image", archive=path)


def run(plan: ScanPlan, *, on_progress: Callable[[int], None] | None = None) -> Audit:
    """Read the planned files, and pass the bytes of each finished file to ``on_progress``."""
    if plan.archive:
        return tars.archive(plan.archive, on_progress=on_progress)
    # The largest first: started last, it would leave the other cores with nothing to do.
    order = sorted(plan.members, key=lambda member: -member.size)
    share = library.Share()

    def one(member: ArchiveMember) -> LibraryAudit | None:
        try:
            return _audit(member, share, alone=plan.alone)
        finally:
            if on_progress:
                on_progress(member.size)

    pool = ThreadPoolExecutor(max_workers=_THREADS)
    try:
        entries = list(pool.map(one, order))
    except RuntimeError as error:
        # An error while reading a file is in its entry: this one is a thread that did not start.
        raise library.no_memory(f"{plan.subject}: {error}") from None
    finally:
        # An error or Ctrl-C must not wait for thousands of files.
        pool.shutdown(wait=True, cancel_futures=True)
        if plan.zip:
            plan.zip.close()
    return library.assemble(
        plan.subject, plan.kind, (*plan.unread, *(entry for entry in entries if entry is not None))
    )


def _audit(member: ArchiveMember, share: library.Share, *, alone: bool) -> LibraryAudit | None:
    try:
        with member.open() as handle:
            head = handle.read(library.HEAD_BYTES)
            if not library.may_be(member.path, head):
                return None
            if not member.size:
                return library.unreadable(member.path, 0, "it is empty")
            if member.packed is not None:
                unpack.bounded(member.path, member.size, member.packed)
            with _data(handle, head, member) as data:
                return share.counted(library.audit(member.path, data, alone=alone))
    except _DAMAGE as error:
        if library.is_refusal(error):
            raise library.no_memory(member.path) from None
        why = "read" if member.packed is None else "unpacked"
        reason = getattr(error, "strerror", None) or error
        return library.unreadable(member.path, member.size, f"it cannot be {why}: {reason}")


def _data(
    handle: IO[bytes], head: bytes, member: ArchiveMember
) -> AbstractContextManager[mmap.mmap]:
    if member.packed is None:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    return library.unpacked(handle, head, member.size, member.path)


def _folder(folder: Path) -> ScanPlan:
    members: list[ArchiveMember] = []
    unread: list[LibraryAudit] = []

    def refused(error: OSError) -> None:
        where = Path(error.filename).relative_to(folder).as_posix()
        unread.append(library.unreadable(where, 0, f"the folder cannot be read: {error.strerror}"))

    for root, _, names in os.walk(folder, onerror=refused):
        for name in names:
            path = Path(root, name)
            status = path.lstat()
            # A link's target is counted where it is.
            if stat.S_ISREG(status.st_mode):
                label = path.relative_to(folder).as_posix()
                members.append(_on_disk(path, label, status.st_size))
    return ScanPlan(
        subject=folder.name or str(folder),
        kind="directory",
        members=tuple(members),
        unread=tuple(unread),
    )


def _on_disk(path: Path, label: str, size: int) -> ArchiveMember:
    return ArchiveMember(path=label, size=size, open=lambda: path.open("rb"))


def _wheel(path: Path) -> ScanPlan:
    archive = zipfile.ZipFile(path)
    members = [info for info in archive.infolist() if not info.is_dir()]
    total = sum(info.file_size for info in members)
    unpack.bounded(str(path), total, path.stat().st_size, whole=True)
    return ScanPlan(
        subject=path.name,
        kind="wheel",
        zip=archive,
        members=tuple(
            ArchiveMember(
                path=info.filename,
                size=info.file_size,
                open=partial(unpack.opened, archive, info),
                packed=info.compress_size,
            )
            for info in members
        ),
    )


ENGINES = ("docker", "podman", "buildah")
# name[:tag][@digest], with an optional registry before it.
_REFERENCE = re.compile(r"[a-z0-9][\w.:/-]*(@sha256:[0-9a-f]{64})?", re.ASCII)


def looks_like_image(name: str) -> bool:
    """Whether a name that is no file can be the name of an image."""
    return bool(_REFERENCE.fullmatch(name)) and not name.endswith((".whl", ".so", ".tar", ".zip"))


def image(name: str) -> Audit:
    """Audit the image ``name``; "podman:NAME" and the like ask one engine only.

    Nothing is pulled or started: a container is created, exported as a stream and removed.

    Raises:
        NoEngineError: no engine is installed.
        BadFileError: no engine has the image; the message has each engine's answer.
        ToolFailedError: the engine failed in between.
    """
    prefix, _, rest = name.partition(":")
    chosen, image = ((prefix,), rest) if rest and prefix in ENGINES else (ENGINES, name)
    programs = [engine for engine in chosen if process.which(engine)]
    if not programs:
        raise NoEngineError(
            f"{name} is no file, and there is no {' or '.join(chosen)} to look for an image with",
            next_step="check the path, or install an engine",
        )
    answers: list[str] = []
    for engine in programs:
        kind = ["inspect", "--type", "image"] if engine == "buildah" else ["image", "inspect"]
        inspection = process.run([engine, *kind, image], check=False)
        if inspection.returncode == 0:
            read = _mounted if engine == "buildah" else _exported
            return read(engine, image)
        lines = inspection.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit status {inspection.returncode}"
        answers.append(f"{engine}: {reason}")
    raise BadFileError(
        f"{name} is neither a file nor an image ({'; '.join(answers)})",
        next_step="check the path, or list the images with `" + programs[0] + " images`",
    )


def _exported(engine: str, image: str) -> Audit:
    # The command is never run, but an image without one cannot be created from.
    created = process.run([engine, "create", image, "true"])
    container = created.stdout.strip().splitlines()[-1]
    try:
        with process.reading([engine, "export", container]) as stream:
            return tars.file_system(stream, image)
    finally:
        process.run([engine, "rm", "--force", container], check=False)


def _mounted(engine: str, image: str) -> Audit:
    """Audit an image of buildah, which cannot export to a stream, as a mounted folder."""
    step = "run it as root, or inside `buildah unshare`"
    container = process.run([engine, "from", "--pull=never", image]).stdout.strip()
    try:
        folder = process.run([engine, "mount", container], next_step=step).stdout.strip()
        contents = run(plan(Path(folder)))
        return Audit(subject=image, kind="image", libraries=contents.libraries)
    finally:
        process.run([engine, "rm", container], check=False)
