"""The first step of a bundle: check the request, and decide everything that it leaves open."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sm12x import layout
from sm12x.core import files, machine
from sm12x.core.errors import BuildFailedError, NoSpaceError
from sm12x.core.progress import Reporter
from sm12x.core.text import GIB
from sm12x.image.base import host_settings, platforms, rootfs
from sm12x.image.base.host_settings import SECRETS_PREFIX, HostConfig
from sm12x.image.base.platforms import Platforms
from sm12x.image.base.rootfs import BaseImage
from sm12x.image.bundle import context, modes, record
from sm12x.image.bundle.modes import BuildMode
from sm12x.image.bundle.record import Record
from sm12x.image.engine import engines
from sm12x.image.engine.engine import Engine
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base
from sm12x.wheel.toolchain import arch as archs

CONTEXT_PREFIX = "context-"
# The audit and the install of the closure; a module's compilation may need more.
_MEMORY_GIB = 2.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """The request. None stands for the base's own choice, or for the first engine that can build.

    ``build`` is "quick", "full" or "auto". ``sources`` are words NAME=DIR: third-party sources that
    are taken from a folder; ``patch_levels`` names sources whose patch level may differ from the
    pin. ``platform`` is such as "linux/arm64".
    ``flashinfer``: FlashInfer's modules are compiled ahead of time; None leaves it to the mode.
    ``twice``: the wheel is built a second time, and has to be the same bytes.
    """

    version: str
    arch_list: str | None = None
    platform: str | None = None
    build: str = "auto"
    sources: tuple[str, ...] = ()
    patch_levels: tuple[str, ...] = ()
    flashinfer: bool | None = None
    engine: str | None = None
    base_image: str | None = None
    find_links: Path | None = None
    image: bool = True
    twice: bool = False


@dataclass(frozen=True, kw_only=True)
class _DiskNeed:
    """``gib`` GiB for ``what``, below ``folder``; ``remedy`` moves it to another disk."""

    what: str
    folder: Path
    gib: float
    remedy: str


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """The decisions that the other steps use.

    ``image`` is the base image of what is made, ``builder`` that of the builder: the same one
    unless the wheel is for another machine. ``inputs`` is a sha256 over all inputs of the bundle;
    ``earlier`` is the record of the bundle that is already in ``folder``, whatever its inputs were.
    ``flashinfer`` are the architectures that FlashInfer's modules are compiled for ahead of time,
    as TORCH_CUDA_ARCH_LIST has them; "" where they are not. ``seconds`` are those of each step.
    """

    base: Base
    platforms: Platforms
    arch_list: str
    mode: BuildMode
    flashinfer: str
    options: Options
    engine: Engine
    image: BaseImage
    builder: BaseImage
    host: HostConfig
    inputs: str
    earlier: Record | None
    report: Reporter
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return folder_of(self.base, self.platforms)

    @property
    def work(self) -> Path:
        return _work_folder(self.base)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)

    def made_before(self) -> Record | None:
        """Return the record of an earlier run with the same inputs, if all it made still exists."""
        earlier = self.earlier
        if earlier is None or earlier.inputs != self.inputs or self.options.twice:
            return None
        if not record.is_whole(self.folder, earlier):
            return None
        has_image = earlier.tags and self.engine.image_id(earlier.tags[0]) == earlier.image_id
        return earlier if has_image or not self.options.image else None

    def require_room(self) -> None:
        """Raise NoSpaceError if disk or memory is too small, unless the bundle was begun before."""
        begun = _begun(self.base, self.engine, self.platforms, self.mode.name)
        if begun.exists():
            # The rest takes less room than a whole bundle.
            return
        systems: dict[int, list[_DiskNeed]] = {}
        for need in self._needs():
            systems.setdefault(files.device(need.folder), []).append(need)
        for group in systems.values():
            gib, free = sum(need.gib for need in group), files.free_gib(group[0].folder)
            if free < gib:
                group.sort(key=lambda need: -need.gib)
                parts = ", ".join(f"{need.what} {need.gib:.1f} ({need.folder})" for need in group)
                raise NoSpaceError(
                    f"building with {self.engine.name} needs {gib:.1f} GiB on the disk of "
                    f"{group[0].folder}, {free:.1f} GiB are free: {parts}",
                    next_step=f"free {gib - free:.1f} GiB there: {group[0].remedy}",
                )
        peaks = [module.peak_gib for module in self.mode.choice.modules]
        peaks += [module.peak_gib for module in self.base.flashinfer if self.flashinfer]
        peak = max(_MEMORY_GIB, *peaks)
        available = machine.available()
        if available is not None and available < peak * GIB:
            raise NoSpaceError(
                f"the build needs {peak:.1f} GiB of memory, {available / GIB:.1f} GiB are free",
                next_step="stop something, or build on a machine with more memory",
            )
        begun.touch()

    def needs_gib(self) -> float:
        """Return GiB that a whole bundle takes on the disks that it uses."""
        return sum(need.gib for need in self._needs())

    def _needs(self) -> list[_DiskNeed]:
        """Return what a bundle takes of each disk, without those of an engine elsewhere."""
        disk, engine = self.base.disk, self.engine
        objects = any(not module.quick for module in self.mode.choice.modules)
        layers = disk.builder_gib + (platforms.CROSS_GIB if self.platforms.crossing else 0.0)
        packages = disk.builder_packages_gib + (disk.objects_gib if objects else 0.0)
        largest = disk.builder_layer_gib
        if self.options.image:
            # Of FlashInfer's modules objects are in the cache, libraries in a layer.
            ahead = disk.flashinfer_gib if self.flashinfer else 0.0
            layers += disk.image_gib + ahead
            packages += disk.image_packages_gib + ahead
            largest = max(largest, disk.image_layer_gib)
        storage, cache = engine.storage(), engine.package_cache()
        layers += engine.copies_in_storage * largest
        packages += engine.copies_in_cache * largest
        move = engine.more_room if cache == storage else "set TMPDIR to a folder on another disk"
        return [
            _DiskNeed(what=what, folder=folder, gib=gib, remedy=remedy)
            for what, folder, gib, remedy in (
                ("layers", storage, layers, engine.more_room),
                ("packages", cache, packages, move),
                ("sources", layout.cache(), disk.sources_gib, files.MOVE_CACHE),
                ("wheel and contexts", self.folder, disk.dist_gib, "move the checkout"),
            )
            if folder is not None
        ]


@contextmanager
def decided(options: Options, report: Reporter) -> Iterator[BuildPlan]:
    """Check the request and decide the rest, holding the lock on bundles of the base.

    Raises:
        Sm12xError: of the kind that says what is wrong.
    """
    base = bases.load(options.version)
    given = modes.parse_given(base, options.sources)
    patch_levels = modes.parse_patch_levels(base, options.patch_levels, given)
    machines = platforms.choose(base, options.platform, image=options.image)
    targets = archs.validate(
        options.arch_list or base.toolchain.arch_list, default=base.toolchain.arch_list
    )
    earlier = record.read(folder_of(base, machines))
    # First: looking up the mode's sources on the network is useless without an engine.
    engine = engines.find(options.engine, say=report.say)
    report.say(f"engine: {engine.description}")
    mode = modes.decide(
        *(base, options.build, given, patch_levels, targets),
        earlier.mode if earlier else "",
        report=report,
    )
    newest = bases.versions()[-1]
    if newest != base.version:
        report.say(f"there is a newer base: make bundle BASE={newest}")
    ahead = modes.flashinfer(base, options.flashinfer, mode.name, machines, image=options.image)
    flashinfer = archs.to_text(targets) if ahead else ""
    with alone(base):
        if not rootfs.is_there(base.image, engine, machines, override=options.base_image):
            # What an earlier run built is gone from the engine.
            _begun(base, engine, machines, mode.name).unlink(missing_ok=True)
        host = host_settings.collect(base.image.suite)
        start = time.monotonic()
        with report.phase("base image") as step:
            resolve = partial(
                rootfs.resolve, base.image, engine, host, say=report.say, on_line=step
            )
            image = builder = resolve(machines, override=options.base_image)
            if machines.crossing:
                builder = resolve(machines.native, override=None)
        report.say(f"base image: {image.origin} ({image.digest})")
        choices = {
            "arch_list": archs.to_text(targets),
            "mode": mode.name,
            "third_party": mode.third_party_sha256,
            "flashinfer": flashinfer,
            "base_image": image.digest,
            "builder_image": builder.digest,
            "engine": engine.name,
        }
        yield BuildPlan(
            base=base,
            platforms=machines,
            arch_list=choices["arch_list"],
            mode=mode,
            flashinfer=flashinfer,
            options=options,
            engine=engine,
            image=image,
            builder=builder,
            host=host,
            inputs=context.inputs_digest(
                base, machines.machine, here=machines.here, choices=choices
            ),
            earlier=earlier,
            report=report,
            seconds={"base image": round(time.monotonic() - start, 1)},
        )


def folder_of(base: Base, machines: Platforms) -> Path:
    """Return the folder of wheel, ledger and audit; another machine's has a suffix."""
    return layout.dist(f"{base.version}{machines.suffix}")


