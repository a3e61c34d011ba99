"""All facts about a host, and all checks. Nothing is written and nothing is changed."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm12x.doctor import caches, containers, gpus, image, memory, network
from sm12x.doctor import driver as _driver  # noqa: F401 - its checks register themselves
from sm12x.doctor import recipe as _recipe  # noqa: F401 - as above
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import CHECKS, SEVERITIES, Diagnosis, Facts, Image, Machine
from sm12x.recipes.model import Recipe

_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
_GROUPS = ("docker", "kubepods", "containerd", "libpod", "lxc")


def facts(
    host: Host,
    known: Knowledge,
    *,
    audit: Path | None = None,
    image_name: str | None = None,
    cache_folders: Sequence[Path] = (),
    dist: Path,
    recipe: Recipe | None = None,
    options: Mapping[str, str] | None = None,
) -> Facts:
    """Collect what several checks need. ``dist`` is the folder of the bundles built here.

    Raises BadFileError when the audit that was named cannot be read.
    """
    # /proc/sys/kernel/arch is there since Linux 6.1.
    arch, kernel = host.text("/proc/sys/kernel/arch"), host.text("/proc/sys/kernel/osrelease")
    machine = Machine(
        name=platform.machine() if isinstance(arch, Unseen) else arch,
        kernel=platform.release() if isinstance(kernel, Unseen) else kernel,
        container=_container(host),
    )
    driver, seen_gpus = gpus.collect(host, known)
    engines = containers.collect(host)
    compiled, hidden = caches.collect(host, engines, cache_folders)
    return Facts(
        host=host,
        known=known,
        machine=machine,
        driver=driver,
        gpus=seen_gpus,
        meminfo=memory.meminfo(host),
        cgroup=memory.cgroup(host),
        engines=engines,
        caches=compiled,
        hidden_caches=hidden,
        ports=network.collect(host),
        image=image.find(host, audit, image_name, machine=machine.name, dist=dist),
        recipe=recipe,
        options=options or {},
    )


def _container(host: Host) -> str:
    for path, kind in _MARKS.items():
        if host.exists(path):
            return kind
    group = host.word("/proc/1/cgroup")
    return next((kind for kind in _GROUPS if kind in group), "")


def run(facts: Facts) -> list[Diagnosis]:
    """Run every check; the worst findings come first, in the order of doctor.toml otherwise."""
    patches = set(facts.image.patches) if isinstance(facts.image, Image) else set()
    findings = []
    for name, about in facts.known.checks.items():
        if patches & set(about.cured_by):
            continue
        for finding in CHECKS[name](facts):
            remedies = [command for fix in finding.fix for command in about.fix[fix]]
            findings.append(
                Diagnosis(
                    id=name,
                    severity=finding.severity,
                    seen=finding.seen,
                    why=finding.why or about.why,
                    sources=finding.sources or about.sources,
                    fix=finding.commands
                    or tuple(command.format_map(finding.values) for command in remedies),
                )
            )
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
