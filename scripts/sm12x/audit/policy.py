"""Judge an audit by a policy: a TOML file that says, for each library, how its code may run.

A rule names libraries by glob, the verdicts their translation units may have, and the reason for
each exception. For a library and a device the first rule that matches both counts; a rule may be
for libraries alone that were compiled here. What could not be read breaks every policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x.audit.model import (
    DEVICES,
    HOST,
    LTO,
    NATIVE,
    NONE,
    PTX,
    UNKNOWN,
    Audit,
    DeclaredDevice,
    Device,
    LibraryAudit,
)
from sm12x.core import declared
from sm12x.core.declared import Declared, KeyFaultError, one_of

_WORDS = {
    NATIVE: "run natively",
    PTX: "run only through PTX",
    LTO: "are LTO-IR alone: they run only where the library links them at run time",
    NONE: "have no code for the device",
    UNKNOWN: "could not be read",
}
_UNREAD = _WORDS[UNKNOWN]
EMBEDDED = (
    "it holds pieces of code that it picks among and loads itself: those for other GPUs are not "
    "judged, and it is not known whether each of its kernels has one for this device"
)


def _matches(path: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(path, glob) or fnmatchcase(path, f"*/{glob}") for glob in globs)


@dataclass(frozen=True, kw_only=True)
class Rule(Declared):
    """What is asked of the libraries whose path matches one of ``match``.

    Args:
        match: globs; each also matches below any folder, so that "vllm/_C*.so" serves a wheel and
            an image. ``*`` crosses slashes.
        units: the verdicts a translation unit may have: "native", "ptx", "lto", "none".
        reason: why something else than native is accepted; "" when only native is.
        native_at_least: how many translation units have to be native.
        ptx_at_most: how many may run through PTX; None: as many as do, where ``units`` has it.
        required: whether a library that matches has to be there.
        on: the devices the rule is for.
        compiled: whether the rule is for libraries alone that were compiled here.
    """

    match: Annotated[tuple[str, ...], Field(min_length=1)]
    units: Annotated[
        tuple[Annotated[str, one_of(NATIVE, PTX, LTO, NONE)], ...], Field(min_length=1)
    ]
    reason: str = ""
    native_at_least: Annotated[int, Field(ge=0)] = 0
    ptx_at_most: Annotated[int, Field(ge=0)] | None = None
    required: bool = False
    on: tuple[DeclaredDevice, ...] = ()
    compiled: bool = False

    def __post_init__(self) -> None:
        if set(self.units) != {NATIVE} and not self.reason:
            raise KeyFaultError("reason", "is missing: an exception has to say why")

    def matches(self, path: str) -> bool:
        return _matches(path, self.match)

    def concerns(self, path: str, device: Device, *, compiled: bool) -> bool:
        if (self.on and device not in self.on) or (self.compiled and not compiled):
            return False
        return self.matches(path)


@dataclass(frozen=True, kw_only=True)
class Policy(Declared):
    """A policy file."""

    schema: Literal[1]
    name: Annotated[str, Field(min_length=1)]
    rules: Annotated[tuple[Rule, ...], Field(alias="rule", min_length=1)]

    @property
    def asks_a_ledger(self) -> bool:
        """Whether it has rules for libraries compiled here, which only a ledger names."""
        return any(rule.compiled for rule in self.rules)


@dataclass(frozen=True, kw_only=True)
class Offender(Declared):
    """A library that does not meet the policy on one device ("" for both), and why.

    ``about_units``: the only objection is how some of its units would run.
    """

    path: str
    device: str
    message: str
    about_units: Annotated[bool, Field(exclude=True)] = False

    def __str__(self) -> str:
        where = f" on {self.device}" if self.device else ""
        return f"{self.path}{where}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class Accepted(Declared):
    """Libraries that pass although not all of their units are native, and the reason."""

    reason: str
    paths: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Judgement(Declared):
    """What the policy says. ``unasked``: there was no ledger, and the policy has rules for
    libraries compiled here. ``accepted`` are the libraries that are not native throughout and still
    pass.
    """

    name: str
    passed: bool
    unasked: bool = False
    offenders: tuple[Offender, ...]
    accepted: tuple[Accepted, ...]


def judge(
    audit: Audit,
    policy: Policy,
    devices: Sequence[Device] = DEVICES,
    *,
    compiled: Mapping[str, str] | None = None,
) -> Judgement:
    """Judge every library of the audit by the policy.

    Args:
        audit: the device code of each library.
        policy: the rules.
        devices: what to judge for.
        compiled: the libraries compiled here, from a ledger: path in the wheel -> sha256. An image
            has the paths below some folder. None: there is no ledger.
    """
    offenders: list[Offender] = []
    accepted: dict[str, list[str]] = {}
    for library in audit.libraries:
        ours = _named(library.path, compiled or {})
        if ours not in ("", library.sha256):
            message = "is not the file that the ledger names: it belongs to another build"
            offenders.append(Offender(path=library.path, device="", message=message))
        if library.unloadable:
            offenders.append(Offender(path=library.path, device="", message=library.unloadable))
        if library.unknown:
            message = f"could not be read: {'; '.join(library.unknown)}"
            offenders.append(Offender(path=library.path, device="", message=message))
        for device in devices:
            number = _rule_for(library.path, device, policy, compiled=bool(ours))
            if number is None:
                message = "no rule of the policy matches it"
                offenders.append(Offender(path=library.path, device=str(device), message=message))
                continue
            rule = policy.rules[number]
            # The reason for a missing verdict is in the findings already.
            finding = library.unknown or library.unloadable
            faults = () if finding else tuple(_faults(library, device, rule))
            offenders.extend(
                Offender(path=library.path, device=str(device), message=fault, about_units=True)
                for fault in faults
            )
            if finding or faults or library.verdict(device) in (NATIVE, HOST, UNKNOWN):
                continue
            for reason in _reasons(library, device, rule):
                paths = accepted.setdefault(reason, [])
                if library.path not in paths:
                    paths.append(library.path)
    for rule in policy.rules:
        applies = not rule.on or any(device in rule.on for device in devices)
        there = any(rule.matches(library.path) for library in audit.libraries)
        if rule.required and applies and not there:
            message = "is not there, and the policy requires it"
            offenders.append(Offender(path=" or ".join(rule.match), device="", message=message))
    return Judgement(
        name=policy.name,
        passed=not offenders,
        unasked=compiled is None and policy.asks_a_ledger,
        offenders=tuple(offenders),
        accepted=tuple(
            Accepted(reason=reason, paths=tuple(paths)) for reason, paths in accepted.items()
        ),
    )


def _named(path: str, compiled: Mapping[str, str]) -> str:
    """Return the sha256 that ``compiled`` has for the library at ``path``, "" without one."""
    hashes = (sha for name, sha in compiled.items() if path == name or path.endswith(f"/{name}"))
    return next(hashes, "")


def _rule_for(path: str, device: Device, policy: Policy, *, compiled: bool) -> int | None:
    for number, rule in enumerate(policy.rules):
        if rule.concerns(path, device, compiled=compiled):
            return number
    return None


def _registered(library: LibraryAudit, device: Device) -> dict[str, int]:
    """Units by verdict, without those that the library loads itself."""
    embedded = library.embedded_on(device)
    units = library.units_on(device)
    return {verdict: number - embedded.get(verdict, 0) for verdict, number in units.items()}


def _reasons(library: LibraryAudit, device: Device, rule: Rule) -> list[str]:
    """The reason why it passes although some of its units are not native."""
    reasons = []
    if any(number for word, number in _registered(library, device).items() if word != NATIVE):
        reasons.append(rule.reason)
    if any(number for word, number in library.embedded_on(device).items() if word != NATIVE):
        reasons.append(EMBEDDED)
    return reasons


def _faults(library: LibraryAudit, device: Device, rule: Rule) -> list[str]:
    units = library.units_on(device)
    total = sum(units.values())
    registered = _registered(library, device)
    faults = [
        f"{number} of {sum(registered.values())} translation units {_WORDS[verdict]}"
        for verdict, number in registered.items()
        if number and verdict not in rule.units
    ]
    # The library picks a piece that fits: one for another GPU is no fault if others fit.
    embedded = library.embedded_on(device)
    number = sum(embedded.values())
    fitting = {word for word, times in embedded.items() if times} - {NONE, UNKNOWN}
    allowed = {*rule.units, LTO} if PTX in rule.units else set(rule.units)
    if embedded[UNKNOWN]:
        faults.append(f"{embedded[UNKNOWN]} of {number} pieces that it loads itself {_UNREAD}")
    elif number and not fitting and NONE not in rule.units:
        faults.append(f"none of {number} pieces of code that it loads itself is for the device")
    elif number and fitting and not fitting & allowed:
        words = " and ".join(_WORDS[word] for word in sorted(fitting))
        faults.append(f"the pieces of code that it loads itself {words}")
    if units[NATIVE] < rule.native_at_least:
        faults.append(
            f"{units[NATIVE]} of {total} translation units run natively, "
            f"the policy asks for {rule.native_at_least}"
        )
    if rule.ptx_at_most is not None and units[PTX] > rule.ptx_at_most:
        faults.append(
            f"{units[PTX]} of {total} translation units run only through PTX, "
            f"the policy allows {rule.ptx_at_most}"
        )
    return faults


def load(path: Path) -> Policy:
    """Read a policy file. Raises BadFileError naming line and key of the first fault."""
    return declared.read_toml(
        Policy, path, next_step="correct that key; data/policies/default.toml shows the layout"
    )
