"""data/doctor.toml: the GPUs, thresholds, checks and known trouble."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm12x import layout
from sm12x.audit.model import Device
from sm12x.core.errors import BadFileError
from sm12x.doctor.model import Finding

SCHEMA = 1
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Model:
    """A kind of GPU. ``pci`` are device ids of vendor 10de in lower case."""

    name: str
    pci: tuple[str, ...]
    capability: Device
    hardware: str
    unified: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """The oldest driver branch for a CUDA toolkit of that major version."""

    toolkit: str
    driver: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Trouble:
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
class Check:
    """What a kind of finding is about."""

    id: str
    title: str
    why: str
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """All of it. Thresholds are in the unit their name ends in."""

    models: tuple[Model, ...]
    requirements: tuple[Requirement, ...]
    troubles: tuple[Trouble, ...]
    checks: Mapping[str, Check]
    thresholds: Mapping[str, float]

    def model_of_name(self, name: str) -> Model | None:
        return next((model for model in self.models if model.name in name), None)

    def model_of_pci(self, device: str) -> Model | None:
        return next((model for model in self.models if device in model.pci), None)

    def bytes_of(self, threshold: str) -> int:
        """A threshold in GiB, as bytes."""
        return int(self.thresholds[threshold] * GIB)

    def finding(
        self,
        check: str,
        severity: str,
        seen: str,
        *,
        fix: tuple[str, ...] = (),
        why: str = "",
        sources: tuple[str, ...] = (),
    ) -> Finding:
        """A finding of a known check; ``why`` and ``sources`` come from the data unless given."""
        about = self.checks[check]
        return Finding(
            id=check,
            severity=severity,
            seen=seen,
            why=why or about.why,
            sources=sources or about.sources,
            fix=fix,
        )


@functools.cache
def load(path: Path | None = None) -> Knowledge:
    """Read the data. Raises BadFileError when it is not what this version expects."""
    path = path or layout.data() / "doctor.toml"
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        if raw["schema"] != SCHEMA:
            raise ValueError(f"schema {raw['schema']!r}")
        return Knowledge(
            models=tuple(_model(entry) for entry in raw["gpu"]),
            requirements=tuple(Requirement(**entry) for entry in raw["cuda"]),
            troubles=tuple(_trouble(entry) for entry in raw["trouble"]),
            checks={name: _check(name, entry) for name, entry in raw["check"].items()},
            thresholds={name: float(value) for name, value in raw["threshold"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFileError(
            f"{path} cannot be used: {error}", next_step="restore the file, or reinstall sm12x"
        ) from None


def _model(entry: dict[str, Any]) -> Model:
    return Model(
        name=entry["name"],
        pci=tuple(entry["pci"]),
        capability=Device.parse(entry["capability"]),
        hardware=entry["hardware"],
        unified=entry.get("unified", False),
        source=entry["source"],
    )


def _trouble(entry: dict[str, Any]) -> Trouble:
    lists = {name: tuple(entry[name]) for name in ("drivers", "kernels", "gpus", "fix", "sources")}
    words = {name: entry[name] for name in ("id", "seen", "advice")}
    return Trouble(**{**lists, **words})


def _check(name: str, entry: dict[str, Any]) -> Check:
    return Check(id=name, title=entry["title"], why=entry["why"], sources=tuple(entry["sources"]))


def _matches(version: str, patterns: tuple[str, ...]) -> bool:
    return any(
        version.startswith(pattern) if pattern.endswith((".", "-")) else version == pattern
        for pattern in patterns
    )
