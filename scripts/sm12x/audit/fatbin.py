"""The fat binary: the container in which nvcc puts the code of one translation unit.

Layout, little-endian, read off the containers of real libraries and checked against cuobjdump:

    container   magic 0xBA55ED50 (u32), version 1 (u16), header size (u16), size of the rest (u64)
    entry       +0x00 kind (u16): 1 PTX, 2 ELF cubin, 8 LTO-IR, 256 several cubins in one
                +0x04 header size (u32)                           +0x08 payload size, padded (u64)
                +0x10 compressed size (u32)                       +0x1c architecture (u32): 120
                +0x28 flags (u64)                                 +0x38 uncompressed size (u64)

Flags: bit 13 lz4, bit 15 zstd, bit 20 architecture-specific (`a`), bit 21 family (`f`). The last
two are the only difference between an entry of sm_120, sm_120a and sm_120f, and PTX has them too.
The headers are never compressed, so nothing has to be unpacked to read them.

Kind 256 is what `nvcc --concat` (13.5) writes: several cubins compressed as one. Its header goes on
at +0x40 with their number (u32) and the size of the list (u32); each item of the list is an entry
header of 64 bytes (with the cubin's place in the uncompressed bytes at +0x04), then at +0x44 the
size (u32) of what follows at +0x48, padded to 8.
"""

from __future__ import annotations

import bisect
import functools
import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sm12x.core.cudaarch import CudaArch

MAGIC = 0xBA55ED50
PTX, CUBIN, LTO, _SEVERAL = 1, 2, 8, 256
LZ4, ZSTD, SPECIFIC, FAMILY = 1 << 13, 1 << 15, 1 << 20, 1 << 21
MAGIC_BYTES = struct.pack("<I", MAGIC)
ELF_MAGIC = b"\x7fELF"
EM_CUDA = 190

_CONTAINER = struct.Struct("<IHHQ")
# kind, entry version, header size, payload size; then from +0x1c architecture, from +0x28 flags,
# from +0x38 uncompressed size.
_ENTRY = struct.Struct("<HHIQ12xI8xQ8xQ")
_LIST = struct.Struct("<II")
_ITEM_BYTES = 0x48
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Of an ELF header: machine (+0x12), then from +0x20 e_phoff, e_shoff, e_flags, and from +0x34 the
# sizes and numbers of program and section headers.
_CUBIN = struct.Struct("<18xH12xQQIHHHHHH")
# Type, flags, then from +0x18 offset and size of a section header.
_SECTION = struct.Struct("<4xIQ8xQQ24x")
# Attributes of 4 bytes: form, name, value (u16), which in form 4 is how many bytes follow.
_NV_COMPAT, _COMPAT_SPECIFIC, _COMPAT_SIZED = 0x70000086, 9, 4
_ELF64_LITTLE = ELF_MAGIC + b"\x02\x01\x01"
# The first bytes of a container outside known sections: magic, version and header size.
_STRAY = struct.pack("<IHH", MAGIC, 1, _CONTAINER.size)
# Containers start on 8-byte boundaries; linkers pad with zeros.
_ALIGN = 8
# A damaged file must not fill the report: only its first faults are listed.
MAX_FAULTS = 20
# Of one file, and of all files of an audit. cuFFT has 24,000 in one library. Each takes some 200
# bytes of memory, which a file of empty ones would use up.
MAX_ENTRIES = 500_000
# One of each architecture: far fewer than this.
_MAX_SEVERAL = 256

Buffer = bytes | mmap.mmap


@dataclass(frozen=True, kw_only=True, slots=True)
class CodePiece:
    """One piece of code: ``kind`` is "cubin", "ptx", "lto", "other" (of a kind that is not known
    here) or "unknown" (damaged); ``note`` says why for the last two.

    ``offset`` and ``size`` are those of its code in the file, in bytes, as it is there: it may be
    compressed, and padded with zeros. ``packed`` is "", "zstd" or "lz4"; ``whole`` is the size in
    bytes after unpacking. The cubins of a concatenated entry all have the place of the whole.
    """

    kind: str
    arch: CudaArch
    note: str = ""
    offset: int = 0
    size: int = 0
    packed: str = ""
    whole: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FatContainer:
    """One translation unit's code. ``offset`` is in the file, in bytes.

    ``hollow``: it has no kernel and no variable, as the container that `nvcc -shared` adds when
    there was nothing to link for the device. It is never called.
    """

    offset: int
    entries: tuple[CodePiece, ...]
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """``faults`` says, in words, what could not be read."""

    containers: tuple[FatContainer, ...]
    faults: tuple[str, ...]


