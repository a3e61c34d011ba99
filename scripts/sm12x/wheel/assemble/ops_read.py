"""Which torch ops a library registers, as far as its file says without being loaded.

For libraries of another machine. An op that was given a schema has that text in the file; one that
was registered by its function alone has not, and which namespace an op goes into is in code. So
this finds fewer than loading does, each without its namespace, and never one that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection

from sm12x.core.errors import BadFileError
from sm12x.wheel.assemble.torch_ops import Registered

# The longest schema of the releases so far has 1500 characters.
_LONGEST = 8192
_ARROW = re.compile(rb"\)\s*->")
_SCHEMA = re.compile(rb"\s*(?:\w+::)?([A-Za-z_]\w*(?:\.\w+)?)\s*\([^\0]*\)\s*->[^\0]*")
_NAME = re.compile(rb"[A-Za-z][A-Za-z0-9_]*")

# Relocation types that put "load address + addend" in a pointer.
_RELATIVE = {"EM_AARCH64": 1027, "EM_X86_64": 8}
_POINTER = 8
# METH_VARARGS .. METH_STATIC and their combinations, of Python's methodobject.h.
_METHOD_FLAGS = range(1, 0x400)


def read(path: Path) -> Registered:
    """What the library's file says: ops as `name` or `name.overload`, and a module's functions.

    Raises BadFileError when it is not a shared library.
    """
    try:
        with path.open("rb") as handle:
            elf = ELFFile(handle)
            ops = {name for data in _constants(elf) for name in schemas(data)}
            names = set(_methods(elf)) if _is_module(elf) else set()
    except (OSError, ELFError) as error:
        raise BadFileError(
            f"{path} is not a shared library that can be read: {error}",
            next_step="build it again",
        ) from None
    public = (name for name in names if not name.startswith("_"))
    return Registered(ops=tuple(sorted(ops)), names=tuple(sorted(public)), by="read")


def schemas(data: bytes) -> Iterator[str]:
    """The names of the ops whose schema is a zero-terminated text in ``data``."""
    for found in _ARROW.finditer(data):
        first = max(found.start() - _LONGEST, 0)
        before = data.rfind(b"\0", first, found.start())
        end = data.find(b"\0", found.end(), found.end() + _LONGEST)
        if before < 0 < first:
            continue
        match = _SCHEMA.fullmatch(data[before + 1 : end if end >= 0 else len(data)])
        if match:
            yield match[1].decode()


def _constants(elf: ELFFile) -> Iterator[bytes]:
    for section in elf.iter_sections():
        if section.name.startswith(".rodata"):
            yield section.data()


def _is_module(elf: ELFFile) -> bool:
    symbols = elf.get_section_by_name(".dynsym")
    return isinstance(symbols, SymbolTableSection) and any(
        symbol.name.startswith("PyInit_") for symbol in symbols.iter_symbols()
    )


def _methods(elf: ELFFile) -> Iterator[str]:
    """The names in tables of PyMethodDef: {name, function, flags, documentation}."""
    pointers = _pointers(elf)
    code = [
        range(segment["p_vaddr"], segment["p_vaddr"] + segment["p_memsz"])
        for segment in elf.iter_segments("PT_LOAD")
        if segment["p_flags"] & 1
    ]
    for address, text in pointers.items():
        function = pointers.get(address + _POINTER)
        if function is None or not any(function in part for part in code):
            continue
        flags = int.from_bytes(_bytes_at(elf, address + 2 * _POINTER, 4), "little")
        name = _bytes_at(elf, text, 256).partition(b"\0")[0]
        if flags in _METHOD_FLAGS and _NAME.fullmatch(name):
            yield name.decode()


def _pointers(elf: ELFFile) -> Mapping[int, int]:
    """Where pointers into the library itself are, and what they point to."""
    kind = _RELATIVE.get(str(elf["e_machine"]))
    found: dict[int, int] = {}
    for section in elf.iter_sections():
        if isinstance(section, RelocationSection):
            for entry in section.iter_relocations():
                if entry["r_info_type"] == kind:
                    found[entry["r_offset"]] = entry["r_addend"]
    return found


def _bytes_at(elf: ELFFile, address: int, size: int) -> bytes:
    for segment in elf.iter_segments("PT_LOAD"):
        offset = address - segment["p_vaddr"]
        if 0 <= offset < segment["p_filesz"]:
            elf.stream.seek(segment["p_offset"] + offset)
            data: bytes = elf.stream.read(min(size, segment["p_filesz"] - offset))
            return data
    return b""
