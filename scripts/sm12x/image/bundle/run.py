"""From a base to an image, in four steps: decide, fetch, wheel, image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sm12x.core import declared
from sm12x.core.progress import Reporter
from sm12x.image.bundle import make, record
from sm12x.image.bundle.decide import BuildPlan, Options, decided
from sm12x.image.bundle.make import NO_IMAGE, BuiltImage, Wheel
from sm12x.image.bundle.record import Record
from sm12x.image.engine.engine import Engine
from sm12x.wheel.compile.estimate import Offer


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A finished bundle. ``unchanged``: nothing was built, all that ``record`` names was there.

    ``offer`` is what full mode would add to a quick bundle.
    """

    record: Record
    folder: Path
    engine: Engine
    unchanged: bool
    offer: Offer | None = None


def run(options: Options, report: Reporter) -> Bundle:
    """Make wheel and image, or find them made.

    Raises:
        Sm12xError: of the kind that says what is wrong; nothing half made is left under its name.
    """
    with decided(options, report) as plan:
        made = plan.made_before()
        unchanged = made is not None
        if made is None:
            plan.require_room()
            release = make.fetch(plan)
            wheel = make.build_wheel(plan, release)
            image = make.build_image(plan, wheel) if options.image else NO_IMAGE
            made = _record(plan, wheel, image)
            declared.write_json(plan.folder / record.NAME, made)
        return Bundle(
            record=made,
            folder=plan.folder,
            engine=plan.engine,
            unchanged=unchanged,
            offer=plan.mode.offer,
        )


def _record(plan: BuildPlan, wheel: Wheel, image: BuiltImage) -> Record:
    return Record(
        version=plan.base.version,
        mode=plan.mode.name,
        machine=plan.machine,
        stack_id=wheel.ledger.stack_id,
        arch_list=plan.arch_list,
        inputs=plan.inputs,
        engine=plan.engine.description,
        base_image=plan.image.origin,
        base_digest=plan.image.digest,
        wheel=wheel.path.name,
        wheel_sha256=wheel.sha256,
        wheel_size=wheel.path.stat().st_size,
        ledger_sha256=wheel.ledger_sha256,
        image_id=image.id,
        tags=image.tags,
        image_size=image.size,
        layers=image.layers,
        seconds=dict(plan.timings.seconds),
        stage_seconds={
            name: None if stage.cached else round(stage.seconds, 1)
            for name, stage in plan.timings.stages.items()
        },
    )