def parse(data: Buffer, start: int, size: int, *, room: int | None = None) -> Parsed:
    """Read the containers in ``data[start : start + size]``.

    Damage never raises: what could not be read is in ``faults``, and reading goes on at the next
    container if there is one.

    Args:
        room: how many containers and entries there may be; ``MAX_ENTRIES`` where it is not given.
    """
    room = MAX_ENTRIES if room is None else room
    end = min(start + size, len(data))
    containers: list[FatContainer] = []
    faults: list[str] = []
    read = 0
    if end < start + size:
        faults.append(f"the section ends at {start + size:#x}, the file at {len(data):#x}")
    offset = start
    while offset < end and len(faults) < MAX_FAULTS:
        if data[offset : offset + 4] != MAGIC_BYTES:
            following = _next_container(data, offset, end, start)
            if _any_byte(data, offset, following):
                faults.append(f"{following - offset} bytes at {offset:#x} are not a fat binary")
            offset = following
            continue
        container, after, fault = _container(data, offset, end, room - read)
        if container is not None:
            containers.append(container)
            read += 1 + len(container.entries)
        if fault:
            faults.append(fault)
            after = _next_container(data, offset + _CONTAINER.size, end, start)
        if read >= room:
            faults.append(_too_many(after))
            break
        offset = after
    return Parsed(containers=tuple(containers), faults=tuple(faults))


def search(
    data: Buffer, taken: Iterable[tuple[int, int]], instructions: Iterable[tuple[int, int]] = ()
) -> Parsed:
    """Find fat binaries and cubins in ``data`` outside the ``taken`` ranges.

    Libraries that load code themselves keep it in sections of any name, each container or cubin
    by itself. ``taken`` and ``instructions`` are (start, end) in bytes. Damaged ones are in
    ``faults``, except inside the host's ``instructions``: code that writes fat binaries has the
    first bytes of one as a constant.
    """
    containers: list[FatContainer] = []
    faults: list[str] = []
    code = _merged(instructions)
    starts = [low for low, _ in code]
    read = 0
    for start, end in _gaps(taken, len(data)):
        offset = start
        for candidate, is_elf in _candidates(data, start, end):
            if candidate < offset:
                continue
            take = _bare_cubin if is_elf else _container
            container, after, fault = take(data, candidate, end, MAX_ENTRIES - read)
            # Damaged ones count too: a hostile file would make each attempt walk the whole rest.
            read += bool(fault) if container is None else 1 + len(container.entries)
            if not fault and container is not None:
                offset = after
            near = bisect.bisect_right(starts, candidate) - 1
            if not (fault and near >= 0 and candidate < code[near][1]):
                faults.extend([fault] if fault else [])
                containers.extend([container] if container and container.entries else [])
            if read >= MAX_ENTRIES:
                faults.append(_too_many(candidate))
            if len(faults) >= MAX_FAULTS or read >= MAX_ENTRIES:
                return Parsed(containers=tuple(containers), faults=tuple(faults))
    return Parsed(containers=tuple(containers), faults=tuple(faults))


def cubin(data: Buffer) -> FatContainer:
    """Read a cubin outside a container as one unit. Raises ValueError for anything else."""
    container, _, fault = _bare_cubin(data, 0, len(data), 1)
    if container is None:
        raise ValueError(fault or "it is not a 64-bit cubin")
    return container


def _too_many(offset: int) -> str:
    return f"more than {MAX_ENTRIES} pieces of code: those after {offset:#x} were not read"


def _any_byte(data: Buffer, start: int, end: int) -> bool:
    """Whether a byte of the range is not 0. A block at a time: a section can be a whole file."""
    block = 1 << 20
    return any(data[at : min(at + block, end)].strip(b"\0") for at in range(start, end, block))


