"""One file: decide whether it is a library, and audit its bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from sm12x.audit import elf
from sm12x.audit.fatbin import Buffer
from sm12x.audit.model import Audit, LibraryAudit

_LIBRARY_NAME = re.compile(r"\.so(\.\d+)*$")
# A linker script (libc.so, libm.so) has a library's name and is text.
_LINKER_SCRIPT = re.compile(rb"\s*(/\*|GROUP|INPUT|OUTPUT_FORMAT)")


def assemble(subject: str, kind: str, libraries: Iterable[LibraryAudit]) -> Audit:
    """An audit of these libraries, in order of their paths."""
    ordered = tuple(sorted(libraries, key=lambda library: library.path))
    return Audit(subject=subject, kind=kind, libraries=ordered)


def may_be(path: str, head: bytes) -> bool:
    """Whether a file of this name, beginning with these bytes, has to be read."""
    return head == elf.MAGIC or bool(_LIBRARY_NAME.search(path))


def audit(path: str, data: Buffer, *, alone: bool = False) -> LibraryAudit | None:
    """Audit the bytes of one file.

    None for what is no library: linker scripts, and object files and bare cubins unless asked for
    alone. A library's name on a file of another kind is a fault, not a reason to pass it over.
    """
    if data[:4] != elf.MAGIC:
        if _LINKER_SCRIPT.match(data[:64]):
            return None
        code = elf.DeviceCode(machine="", shared=True, faults=("it is not an ELF file",))
    else:
        code = elf.read(data)
    if not alone and (not code.shared or code.machine == "cuda"):
        return None
    return LibraryAudit(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        machine=code.machine,
        units=code.units,
        relocatable=code.relocatable,
        faults=code.faults,
    )


def unreadable(path: str, size: int, why: str) -> LibraryAudit:
    """The entry for a library whose bytes could not be had."""
    return LibraryAudit(path=path, sha256="", size=size, machine="", faults=(why,))
