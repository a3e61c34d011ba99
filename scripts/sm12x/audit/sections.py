"""The sections of a 64-bit little-endian ELF file, with the standard library alone.

An image has only what the release depends on, which pyelftools is not part of; `check` reads the
machine code of the image's own files through this. The audit of a wheel uses pyelftools (`elf`), so
a module that both read alike has been read by two readers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from sm12x.audit import fatbin
from sm12x.audit.fatbin import Buffer, Container
from sm12x.audit.model import LibraryAudit

_MAGIC = b"\x7fELF\x02\x01"
# e_shoff, then from +0x3a the size of a section header, their number, and the one with the names.
_HEADER = struct.Struct("<40xQ10xHHH")
# Name, type, then from +0x18 offset and size (System V ABI, "Section Header").
_SECTION = struct.Struct("<II16xQQ")
_ENTRY_BYTES = 64
_LOADED, _RELOCATABLE = ".nv_fatbin", "__nv_relfatbin"
_NOT_IN_FILE = 8


@dataclass(frozen=True, kw_only=True)
class Section:
    """``offset`` and ``size`` are in bytes, in the file; ``kind`` is the ELF section type."""

    name: str
    kind: int
    offset: int
    size: int


def sections(data: Buffer) -> Iterator[Section]:
    """Every section of an ELF file. Raises ValueError when it is not one, or damaged."""
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEADER.size:
        raise ValueError("it is not a 64-bit ELF file")
    start, size, number, names = _HEADER.unpack_from(data)
    if size != _ENTRY_BYTES or not 0 < names < number or start + size * number > len(data):
        raise ValueError("its section headers are damaged")
    headers = [_SECTION.unpack_from(data, start + size * index) for index in range(number)]
    _, _, text, length = headers[names]
    table = bytes(data[text : text + length])
    for name, kind, offset, extent in headers:
        end = table.find(b"\0", name)
        if end < 0:
            raise ValueError("its section names are damaged")
        yield Section(
            name=table[name:end].decode("ascii", "replace"), kind=kind, offset=offset, size=extent
        )


def audit(path: str, data: Buffer) -> LibraryAudit:
    """The machine code of one library; ``sha256`` and ``machine`` are left empty.

    Damage never raises: it is in ``faults``.
    """
    found: dict[str, list[Container]] = {_LOADED: [], _RELOCATABLE: []}
    faults: list[str] = []
    try:
        for section in sections(data):
            if section.name not in found:
                continue
            if section.kind == _NOT_IN_FILE:
                faults.append(f"{section.name} has been taken out of the file")
                continue
            parsed = fatbin.parse(data, section.offset, section.size)
            found[section.name] += parsed.containers
            faults += parsed.faults
    except (ValueError, struct.error) as error:
        faults.append(str(error))
    return LibraryAudit(
        path=path,
        sha256="",
        size=len(data),
        machine="",
        units=tuple(found[_LOADED]),
        relocatable=tuple(found[_RELOCATABLE]),
        faults=tuple(faults),
    )
