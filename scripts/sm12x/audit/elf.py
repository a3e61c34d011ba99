"""The device code in an ELF file of the host, its headers read by pyelftools."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import IO, cast

import zstandard
from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from sm12x.audit import fatbin, sections
from sm12x.audit.fatbin import Buffer, CodePiece, FatContainer
from sm12x.audit.sections import FoundCode, Section

_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
_MAX_SECTIONS = 65536
# pyelftools checks little: a damaged header surfaces as any of these.
_DAMAGE = (
    ELFError, ConstructError, ValueError, KeyError, IndexError, TypeError, AttributeError,
    AssertionError, OverflowError, EOFError, struct.error, UnicodeDecodeError,
)  # fmt: skip
# A cubin without a kernel has some 700 bytes: headers, symbols, what compiled it.
_HOLLOW_BYTES = 16384
# Bytes that zstd may look back, which it allocates: 128 MiB unless told.
_WINDOW = 1 << 20
_ALLOCATED = 2
# The function that device-linked code defines for each unit compiled with -rdc=true, and the unit
# calls when the library is loaded.
_LINKED = b"__cudaRegisterLinkedBinary_"
_SYMBOL = struct.Struct("<I2xH16x")


@dataclass(frozen=True, kw_only=True)
class DeviceCode:
    """``machine`` is that of the host code; ``shared`` is whether the file can be loaded or run (a
    library or a program, not an object file); ``unloadable`` is the reason why such a file cannot
    be loaded."""

    machine: str
    shared: bool
    found: FoundCode
    unloadable: str = ""


def read(data: Buffer) -> DeviceCode:
    """Read the device code of one ELF file. Damage never raises: it is in the faults."""
    # A mapped file reads and seeks as pyelftools needs it to, whatever its declared type says.
    stream = io.BytesIO(data) if isinstance(data, bytes) else cast(IO[bytes], data)
    try:
        elf = ELFFile(stream)
        machine = elf["e_machine"]
        name = _MACHINES.get(machine, str(machine))
        shared = elf["e_type"] in ("ET_DYN", "ET_EXEC")
    except _DAMAGE as error:
        return DeviceCode(machine="", shared=True, found=_damaged(data, error))
    try:
        listed = list(_sections(elf))
        unloadable = _unloadable(data, elf) if shared else ""
    except _DAMAGE as error:
        return DeviceCode(machine=name, shared=shared, found=_damaged(data, error))
    code = sections.collect(data, listed)
    units = tuple(_seen_through(data, unit) for unit in code.units)
    return DeviceCode(
        machine=name,
        shared=shared,
        found=replace(code, units=units),
        unloadable=unloadable,
    )


def _damaged(data: Buffer, error: Exception) -> FoundCode:
    """Return the code that a search finds without the headers: a damaged file is not empty."""
    what = f"{type(error).__name__} {error}".strip()
    code = sections.collect(data, ())
    return replace(code, faults=(f"the ELF headers are damaged: {what}", *code.faults))


def _sections(elf: ELFFile) -> Iterator[Section]:
    number = elf.num_sections()
    if not 0 < number < _MAX_SECTIONS:
        # Only the section names tell which fat binaries are loaded.
        raise ValueError(f"it has {number} section headers")
    names = elf.get_section(elf.get_shstrndx())
    if names["sh_type"] != "SHT_STRTAB" or names.name not in sections.NAME_TABLES:
        raise ValueError(f"its section names are in {names.name!r}, a {names['sh_type']}")
    for section in elf.iter_sections():
        # pyelftools does not check that a name's offset is inside the table.
        if section["sh_name"] >= names["sh_size"]:
            raise ValueError("a section's name is not in the table of names")
        yield Section(
            name=section.name,
            kind=8 if section["sh_type"] == "SHT_NOBITS" else 0,
            offset=section["sh_offset"],
            size=section["sh_size"],
            flags=section["sh_flags"],
        )


def _unloadable(data: Buffer, elf: ELFFile) -> str:
    """Why the dynamic linker refuses the library, as far as its device code is the reason."""
    symbols, strings = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".dynstr")
    if symbols is None or strings is None or elf.elfclass != 64 or not elf.little_endian:
        return ""
    # Not through pyelftools, which unpacks a section that says it is compressed, whatever its size.
    text, table = (
        bytes(data[section["sh_offset"] : section["sh_offset"] + section["sh_size"]])
        for section in (strings, symbols)
    )
    if _LINKED not in text:
        return ""
    whole = len(table) - len(table) % _SYMBOL.size
    missing = sum(
        not section and text.startswith(_LINKED, name)
        for name, section in _SYMBOL.iter_unpack(table[:whole])
    )
    if not missing:
        return ""
    return (
        f"it cannot be loaded: {missing} symbols {_LINKED.decode()}* are not defined, for its "
        "objects were compiled with -rdc=true and linked without `nvcc -dlink`"
    )


def _seen_through(data: Buffer, unit: FatContainer) -> FatContainer:
    """The unit, marked where it is hollow: no entry at all, or each cubin without a kernel."""
    cubins = [entry for entry in unit.entries if entry.kind == "cubin"]
    if not unit.entries:
        return replace(unit, hollow=True)
    if not cubins or any(entry.kind not in ("cubin", "ptx") for entry in unit.entries):
        return unit
    return replace(unit, hollow=True) if all(_empty(data, entry) for entry in cubins) else unit


def _empty(data: Buffer, entry: CodePiece) -> bool:
    """Tell whether a cubin has nothing to load on a device: no kernel, function or variable."""
    if max(entry.size, entry.whole) > _HOLLOW_BYTES:
        return False
    code = _unpacked(bytes(data[entry.offset : entry.offset + entry.size]), entry)
    try:
        fatbin.cubin(code)
        parts = list(fatbin.cubin_sections(code, 0, len(code)))
    except (ValueError, struct.error):
        return False
    return bool(parts) and not any(flags & _ALLOCATED and size for _, flags, _, size in parts)


def _unpacked(code: bytes, entry: CodePiece) -> bytes:
    """Return the code of an entry of known, small size; b"" where that cannot be unpacked here."""
    if entry.packed == "zstd":
        try:
            # Not the whole of `code`: it is padded. The size bounds what is unpacked.
            reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(code)
            return reader.read(entry.whole)
        except zstandard.ZstdError:
            return b""
    return b"" if entry.packed else code
