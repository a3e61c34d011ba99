"""From a base to an image, in four steps: decide (``decide``), fetch, wheel, image."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from sm12x import __version__, layout
from sm12x.audit import report as audits
from sm12x.core import declared, files, index
from sm12x.core.errors import BuildFailedError, ToolFailedError
from sm12x.core.progress import Reporter
from sm12x.image.bundle import context, decide, modes, record
from sm12x.image.bundle.context import Context
from sm12x.image.bundle.decide import BuildPlan, Options, decided
from sm12x.image.bundle.record import Record
from sm12x.image.bundle.summary import Bundle
from sm12x.image.engine import buildah, follow
from sm12x.image.engine.engine import BuildRequest
from sm12x.image.engine.follow import Follower
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.ledger import Ledger

_PROJECT = "vllm"
_IMAGE = "vllm-sm12x"


def run(options: Options, report: Reporter) -> Bundle:
    """Make wheel and image, or find existing ones.

    Raises:
        Sm12xError: of the kind that says what is wrong; nothing half made is left under its name.
    """
    with decided(options, report) as plan:
        bundle_record = plan.made_before()
        unchanged = bundle_record is not None
        if bundle_record is None:
            plan.require_room()
            release = _fetch(plan)
            ledger = _build_wheel(plan, release)
            tags = _build_image(plan, ledger) if options.image else ()
            bundle_record = _record(plan, ledger.stack_id, tags)
            declared.write_json(plan.folder / record.NAME, bundle_record)
        return Bundle(
            record=bundle_record,
            ledger=ledgers.read(plan.folder / record.LEDGER),
            audit=audits.read(
                plan.folder / record.AUDIT, next_step=f"remove {plan.folder} and build again"
            ),
            folder=plan.folder,
            engine=plan.engine,
            unchanged=unchanged,
            offer=plan.mode.offer,
        )


def _fetch(plan: BuildPlan) -> list[Path]:
    """Return the release's sdist and wheel, downloaded or cached. Raises HashMismatchError."""
    with plan.step("fetch"), plan.report.phase("sources", live=False):
        return [
            index.fetch_shown(
                _PROJECT,
                pinned.name,
                pinned.sha256,
                cache=layout.cache(),
                find_links=plan.options.find_links,
            )
            for pinned in (plan.base.sdist, plan.base.wheels[plan.platforms.machine])
        ]


def _build_wheel(plan: BuildPlan, release: list[Path]) -> Ledger:
    """Build the wheel, its ledger and its audit in the builder, and move them to dist/.

    Raises:
        BuildFailedError: the builder failed, or a second build gave other bytes.
        NoSpaceError: a disk was full.
    """
    publishing = files.replacing_folder(plan.folder, record.LEDGER)
    with plan.step("wheel"), publishing as staged:
        _run_builder(plan, release, staged)
        if plan.options.twice:
            _require_same_again(plan, release, record.one_wheel(staged))
        return ledgers.read(staged / record.LEDGER)


def _require_same_again(plan: BuildPlan, release: list[Path], wheel: Path) -> None:
    """The second build uses nothing of the first: no layer from `native` on, no work folder."""
    with TemporaryDirectory(dir=plan.work, prefix=decide.CONTEXT_PREFIX) as folder:
        _run_builder(plan, release, Path(folder), again="again")
        same = files.sha256(record.one_wheel(Path(folder))) == files.sha256(wheel)
    if not same:
        raise BuildFailedError(
            f"{wheel.name} was built twice, and the two are not the same bytes",
            next_step=f"report it, with the log {plan.work / 'builder.log'}",
        )
    plan.report.say(f"built twice, the same bytes: {wheel.name}")


def _run_builder(plan: BuildPlan, release: list[Path], out: Path, *, again: str = "") -> None:
    mode, base, machine = plan.mode, plan.base, plan.platforms.machine
    locks = {base.build_lock_path(name) for name in (plan.platforms.here, machine)}
    copied = Context(
        files=context.builder_files(base, machine, here=plan.platforms.here),
        large={
            **{f"sources/{path.name}": path for path in release},
            **context.links(plan.options.find_links, *locks),
            **mode.third_party,
        },
        folders=("links", "third_party"),
    )
    args = {
        "BASE_IMAGE": plan.builder.reference,
        "BASE": base.version,
        "MACHINE": machine,
        "CROSS": machine if plan.platforms.crossing else "",
        "ARCH_LIST": plan.arch_list,
        "MODE": mode.name,
        "PATCH_LEVELS": " ".join(mode.patch_levels),
        "THIRD_PARTY_SHA256": mode.third_party_sha256,
        "NATIVE_KEY": mode.key(base, machine, plan.arch_list) + again,
        "AGAIN": again,
        "DEVICES": " ".join(modes.devices(mode.name, plan.arch_list)),
    }
    request = BuildRequest(
        dockerfile=layout.root() / context.DOCKERFILES["builder"],
        context=plan.work,
        target="out",
        build_args=args,
        output_dir=out,
    )
    _build(plan, "builder", "wheel, again" if again else "wheel", copied, request)


