"""All checks of a host, and the order of their findings. Each is a pure function of the facts."""

from __future__ import annotations

from collections.abc import Callable

from sm12x.doctor import caches, containers, driver, gpus, memory, network, serving
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import SEVERITIES, Diagnosis, HostFacts

Check = Callable[[HostFacts, Knowledge], list[Diagnosis]]

ALL: tuple[Check, ...] = (
    driver.answers,
    driver.version,
    driver.trouble,
    driver.log,
    gpus.present,
    gpus.image_known,
    gpus.code,
    gpus.leftover,
    gpus.unified,
    gpus.stuck,
    serving.offline,
    containers.engines,
    containers.gpu_access,
    containers.cdi,
    memory.host_copies,
    memory.huge_pages,
    memory.locked,
    memory.shared,
    memory.page_cache,
    memory.reclaim,
    caches.stale,
    serving.compiling,
    network.rdma,
    network.variables,
    serving.nccl_sound,
    serving.segments,
    driver.iommu,
    driver.handover,
)


def run(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """Every check, the worst findings first, in the order of ``ALL`` otherwise."""
    return ordered([finding for check in ALL for finding in check(facts, known)])


def ordered(findings: list[Diagnosis]) -> list[Diagnosis]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