def _next_container(data: Buffer, offset: int, end: int, start: int) -> int:
    """Return the offset of the next aligned magic, or ``end``."""
    position = data.find(MAGIC_BYTES, offset, end)
    while position != -1 and (position - start) % _ALIGN:
        position = data.find(MAGIC_BYTES, position + 1, end)
    return end if position == -1 else position


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order; ranges that overlap become one."""
    extents: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if extents and start <= extents[-1][1]:
            extents[-1] = (extents[-1][0], max(extents[-1][1], end))
        else:
            extents.append((start, end))
    return extents


def _gaps(taken: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    at = 0
    for start, end in _merged(taken):
        if at < min(start, size):
            yield at, min(start, size)
        at = max(at, end)
    if at < size:
        yield at, size


def _candidates(data: Buffer, start: int, end: int) -> Iterator[tuple[int, bool]]:
    """Where a container (False) or an ELF file (True) may begin, in order."""
    stray, elf = data.find(_STRAY, start, end), data.find(_ELF64_LITTLE, start, end)
    while stray != -1 or elf != -1:
        if elf == -1 or (stray != -1 and stray < elf):
            yield stray, False
            stray = data.find(_STRAY, stray + 1, end)
        else:
            yield elf, True
            elf = data.find(_ELF64_LITTLE, elf + 1, end)


def _bare_cubin(
    data: Buffer, offset: int, end: int, room: int
) -> tuple[FatContainer | None, int, str]:
    """The cubin at ``offset`` as a unit of its own; no fault where there is other ELF."""
    if data[offset : offset + len(_ELF64_LITTLE)] != _ELF64_LITTLE or end - offset < _CUBIN.size:
        return None, end, ""
    machine, programs, headers, flags, _, each_program, number_programs, each, number, _ = (
        _CUBIN.unpack_from(data, offset)
    )
    if machine != EM_CUDA:
        return None, end, ""
    size = max(_CUBIN.size, headers + each * number, programs + each_program * number_programs)
    if offset + size > end:
        return None, end, f"the cubin at {offset:#x} is cut off"
    sm, specific = _target(data[offset + 8], flags)
    if not 20 <= sm < 1000:
        return None, end, f"the cubin at {offset:#x} is for architecture {sm}"
    specific = specific or _says_specific(data, offset, size)
    arch = CudaArch(major=sm // 10, minor=sm % 10, suffix="a" if specific else "")
    entry = CodePiece(kind="cubin", arch=arch, offset=offset, size=size, whole=size)
    return FatContainer(offset=offset, entries=(entry,)), offset + size, ""


def _target(abi: int, flags: int) -> tuple[int, bool]:
    """Architecture, and whether the code is architecture-specific, by a cubin's e_flags.

    Since ABI version 8 (CUDA 13) the number is in the second byte. A family target has no mark.
    """
    if abi < 8:
        return flags & 0xFF, bool(flags & 0x800)
    return flags >> 8 & 0xFF, bool(flags & 8)


def cubin_sections(data: Buffer, offset: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Type, flags, place (from ``offset``) and size of each section of a cubin, in bytes."""
    _, _, headers, _, _, _, _, each, number, _ = _CUBIN.unpack_from(data, offset)
    for index in range(number if each == _SECTION.size else 0):
        at = offset + headers + each * index
        if at + each > end:
            return
        yield _SECTION.unpack_from(data, at)


def _says_specific(data: Buffer, offset: int, size: int) -> bool:
    """Whether `.nv.compat` marks it so: ptxas 13.5 marks small cubins of sm_120a only there."""
    end = offset + size
    for kind, _, place, length in cubin_sections(data, offset, end):
        at, stop = offset + place, min(offset + place + length, end)
        while kind == _NV_COMPAT and at + 4 <= stop:
            form, attribute, value, _ = data[at : at + 4]
            if attribute == _COMPAT_SPECIFIC:
                return value == 1
            at += 4 + (value if form == _COMPAT_SIZED else 0)
    return False