def _build_image(plan: BuildPlan, ledger: Ledger) -> tuple[str, ...]:
    """Build the image around the wheel; return its tags, the most telling first.

    Raises:
        BuildFailedError: the engine failed.
        NoSpaceError: a disk was full.
    """
    base, mode, machine = plan.base, plan.mode.name, plan.platforms.machine
    tags = image_tags(base.version, ledger.stack_id, mode, plan.platforms.suffix)
    wheel, ledger_path = record.one_wheel(plan.folder), plan.folder / record.LEDGER
    args = {
        "BASE_IMAGE": plan.image.reference,
        "PACKAGE_SHA256": context.package_digest(),
        "WHEEL_SHA256": files.sha256(wheel),
        # What the labels say.
        "BASE": base.version,
        "STACK": ledger.stack_id,
        "MODE": mode,
        "ARCH_LIST": plan.arch_list,
        "VERSION": ledger.wheel_version,
        "SM12X_VERSION": __version__,
        "BASE_IMAGE_NAME": plan.image.origin,
        "BASE_IMAGE_DIGEST": plan.image.digest,
        "LEDGER_SHA256": files.sha256(ledger_path),
        **plan.platforms.install_args(),
    }
    locks = base.lock_path(machine), base.build_lock_path(machine)
    inside = context.bundle_files(base, machine, flashinfer=plan.flashinfer)
    copied = Context(
        files={**inside, "ledger.json": ledger_path},
        large={f"wheel/{wheel.name}": wheel, **context.links(plan.options.find_links, *locks)},
        folders=("links", "recipes"),
    )
    request = BuildRequest(
        dockerfile=layout.root() / context.DOCKERFILES["bundle"],
        context=plan.work,
        target="runtime",
        build_args=args,
        tags=tags,
        platform=plan.platforms.platform,
    )
    with plan.step("image"):
        _build(plan, "bundle", "image", copied, request)
    if plan.flashinfer:
        modules_request = context.flashinfer_request(base, machine, plan.flashinfer)
        declared.write_json(plan.folder / ledgers.FLASHINFER_REQUEST, modules_request)
    if script := plan.engine.script(tags[0]):
        files.write_text(plan.folder / buildah.SCRIPT, script)
    return tags


def image_tags(version: str, stack_id: str, mode: str, suffix: str = "") -> tuple[str, ...]:
    """The tags of an image, the most telling first; ``suffix`` is that of its platform."""
    short = f"{_IMAGE}:{version}-{stack_id}"
    return (f"{short}-{mode}{suffix}", f"{short}{suffix}")


def _build(plan: BuildPlan, name: str, label: str, copied: Context, request: BuildRequest) -> None:
    """Stage ``copied`` as the context of ``request`` and build it."""
    log = plan.work / f"{name}.log"
    log.unlink(missing_ok=True)
    with (
        plan.report.phase(f"{label} ({request.dockerfile.name})") as step,
        TemporaryDirectory(dir=plan.work, prefix=decide.CONTEXT_PREFIX) as folder,
        plan.host.files(plan.work) as secrets,
    ):
        copied.write(Path(folder))
        follower = Follower(step)
        staged = replace(
            request, context=Path(folder), secrets=secrets, host_network=plan.host.host_network
        )
        try:
            plan.engine.build(staged, on_line=follower, log=log)
        except ToolFailedError:
            raise follow.failure(
                plan.engine, request.dockerfile.name, follower, log, needs_gib=plan.needs_gib()
            ) from None


def _record(plan: BuildPlan, stack_id: str, tags: tuple[str, ...]) -> Record:
    """Return the record of a bundle; without ``tags`` there is no image."""
    engine, wheel = plan.engine, record.one_wheel(plan.folder)
    return Record(
        version=plan.base.version,
        mode=plan.mode.name,
        machine=plan.platforms.machine,
        stack_id=stack_id,
        arch_list=plan.arch_list,
        flashinfer=plan.flashinfer,
        inputs=plan.inputs,
        engine=engine.description,
        base_image=plan.image.origin,
        base_digest=plan.image.digest,
        wheel=wheel.name,
        wheel_sha256=files.sha256(wheel),
        wheel_size=wheel.stat().st_size,
        ledger_sha256=files.sha256(plan.folder / record.LEDGER),
        image_id=(engine.image_id(tags[0]) or "") if tags else "",
        tags=tags,
        image_size=engine.size(tags[0]) if tags else 0,
        seconds=dict(plan.seconds),
    )
