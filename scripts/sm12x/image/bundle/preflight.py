"""Checks before a bundle starts: machine, disk, memory, and that no other bundle runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sm12x import layout
from sm12x.core import files, machine
from sm12x.core.errors import BuildFailedError, NoSpaceError
from sm12x.core.text import GIB
from sm12x.image.base import platforms
from sm12x.image.base.host_settings import SECRETS_PREFIX
from sm12x.image.base.platforms import Platforms
from sm12x.image.engine.engine import Engine
from sm12x.stack.model.base import Base, Module

# A phase that is repeated writes its last layers again.
_AGAIN_GIB = 2.0
CONTEXT_PREFIX = "context-"
# The audit and the install of the closure; a module's compilation may need more.
_MEMORY_GIB = 2.0
# The phases of a build that fill the engine's storage.
WHEEL, IMAGE = "wheel", "image"


@dataclass(frozen=True, kw_only=True)
class _DiskNeed:
    """``gib`` GiB for ``what``, below ``folder``; ``remedy`` moves it to another disk."""

    what: str
    folder: Path
    gib: float
    remedy: str


class Meter:
    """What each phase of a build has put on the disk of an engine, over runs that were interrupted.

    A file in the work folder: phase -> GiB spent, or that were free when it began where the run was
    killed. An unreadable file counts as absent: the whole figure is required again.
    """

    def __init__(self, base: Base, engine: Engine, wanted: Platforms) -> None:
        self.base, self.engine, self.wanted = base, engine, wanted
        self.path = work_folder(base) / f"spent-{engine.name}{wanted.suffix}.json"
        self.storage = engine.storage()
        self._phases: dict[str, dict[str, float]] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError):
            for phase, entry in json.loads(self.path.read_text(encoding="utf-8")).items():
                self._phases[phase] = {key: float(value) for key, value in entry.items()}

    def forget(self) -> None:
        """What an earlier run built is gone from the engine."""
        self._phases = {}
        self.path.unlink(missing_ok=True)

    def rest(self, phase: str, gib: float) -> float:
        """GiB that ``phase`` still needs of its ``gib``: at least those of its last layers."""
        entry = self._phases.get(phase)
        if entry is None:
            return gib
        if entry.get("done"):
            return min(_AGAIN_GIB, gib)
        spent = entry.get("spent", 0.0)
        if "free" in entry:
            spent += max(0.0, entry["free"] - self._free())
        return max(min(_AGAIN_GIB, gib), gib - spent)

    def is_done(self, phase: str) -> bool:
        return bool(self._phases.get(phase, {}).get("done"))

    @property
    def begun(self) -> bool:
        return bool(self._phases)

    @contextmanager
    def measuring(self, phase: str) -> Iterator[None]:
        """Count what the block takes as spent on ``phase``, however it ends."""
        before = self._phases.get(phase, {})
        spent, free = before.get("spent", 0.0), self._free()
        # What a kill leaves.
        self._write(phase, {"spent": spent, "free": free})
        try:
            yield
        except BaseException:
            self._write(phase, {"spent": spent + max(0.0, free - self._free())})
            raise
        self._write(phase, {"done": 1.0})

    def _free(self) -> float:
        return files.free_gib(self.storage) if self.storage else 0.0

    def _write(self, phase: str, entry: dict[str, float]) -> None:
        self._phases[phase] = entry
        # The phase that filled the disk reports it.
        with suppress(OSError):
            files.write_text(self.path, json.dumps(self._phases) + "\n")


def require_room(meter: Meter, modules: Sequence[Module], *, flashinfer: bool, image: bool) -> None:
    """Raise NoSpaceError before anything starts if disk or memory is too small.

    ``modules`` are what will be compiled, and with ``flashinfer`` FlashInfer's; without ``image``
    the build stops at the wheel.
    """
    base = meter.base
    work_folder(base).mkdir(parents=True, exist_ok=True)
    _require_disk(needs(meter, modules, flashinfer=flashinfer, image=image), meter.engine.name)
    # A continued build checks the memory for the remaining units itself.
    peaks = [module.peak_gib for module in modules]
    peaks += [module.peak_gib for module in base.flashinfer if flashinfer]
    units = [] if meter.begun else peaks
    peak = max([_MEMORY_GIB, *units])
    free = machine.available()
    if free is not None and free < peak * GIB:
        raise NoSpaceError(
            f"the build needs {peak:.1f} GiB of memory, {free / GIB:.1f} GiB are free",
            next_step="stop something, or build on a machine with more memory",
        )


def needs(
    meter: Meter, modules: Sequence[Module], *, flashinfer: bool, image: bool
) -> list[_DiskNeed]:
    """The remaining steps' disk needs by folder, without those of an engine elsewhere."""
    base, engine = meter.base, meter.engine
    disk = base.disk
    found: list[_DiskNeed] = []

    def need(what: str, folder: Path | None, gib: float, remedy: str) -> None:
        if folder is not None:
            found.append(_DiskNeed(what=what, folder=folder, gib=gib, remedy=remedy))

    storage, cache = engine.storage(), engine.package_cache()
    # What a phase has spent was seen on the storage's disk, where both may lie.
    together = storage is not None and cache is not None and _on_one_disk(storage, cache)
    cross = platforms.CROSS_GIB if meter.wanted.crossing else 0.0
    objects = disk.objects_gib if any(not module.quick for module in modules) else 0.0
    phases = [
        (
            WHEEL,
            disk.builder_gib + cross,
            disk.builder_layer_gib,
            disk.builder_packages_gib + objects,
        )
    ]
    if image:
        # Objects in the cache, libraries in a layer.
        ahead = disk.flashinfer_gib if flashinfer else 0.0
        fetched_too = disk.image_packages_gib + ahead
        phases.append((IMAGE, disk.image_gib + ahead, disk.image_layer_gib, fetched_too))
    # What stays of each phase, and on top of it what the phase has there for a while.
    stays = cached = layers = packages = 0.0
    for phase, own, largest, fetched in phases:
        whole = own + (fetched if together else 0.0)
        share = meter.rest(phase, whole) / whole if whole else 0.0
        stays += own * share
        cached += fetched * share
        written = min(largest, own * share) if meter.is_done(phase) else largest
        layers = max(layers, stays + engine.copies_in_storage * written)
        packages = max(packages, cached + engine.copies_in_cache * written)
    moved = engine.more_room if cache == storage else "set TMPDIR to a folder on another disk"
    need(f"layers of {engine.name}", storage, layers, engine.more_room)
    cache_holds = "packages and layers in the making" if engine.copies_in_cache else "packages"
    need(cache_holds, cache, packages, moved)
    need("sources", layout.cache(), disk.sources_gib, files.MOVE_CACHE)
    need("wheel and contexts", layout.dist(base.version), disk.dist_gib, "move the checkout")
    return found


