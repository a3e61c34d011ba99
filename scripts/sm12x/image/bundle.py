"""From a base to an image: fetch, build the wheel in the builder, build the image around it."""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from sm12x import __version__, layout
from sm12x.build import arch as archs
from sm12x.build import ledger as ledgers
from sm12x.build import select
from sm12x.core import files, index, progress
from sm12x.core.errors import (
    BadArchitectureError,
    BuildFailedError,
    NoSpaceError,
    Sm12xError,
    ToolFailedError,
)
from sm12x.image import baseimage, context, engines, hostconfig, record
from sm12x.image.baseimage import BaseImage
from sm12x.image.engine import BuildRequest, Engine
from sm12x.image.hostconfig import HostConfig
from sm12x.image.output import Follower, Stage
from sm12x.image.record import Record
from sm12x.stack import base as bases
from sm12x.stack import series
from sm12x.stack.base import Base

PROJECT = "vllm"
IMAGE = "vllm-sm12x"
MODES = ("quick",)

# Measured with docker 20.10 and buildah 1.28 (docs in README): builder 6 GiB, image 10 GiB, package
# cache 10 GiB, and what the engine needs for a moment while it writes a layer.
ENGINE_GIB = 32.0
# A resumed or repeated build finds most of that in the layer cache.
ENGINE_AGAIN_GIB = 4.0
# Archives in the cache, contexts, dist/.
HOST_GIB = 1.5
# The audit and the install of the closure; a module's compilation may need more.
MEMORY_GIB = 2.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. None stands for the base's own choice, or the first engine that can."""

    version: str
    arch_list: str | None = None
    machine: str | None = None
    mode: str = "quick"
    engine: str | None = None
    base_image: str | None = None
    find_links: Path | None = None
    image: bool = True


class Reporter(Protocol):
    """Where progress goes; the command layer prints."""

    def say(self, text: str) -> None: ...

    def phase(self, label: str) -> AbstractContextManager[Callable[[str], None]]:
        """A phase of the work; the block is given what shows the step it is at."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``unchanged``: nothing was built, all that ``record`` names was there and whole."""

    record: Record
    folder: Path
    engine: Engine
    unchanged: bool
    stages: Mapping[str, tuple[Stage, ...]] = field(default_factory=dict)


def run(options: Options, report: Reporter) -> Outcome:
    """Make wheel and image, or find them made.

    Raises:
        Sm12xError: of the kind that says what is wrong; nothing half made is left under its name.
    """
    base = bases.load(options.version)
    machine = _machine(base, options.machine)
    targets = archs.validate(
        options.arch_list or base.toolchain.arch_list, default=base.toolchain.arch_list
    )
    arch_list = archs.to_text(targets)
    engine = engines.find(options.engine, say=report.say)
    report.say(f"engine: {engine.description}")
    with _alone(base):
        if record.read(layout.dist(base.version)) is None:
            require_room(base, engine)
        host = hostconfig.collect(base.image.suite)
        image = base_image(base, engine, host, options.base_image, report)
        choices = {
            "arch_list": arch_list,
            "mode": options.mode,
            "base_image": image.digest,
            "engine": engine.name,
        }
        job = _Job(
            base=base,
            machine=machine,
            arch_list=arch_list,
            options=options,
            engine=engine,
            image=image,
            host=host,
            inputs=context.inputs_digest(base, machine, choices=choices),
            report=report,
        )
        done = job.made_before()
        if done is not None:
            return Outcome(record=done, folder=job.folder, engine=engine, unchanged=True)
        return job.build()


def base_image(
    base: Base, engine: Engine, host: HostConfig, override: str | None, report: Reporter
) -> BaseImage:
    """The base image, pulled or made; see ``baseimage.resolve``."""
    with report.phase("base image") as step:
        image = baseimage.resolve(
            base.image, engine, host, override=override, say=report.say, on_line=step
        )
        report.say(f"base image: {image.origin} ({image.digest})")
    return image


def make_base_image(options: Options, report: Reporter) -> tuple[BaseImage, Engine]:
    """Only the base image, made with debootstrap even where one could be pulled."""
    base = bases.load(options.version)
    engine = engines.find(options.engine, say=report.say)
    host = hostconfig.collect(base.image.suite)
    with report.phase("base image") as step:
        made = baseimage.make(base.image, engine, host, say=report.say, on_line=step)
    return made, engine


