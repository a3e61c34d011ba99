"""Checks before a bundle starts: disk, memory, and that no other bundle runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

CONTEXT_PREFIX = "context-"
# The audit and the install of the closure; a module's compilation may need more.
_MEMORY_GIB = 2.0


@dataclass(frozen=True, kw_only=True)
class DiskNeed:
    """``gib`` GiB for ``what``, below ``folder``; ``remedy`` moves it to another disk."""

    what: str
    folder: Path
    gib: float
    remedy: str


def require_room(
    base: Base,
    engine: Engine,
    modules: Sequence[Module],
    target: Platforms,
    *,
    flashinfer: bool,
    image: bool,
) -> None:
    """Raise NoSpaceError before anything starts if disk or memory is too small.

    ``modules`` are what will be compiled, and with ``flashinfer`` FlashInfer's; without ``image``
    the build stops at the wheel.
    """
    needed = needs(base, engine, modules, target, flashinfer=flashinfer, image=image)
    systems: dict[int, list[DiskNeed]] = {}
    for need in needed:
        systems.setdefault(files.device(need.folder), []).append(need)
    for group in systems.values():
        gib, free = sum(need.gib for need in group), files.free_gib(group[0].folder)
        if free < gib:
            group.sort(key=lambda need: -need.gib)
            parts = ", ".join(f"{need.what} {need.gib:.1f} ({need.folder})" for need in group)
            raise NoSpaceError(
                f"building with {engine.name} needs {gib:.1f} GiB on the disk of "
                f"{group[0].folder}, {free:.1f} GiB are free: {parts}",
                next_step=f"free {gib - free:.1f} GiB there: {group[0].remedy}",
            )
    peaks = [module.peak_gib for module in modules]
    peaks += [module.peak_gib for module in base.flashinfer if flashinfer]
    peak, available = max([_MEMORY_GIB, *peaks]), machine.available()
    if available is not None and available < peak * GIB:
        raise NoSpaceError(
            f"the build needs {peak:.1f} GiB of memory, {available / GIB:.1f} GiB are free",
            next_step="stop something, or build on a machine with more memory",
        )


def needs(
    base: Base,
    engine: Engine,
    modules: Sequence[Module],
    target: Platforms,
    *,
    flashinfer: bool,
    image: bool,
) -> list[DiskNeed]:
    """Return what a bundle takes of each disk, without those of an engine elsewhere."""
    disk = base.disk
    cross = platforms.CROSS_GIB if target.crossing else 0.0
    objects = disk.objects_gib if any(not module.quick for module in modules) else 0.0
    ahead = disk.flashinfer_gib if flashinfer else 0.0
    layers, packages = disk.builder_gib + cross, disk.builder_packages_gib + objects
    largest = disk.builder_layer_gib
    if image:
        # Of FlashInfer's modules objects are in the cache, libraries in a layer.
        layers += disk.image_gib + ahead
        packages += disk.image_packages_gib + ahead
        largest = max(largest, disk.image_layer_gib)
    storage, cache = engine.storage(), engine.package_cache()
    move = engine.more_room if cache == storage else "set TMPDIR to a folder on another disk"
    figures = (
        ("layers", storage, layers + engine.copies_in_storage * largest, engine.more_room),
        ("packages", cache, packages + engine.copies_in_cache * largest, move),
        ("sources", layout.cache(), disk.sources_gib, files.MOVE_CACHE),
        ("wheel and contexts", layout.dist(base.version), disk.dist_gib, "move the checkout"),
    )
    return [
        DiskNeed(what=what, folder=folder, gib=gib, remedy=remedy)
        for what, folder, gib, remedy in figures
        if folder is not None
    ]


def work_folder(base: Base) -> Path:
    """Return the folder of logs, contexts and the lock of a bundle in the making."""
    return layout.root() / "build" / base.version


def begun(base: Base, engine: Engine, target: Platforms, mode: str) -> Path:
    """Return the file that says that a bundle was begun: the rest takes less room than a whole."""
    return work_folder(base) / f"begun-{engine.name}-{mode}{target.suffix}"


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
            # Folders that a killed run has left.
            for leftover in folder.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield
