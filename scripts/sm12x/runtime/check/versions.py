"""Are the installed packages the locked ones, and do their requirements hold?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from sm12x.core import lockfile
from sm12x.core.errors import BadFileError
from sm12x.core.files import sha256
from sm12x.runtime import sleep_backend
from sm12x.runtime.check.report import FAIL, Line, Topic
from sm12x.wheel.ledger import ExtraEntry, Ledger, OverrideEntry

# Installed and in no lock: the wheel of this bundle, this package and its backend, the installer.
_OWN = ("sm12x-bundle", sleep_backend.PACKAGE, "vllm", "pip")
_REBUILD = "rebuild the image; something changed its packages after the build"
TOPIC = Topic("versions", _REBUILD)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One installed distribution. ``requires`` are its requirements as its metadata has them.

    ``license`` is what its metadata says in License-Expression, else in License, "" without either.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    license: str = ""


def installed(site: Path) -> dict[str, Distribution]:
    """Return the distributions installed in ``site``, by canonical name."""
    distributions: dict[str, Distribution] = {}
    for dist in metadata.distributions(path=[str(site)]):
        name = canonicalize_name(dist.metadata["Name"])
        licenses = dist.metadata.get_all("License-Expression") or dist.metadata.get_all("License")
        distributions[name] = Distribution(
            name=name,
            version=dist.version,
            requires=tuple(dist.requires or ()),
            license=licenses[0] if licenses else "",
        )
    return distributions


def locked(path: Path) -> dict[str, str]:
    """The versions a lock pins here, by canonical name.

    Raises:
        BadFileError: the lock cannot be read, or a line pins no exact version.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(f"{path} cannot be read: {error}", next_step=_REBUILD) from None
    pins: dict[str, str] = {}
    for logical in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"\s--hash=\S+|(?:^|\s)#.*", "", logical).strip()
        if not line or line.startswith("-"):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise BadFileError(
                f"{path}: {line!r} is not a requirement: {error}", next_step=_REBUILD
            ) from None
        if requirement.marker and not requirement.marker.evaluate():
            continue
        exact = [spec.version for spec in requirement.specifier if spec.operator == "=="]
        if len(exact) != 1:
            raise BadFileError(f"{path}: {line!r} pins no exact version", next_step=_REBUILD)
        pins[canonicalize_name(requirement.name)] = exact[0]
    return pins


def check(ledger: Ledger, lock: Path, present: Mapping[str, Distribution]) -> list[Line]:
    """Compare what is installed with the lock and with the ledger."""
    lines = []
    # The lock pins the release; the installed wheel is this bundle's build of it.
    pins: dict[str, str] = {name: pin for name, pin in locked(lock).items() if name != "vllm"}
    named: dict[str, str] = {
        canonicalize_name(name): text for name, text in ledger.dependencies.items()
    }
    named.pop("vllm", None)
    if ledger.lock_sha256 and sha256(lock) != ledger.lock_sha256:
        lines.append(TOPIC.failed(f"{lock} is not the lock the ledger names"))
    else:
        lines.append(TOPIC.passed("the lock is the one the ledger names"))
    lines += _differences(pins, present, "locked")
    lines += _differences(named, present, "in the ledger")
    expected = {**pins, **named}
    for name, package in sorted(present.items()):
        if name not in expected and name not in _OWN:
            lines.append(TOPIC.failed(f"{name} {package.version} is installed and in no lock"))
    vllm = present.get("vllm")
    version = vllm.version if vllm else "missing"
    if version == ledger.wheel_version:
        lines.append(TOPIC.passed(f"vllm {version}"))
    else:
        lines.append(TOPIC.failed(f"vllm is {version}, the ledger says {ledger.wheel_version}"))
    if all(line.state != "fail" for line in lines):
        lines.append(
            TOPIC.passed(f"{len(expected)} packages are as locked, and there are no others")
        )
    lines += _extras(ledger.extras, present)
    return [*lines, *requirements(present.values(), ledger.overrides, ledger.extras)]


