"""All facts about a host, read in one go, and all checks, each a pure function of the facts.

Nothing is written and nothing is changed.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

from sm12x.doctor import (
    caches,
    containers,
    driver,  # noqa: F401 - its checks register themselves
    gpus,
    image,
    memory,
    network,
    serving,
)
from sm12x.doctor.host import Host
from sm12x.doctor.knowledge import CHECKS, Knowledge
from sm12x.doctor.model import SEVERITIES, Diagnosis, HostFacts, HostMachine, Unseen

_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")


def facts(
    host: Host,
    knowledge: Knowledge,
    *,
    audit: Path | None = None,
    image_name: str | None = None,
    cache_folders: Sequence[Path] = (),
    dist: Path,
) -> HostFacts:
    """Collect all facts about the host. ``dist`` is the folder of the bundles built here.

    Raises BadFileError when the audit that was named cannot be read.
    """
    here = _machine(host)
    gpu_driver, seen_gpus = gpus.collect(host, knowledge)
    engines = containers.collect(host)
    compiled, hidden = caches.collect(host, engines, cache_folders)
    return HostFacts(
        machine=here,
        driver=gpu_driver,
        gpus=seen_gpus,
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


def run(facts: HostFacts, knowledge: Knowledge) -> list[Diagnosis]:
    """Run every check; the worst findings come first, in the order of doctor.toml otherwise."""
    return ordered(
        [
            knowledge.diagnosis(name, finding)
            for name in knowledge.checks
            if name in CHECKS and not serving.cured(facts, name, knowledge)
            for finding in CHECKS[name](facts, knowledge)
        ]
    )


def ordered(findings: list[Diagnosis]) -> list[Diagnosis]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
