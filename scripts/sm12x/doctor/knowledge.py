"""data/doctor.toml: the GPUs, thresholds, checks and known trouble."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x import layout
from sm12x.audit.model import DeclaredDevice
from sm12x.core import declared
from sm12x.core.declared import Declared


@dataclass(frozen=True, kw_only=True)
class _GpuModel(Declared):
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
class _Requirement(Declared):
    """The oldest driver branch for a CUDA toolkit of that major version."""

    toolkit: str
    driver: str
    source: str


@dataclass(frozen=True, kw_only=True)
class _Trouble(Declared):
    """A report about certain drivers or kernels, empty for any, on GPUs named like ``gpus``."""

    id: str
    drivers: tuple[str, ...]
    kernels: tuple[str, ...]
    gpus: tuple[str, ...]
    seen: str
    advice: str
    fix: tuple[str, ...]
    sources: tuple[str, ...]

    def matches(self, driver: str, kernel: str) -> bool:
        return all(
            not patterns
            or any(
                version.startswith(one) if one.endswith((".", "-")) else version == one
                for one in patterns
            )
            for version, patterns in ((driver, self.drivers), (kernel, self.kernels))
        )


@dataclass(frozen=True, kw_only=True)
class SettingReport(Declared):
    """A report about a setting of a recipe's server on SM12x: what users of it have met.

    It is about servers of which one of ``options`` (option -> regular expression of its value)
    holds, none of ``unless`` is given, and whose recipe's model fits ``model``; any where these are
    empty. ``unified``: on machines where GPU and CPU share one memory alone. ``gpus``: with so many
    of a machine, or more.
    """

    id: str
    level: Literal["warn", "info"]
    seen: str
    why: str
    sources: tuple[str, ...]
    fix: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    unless: tuple[str, ...] = ()
    model: str = ""
    unified: bool = False
    gpus: int = 1

    def concerns(self, options: Mapping[str, str], model: str, gpus: int, *, unified: bool) -> str:
        """Return the option that it is about, "the model" without one, or "" where it is not."""
        if any(name in options for name in self.unless) or gpus < self.gpus:
            return ""
        if (self.unified and not unified) or not re.search(self.model, model):
            return ""
        for name, value in self.options.items():
            if name in options and re.search(value, options[name]):
                return f"--{name} {options[name]}".rstrip()
        return "" if self.options else "the model"


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
class _Thresholds(Declared):
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
    models: Annotated[tuple[_GpuModel, ...], Field(alias="gpu")]
    requirements: Annotated[tuple[_Requirement, ...], Field(alias="cuda")]
    troubles: Annotated[tuple[_Trouble, ...], Field(alias="trouble")]
    checks: Annotated[Mapping[str, KnownCheck], Field(alias="check")]
    reports: Annotated[tuple[SettingReport, ...], Field(alias="report")]
    thresholds: Annotated[_Thresholds, Field(alias="threshold")]

    def model_of_name(self, name: str) -> _GpuModel | None:
        return next((model for model in self.models if model.name in name), None)


@functools.cache
def load(path: Path | None = None) -> Knowledge:
    """Read the data. Raises BadFileError when it is not what this version expects."""
    path = path or layout.data() / "doctor.toml"
    return declared.read_toml(Knowledge, path, next_step="restore the file, or reinstall sm12x")


def numbers(version: str) -> tuple[int, ...]:
    """The numbers in a version, to compare it by."""
    return tuple(int(part) for part in re.findall(r"\d+", version))
