"""The report of `sm12x doctor`: as JSON, whose schema is data/schemas/doctor-1.json, and as text.

The text is made without rich, which a bare host may lack.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from sm12x.core import text as texts
from sm12x.core.declared import Declared
from sm12x.doctor.host import Unseen
from sm12x.doctor.knowledge import KnownCheck
from sm12x.doctor.model import SEVERITIES, Diagnosis, Facts, Severity

WIDTH = texts.WIDTH
# A narrower terminal gets lines that wrap by themselves.
_NARROWEST = 60
# Severities whose findings are told in full.
_IN_FULL = ("bad", "warn")
_WORDS = {"bad": "failed", "warn": "warning", "unknown": "unknown", "info": "note", "ok": "ok"}
# Those whose word has a plural.
_PLURAL = ("warn", "info")


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
    told_by: Literal["nvml", "pci"]


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
    summary: Mapping[Severity, Annotated[int, Field(ge=0)]]
    findings: tuple[Diagnosis, ...]


def document(facts: Facts, findings: Sequence[Diagnosis]) -> DoctorReport:
    """The report of the findings."""
    counted = Counter(finding.severity for finding in findings)
    image = facts.image
    gpus = tuple(
        GpuReport(
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
        for gpu in facts.seen_gpus
    )
    return DoctorReport(
        machine=MachineReport(
            architecture=facts.machine.name,
            kernel=facts.machine.kernel,
            container=facts.machine.container or None,
            driver=None if isinstance(facts.driver.version, Unseen) else facts.driver.version,
            unified_memory=None if isinstance(facts.gpus, Unseen) else facts.unified,
        ),
        gpus=None if isinstance(facts.gpus, Unseen) else gpus,
        image=None
        if isinstance(image, Unseen)
        else ImageReport(name=image.name, stack_id=image.stack_id or None, machine=image.machine),
        summary={severity: counted[severity] for severity in SEVERITIES},
        findings=tuple(findings),
    )


_Paint = Callable[[str, str], str]


def _plain(text: str, severity: str) -> str:
    return text


def text(
    facts: Facts, findings: Sequence[Diagnosis], *, width: int = WIDTH, paint: _Paint = _plain
) -> str:
    """The findings that need action, with reason and commands; then a line per other finding."""
    width = max(width, _NARROWEST)
    parts = [_head(facts, findings, width)]
    full = [finding for finding in findings if finding.severity in _IN_FULL]
    rest = [finding for finding in findings if finding.severity not in _IN_FULL]
    parts += [_full(finding, width, paint) for finding in full]
    if rest:
        parts.append(_table(rest, width, paint))
    if full:
        parts.append("Nothing was changed: the commands are for you to run.")
    return "\n\n".join(parts) + "\n"


def explain(
    name: str, check: KnownCheck, findings: Sequence[Diagnosis], *, width: int = WIDTH
) -> str:
    """The description of one check, and its findings here."""
    width = max(width, _NARROWEST)
    lines = [f"{name}: {check.title}", "", texts.paragraph(check.why, width)]
    if check.sources:
        lines += ["", "Sources", *texts.bullets(check.sources, width, indent=2)]
    for finding in findings:
        lines += ["", *_labelled(f"Here ({_WORDS[finding.severity]})", finding.seen, width)]
        if finding.why != check.why:
            lines += _labelled("  why", finding.why, width)
        if finding.sources != check.sources:
            lines += ["  sources", *texts.bullets(finding.sources, width, indent=4)]
        lines += [f"  $ {command}" for command in finding.fix]
    if not findings:
        lines += ["", "This check has no finding on this host."]
    return "\n".join(lines) + "\n"


def _head(facts: Facts, findings: Sequence[Diagnosis], width: int) -> str:
    counted = Counter(finding.severity for finding in findings)
    counts = [
        texts.counted(counted[kind], _WORDS[kind], "" if kind in _PLURAL else _WORDS[kind])
        for kind in SEVERITIES
        if counted[kind]
    ]
    where = f", inside a container ({facts.machine.container})" if facts.machine.container else ""
    driver = facts.driver.version
    version = "driver not seen" if isinstance(driver, Unseen) else f"driver {driver}"
    first = f"{facts.machine.name}, kernel {facts.machine.kernel}, {version}{where}"
    return "\n".join([texts.paragraph(first, width), texts.paragraph(", ".join(counts), width)])


def _table(findings: Sequence[Diagnosis], width: int, paint: _Paint) -> str:
    left = max((len(finding.id) for finding in findings), default=0)
    marks = max(len(word) for word in _WORDS.values())
    lines = []
    for finding in findings:
        mark = _WORDS[finding.severity]
        head = f"{paint(mark, finding.severity)}{' ' * (marks - len(mark))}  {finding.id:<{left}}  "
        margin = marks + left + 4
        wrapped = textwrap.wrap(finding.seen, width - margin, break_on_hyphens=False)
        lines.append(head + (wrapped[0] if wrapped else ""))
        lines += [" " * margin + line for line in wrapped[1:]]
    return "\n".join(lines)


def _full(finding: Diagnosis, width: int, paint: _Paint) -> str:
    mark = paint(_WORDS[finding.severity], finding.severity)
    lines = [f"{mark} {finding.id}", *_labelled("  seen", finding.seen, width)]
    lines += _labelled("  why", finding.why, width)
    lines += _labelled("  from", "; ".join(finding.sources), width) if finding.sources else []
    # A command is not wrapped: it is to be copied.
    lines += [f"  $ {command}" for command in finding.fix]
    return "\n".join(lines)


def _labelled(label: str, words: str, width: int) -> list[str]:
    return [texts.paragraph(words, width, first=f"{label:<7} ", rest=" " * 8)]
