"""Which torch ops the native modules register, found by loading them without a GPU.

Modules of another machine are read: an op registered with a schema has that text in the file; one
registered by its function alone does not, and the namespace is only in code. So reading finds fewer
ops than loading, each without its namespace, but never a wrong one.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection

from sm12x.core import process
from sm12x.core.errors import BadFileError, BuildFailedError, ToolFailedError
from sm12x.core.text import first_of
from sm12x.wheel.ledger import is_program
from sm12x.wheel.toolchain import cuda_home, libcuda_stub

# Run by its path, not imported: it needs torch, and this package does not.
_PROBE = Path(__file__).with_name("ops_probe.py")

_FOR_ONE_PYTHON = re.compile(r"\.cpython-(\d)(\d+)-[\w-]+\.so$")


@dataclass(frozen=True, kw_only=True)
class Registered:
    """``ops`` are full names with overload (``_C::silu_and_mul``); ``names`` what a Python module
    offers besides. ``by`` is "loaded", or "read" from the file: then no op has its namespace.
    """

    ops: tuple[str, ...]
    names: tuple[str, ...]
    by: str = "loaded"


def loads_on(path: str, python: str) -> bool:
    """Tell whether the library's name allows ``python`` ("3.13"): stable ABI, or that version.

    A program is not loaded on any.
    """
    match = _FOR_ONE_PYTHON.search(path)
    return not is_program(path) and (match is None or f"{match[1]}.{match[2]}" == python)


def find(
    folder: Path, paths: Sequence[str], *, python: Path, purelib: Path
) -> Mapping[str, Registered]:
    """Load ``paths`` (relative to ``folder``) in ``python`` and list what each registers.

    Args:
        purelib: the site-packages of ``python``, with torch and the CUDA toolkit's headers.

    Raises:
        BuildFailedError: a library does not load.
    """
    if not paths:
        return {}
    include = cuda_home.find_package(purelib) / "include"
    full = {str(folder / path): path for path in paths}
    with tempfile.TemporaryDirectory(prefix="sm12x-ops-") as driver:
        # The name that the loader asks for; only this process's children see the folder.
        libcuda_stub.build(include, Path(driver) / libcuda_stub.SONAME)
        try:
            done = process.run(
                [python, "-I", _PROBE, json.dumps(list(full))],
                env={"LD_LIBRARY_PATH": driver, "CUDA_VISIBLE_DEVICES": ""},
                timeout=600,
            )
        except ToolFailedError as error:
            raise BuildFailedError(
                f"the process that loads the native modules died: {error.message}",
                next_step="load them one by one to find the one that crashes",
            ) from None
    results = json.loads(done.stdout.splitlines()[-1])
    for path, result in results.items():
        if "error" in result:
            raise BuildFailedError(
                f"{full[path]} does not load: {result['error']}",
                next_step="check that it was compiled against the release's torch",
            )
    return {
        full[path]: Registered(ops=tuple(result["ops"]), names=tuple(result["names"]))
        for path, result in results.items()
    }


def lost(
    path: str, ours: Registered, official: Registered, other_gpus: Sequence[str]
) -> tuple[str, ...]:
    """List the official module's ops and names that our build of ``path`` lacks.

    Args:
        other_gpus: the ops that our build may lack: their kernels are for other GPUs.

    Raises:
        BuildFailedError: our build lacks another op.
    """
    missing = sorted({*official.ops, *official.names} - {*ours.ops, *ours.names})
    exceptions = set(other_gpus)
    if official.by == "read":
        exceptions = {name.rpartition("::")[2] for name in exceptions}
    unexplained = [name for name in missing if name not in exceptions]
    if unexplained:
        raise BuildFailedError(
            f"{path} as compiled here lacks {len(unexplained)} of the official one's "
            f"{len(official.ops)} ops: {first_of(unexplained, 3)}",
            next_step="find the sources that CMake left out in the compile log",
        )
    return tuple(missing)


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
    """Reads the library's file: ops as `name` or `name.overload`, and a module's functions.

    Raises BadFileError when it is not a shared library.
    """
    try:
        with path.open("rb") as handle:
            elf = ELFFile(handle)
            constants = (one for one in elf.iter_sections() if one.name.startswith(".rodata"))
            ops = {name for section in constants for name in schemas(section.data())}
            names = set(_methods(elf)) if _is_module(elf) else set()
    except (OSError, ELFError) as error:
        raise BadFileError(
            f"{path} is not a shared library that can be read: {error}",
            next_step="build it again",
        ) from None
    public = (name for name in names if not name.startswith("_"))
    # The docstring of a function looks like a schema where it begins with the signature.
    return Registered(ops=tuple(sorted(ops - names)), names=tuple(sorted(public)), by="read")


def schemas(data: bytes) -> Iterator[str]:
    """Yield the names of the ops whose schema is a zero-terminated text in ``data``."""
    for arrow in _ARROW.finditer(data):
        first = max(arrow.start() - _LONGEST, 0)
        before = data.rfind(b"\0", first, arrow.start())
        end = data.find(b"\0", arrow.end(), arrow.end() + _LONGEST)
        if before < 0 < first:
            continue
        match = _SCHEMA.fullmatch(data[before + 1 : end if end >= 0 else len(data)])
        if match:
            yield match[1].decode()


def _is_module(elf: ELFFile) -> bool:
    symbols = elf.get_section_by_name(".dynsym")
    return isinstance(symbols, SymbolTableSection) and any(
        symbol.name.startswith("PyInit_") for symbol in symbols.iter_symbols()
    )


def _methods(elf: ELFFile) -> Iterator[str]:
    """Return the names in tables of PyMethodDef: {name, function, flags, documentation}."""
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
    """Map the offset of each pointer into the library itself to its target."""
    kind = _RELATIVE.get(str(elf["e_machine"]))
    pointers: dict[int, int] = {}
    for section in elf.iter_sections():
        if isinstance(section, RelocationSection):
            for entry in section.iter_relocations():
                if entry["r_info_type"] == kind:
                    pointers[entry["r_offset"]] = entry["r_addend"]
    return pointers


def _bytes_at(elf: ELFFile, address: int, size: int) -> bytes:
    for segment in elf.iter_segments("PT_LOAD"):
        offset = address - segment["p_vaddr"]
        if 0 <= offset < segment["p_filesz"]:
            elf.stream.seek(segment["p_offset"] + offset)
            data: bytes = elf.stream.read(min(size, segment["p_filesz"] - offset))
            return data
    return b""
