"""All facts about a host, read in one go, and all checks, each a pure function of the facts.

Nothing is written and nothing is changed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sm12x.doctor import caches, containers, driver, gpus, image, memory, network, serving
from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import SEVERITIES, Diagnosis, HostFacts, HostMachine, Unseen

_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")

_CHECKS: tuple[Callable[[HostFacts, Knowledge], Iterable[Diagnosis]], ...] = (
    driver.answers,
    driver.version,
    driver.trouble,
    driver.log,
    gpus.present,
    gpus.split,
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


def facts(
    host: Host,
    known: Knowledge,
    *,
    audit: Path | None = None,
    image_name: str | None = None,
    cache_folders: Sequence[Path] = (),
    dist: Path,
) -> HostFacts:
    """Collect everything. ``dist`` is the folder of what was built here.

    Raises BadFileError when the audit that was named cannot be read.
    """
    here = _machine(host)
    gpu_driver, found = gpus.collect(host, known)
    engines = containers.collect(host)
    compiled, hidden = caches.collect(host, engines, cache_folders)
    return HostFacts(
        machine=here,
        driver=gpu_driver,
        gpus=found,
        log=gpus.log(host),
        memory=memory.collect(host),
        containers=engines,
        caches=compiled,
        hidden_caches=hidden,
        network=network.collect(host),
        image=image.find(host, audit, image_name, machine=here.name, dist=dist),
        environment=serving.variables(host),
        routed=serving.routed(host),
        nccl=serving.nccl(host) if here.name == "aarch64" else (),
    )


def _machine(host: Host) -> HostMachine:
    kernel = host.text("/proc/sys/kernel/osrelease")
    name = host.text("/proc/sys/kernel/arch")
    return HostMachine(
        # /proc/sys/kernel/arch is there since Linux 6.1.
        name=platform.machine() if isinstance(name, Unseen) else name,
        kernel=platform.release() if isinstance(kernel, Unseen) else kernel,
        container=_container(host),
        cmdline=host.text("/proc/cmdline"),
        cpus=serving.cpus(host),
    )


def _container(host: Host) -> str:
    for path, kind in _MARKS.items():
        if host.exists(path):
            return kind
    group = host.text("/proc/1/cgroup")
    if isinstance(group, Unseen):
        return ""
    return next((kind for kind in _GROUPS if kind in group), "")


def run(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    """Every check, the worst findings first, in the order of ``_CHECKS`` otherwise."""
    return ordered([finding for check in _CHECKS for finding in check(facts, known)])


def ordered(findings: list[Diagnosis]) -> list[Diagnosis]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