@dataclass(kw_only=True)
class _Job:
    """One bundle with everything decided."""

    base: Base
    machine: str
    arch_list: str
    options: Options
    engine: Engine
    image: BaseImage
    host: HostConfig
    inputs: str
    report: Reporter
    seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[str, tuple[Stage, ...]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return layout.dist(self.base.version)

    @property
    def work(self) -> Path:
        return work_folder(self.base)

    def made_before(self) -> Record | None:
        """The record of an earlier run with the same inputs, if all it names is still there."""
        known = record.read(self.folder)
        if known is None or known.inputs != self.inputs or not record.is_whole(self.folder, known):
            return None
        if not self.options.image:
            return known
        there = bool(known.tags) and self.engine.image_id(known.tags[0]) == known.image_id
        return known if there else None

    def build(self) -> Outcome:
        require_room(self.base, self.engine)
        with self._timed("fetch"):
            sdist, official = self._fetch()
        with self._timed("wheel"):
            ledger = self._build_wheel(sdist, official)
        wheel = record.one_wheel(self.folder)
        tags: tuple[str, ...] = ()
        if self.options.image:
            tags = image_tags(self.base.version, ledger.stack_id, self.options.mode)
            with self._timed("image"):
                self._build_image(wheel, ledger, tags)
        made = Record(
            version=self.base.version,
            mode=self.options.mode,
            machine=self.machine,
            stack_id=ledger.stack_id,
            arch_list=self.arch_list,
            inputs=self.inputs,
            engine=self.engine.description,
            base_image=self.image.origin,
            base_digest=self.image.digest,
            wheel=wheel.name,
            wheel_sha256=files.sha256(wheel),
            wheel_size=wheel.stat().st_size,
            ledger_sha256=files.sha256(self.folder / record.LEDGER),
            image_id=(self.engine.image_id(tags[0]) or "") if tags else "",
            tags=tags,
            image_size=self.engine.size(tags[0]) if tags else 0,
            layers=self.engine.layers(tags[0]) if tags else (),
            seconds=dict(self.seconds),
        )
        record.write(self.folder, made)
        return Outcome(
            record=made,
            folder=self.folder,
            engine=self.engine,
            unchanged=False,
            stages=self.stages,
        )

    def _fetch(self) -> tuple[Path, Path]:
        found = []
        for pinned in (self.base.sdist, self.base.wheels[self.machine]):
            with progress.transfer(pinned.name) as moved:
                found.append(
                    index.fetch(
                        PROJECT,
                        pinned.name,
                        pinned.sha256,
                        cache=layout.cache(),
                        find_links=self.options.find_links,
                        on_progress=moved,
                    )
                )
        return found[0], found[1]

    def _build_wheel(self, sdist: Path, official: Path) -> ledgers.Ledger:
        files_of = context.builder(
            self.base,
            self.machine,
            sdist=sdist,
            wheel=official,
            find_links=self.options.find_links,
        )
        args = {
            "BASE_IMAGE": self.image.reference,
            "BASE": self.base.version,
            "MACHINE": self.machine,
            "ARCH_LIST": self.arch_list,
        }
        with record.publishing(self.folder) as staged:
            self._engine_build(
                "builder",
                files_of,
                BuildRequest(
                    dockerfile=layout.root() / context.DOCKERFILES["builder"],
                    context=self.work,
                    target="out",
                    build_args=args,
                    output_dir=staged,
                ),
            )
            record.one_wheel(staged)
            return ledgers.read(staged / record.LEDGER)

    def _build_image(self, wheel: Path, ledger: ledgers.Ledger, tags: tuple[str, ...]) -> None:
        ledger_path = self.folder / record.LEDGER
        files_of = context.bundle(
            self.base,
            self.machine,
            wheel=wheel,
            ledger=ledger_path,
            find_links=self.options.find_links,
        )
        self._engine_build(
            "bundle",
            files_of,
            BuildRequest(
                dockerfile=layout.root() / context.DOCKERFILES["bundle"],
                context=self.work,
                target="runtime",
                build_args={
                    "BASE_IMAGE": self.image.reference,
                    "PACKAGE_SHA256": context.package_digest(),
                    "WHEEL_SHA256": files.sha256(wheel),
                },
                labels=self._labels(ledger, files.sha256(ledger_path)),
                tags=tags,
            ),
        )

    def _labels(self, ledger: ledgers.Ledger, ledger_sha256: str) -> dict[str, str]:
        return {
            "org.opencontainers.image.title": IMAGE,
            "org.opencontainers.image.description": (
                f"vLLM {self.base.version} patched for SM12x GPUs, {self.options.mode} mode"
            ),
            "org.opencontainers.image.version": ledger.wheel_version,
            "org.opencontainers.image.licenses": "Apache-2.0",
            "org.opencontainers.image.base.name": self.image.origin,
            "org.opencontainers.image.base.digest": self.image.digest,
            "sm12x.version": __version__,
            "sm12x.base": self.base.version,
            "sm12x.stack": ledger.stack_id,
            "sm12x.mode": self.options.mode,
            "sm12x.arch-list": self.arch_list,
            "sm12x.ledger.sha256": ledger_sha256,
        }

    def _engine_build(self, name: str, files_of: context.Context, request: BuildRequest) -> None:
        """Stage ``files_of`` as the context of ``request`` and build it."""
        log = self.work / f"{name}.log"
        log.unlink(missing_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        with (
            self.report.phase(f"{request.target} of {request.dockerfile.name}") as step,
            TemporaryDirectory(dir=self.work, prefix="context-") as folder,
            self.host.files() as secrets,
        ):
            files_of.write(Path(folder))
            follower = Follower(step)
            request = BuildRequest(
                **{
                    **request.__dict__,
                    "context": Path(folder),
                    "secrets": secrets,
                    "host_network": self.host.host_network,
                }
            )
            try:
                self.engine.build(request, on_line=follower, log=log)
            except ToolFailedError:
                raise self._failed(name, follower, log) from None
            finally:
                follower.finish()
                self.stages[name] = tuple(follower.stages.values())

    def _failed(self, name: str, follower: Follower, log: Path) -> Sm12xError:
        if follower.no_space:
            return NoSpaceError(
                f"the disk of {self.engine.name} is full ({self.engine.storage()})",
                next_step=f"free about {ENGINE_GIB:.0f} GiB there and run the same command again: "
                "it resumes",
            )
        return BuildFailedError(
            f"{self.engine.name} could not build {context.DOCKERFILES[name]}: {follower.reason}",
            next_step=f"read {log}; the same command resumes at the step that failed",
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)


def require_room(base: Base, engine: Engine) -> None:
    """Raise NoSpaceError before anything starts if disk or memory will not do."""
    work = work_folder(base)
    work.mkdir(parents=True, exist_ok=True)
    started = work / f"started-{engine.name}"
    storage = engine.storage()
    if storage is not None:
        need = ENGINE_AGAIN_GIB if started.exists() else ENGINE_GIB
        files.require_space(storage, need, what=f"building with {engine.name}")
    files.require_space(layout.cache(), HOST_GIB, what="the cache")
    files.require_space(layout.dist(base.version), HOST_GIB, what="the bundle")
    stack = series.load(base)
    changed = [file.path for patch in stack.patches for file in patch.files]
    modules = select.touched(base, changed)
    peak = max([MEMORY_GIB, *(module.peak_gib for module in modules)])
    free = memory_gib(Path("/proc/meminfo"))
    if free is not None and free < peak:
        raise NoSpaceError(
            f"the build needs {peak:.1f} GiB of memory, {free:.1f} GiB are free",
            next_step="stop something, or build on a machine with more memory",
        )
    started.touch()


def image_tags(version: str, stack_id: str, mode: str) -> tuple[str, ...]:
    """The tags of an image, the most telling first."""
    short = f"{IMAGE}:{version}-{stack_id}"
    return (f"{short}-{mode}", short)


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


def _machine(base: Base, asked: str | None) -> str:
    here = platform.machine()
    machine = asked or here
    if machine not in base.wheels:
        raise BadArchitectureError(
            f"base {base.version} has no wheel for {machine}",
            next_step=f"choose one of {', '.join(base.wheels)} with --machine",
        )
    if machine != "x86_64":
        raise BadArchitectureError(
            f"images for {machine} cannot be built yet: only x86_64 is tried and audited",
            next_step="build for x86_64; the steps of `sm12x build` work on either",
        )
    if here != machine:
        raise BadArchitectureError(
            f"this machine is {here}; an image for {machine} would have to be emulated",
            next_step=f"run it on a machine that is {machine}",
        )
    return machine


@contextmanager
def _alone(base: Base) -> Iterator[None]:
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
        yield
    finally:
        os.close(handle)