def _on_one_disk(one: Path, other: Path) -> bool:
    return files.device(one) == files.device(other)


def _require_disk(needed: Sequence[_DiskNeed], engine: str) -> None:
    """Raise NoSpaceError if a file system has less room than the sum of the needs on it."""
    systems: dict[int, list[_DiskNeed]] = {}
    for need in needed:
        systems.setdefault(files.device(need.folder), []).append(need)
    for group in systems.values():
        gib = sum(need.gib for need in group)
        free = files.free_gib(group[0].folder)
        if free >= gib:
            continue
        largest = max(group, key=lambda need: need.gib)
        # Remedies that would not help are left out, unless there are no others.
        tall = [need for need in group if need.gib >= min(gib - free, largest.gib)]
        tall.sort(key=lambda need: -need.gib)
        remedies = dict.fromkeys(need.remedy for need in tall)
        parts = ", ".join(f"{need.what} {need.gib:.1f} ({need.folder})" for need in group)
        raise NoSpaceError(
            f"building with {engine} needs {gib:.1f} GiB on the disk of {largest.folder}, "
            f"{free:.1f} GiB are free: {parts}",
            next_step=f"free {gib - free:.1f} GiB there: {'; '.join(remedies)}",
        )


def work_folder(base: Base) -> Path:
    """Logs, contexts and the lock of a bundle in the making."""
    return layout.root() / "build" / base.version


@contextmanager
def alone(base: Base) -> Iterator[None]:
    """Keep a second bundle of the same checkout and base out."""
    folder = work_folder(base)
    folder.mkdir(parents=True, exist_ok=True)
    refused = BuildFailedError(
        f"another `sm12x bundle` of {base.version} runs in this checkout",
        next_step="wait for it to end",
    )
    with files.locked(folder, refused):
        for prefix in (CONTEXT_PREFIX, SECRETS_PREFIX):
            # What a run that was killed has left.
            for left in folder.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
