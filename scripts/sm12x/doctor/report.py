"""The report of `sm12x doctor --json`; data/schemas/doctor-1.json is made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sm12x.core.declared import Declared, one_of
from sm12x.doctor.model import SEVERITIES, Diagnosis, Gpu, HostFacts, Unseen


@dataclass(frozen=True, kw_only=True)
class MachineReport(Declared):
    """``container`` is the evidence that this runs inside one, null on a host. ``driver`` is null
    where it could not be seen, ``unified_memory`` where the GPUs could not.
    """

    architecture: Annotated[str, Field(description="x86_64 or aarch64")]
    kernel: str
    container: str | None
    driver: str | None
    unified_memory: bool | None


@dataclass(frozen=True, kw_only=True)
class GpuReport(Declared):
    """``hardware`` is the name that recipes use. Memory is in bytes, null where the driver does not
    report it."""

    index: Annotated[int, Field(ge=0)]
    name: str
    bus: Annotated[str, Field(description="PCI address, four-digit domain")]
    capability: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]$")] | None
    hardware: str | None
    unified: bool
    memory_total: int | None
    memory_used: int | None
    told_by: Annotated[str, one_of("nvml", "pci")]


@dataclass(frozen=True, kw_only=True)
class ImageReport(Declared):
    """What the host was compared with."""

    name: str
    stack_id: Annotated[str, Field(pattern="^[0-9a-f]{8}$")] | None
    machine: str


@dataclass(frozen=True, kw_only=True)
class DoctorReport(Declared):
    """The report of `sm12x doctor --json`. A number that could not be read is null, never 0.

    ``gpus`` is null where they could not be seen, empty where there is none; ``image`` is null
    where nothing is known of it. ``summary`` counts the findings of each severity.
    """

    schema: Literal[1] = 1
    machine: MachineReport
    gpus: tuple[GpuReport, ...] | None
    image: ImageReport | None
    summary: Mapping[Annotated[str, one_of(*SEVERITIES)], Annotated[int, Field(ge=0)]]
    findings: tuple[Diagnosis, ...]


def document(facts: HostFacts, findings: Sequence[Diagnosis]) -> DoctorReport:
    """The report of the findings."""
    counted = Counter(finding.severity for finding in findings)
    image = facts.image
    return DoctorReport(
        machine=MachineReport(
            architecture=facts.machine.name,
            kernel=facts.machine.kernel,
            container=facts.machine.container or None,
            driver=None if isinstance(facts.driver.version, Unseen) else facts.driver.version,
            unified_memory=None if isinstance(facts.gpus, Unseen) else facts.unified,
        ),
        gpus=None if isinstance(facts.gpus, Unseen) else tuple(map(_gpu, facts.gpus)),
        image=None
        if isinstance(image, Unseen)
        else ImageReport(name=image.name, stack_id=image.stack_id or None, machine=image.machine),
        summary={severity: counted[severity] for severity in SEVERITIES},
        findings=tuple(findings),
    )


def _gpu(gpu: Gpu) -> GpuReport:
    return GpuReport(
        index=gpu.index,
        name=gpu.name,
        bus=gpu.bus,
        capability=str(gpu.capability) if gpu.capability else None,
        hardware=gpu.hardware or None,
        unified=gpu.unified,
        memory_total=gpu.memory_total,
        memory_used=gpu.memory_used,
        told_by=gpu.told_by,
    )
