"""One file: decide whether it can hold device code, and audit its bytes.

A packed one is unpacked to a temporary file, which is mapped.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from sm12x.audit import elf, fatbin
from sm12x.audit.fatbin import Buffer, CodePiece, FatContainer
from sm12x.audit.model import Audit, LibraryAudit
from sm12x.core import files, text
from sm12x.core.cudaarch import CudaArch
from sm12x.core.errors import DISK_FULL, BadFileError, NoSpaceError

# Suffixes of files to read whatever their first bytes are; .so also with a version after it.
_NAME = re.compile(r"(\.so(\.\d+)*|\.cubin|\.fatbin|\.ptx|\.o|\.a)$")
# A linker script (libc.so, libm.a) has a library's name and is text.
_LINKER_SCRIPT = re.compile(rb"\s*(/\*|GROUP|INPUT|OUTPUT_FORMAT)")
_ARCHIVE, _THIN = b"!<arch>\n", b"!<thin>\n"
# How many first bytes identify the kind of a file.
HEAD_BYTES = 8
# ar does not make archives in archives.
_MAX_DEPTH = 2
_MAX_MEMBERS = 100_000
_AR_HEADER = 60
_BLOCK = 1 << 20
_VERSION = re.compile(rb"^[ \t]*\.version[ \t]", re.MULTILINE)
_TARGET = re.compile(rb"^[ \t]*\.target[ \t]+sm_(\d{2,3})([af]?)\b", re.MULTILINE)


# What the bytes of one file hold, whatever its name.
_code = partial(LibraryAudit, path="", sha256="", size=0, machine="")


def assemble(subject: str, kind: str, libraries: Iterable[LibraryAudit]) -> Audit:
    """Return an audit of these libraries by path; no name drives a terminal or ends a line."""
    named = (replace(library, path=text.one_line(library.path)) for library in libraries)
    ordered = tuple(sorted(named, key=lambda library: library.path))
    return Audit(subject=text.one_line(subject), kind=kind, libraries=ordered)


def may_be(path: str, head: bytes) -> bool:
    """Whether a file of this name, beginning with these bytes, has to be read."""
    return bool(_NAME.search(path)) or head.startswith(
        (fatbin.ELF_MAGIC, fatbin.MAGIC_BYTES, _ARCHIVE, _THIN)
    )


def audit(path: str, data: Buffer, *, alone: bool = False) -> LibraryAudit | None:
    """Audit the bytes of one file.

    None for a file that is not a library and holds no device code (linker scripts, object files and
    archives of host code), unless asked for ``alone``. A file whose name promises code and whose
    content is of another kind is a fault; it is not skipped.
    """
    read = _read(path, data, 0)
    if read is None:
        return None
    code, loads = read
    holds = code.units or code.relocatable or code.embedded or code.faults
    if not (alone or loads or holds):
        return None
    return replace(code, path=path, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def unreadable(path: str, size: int, why: str) -> LibraryAudit:
    """The entry for a library whose bytes could not be read."""
    return LibraryAudit(path=path, sha256="", size=size, machine="", faults=(why,))


def _read(path: str, data: Buffer, depth: int) -> tuple[LibraryAudit, bool] | None:
    """Read the device code of a file; the flag says to list the file even without device code.

    It is set for a library and a program. None for a linker script.
    """
    head = bytes(data[:64])
    if head.startswith(fatbin.ELF_MAGIC):
        if head[18:20] == fatbin.EM_CUDA.to_bytes(2, "little"):
            return _cubin(data), False
        code = elf.read(data)
        entry = _code(
            machine=code.machine,
            units=code.found.units,
            relocatable=code.found.relocatable,
            embedded=code.found.embedded,
            unloadable=code.unloadable,
            faults=code.found.faults,
        )
        return entry, code.shared
    if head.startswith(fatbin.MAGIC_BYTES):
        parsed = fatbin.parse(data, 0, len(data))
        return _code(machine="cuda", units=parsed.containers, faults=parsed.faults), False
    if head.startswith(_ARCHIVE):
        return _archive(data, depth), False
    if head.startswith(_THIN):
        return _code(faults=("it is a thin archive: its members are other files",)), False
    if path.endswith(".ptx"):
        return _ptx(data), False
    if _LINKER_SCRIPT.match(head):
        return None
    kind = {".fatbin": "a fat binary", ".a": "an archive"}.get(path[path.rfind(".") :])
    return _code(faults=(f"it is not {kind or 'an ELF file'}",)), False


def _cubin(data: Buffer) -> LibraryAudit:
    try:
        return _code(machine="cuda", units=(fatbin.cubin(data),))
    except ValueError as error:
        return _code(machine="cuda", faults=(str(error),))


def _ptx(data: Buffer) -> LibraryAudit:
    """PTX as text: one `.version`, one `.target` (PTX ISA, "PTX Module Directives")."""
    version = _VERSION.search(data)
    target = _TARGET.search(data, version.end()) if version else None
    if target is None:
        return _code(machine="cuda", faults=("no .version and .target of PTX are in it",))
    number = int(target[1])
    arch = CudaArch(major=number // 10, minor=number % 10, suffix=target[2].decode())
    entry = CodePiece(kind="ptx", arch=arch, size=len(data), whole=len(data))
    return _code(machine="cuda", units=(FatContainer(offset=0, entries=(entry,)),))


def _archive(data: Buffer, depth: int) -> LibraryAudit:
    """The members of an `ar` archive together, as the linker would take all of them."""
    if depth == _MAX_DEPTH:
        return _code(faults=(f"archives in archives, more than {_MAX_DEPTH} deep",))
    machines: list[str] = []
    lists: tuple[list[FatContainer], ...] = ([], [], [])
    faults: list[str] = []
    pieces = 0
    try:
        for number, (name, start, size) in enumerate(_members(data)):
            if number == _MAX_MEMBERS:
                raise ValueError(f"it has more than {_MAX_MEMBERS} members")
            if pieces > fatbin.MAX_ENTRIES:
                raise ValueError(
                    f"more than {fatbin.MAX_ENTRIES} pieces of code: the members from {name} on "
                    "were not read"
                )
            if not may_be(name, bytes(data[start : start + HEAD_BYTES])):
                continue
            # pyelftools and the offsets in a member begin at its own first byte.
            read = _read(name, bytes(data[start : start + size]), depth + 1)
            if read is None:
                continue
            member, _ = read
            machines.append(member.machine)
            for all_, of_it in zip(
                lists, (member.units, member.relocatable, member.embedded), strict=True
            ):
                all_ += of_it
            pieces += _pieces(member)
            faults += (
                f"{name}: {fault}" for fault in member.faults[: fatbin.MAX_FAULTS - len(faults)]
            )
    except ValueError as error:
        faults.append(str(error))
    units, relocatable, embedded = map(tuple, lists)
    host = [each for each in machines if each not in ("", "cuda")]
    return _code(
        machine=next(iter(host or machines), ""),
        units=units,
        relocatable=relocatable,
        embedded=embedded,
        faults=tuple(faults),
    )


def _members(data: Buffer) -> Iterator[tuple[str, int, int]]:
    """Name, place and size in bytes of each member (System V and GNU `ar`; names of BSD too).

    Raises ValueError where the archive is damaged, after the members before that.
    """
    names, at = b"", len(_ARCHIVE)
    while at < len(data):
        header = bytes(data[at : at + _AR_HEADER])
        length = header[48:58].strip()
        if len(header) < _AR_HEADER or header[58:] != b"`\n" or not length.isdigit():
            raise ValueError(f"the archive's member at {at:#x} is damaged")
        name, start, size = header[:16].rstrip(), at + _AR_HEADER, int(length)
        if start + size > len(data):
            raise ValueError(f"the archive's member at {at:#x} is cut off")
        at = start + size + size % 2
        if name in (b"/", b"/SYM64/", b"__.SYMDEF"):
            continue
        if name == b"//":
            names = bytes(data[start : start + size])
            continue
        if name.startswith(b"#1/") and name[3:].isdigit() and int(name[3:]) <= size:
            long = int(name[3:])
            name, start, size = bytes(data[start : start + long]), start + long, size - long
        elif name.startswith(b"/") and name[1:].isdigit():
            name = names[int(name[1:]) :].partition(b"\n")[0]
        yield name.rstrip(b"/\0").decode("utf-8", "replace"), start, size


class Share:
    """What one audit may hold: all its libraries no more than ``fatbin.MAX_ENTRIES`` pieces of
    code."""

    def __init__(self) -> None:
        self._pieces = 0
        self._lock = threading.Lock()

    def counted(self, library: LibraryAudit | None) -> LibraryAudit | None:
        """Count the pieces of ``library`` and return it. Raises BadFileError for too many."""
        if library is None:
            return None
        pieces = _pieces(library)
        with self._lock:
            self._pieces += pieces
            if self._pieces > max(pieces, fatbin.MAX_ENTRIES):
                raise BadFileError(
                    f"the libraries up to {library.path} hold more than {fatbin.MAX_ENTRIES} "
                    "pieces of device code together",
                    next_step="audit its files one by one",
                )
        return library


def _pieces(library: LibraryAudit) -> int:
    units = (*library.units, *library.relocatable, *library.embedded)
    return sum(1 + len(unit.entries) for unit in units)


@contextmanager
def unpacked(handle: IO[bytes], head: bytes, size: int, name: str) -> Iterator[mmap.mmap]:
    """Unpack a stream, of which ``head`` is read already, to disk: ``size`` bytes, mapped.

    Raises:
        NoSpaceError: there is not so much room in the temporary folder.
        EOFError: the stream ends before.
    """
    folder = Path(tempfile.gettempdir())
    move = "set TMPDIR to a folder on another disk"
    files.require_space(folder, size / text.GIB, what=f"unpacking {name}", move=move)
    with tempfile.TemporaryFile(dir=folder) as out:
        out.write(head[:size])
        while out.tell() < size:
            block = handle.read(min(_BLOCK, size - out.tell()))
            if not block:
                raise EOFError(f"{out.tell()} of {size} bytes are there")
            out.write(block)
        # Read to the end, where a zip checks its CRC.
        handle.read(1)
        out.flush()
        with mmap.mmap(out.fileno(), size, access=mmap.ACCESS_READ) as data:
            yield data


def no_memory(what: str) -> NoSpaceError:
    return NoSpaceError(
        f"{what}: not enough memory or disk",
        next_step="free memory and the disk of TMPDIR, or audit its files one by one",
    )


def is_refusal(error: BaseException) -> bool:
    """Return whether the system refused memory or disk, and nothing is wrong with the file."""
    return isinstance(error, OSError) and error.errno in (errno.ENOMEM, *DISK_FULL)
