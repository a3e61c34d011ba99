"""The device code in the sections of a 64-bit little-endian ELF file, with the standard library.

An image has only the release's dependencies, without pyelftools; `check` reads the machine code of
the image's own files through this module. The audit of a wheel takes the sections from pyelftools
(`elf`), so a module on which both agree has been read by two independent readers.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sm12x.audit import fatbin
from sm12x.audit.fatbin import Buffer, FatContainer
from sm12x.audit.model import LibraryAudit

_MAGIC = b"\x7fELF\x02\x01"
# e_shoff, then from +0x3a the size of a section header, their number, and the one with the names.
_HEADER = struct.Struct("<40xQ10xHHH")
# Name, type, flags, address, offset and size (System V ABI, "Section Header").
_SECTION = struct.Struct("<IIQQQQ")
_ENTRY_BYTES = 64
# What each name means: `__nv_relfatbin` is input of the device linker, `.nv_fatbin` is loaded.
_LOADED, _RELOCATABLE, _REGISTERED = ".nv_fatbin", "__nv_relfatbin", ".nvFatBinSegment"
# One record registers one fat binary: magic, version, its address, linked inputs.
_RECORD_BYTES = 24
# The section with the names of all, itself included: LLVM has one for symbols' names too.
NAME_TABLES = (".shstrtab", ".strtab")
_NOT_IN_FILE, _INSTRUCTIONS, _STRINGS = 8, 4, 3


@dataclass(frozen=True, kw_only=True)
class Section:
    """``offset`` and ``size`` are in bytes, in the file; ``kind`` and ``flags`` as ELF has them."""

    name: str
    kind: int
    offset: int
    size: int
    flags: int = 0

    @property
    def executable(self) -> bool:
        """Whether the file has instructions of the host in it."""
        return bool(self.flags & _INSTRUCTIONS) and self.kind != _NOT_IN_FILE


@dataclass(frozen=True, kw_only=True)
class FoundCode:
    """The fat binaries of one file, as ``LibraryAudit`` has them."""

    units: tuple[FatContainer, ...] = ()
    relocatable: tuple[FatContainer, ...] = ()
    embedded: tuple[FatContainer, ...] = ()
    faults: tuple[str, ...] = ()


def sections(data: Buffer) -> Iterator[Section]:
    """Every section of an ELF file. Raises ValueError when it is not one, or damaged."""
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEADER.size:
        raise ValueError("it is not a 64-bit ELF file")
    start, size, number, names = _HEADER.unpack_from(data)
    if size != _ENTRY_BYTES or not 0 < names < number or start + size * number > len(data):
        raise ValueError("its section headers are damaged")
    headers = [_SECTION.unpack_from(data, start + size * index) for index in range(number)]
    _, kind_of_names, _, _, text, length = headers[names]
    if kind_of_names != _STRINGS:
        raise ValueError("its section names are damaged")
    table = bytes(data[text : text + length])
    own = headers[names][0]
    if table[own : max(table.find(b"\0", own), own)].decode("ascii", "replace") not in NAME_TABLES:
        raise ValueError("its section names are damaged")
    for name, kind, flags, _, offset, extent in headers:
        end = table.find(b"\0", name)
        if end < 0:
            raise ValueError("its section names are damaged")
        yield Section(
            name=table[name:end].decode("ascii", "replace"),
            kind=kind,
            offset=offset,
            size=extent,
            flags=flags,
        )


def collect(data: Buffer, headers: Iterable[Section]) -> FoundCode:
    """Read the device code in the sections of ``headers`` and elsewhere in the file.

    Damage never raises: it is in ``faults``.
    """
    containers: dict[str, list[FatContainer]] = {_LOADED: [], _RELOCATABLE: []}
    faults: list[str] = []
    # The file's own headers begin like a cubin's where it is one.
    taken, instructions = [(0, len(_MAGIC))], []
    apart: list[tuple[int, int]] = []
    records = pieces = 0
    for section in headers:
        extent = (section.offset, section.offset + section.size)
        if section.name in containers and len(faults) >= fatbin.MAX_FAULTS:
            # Nor are they searched for code below.
            taken.append(extent)
        elif section.name in containers and section.kind == _NOT_IN_FILE:
            faults.append(f"{section.name} has been taken out of the file")
        elif section.name in containers and _overlaps(extent, apart):
            # Read once for each section, a small file would have any number of units.
            faults.append(f"{section.name} at {section.offset:#x} overlaps another section of code")
        elif section.name in containers:
            room = fatbin.MAX_ENTRIES - pieces
            parsed = fatbin.parse(data, section.offset, section.size, room=room)
            containers[section.name].extend(parsed.containers)
            pieces += sum(1 + len(container.entries) for container in parsed.containers)
            faults.extend(f"{section.name}: {fault}" for fault in parsed.faults)
            taken.append(extent)
            if section.size:
                bisect.insort(apart, extent)
        elif section.name == _REGISTERED:
            records += section.size // _RECORD_BYTES
        elif section.executable:
            instructions.append(extent)
    read = sum(map(len, containers.values()))
    if records > read and not faults:
        faults.append(f"{records} fat binaries are registered, {read} were found")
    elsewhere = fatbin.search(data, taken, instructions)
    return FoundCode(
        units=tuple(containers[_LOADED]),
        relocatable=tuple(containers[_RELOCATABLE]),
        embedded=elsewhere.containers,
        faults=(*faults, *elsewhere.faults),
    )


def _overlaps(extent: tuple[int, int], apart: list[tuple[int, int]]) -> bool:
    """Whether a range has a byte in common with one of ``apart``, which are in order."""
    start, end = extent
    at = bisect.bisect_left(apart, extent)
    after = at < len(apart) and apart[at][0] < end
    return start < end and (after or (at > 0 and start < apart[at - 1][1]))


def audit(path: str, data: Buffer) -> LibraryAudit:
    """Read the machine code of one library; ``sha256`` and ``machine`` stay empty.

    Damage never raises: it is in ``faults``.
    """
    try:
        code = collect(data, list(sections(data)))
    except (ValueError, struct.error) as error:
        code = FoundCode(faults=(str(error),))
    return LibraryAudit(
        path=path,
        sha256="",
        size=len(data),
        machine="",
        units=code.units,
        relocatable=code.relocatable,
        embedded=code.embedded,
        faults=code.faults,
    )
