"""The ledger: the JSON in every wheel and image that lists its contents and their origin.

Nothing in it depends on when or where it was written: the wheel that carries it is reproducible.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from sm12x.core import declared, unpack
from sm12x.core.declared import Declared
from sm12x.core.errors import BadFileError

# The request for FlashInfer's modules, beside a bundle's ledger if it has any; and the record of
# the compiled ones, beside the image's. Defined here, as the doctor has few libraries.
FLASHINFER_REQUEST, FLASHINFER_RECORD = "flashinfer-request.json", "flashinfer.json"
# Inside the wheel, under the .dist-info folder.
NAME = "sm12x-ledger.json"
# Bytes of one: it has some 300 KB.
_MOST = 64 << 20
_NEXT = "rebuild the bundle with this version of sm12x"


@dataclass(frozen=True, kw_only=True)
class PatchEntry(Declared):
    """``sha256`` is of the patch file; ``state`` is "applied" or "upstream".

    ``native`` says whether its C++ and CUDA are in effect: "compiled", "not compiled in quick
    mode", "not compiled: <modules>" where a full build kept official ones, and "" for a patch that
    has none.
    """

    name: str
    subject: str
    upstream: str
    drop_when: str
    witness: str
    sha256: str
    state: str
    native: str


@dataclass(frozen=True, kw_only=True)
class FileEntry(Declared):
    """A file of the wheel that is not the official one's. Hashes are sha256 in hex.

    ``origin`` is "patched", "compiled", "generated" (it carries the version) or "removed".
    ``base_sha256`` is "" for a file the stack adds, ``sha256`` for one it removes.
    """

    path: str
    sha256: str
    base_sha256: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class LibraryEntry(Declared):
    """One shared library: its machine code, and the torch ops it registers.

    ``origin`` is "official" or "compiled"; ``reason`` says why a requested module is still the
    official one. Sizes are in bytes, ``official_size`` 0 where the official wheel has no such file.
    ``cubins`` and ``ptx`` count the code by architecture ("12.0a", "8.0"). ``sm120`` and ``sm121``
    are "native", "mixed", "ptx", "none", "host" (no device code) or "unknown". ``ops`` are full
    names with overload; none are listed for a library that is for another Python than the ledger's.
    ``ops_by`` says how they were found: "loaded", or "read" out of the file on another machine,
    which finds no namespaces and not all ops. ``lost`` are those of the official library that it
    was allowed to lack.
    """

    path: str
    sha256: str
    size: int
    official_size: int
    origin: str
    reason: str
    cubins: dict[str, int]
    ptx: dict[str, int]
    sm120: str
    sm121: str
    ops: tuple[str, ...]
    lost: tuple[str, ...]
    ops_by: str = "loaded"


@dataclass(frozen=True, kw_only=True)
class OverrideEntry(Declared):
    """A requirement that the lock replaces: the metadata of the package ``of`` still names it."""

    requirement: str
    instead_of: str
    why: str
    of: str = "vllm"


@dataclass(frozen=True, kw_only=True)
class SourceEntry(Declared):
    """A third-party source that modules were compiled of, and what base.toml ``pin``s it to.

    ``version`` is what its own files say, "" where they do not. It may be another patch level than
    the pin where that was asked for.
    """

    name: str
    pin: str
    version: str


@dataclass(frozen=True, kw_only=True)
class ExtraEntry(Declared):
    """An extra of the release that the lock has too; ``license`` is that of the package it brings.

    ``modules`` are those of the package that the release uses.
    """

    name: str
    requirement: str
    license: str
    modules: tuple[str, ...]

    @property
    def package(self) -> str:
        """Return the normal name of the package, without a library that the doctor may lack."""
        return re.sub(r"[-_.]+", "-", self.requirement.partition("==")[0].strip()).lower()


@dataclass(frozen=True, kw_only=True)
class Ledger(Declared):
    """``mode`` is "quick" (the official wheel, changed) or "full" (all compiled here).

    ``arch_list`` is what was asked for, ``cmake_archs`` what the release's CMake made of it; both
    concern what was compiled here. ``lock_sha256`` is of the locked closure, whose versions are
    ``dependencies``. ``allowed_missing`` is empty: older ledgers of this schema name third-party
    sources there that modules were compiled without.
    """

    base_version: str
    sdist: str
    sdist_sha256: str
    official_wheel: str
    official_wheel_sha256: str
    stack_id: str
    patches: tuple[PatchEntry, ...]
    mode: str
    machine: str
    python: str
    arch_list: str
    cmake_archs: str
    compiler: str
    nvcc: str
    files: tuple[FileEntry, ...]
    libraries: tuple[LibraryEntry, ...]
    lock_sha256: str
    dependencies: dict[str, str]
    overrides: tuple[OverrideEntry, ...] = ()
    extras: tuple[ExtraEntry, ...] = ()
    sources: tuple[SourceEntry, ...] = ()
    allowed_missing: tuple[str, ...] = ()
    schema: Literal[2] = 2

    @property
    def wheel_version(self) -> str:
        return wheel_version(self.base_version, self.stack_id, self.mode)

    @property
    def replaced(self) -> tuple[str, ...]:
        """Return sources of another version than pinned: "cutlass v4.7.0 in place of v4.7.1"."""
        return tuple(
            f"{source.name} {source.version} in place of {source.pin}"
            for source in self.sources
            if source.version and source.version != source.pin
        )


def is_program(path: str) -> bool:
    """Tell whether a file of machine code is a program; releases may ship some."""
    return ".so" not in PurePosixPath(path).name


def wheel_version(base_version: str, stack_id: str, mode: str) -> str:
    """Return the release's version with stack id and build mode as local label (PEP 440)."""
    return f"{base_version}+sm12x.{stack_id}.{mode}"


def read(path: Path) -> Ledger:
    """Read a ledger file. Raises BadFileError when it is not one."""
    return declared.read_json(Ledger, path, next_step=_NEXT, what="ledger")


def parse(text: str, path: Path) -> Ledger:
    """Return a ledger out of its JSON, which was found in ``path``. Raises BadFileError."""
    return declared.parse_json(Ledger, text, path, next_step=_NEXT, what="ledger")


def inside(path: Path) -> Ledger | None:
    """Read the ledger in a wheel, or in a folder with an unpacked or installed wheel.

    Returns None without one. Raises BadFileError when the file is not a ledger.
    """
    place = f"*.dist-info/{NAME}"
    if path.is_dir():
        return next((read(file) for file in sorted(path.glob(place))), None)
    if not zipfile.is_zipfile(path):
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            names = [one for one in archive.infolist() if PurePosixPath(one.filename).match(place)]
            text = unpack.small(archive, names[0], _MOST).decode() if names else ""
    # As in audit/scan.py: NotImplementedError is a compression this Python lacks, RuntimeError an
    # encrypted member.
    except (
        *(zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError),
        ValueError,
    ) as error:
        raise BadFileError(f"{path} holds no ledger: {error}", next_step=_NEXT) from None
    return parse(text, path) if names else None
