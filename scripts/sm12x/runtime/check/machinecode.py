"""Is the machine code of the installed libraries the ledger's? Read anew from the files."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from sm12x.audit import sections
from sm12x.audit.model import LibraryAudit
from sm12x.core.cudaarch import CudaArch
from sm12x.runtime.check.report import Line, failed, passed
from sm12x.wheel.ledger import Ledger, LibraryEntry

TOPIC = "machine code"
REBUILD = "pull or rebuild the image; nothing should write to its packages"


def check(ledger: Ledger, site: Path) -> list[Line]:
    """Compare cubins and PTX of every library of the ledger. Reads headers, not the code."""
    lines = []
    cubins: Counter[str] = Counter()
    ptx = 0
    for entry in ledger.libraries:
        try:
            found = read(site / entry.path)
        except OSError as error:
            reason = error.strerror or "it is empty"
            lines.append(failed(TOPIC, f"{entry.path} cannot be read: {reason}", REBUILD))
            continue
        problem = _difference(entry, found)
        if problem:
            lines.append(failed(TOPIC, f"{entry.path} ({entry.origin}) {problem}", REBUILD))
        cubins.update(found.cubins)
        ptx += sum(found.ptx.values())
    if lines:
        return lines
    compiled = sum(entry.origin == "compiled" for entry in ledger.libraries)
    own = {arch: number for arch, number in cubins.items() if arch.startswith("12.")}
    return [
        passed(
            TOPIC,
            f"{len(ledger.libraries)} libraries, {compiled} of them compiled for this image "
            f"({ledger.mode} mode), hold the ledger's: cubins {_text(own) or 'none of 12.x'}; "
            f"{sum(cubins.values()) - sum(own.values())} for other GPUs; {ptx} PTX",
        )
    ]


def read(path: Path) -> LibraryAudit:
    """The machine code of one file. Raises OSError when it cannot be read."""
    with path.open("rb") as handle:
        if not path.stat().st_size:
            raise OSError
        with mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return sections.audit(path.as_posix(), data)


def _difference(entry: LibraryEntry, found: LibraryAudit) -> str:
    if found.unknown:
        return f"has machine code that cannot be read: {'; '.join(found.unknown)}"
    parts = []
    for what, ours, theirs in (
        ("cubins", found.cubins, entry.cubins),
        ("PTX", found.ptx, entry.ptx),
    ):
        if dict(ours) != theirs:
            parts.append(f"has {what} {_text(ours) or 'none'}, ledger {_text(theirs) or 'none'}")
    return "; ".join(parts)


def _text(counts: Mapping[str, int]) -> str:
    """ "12.0a x 56, 12.1a x 56"."""
    return ", ".join(f"{arch} x {counts[arch]}" for arch in sorted(counts, key=CudaArch.parse))