def _extras(extras: Iterable[ExtraEntry], present: Mapping[str, Distribution]) -> list[Line]:
    """Check that vLLM's own metadata names each extra, and that its licence is the ledger's."""
    vllm = present.get("vllm")
    named = [Requirement(text) for text in (vllm.requires if vllm else ())]
    lines = []
    for extra in extras:
        package = present.get(extra.package)
        if package is None:
            # The comparison with the lock has already reported that it is missing.
            continue
        about = f"{package.name} {package.version}, of vLLM's extra {extra.name}"
        brought = [
            requirement
            for requirement in named
            if canonicalize_name(requirement.name) == extra.package
            and lockfile.brought_by(requirement, extra.name)
        ]
        if not any(
            _name_and_specifier(requirement) == _name_and_specifier(Requirement(extra.requirement))
            for requirement in brought
        ):
            terms = ", ".join(map(str, brought)) or "nothing of it"
            lines.append(
                TOPIC.failed(
                    f"{about}: vLLM's metadata asks for {terms}", "correct base.toml's extra"
                )
            )
        elif package.license != extra.license:
            lines.append(
                TOPIC.failed(
                    f"{about}: its licence is {package.license or 'not said'}, the ledger says "
                    f"{extra.license}",
                    "read the new licence, then correct base.toml's extra",
                )
            )
        else:
            lines.append(TOPIC.passed(f"{about}, {extra.license}"))
    return lines


def _differences(
    expected: Mapping[str, str], present: Mapping[str, Distribution], where: str
) -> list[Line]:
    lines = []
    for name, version in sorted(expected.items()):
        package = present.get(name)
        if package is None:
            lines.append(TOPIC.failed(f"{name} {version} is {where} and not installed"))
        elif Version(package.version) != Version(version):
            lines.append(TOPIC.failed(f"{name} is {package.version}, {version} is {where}"))
    return lines


def requirements(
    packages: Iterable[Distribution],
    overrides: Iterable[OverrideEntry] = (),
    extras: Iterable[ExtraEntry] = (),
) -> list[Line]:
    """Check, as `pip check` does, that each requirement of each package is installed.

    vLLM is checked with ``extras``, every other package without any.

    A requirement that the lock replaces is noted with the reason, where the replacement is
    installed. An override holds for the package it names alone: another package with the same
    requirement has not been reviewed.
    """
    replaced = {
        (canonicalize_name(each.of), _name_and_specifier(Requirement(each.instead_of))): each
        for each in overrides
    }
    chosen = ("", *(extra.name for extra in extras))
    packages = list(packages)
    versions = {package.name: package.version for package in packages}
    lines = []
    for package in sorted(packages, key=lambda package: package.name):
        for text in package.requires:
            requirement = Requirement(text)
            with_extras = chosen if package.name == "vllm" else ("",)
            if requirement.marker and not any(
                requirement.marker.evaluate({"extra": name}) for name in with_extras
            ):
                continue
            version = versions.get(canonicalize_name(requirement.name))
            if version is not None and requirement.specifier.contains(version, prereleases=True):
                continue
            difference = f"{package.name} requires {requirement}, found {version}"
            override = replaced.get(
                (canonicalize_name(package.name), _name_and_specifier(requirement))
            )
            if (
                override
                and version
                and Requirement(override.requirement).specifier.contains(version)
            ):
                lines.append(TOPIC.noted(f"{difference}, as the lock says: {override.why}"))
            else:
                lines.append(TOPIC.failed(difference))
    if all(line.state != FAIL for line in lines):
        lines.append(TOPIC.passed(f"the requirements of {len(packages)} packages hold"))
    return lines


def _name_and_specifier(requirement: Requirement) -> tuple[str, str]:
    """Name and versions, without the marker that says where it holds."""
    return canonicalize_name(requirement.name), str(requirement.specifier)
