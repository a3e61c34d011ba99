"""From a base to an image: fetch, build the wheel in the builder, build the image around it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from sm12x import __version__, layout
from sm12x.core import files, transfer
from sm12x.core.errors import (
    BuildFailedError,
    ToolFailedError,
)
from sm12x.image.base import host_settings, platforms, rootfs
from sm12x.image.base.host_settings import HostConfig
from sm12x.image.base.platforms import Plan
from sm12x.image.base.rootfs import BaseImage
from sm12x.image.bundle import context, modes, preflight, record
from sm12x.image.bundle.modes import How
from sm12x.image.bundle.preflight import Meter
from sm12x.image.bundle.record import Record
from sm12x.image.bundle.reporter import Reporter
from sm12x.image.engine import engines, failure
from sm12x.image.engine.engine import BuildRequest, Engine
from sm12x.image.engine.follow import Follower, Stage
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.compile.estimate import Offer
from sm12x.wheel.toolchain import arch as archs

PROJECT = "vllm"
IMAGE = "vllm-sm12x"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. None stands for the base's own choice, or the first engine that can.

    ``build`` is "quick", "full" or "auto". ``sources`` are words NAME=DIR: third-party sources that
    are taken from a folder; ``allow_missing`` names those to do without. ``platform`` is such as
    "linux/arm64". ``twice``: the wheel is built a second time, and has to be the same bytes.
    """

    version: str
    arch_list: str | None = None
    platform: str | None = None
    build: str = "auto"
    sources: tuple[str, ...] = ()
    allow_missing: tuple[str, ...] = ()
    engine: str | None = None
    base_image: str | None = None
    find_links: Path | None = None
    image: bool = True
    twice: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``unchanged``: nothing was built, all that ``record`` names was there and whole.

    ``offer`` is what full mode would add to a quick bundle.
    """

    record: Record
    folder: Path
    engine: Engine
    unchanged: bool
    offer: Offer | None = None


def run(options: Options, report: Reporter) -> Outcome:
    """Make wheel and image, or find them made.

    Raises:
        Sm12xError: of the kind that says what is wrong; nothing half made is left under its name.
    """
    base = bases.load(options.version)
    wish = modes.parse(base, options.build, options.sources, options.allow_missing)
    plan = platforms.plan(base, options.platform, image=options.image)
    targets = archs.validate(
        options.arch_list or base.toolchain.arch_list, default=base.toolchain.arch_list
    )
    arch_list = archs.to_text(targets)
    there = record.read(folder_of(base, plan))
    made = there.mode if there else ""
    # Before the mode: what that takes is looked for on the network, for nothing without an engine.
    engine = engines.find(options.engine, say=report.say)
    report.say(f"engine: {engine.description}")
    how = modes.settle(base, wish, targets, made, find_links=options.find_links, report=report)
    with preflight.alone(base):
        meter = preflight.Meter(base, engine, plan)
        if not rootfs.is_there(base.image, engine, plan, override=options.base_image):
            meter.forget()
        if there is None:
            preflight.require_room(
                base, engine, how.choice.modules, plan, meter, image=options.image
            )
        host = host_settings.collect(base.image.suite)
        start = time.monotonic()
        image = base_image(base, engine, host, options.base_image, plan, report)
        builder = image
        if plan.crossing:
            builder = base_image(base, engine, host, None, plan.native, report)
        seconds = {"base image": round(time.monotonic() - start, 1)}
        choices = {
            "arch_list": arch_list,
            "mode": how.mode,
            "allow_missing": " ".join(how.allowed),
            "third_party": how.third_party_sha256,
            "base_image": image.digest,
            "builder_image": builder.digest,
            "engine": engine.name,
        }
        job = _Job(
            base=base,
            plan=plan,
            arch_list=arch_list,
            how=how,
            options=options,
            engine=engine,
            image=image,
            builder=builder,
            host=host,
            meter=meter,
            inputs=context.inputs_digest(base, plan.machine, here=plan.here, choices=choices),
            report=report,
            seconds=seconds,
        )
        done = job.made_before()
        if done is not None:
            return Outcome(
                record=done, folder=job.folder, engine=engine, unchanged=True, offer=how.offer
            )
        return job.build()


def folder_of(base: Base, plan: Plan) -> Path:
    """Where wheel, ledger and audit go; those for another machine apart from those for this one."""
    return layout.dist(f"{base.version}{plan.suffix}")


def base_image(
    base: Base,
    engine: Engine,
    host: HostConfig,
    override: str | None,
    plan: Plan,
    report: Reporter,
) -> BaseImage:
    """The base image, pulled or made; see ``baseimage.resolve``."""
    with report.phase(f"base image{f' for {plan.platform}' if plan.crossing else ''}") as step:
        image = rootfs.resolve(
            base.image, engine, host, plan, override=override, say=report.say, on_line=step
        )
        report.say(f"base image: {image.origin} ({image.digest})")
    return image


def make_base_image(options: Options, report: Reporter) -> tuple[BaseImage, Engine]:
    """Only the base image, made with debootstrap even where one could be pulled."""
    base = bases.load(options.version)
    plan = platforms.plan(base, options.platform)
    engine = engines.find(options.engine, say=report.say)
    host = host_settings.collect(base.image.suite)
    with report.phase("base image") as step:
        made = rootfs.make(base.image, engine, host, plan, say=report.say, on_line=step)
    return made, engine


@dataclass(kw_only=True)
class _Job:
    """One bundle with everything decided."""

    base: Base
    plan: Plan
    arch_list: str
    how: How
    options: Options
    engine: Engine
    image: BaseImage
    builder: BaseImage
    host: HostConfig
    meter: Meter
    inputs: str
    report: Reporter
    seconds: dict[str, float] = field(default_factory=dict)
    stages: dict[str, Stage] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return folder_of(self.base, self.plan)

    @property
    def machine(self) -> str:
        return self.plan.machine

    @property
    def work(self) -> Path:
        return preflight.work_folder(self.base)

    def made_before(self) -> Record | None:
        """The record of an earlier run with the same inputs, if all it names is still there."""
        known = record.read(self.folder)
        if known is None or known.inputs != self.inputs or not record.is_whole(self.folder, known):
            return None
        if self.options.twice:
            return None
        if not self.options.image:
            return known
        there = bool(known.tags) and self.engine.image_id(known.tags[0]) == known.image_id
        return known if there else None

    def build(self) -> Outcome:
        modules = self.how.choice.modules
        image = self.options.image
        preflight.require_room(self.base, self.engine, modules, self.plan, self.meter, image=image)
        with self._timed("fetch"):
            sdist, official = self._fetch()
        with self._timed("wheel"), self.meter.measuring(preflight.WHEEL):
            ledger = self._build_wheel(sdist, official)
        wheel = record.one_wheel(self.folder)
        tags: tuple[str, ...] = ()
        if self.options.image:
            tags = image_tags(self.base.version, ledger.stack_id, self.how.mode, self.plan.suffix)
            with self._timed("image"), self.meter.measuring(preflight.IMAGE):
                self._build_image(wheel, ledger, tags)
        made = Record(
            version=self.base.version,
            mode=self.how.mode,
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
            stage_seconds={
                name: None if stage.cached else round(stage.seconds, 1)
                for name, stage in self.stages.items()
            },
        )
        record.write(self.folder, made)
        return Outcome(
            record=made,
            folder=self.folder,
            engine=self.engine,
            unchanged=False,
            offer=self.how.offer,
        )

    def _fetch(self) -> tuple[Path, Path]:
        with self.report.phase("sources", live=False):
            sdist, wheel = (
                transfer.fetch(
                    PROJECT,
                    pinned.name,
                    pinned.sha256,
                    cache=layout.cache(),
                    find_links=self.options.find_links,
                )
                for pinned in (self.base.sdist, self.base.wheels[self.machine])
            )
        return sdist, wheel

    def _build_wheel(self, sdist: Path, official: Path) -> ledgers.Ledger:
        with record.publishing(self.folder) as staged:
            self._run_builder(sdist, official, staged)
            wheel = record.one_wheel(staged)
            if self.options.twice:
                # Nothing of the first is used again: no layer from `native` on, no work folder.
                with TemporaryDirectory(dir=self.work, prefix=preflight.CONTEXT_PREFIX) as folder:
                    self._run_builder(sdist, official, Path(folder), again="again")
                    same = files.sha256(record.one_wheel(Path(folder))) == files.sha256(wheel)
                if not same:
                    raise BuildFailedError(
                        f"{wheel.name} was built twice, and the two are not the same bytes",
                        next_step="compare native.json of both in the builder's log, and report it",
                    )
                self.report.say(f"built twice, the same bytes: {wheel.name}")
            return ledgers.read(staged / record.LEDGER)

    def _run_builder(self, sdist: Path, official: Path, out: Path, *, again: str = "") -> None:
        files_of = context.builder(
            self.base,
            self.machine,
            here=self.plan.here,
            sdist=sdist,
            wheel=official,
            third_party=self.how.third_party,
            find_links=self.options.find_links,
        )
        args = {
            "BASE_IMAGE": self.builder.reference,
            "BASE": self.base.version,
            "MACHINE": self.machine,
            "CROSS": self.machine if self.plan.crossing else "",
            "ARCH_LIST": self.arch_list,
            "MODE": self.how.mode,
            "ALLOW_MISSING": " ".join(self.how.allowed),
            "THIRD_PARTY_SHA256": self.how.third_party_sha256,
            "NATIVE_KEY": self.how.key(self.base, self.machine, self.arch_list) + again,
            "AGAIN": again,
            "DEVICES": " ".join(modes.devices(self.how.mode, self.arch_list)),
        }
        self._engine_build(
            "builder",
            "wheel, again" if again else "wheel",
            files_of,
            BuildRequest(
                dockerfile=layout.root() / context.DOCKERFILES["builder"],
                context=self.work,
                target="out",
                build_args=args,
                output_dir=out,
            ),
        )

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
            "image",
            files_of,
            BuildRequest(
                dockerfile=layout.root() / context.DOCKERFILES["bundle"],
                context=self.work,
                target="runtime",
                build_args={
                    "BASE_IMAGE": self.image.reference,
                    "PACKAGE_SHA256": context.package_digest(),
                    "WHEEL_SHA256": files.sha256(wheel),
                    # What the labels say.
                    "BASE": self.base.version,
                    "STACK": ledger.stack_id,
                    "MODE": self.how.mode,
                    "ARCH_LIST": self.arch_list,
                    "VERSION": ledger.wheel_version,
                    "SM12X_VERSION": __version__,
                    "BASE_IMAGE_NAME": self.image.origin,
                    "BASE_IMAGE_DIGEST": self.image.digest,
                    "LEDGER_SHA256": files.sha256(ledger_path),
                    **self.plan.install_args(),
                },
                tags=tags,
                platform=self.plan.platform,
            ),
        )

    def _engine_build(
        self, name: str, label: str, files_of: context.Context, request: BuildRequest
    ) -> None:
        """Stage ``files_of`` as the context of ``request`` and build it."""
        log = self.work / f"{name}.log"
        log.unlink(missing_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        with (
            self.report.phase(f"{label} ({request.dockerfile.name})") as step,
            TemporaryDirectory(dir=self.work, prefix=preflight.CONTEXT_PREFIX) as folder,
            self.host.files(self.work) as secrets,
        ):
            files_of.write(Path(folder))
            follower = Follower(step)
            request = replace(
                request,
                context=Path(folder),
                secrets=secrets,
                host_network=self.host.host_network,
            )
            try:
                self.engine.build(request, on_line=follower, log=log)
            except ToolFailedError:
                raise failure.of(
                    self.engine,
                    request.dockerfile.name,
                    follower,
                    log,
                    rest_gib=self._rest_gib(),
                ) from None
            finally:
                follower.finish()
                self.stages.update(follower.stages)

    def _rest_gib(self) -> float:
        full = any(not module.quick for module in self.how.choice.modules)
        rest = preflight.needs(
            self.base,
            self.engine,
            self.plan,
            self.meter,
            full=full,
            image=self.options.image,
        )
        return sum(need.gib for need in rest)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)


def image_tags(version: str, stack_id: str, mode: str, suffix: str = "") -> tuple[str, ...]:
    """The tags of an image, the most telling first; ``suffix`` is the plan's."""
    short = f"{IMAGE}:{version}-{stack_id}"
    return (f"{short}-{mode}{suffix}", f"{short}{suffix}")
