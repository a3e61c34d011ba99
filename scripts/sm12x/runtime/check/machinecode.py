"""Is the machine code of the installed libraries as recorded? Read anew from the files.

The libraries of the ledger, and FlashInfer's modules, which FlashInfer has to load as well.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from sm12x.audit import sections
from sm12x.audit.model import LibraryAudit
from sm12x.core import files
from sm12x.core.cudaarch import CudaArch
from sm12x.core.errors import BadFileError, ToolFailedError
from sm12x.core.text import counted, size
from sm12x.runtime.check.native import REBUILD, LoadedDriver
from sm12x.runtime.check.report import Line, Topic
from sm12x.runtime.places import Places
from sm12x.wheel import flashinfer, flashinfer_jit
from sm12x.wheel.flashinfer import Library
from sm12x.wheel.ledger import Ledger, LibraryEntry

_TOPIC = Topic("machine code", "pull or rebuild the image; nothing should write to its packages")
_FLASHINFER = Topic("flashinfer", REBUILD)
# As FlashInfer has the two devices where no GPU is there to be asked.
_DEVICES = ("12.0f", "12.1a")


def check(ledger: Ledger, site: Path) -> list[Line]:
    """Compare cubins and PTX of every library of the ledger. Reads headers, not the code."""
    lines = []
    cubins: Counter[str] = Counter()
    ptx = 0
    for entry in ledger.libraries:
        try:
            audit = read(site / entry.path)
        except OSError as error:
            reason = error.strerror or "it is empty"
            lines.append(_TOPIC.failed(f"{entry.path} cannot be read: {reason}"))
            continue
        problem = _difference(entry, audit)
        if problem:
            lines.append(_TOPIC.failed(f"{entry.path} ({entry.origin}) {problem}"))
        cubins.update(audit.cubins)
        ptx += sum(audit.ptx.values())
    if lines:
        return lines
    compiled = sum(entry.origin == "compiled" for entry in ledger.libraries)
    own = {arch: number for arch, number in cubins.items() if arch.startswith("12.")}
    return [
        _TOPIC.passed(
            f"{len(ledger.libraries)} libraries, {compiled} of them compiled for this image "
            f"({ledger.mode} mode), hold the ledger's: cubins {_text(own) or 'none of 12.x'}; "
            f"{sum(cubins.values()) - sum(own.values())} for other GPUs; {ptx} PTX"
        )
    ]


def read(path: Path) -> LibraryAudit:
    """Read the machine code of one file. Raises OSError when it cannot be read."""
    with path.open("rb") as handle:
        if not path.stat().st_size:
            raise OSError
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return sections.audit(path.as_posix(), data)


def _difference(entry: LibraryEntry, audit: LibraryAudit) -> str:
    if audit.unknown:
        return f"has machine code that cannot be read: {'; '.join(audit.unknown)}"
    parts = []
    for what, ours, theirs in (
        ("cubins", audit.cubins, entry.cubins),
        ("PTX", audit.ptx, entry.ptx),
    ):
        if dict(ours) != theirs:
            parts.append(f"has {what} {_text(ours) or 'none'}, ledger {_text(theirs) or 'none'}")
    return "; ".join(parts)


def _text(counts: Mapping[str, int]) -> str:
    """ "12.0a x 56, 12.1a x 56"."""
    return ", ".join(f"{arch} x {counts[arch]}" for arch in sorted(counts, key=CudaArch.parse))


def check_flashinfer(places: Places, driver: LoadedDriver, scratch: Path) -> list[Line]:
    """Compare hashes and machine code with the record, then run FlashInfer's own loader."""
    try:
        record = flashinfer.read(places.flashinfer)
    except BadFileError as error:
        return [_FLASHINFER.failed(error.message, error.next_step)]
    if not record.libraries:
        return [_FLASHINFER.noted("no module is compiled ahead of time: the first start compiles")]
    lines = []
    for library in record.libraries:
        problem = _module_difference(library, places.site)
        if problem:
            lines.append(_FLASHINFER.failed(f"{library.module.name} {problem}"))
    modules = [library.module for library in record.libraries]
    for device in _DEVICES:
        env: dict[str, str | None] = {
            **driver.env,
            "FLASHINFER_CUDA_ARCH_LIST": device,
            "FLASHINFER_WORKSPACE_BASE": str(scratch),
            # A module that is not there is then an error, and no compilation.
            "FLASHINFER_DISABLE_JIT": "1",
        }
        try:
            answer = flashinfer.ask(flashinfer_jit.LOAD, modules, scratch, env=env)
        except ToolFailedError as error:
            message = f"loading for {device} stopped the probe: {error.message}"
            lines.append(_FLASHINFER.failed(message))
            continue
        lines += [
            _FLASHINFER.failed(f"{name} is not loaded for {device}: {problem}")
            for name, problem in answer.items()
            if problem
        ]
    if lines:
        return lines
    total = size(sum(library.size for library in record.libraries))
    message = f"{counted(len(modules), 'module')} for {record.arch_list} ({total})"
    return [_FLASHINFER.passed(f"{message}: FlashInfer loads each, and compiles none")]


def _module_difference(library: Library, site: Path) -> str:
    name = library.module.name
    path = site / flashinfer.FOLDER / name / f"{name}.so"
    try:
        if files.sha256(path) != library.sha256:
            return "is not the file that was compiled"
        audit = read(path)
    except OSError as error:
        return f"cannot be read: {error.strerror or 'it is empty'}"
    if dict(audit.cubins) != library.cubins or dict(audit.ptx) != library.ptx:
        return "has other machine code than was recorded"
    return ""
