"""The device code in an ELF file, through pyelftools and the fat binary reader.

Code that a library keeps in a format of its own is not seen, as cuobjdump does not see it: cuFFT
unpacks its kernels itself, out of .ldata.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import IO, cast

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from sm12x.audit import fatbin
from sm12x.audit.fatbin import Buffer, Container

MAGIC = b"\x7fELF"
# What each name means: `__nv_relfatbin` is input of the device linker, `.nv_fatbin` is loaded.
_LOADED, _RELOCATABLE, _REGISTERED = ".nv_fatbin", "__nv_relfatbin", ".nvFatBinSegment"
# One record registers one fat binary: magic, version, its address, linked inputs.
_RECORD_BYTES = 24
_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
_MAX_SECTIONS = 65536
# pyelftools checks little: a damaged header surfaces as any of these.
_DAMAGE = (
    ELFError, ConstructError, ValueError, KeyError, IndexError, TypeError, AttributeError,
    AssertionError, OverflowError, MemoryError, EOFError,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeviceCode:
    """``machine`` is that of the host code, "cuda" for a cubin; ``shared`` is whether the file can
    be loaded or run (a library or a program, not an object file)."""

    machine: str
    shared: bool
    units: tuple[Container, ...] = ()
    relocatable: tuple[Container, ...] = ()
    faults: tuple[str, ...] = ()


def read(data: Buffer) -> DeviceCode:
    """Read the device code of one ELF file. Damage never raises: it is in ``faults``."""
    # A mapped file reads and seeks as pyelftools needs it to, whatever its declared type says.
    stream = io.BytesIO(data) if isinstance(data, bytes) else cast(IO[bytes], data)
    try:
        return _read(data, stream)
    except _DAMAGE as error:
        what = f"{type(error).__name__} {error}".strip()
        return DeviceCode(machine="", shared=True, faults=(f"the ELF headers are damaged: {what}",))


def _read(data: Buffer, stream: IO[bytes]) -> DeviceCode:
    elf = ELFFile(stream)
    machine = elf["e_machine"]
    name = "cuda" if machine == "EM_CUDA" else _MACHINES.get(machine, str(machine))
    shared = elf["e_type"] in ("ET_DYN", "ET_EXEC")
    number = elf.num_sections()
    if not 0 < number < _MAX_SECTIONS:
        # Section names are all that says where the fat binaries are.
        fault = f"it has {number} section headers: device code cannot be looked for"
        return DeviceCode(machine=name, shared=shared, faults=(fault,))
    found: dict[str, list[Container]] = {_LOADED: [], _RELOCATABLE: []}
    faults: list[str] = []
    records = 0
    for section in elf.iter_sections():
        start, size = section["sh_offset"], section["sh_size"]
        if section.name in found and section["sh_type"] == "SHT_NOBITS":
            faults.append(f"{section.name} has been taken out of the file")
        elif section.name in found:
            parsed = fatbin.parse(data, start, size)
            found[section.name].extend(parsed.containers)
            faults.extend(f"{section.name}: {fault}" for fault in parsed.faults)
        elif section.name == _REGISTERED:
            records += size // _RECORD_BYTES
    read = sum(len(containers) for containers in found.values())
    if records > read and not faults:
        faults.append(f"{records} fat binaries are registered, {read} were found")
    return DeviceCode(
        machine=name,
        shared=shared,
        units=tuple(found[_LOADED]),
        relocatable=tuple(found[_RELOCATABLE]),
        faults=tuple(faults),
    )
