"""What is checked before a bundle starts: machine, disk, memory, and that it runs alone."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sm12x import layout
from sm12x.core import files
from sm12x.core.errors import BuildFailedError, NoSpaceError
from sm12x.image import platforms
from sm12x.image.engine import Engine
from sm12x.image.hostconfig import SECRETS_PREFIX
from sm12x.image.platforms import Plan
from sm12x.stack.base import Base, Module

# Measured with docker 20.10, from nothing to the image: 23 GiB. The image is 8.5, the builder 5.5,
# the package cache the rest.
ENGINE_GIB = 26.0
# Of that, what a build takes that stops at the wheel.
WHEEL_GIB = 14.0
# A resumed or repeated build finds most of that in the layer cache.
ENGINE_AGAIN_GIB = 4.0
# Objects and the compiler's cache of a full build.
FULL_GIB = 6.0
# Archives in the cache, contexts, dist/.
HOST_GIB = 1.5
CONTEXT_PREFIX = "context-"
# The audit and the install of the closure; a module's compilation may need more.
MEMORY_GIB = 2.0


def require_room(
    base: Base, engine: Engine, modules: Sequence[Module], plan: Plan, *, image: bool = True
) -> None:
    """Raise NoSpaceError before anything starts if disk or memory will not do.

    ``modules`` are what will be compiled; without ``image`` the build stops at the wheel.
    """
    work = work_folder(base)
    work.mkdir(parents=True, exist_ok=True)
    started = work / f"started-{engine.name}{plan.suffix}"
    storage = engine.storage()
    if storage is not None:
        need = ENGINE_GIB if image else WHEEL_GIB
        need = ENGINE_AGAIN_GIB if started.exists() else need
        need += FULL_GIB if any(not module.quick for module in modules) else 0.0
        need += platforms.CROSS_GIB if plan.crossing and not started.exists() else 0.0
        files.require_space(storage, need, what=f"building with {engine.name}")
    files.require_space(layout.cache(), HOST_GIB, what="the cache")
    files.require_space(layout.dist(base.version), HOST_GIB, what="the bundle")
    # Of a build that was begun, what is left to compile asks for its memory itself.
    units = [] if started.exists() else [module.peak_gib for module in modules]
    peak = max([MEMORY_GIB, *units])
    free = memory_gib(Path("/proc/meminfo"))
    if free is not None and free < peak:
        raise NoSpaceError(
            f"the build needs {peak:.1f} GiB of memory, {free:.1f} GiB are free",
            next_step="stop something, or build on a machine with more memory",
        )
    started.touch()


def work_folder(base: Base) -> Path:
    """Logs, contexts and the lock of a bundle in the making."""
    return layout.root() / "build" / base.version


def memory_gib(meminfo: Path) -> float | None:
    """GiB of memory that can be had without swapping; None where the system does not say."""
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 1024**2
    except OSError:
        return None
    return None


@contextmanager
def alone(base: Base) -> Iterator[None]:
    """Keep a second bundle of the same checkout and base out."""
    path = work_folder(base) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildFailedError(
                f"another `sm12x bundle` of {base.version} runs in this checkout",
                next_step="wait for it to end",
            ) from None
        for prefix in (CONTEXT_PREFIX, SECRETS_PREFIX):
            # What a run that was killed has left.
            for left in path.parent.glob(f"{prefix}*"):
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(handle)
