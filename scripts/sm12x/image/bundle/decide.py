"""The first step of a bundle: check the request, and decide everything that it leaves open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sm12x import layout
from sm12x.core.progress import Reporter
from sm12x.image.base import host_settings, platforms, rootfs
from sm12x.image.base.host_settings import HostConfig
from sm12x.image.base.platforms import Platforms
from sm12x.image.base.rootfs import BaseImage
from sm12x.image.bundle import context, modes, preflight, record
from sm12x.image.bundle.modes import BuildMode
from sm12x.image.bundle.record import Record
from sm12x.image.engine import engines
from sm12x.image.engine.engine import Engine
from sm12x.image.engine.follow import Stage
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base, Module
from sm12x.wheel.toolchain import arch as archs


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


@dataclass(kw_only=True)
class _Timings:
    """Seconds of each step, and each stage of a Dockerfile as the engine reported it."""

    seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """The decisions that the other steps use.

    ``image`` is the base image of what is made, ``builder`` that of the builder: the same one
    unless the wheel is for another machine. ``inputs`` is a sha256 over all inputs of the bundle;
    ``there`` is the record of the bundle that is already in ``folder``, whatever its inputs were.
    ``flashinfer`` are the architectures that FlashInfer's modules are compiled for ahead of time,
    as TORCH_CUDA_ARCH_LIST has them; "" where they are not.
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
    there: Record | None
    report: Reporter
    timings: _Timings

    @property
    def folder(self) -> Path:
        return folder_of(self.base, self.platforms)

    @property
    def machine(self) -> str:
        return self.platforms.machine

    @property
    def work(self) -> Path:
        return preflight.work_folder(self.base)

    def made_before(self) -> Record | None:
        """Return the record of an earlier run with the same inputs, if all it made still exists."""
        earlier_record = self.there
        if (
            earlier_record is None
            or earlier_record.inputs != self.inputs
            or not record.is_whole(self.folder, earlier_record)
        ):
            return None
        if self.options.twice:
            return None
        if not self.options.image:
            return earlier_record
        there = (
            bool(earlier_record.tags)
            and self.engine.image_id(earlier_record.tags[0]) == earlier_record.image_id
        )
        return earlier_record if there else None

    def require_room(self) -> None:
        """Check disk and memory, unless the bundle was begun before. Raises NoSpaceError."""
        begun = preflight.begun(self.base, self.engine, self.platforms, self.mode.name)
        if not begun.exists():
            preflight.require_room(
                *self._needs, flashinfer=bool(self.flashinfer), image=self.options.image
            )
        begun.touch()

    def needs_gib(self) -> float:
        """Return GiB that a whole bundle takes on the disks that it uses."""
        needs = preflight.needs(
            *self._needs, flashinfer=bool(self.flashinfer), image=self.options.image
        )
        return sum(need.gib for need in needs)

    @property
    def _needs(self) -> tuple[Base, Engine, tuple[Module, ...], Platforms]:
        return self.base, self.engine, self.mode.choice.modules, self.platforms


@contextmanager
def decided(options: Options, report: Reporter) -> Iterator[BuildPlan]:
    """Check the request and decide the rest, holding the lock on bundles of the base.

    Raises:
        Sm12xError: of the kind that says what is wrong.
    """
    base = bases.load(options.version)
    request = modes.parse_request(
        base, options.build, options.sources, patch_levels=options.patch_levels
    )
    machines = platforms.choose(base, options.platform, image=options.image)
    targets = archs.validate(
        options.arch_list or base.toolchain.arch_list, default=base.toolchain.arch_list
    )
    there = record.read(folder_of(base, machines))
    earlier_mode = there.mode if there else ""
    # First: looking up the mode's sources on the network is useless without an engine.
    engine = engines.find(options.engine, say=report.say)
    report.say(f"engine: {engine.description}")
    mode = modes.settle(base, request, targets, earlier_mode, report=report)
    ahead = modes.flashinfer(base, options.flashinfer, mode.name, machines, image=options.image)
    flashinfer = archs.to_text(targets) if ahead else ""
    with preflight.alone(base):
        begun = preflight.begun(base, engine, machines, mode.name)
        if not rootfs.is_there(base.image, engine, machines, override=options.base_image):
            # What an earlier run built is gone from the engine.
            begun.unlink(missing_ok=True)
        if there is None and not begun.exists():
            preflight.require_room(
                *(base, engine, mode.choice.modules, machines),
                flashinfer=ahead,
                image=options.image,
            )
        host = host_settings.collect(base.image.suite)
        timings = _Timings()
        with timings.step("base image"):
            image = _base_image(base, engine, host, options.base_image, machines, report)
            builder = image
            if machines.crossing:
                builder = _base_image(base, engine, host, None, machines.native, report)
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
            there=there,
            report=report,
            timings=timings,
        )


def folder_of(base: Base, machines: Platforms) -> Path:
    """Return the folder of wheel, ledger and audit; another machine's has a suffix."""
    return layout.dist(f"{base.version}{machines.suffix}")


def _base_image(
    base: Base,
    engine: Engine,
    host: HostConfig,
    override: str | None,
    machines: Platforms,
    report: Reporter,
) -> BaseImage:
    """Pull or make the base image; see ``rootfs.resolve``."""
    with report.phase(
        f"base image{f' for {machines.platform}' if machines.crossing else ''}"
    ) as step:
        image = rootfs.resolve(
            base.image, engine, host, machines, override=override, say=report.say, on_line=step
        )
        report.say(f"base image: {image.origin} ({image.digest})")
    return image


def make_base_image(options: Options, report: Reporter) -> tuple[BaseImage, Engine]:
    """Make only the base image, with debootstrap even where one could be pulled."""
    base = bases.load(options.version)
    machines = platforms.choose(base, options.platform)
    engine = engines.find(options.engine, say=report.say)
    host = host_settings.collect(base.image.suite)
    with report.phase("base image") as step:
        image = rootfs.make(base.image, engine, host, machines, say=report.say, on_line=step)
    return image, engine