def _work_folder(base: Base) -> Path:
    """Return the folder of logs, contexts and the lock of a bundle in the making."""
    return layout.root() / "build" / base.version


def _begun(base: Base, engine: Engine, machines: Platforms, mode: str) -> Path:
    """Return the file that says that a bundle was begun."""
    return _work_folder(base) / f"begun-{engine.name}-{mode}{machines.suffix}"


@contextmanager
def alone(base: Base) -> Iterator[None]:
    """Keep a second bundle of the same checkout and base out. Raises BuildFailedError for it."""
    folder = _work_folder(base)
    folder.mkdir(parents=True, exist_ok=True)
    refused = BuildFailedError(
        f"another `sm12x bundle` of {base.version} runs in this checkout",
        next_step="wait for it to end",
    )
    with files.locked(folder, refused):
        for parent, prefix in (
            *((folder, CONTEXT_PREFIX), (folder, SECRETS_PREFIX)),
            (layout.bundles(), f".{base.version}"),
        ):
            # Folders that a killed run has left.
            for leftover in parent.glob(f"{prefix}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def make_base_image(options: Options, report: Reporter) -> tuple[BaseImage, Engine]:
    """Make only the base image, with debootstrap even where one could be pulled."""
    base = bases.load(options.version)
    machines = platforms.choose(base, options.platform)
    engine = engines.find(options.engine, say=report.say)
    host = host_settings.collect(base.image.suite)
    with report.phase("base image") as step:
        image = rootfs.make(base.image, engine, host, machines, say=report.say, on_line=step)
    return image, engine
