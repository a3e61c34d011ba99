"""data/doctor.toml: the GPUs, thresholds, checks and known trouble."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x import layout
from sm12x.audit.model import DeclaredDevice
from sm12x.core import declared
from sm12x.core.declared import Declared
from sm12x.doctor.model import Diagnosis, Finding, HostFacts


@dataclass(frozen=True, kw_only=True)
class GpuModel(Declared):
    """A kind of GPU. ``pci`` are device ids of vendor 10de in lower case.

    One that is busy and draws no more than ``stuck_watts`` waits; 0 where no report says how much.
    """

    name: str
    pci: tuple[str, ...]
    capability: DeclaredDevice
    hardware: str
    source: str
    unified: bool = False
    stuck_watts: float = 0


@dataclass(frozen=True, kw_only=True)
class Requirement(Declared):
    """The oldest driver branch for a CUDA toolkit of that major version."""

    toolkit: str
    driver: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Trouble(Declared):
    """A report about certain drivers or kernels, empty for any, on GPUs named like ``gpus``."""

    id: str
    drivers: tuple[str, ...]
    kernels: tuple[str, ...]
    gpus: tuple[str, ...]
    seen: str
    advice: str
    fix: tuple[str, ...]
    sources: tuple[str, ...]

    def concerns(self, gpu: str) -> bool:
        return any(name in gpu for name in self.gpus)

    def matches(self, driver: str, kernel: str) -> bool:
        return (not self.drivers or _matches(driver, self.drivers)) and (
            not self.kernels or _matches(kernel, self.kernels)
        )


@dataclass(frozen=True, kw_only=True)
class KnownCheck(Declared):
    """A kind of finding.

    ``fix`` are the commands of each remedy, with names of values in braces. ``cured_by`` are
    subjects of patches: an image that has one of them needs no such finding.
    """

    title: str
    why: str
    sources: tuple[str, ...]
    fix: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cured_by: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Thresholds(Declared):
    """Thresholds of findings; doctor.toml has the reasons."""

    leftover_gib: float
    unified_leftover_gib: float
    unified_page_cache_gib: float
    unified_min_free_gib: float
    shm_gib: float
    unified_utilization: float
    stuck_percent: int
    nccl_aarch64: str


@dataclass(frozen=True, kw_only=True)
class Knowledge(Declared):
    """All of it."""

    schema: Literal[1]
    models: Annotated[tuple[GpuModel, ...], Field(alias="gpu")]
    requirements: Annotated[tuple[Requirement, ...], Field(alias="cuda")]
    troubles: Annotated[tuple[Trouble, ...], Field(alias="trouble")]
    checks: Annotated[Mapping[str, KnownCheck], Field(alias="check")]
    thresholds: Annotated[Thresholds, Field(alias="threshold")]

    def model_of_name(self, name: str) -> GpuModel | None:
        return next((model for model in self.models if model.name in name), None)

    def model_of_pci(self, device: str) -> GpuModel | None:
        return next((model for model in self.models if device in model.pci), None)

    def diagnosis(self, check: str, finding: Finding) -> Diagnosis:
        """Complete a finding of a known check with the reason and the sources of the data."""
        about = self.checks[check]
        return Diagnosis(
            id=check,
            severity=finding.severity,
            seen=finding.seen,
            why=finding.why or about.why,
            sources=finding.sources or about.sources,
            fix=finding.commands
            or tuple(
                command.format_map(finding.values)
                for name in finding.fix
                for command in about.fix[name]
            ),
        )


_Check = Callable[[HostFacts, Knowledge], Iterable[Finding]]
# Every check of a host by its name in doctor.toml, whose order is that of the report.
CHECKS: dict[str, _Check] = {}


def check(name: str) -> Callable[[_Check], _Check]:
    """Register a function as the check ``name``: it and its entry in doctor.toml are all of it."""

    def register(function: _Check) -> _Check:
        CHECKS[name] = function
        return function

    return register


@functools.cache
def load(path: Path | None = None) -> Knowledge:
    """Read the data. Raises BadFileError when it is not what this version expects."""
    path = path or layout.data() / "doctor.toml"
    return declared.read_toml(Knowledge, path, next_step="restore the file, or reinstall sm12x")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers in a version, to compare it by."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _matches(version: str, patterns: tuple[str, ...]) -> bool:
    return any(
        version.startswith(pattern) if pattern.endswith((".", "-")) else version == pattern
        for pattern in patterns
    )
