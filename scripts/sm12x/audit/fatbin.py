"""The fat binary: the container in which nvcc puts the code of one translation unit.

Layout, little-endian, read off the containers of real libraries and checked against cuobjdump:

    container   magic 0xBA55ED50 (u32), version 1 (u16), header size (u16), size of the rest (u64)
    entry       +0x00 kind (u16): 1 PTX, 2 ELF cubin, 8 LTO IR    +0x04 header size (u32)
                +0x08 payload size with padding (u64)             +0x10 compressed size (u32)
                +0x1c architecture (u32): 120 = 12.0              +0x28 flags (u64)

Flags: bit 13 lz4, bit 15 zstd, bit 20 architecture-specific (`a`), bit 21 family (`f`). The last
two are the only difference between an entry of sm_120, sm_120a and sm_120f, and PTX has them too.
The headers are never compressed, so nothing has to be unpacked to read them.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

from sm12x.core.cudaarch import CudaArch

MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
LZ4, ZSTD, SPECIFIC, FAMILY = 1 << 13, 1 << 15, 1 << 20, 1 << 21

_CONTAINER = struct.Struct("<IHHQ")
# kind, entry version, header size, payload size; then from +0x1c architecture, from +0x28 flags.
_ENTRY = struct.Struct("<HHIQ12xI8xQ")
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ELF_MAGIC = b"\x7fELF"
# Containers start on 8-byte boundaries; linkers pad with zeros.
_ALIGN = 8
# A damaged file must not fill the report: what follows the first faults says nothing new.
_MAX_FAULTS = 20

Buffer = bytes | mmap.mmap


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One piece of code: ``kind`` is "cubin", "ptx" or "unknown"; ``note`` says why unknown.

    ``offset`` and ``size`` are those of its code in the file, in bytes, as it is there: it may be
    compressed, and padded with zeros.
    """

    kind: str
    arch: CudaArch
    note: str = ""
    offset: int = 0
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Container:
    """One translation unit's code. ``offset`` is in the file, in bytes."""

    offset: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """``faults`` says, in words, what could not be read."""

    containers: tuple[Container, ...]
    faults: tuple[str, ...]


def parse(data: Buffer, start: int, size: int) -> Parsed:
    """Read the containers in ``data[start : start + size]``.

    Damage never raises: what could not be read is in ``faults``, and reading goes on at the next
    container if there is one.
    """
    end = min(start + size, len(data))
    containers: list[Container] = []
    faults: list[str] = []
    if end < start + size:
        faults.append(f"the section ends at {start + size:#x}, the file at {len(data):#x}")
    offset = start
    while offset < end and len(faults) < _MAX_FAULTS:
        if data[offset : offset + 4] != _MAGIC_BYTES:
            following = _next_container(data, offset, end, start)
            if data[offset:following].strip(b"\0"):
                faults.append(f"{following - offset} bytes at {offset:#x} are no fat binary")
            offset = following
            continue
        container, after, fault = _container(data, offset, end)
        if container is not None:
            containers.append(container)
        if fault:
            faults.append(fault)
            after = _next_container(data, offset + _CONTAINER.size, end, start)
        offset = after
    return Parsed(containers=tuple(containers), faults=tuple(faults))


def _next_container(data: Buffer, offset: int, end: int, start: int) -> int:
    """Where the next aligned magic is, or ``end``."""
    found = data.find(_MAGIC_BYTES, offset, end)
    while found != -1 and (found - start) % _ALIGN:
        found = data.find(_MAGIC_BYTES, found + 1, end)
    return end if found == -1 else found


def _container(data: Buffer, offset: int, end: int) -> tuple[Container | None, int, str]:
    """The container at ``offset``, where the next may begin, and what is wrong with it."""
    if end - offset < _CONTAINER.size:
        return None, end, f"the fat binary at {offset:#x} is cut off in its header"
    _, version, header, length = _CONTAINER.unpack_from(data, offset)
    if version != 1 or header < _CONTAINER.size:
        return None, end, f"the fat binary at {offset:#x} has version {version}, header {header}"
    position = offset + header
    stop = position + length
    if stop > end:
        return None, end, f"the fat binary at {offset:#x} is longer than its section"
    entries: list[Entry] = []
    fault = ""
    while position < stop:
        if stop - position < _ENTRY.size:
            fault = f"the entry at {position:#x} is cut off in its header"
            break
        kind, _, entry_header, payload, number, flags = _ENTRY.unpack_from(data, position)
        after = position + entry_header + payload
        if entry_header < _ENTRY.size or after > stop:
            fault = f"the entry at {position:#x} does not fit its fat binary"
            break
        entries.append(_entry(data, kind, number, flags, position + entry_header, payload))
        position = after
    return Container(offset=offset, entries=tuple(entries)), stop, fault


def _entry(data: Buffer, kind: int, number: int, flags: int, offset: int, size: int) -> Entry:
    start = data[offset : offset + 4]
    suffix = "a" if flags & SPECIFIC else "f" if flags & FAMILY else ""
    arch = CudaArch(major=number // 10, minor=number % 10, suffix=suffix)
    note = ""
    if kind not in (PTX, CUBIN):
        note = f"code of kind {kind}"
    elif not 20 <= number < 1000 or (flags & SPECIFIC and flags & FAMILY):
        note = f"architecture {number}, flags {flags:#x}"
    elif flags & ZSTD:
        note = "" if start == _ZSTD_MAGIC else "the payload is not the zstd its header promises"
    elif kind == CUBIN and not flags & LZ4 and start != _ELF_MAGIC:
        note = "the payload is not the cubin its header promises"
    name = "unknown" if note else "ptx" if kind == PTX else "cubin"
    return Entry(kind=name, arch=arch, note=note, offset=offset, size=size)