def _container(
    data: Buffer, offset: int, end: int, room: int = MAX_ENTRIES
) -> tuple[FatContainer | None, int, str]:
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
    entries: list[CodePiece] = []
    fault = ""
    while position < stop and len(entries) < room:
        if stop - position < _ENTRY.size:
            fault = f"the entry at {position:#x} is cut off in its header"
            break
        kind, _, entry_header, payload, number, flags, whole = _ENTRY.unpack_from(data, position)
        code = position + entry_header
        after = code + payload
        if entry_header < _ENTRY.size or after > stop:
            fault = f"the entry at {position:#x} does not fit its fat binary"
            break
        if kind == _SEVERAL:
            entries.extend(_several(data, position, entry_header, payload, flags, whole))
        else:
            entries.append(_entry(data, kind, number, flags, code, payload, whole))
        position = after
    return FatContainer(offset=offset, entries=tuple(entries)), stop, fault


def _several(
    data: Buffer, position: int, header: int, payload: int, flags: int, whole: int
) -> Iterator[CodePiece]:
    """The cubins of a concatenated entry, or one unknown entry where its list is damaged."""
    code = position + header
    at = position + _ENTRY.size + _LIST.size
    number, length = _LIST.unpack_from(data, at - _LIST.size) if at <= code else (0, 0)
    items: list[CodePiece] = []
    start = bytes(data[code : code + 4])
    sound = 0 < number <= _MAX_SEVERAL and at - _LIST.size + length <= code
    sound = sound and (start == _ZSTD_MAGIC if flags & ZSTD else bool(flags & LZ4))
    for _ in range(number if sound else 0):
        if at + _ITEM_BYTES > code:
            break
        kind, _, place, size, sm, item_flags, _ = _ENTRY.unpack_from(data, at)
        (rest,) = struct.unpack_from("<I", data, at + _ITEM_BYTES - 4)
        if kind != CUBIN or place + size > whole or not _names_target(sm, item_flags):
            break
        items.append(
            CodePiece(
                kind="cubin",
                arch=_arch(sm, item_flags),
                offset=code,
                size=payload,
                packed=_packed(flags),
                whole=whole,
            )
        )
        at += (_ITEM_BYTES + rest + 7) // 8 * 8
    if sound and len(items) == number:
        yield from items
    else:
        note = f"the list of a concatenated entry is damaged, flags {flags:#x}"
        yield CodePiece(kind="unknown", arch=_arch(0, 0), note=note, offset=code, size=payload)


def _names_target(number: int, flags: int) -> bool:
    return 20 <= number < 1000 and not (flags & SPECIFIC and flags & FAMILY)


def _arch(number: int, flags: int) -> CudaArch:
    return _named(number, "a" if flags & SPECIFIC else "f" if flags & FAMILY else "")


@functools.lru_cache(1024)
def _named(number: int, suffix: str) -> CudaArch:
    return CudaArch(major=number // 10, minor=number % 10, suffix=suffix)


def _packed(flags: int) -> str:
    return "zstd" if flags & ZSTD else "lz4" if flags & LZ4 else ""


def _entry(
    data: Buffer, kind: int, number: int, flags: int, offset: int, size: int, whole: int
) -> CodePiece:
    start = data[offset : offset + 4]
    names = {PTX: "ptx", CUBIN: "cubin", LTO: "lto"}
    name = names.get(kind, "other")
    note = "" if kind in names else f"code of kind {kind}"
    damage = ""
    if name == "other":
        # What its fields mean is not known.
        pass
    elif not _names_target(number, flags):
        damage = f"architecture {number}, flags {flags:#x}"
    elif flags & ZSTD and kind != LTO:
        damage = "" if start == _ZSTD_MAGIC else "the payload is not zstd, which its header names"
    elif kind == CUBIN and not flags & LZ4 and start != ELF_MAGIC:
        damage = "the payload is not a cubin, which its header names"
    return CodePiece(
        kind="unknown" if damage else name,
        arch=_arch(number, flags),
        note=damage or note,
        offset=offset,
        size=size,
        packed=_packed(flags),
        whole=whole if _packed(flags) else size,
    )
