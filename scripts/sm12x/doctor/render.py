"""The findings as text for a person, without rich, which a bare host may lack."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence

from sm12x.core import text as texts
from sm12x.doctor.knowledge import KnownCheck
from sm12x.doctor.model import (
    BAD,
    INFO,
    OK,
    SEVERITIES,
    UNKNOWN,
    WARN,
    Diagnosis,
    HostFacts,
    Unseen,
)

WIDTH = texts.WIDTH
# A narrower terminal gets lines that wrap by themselves.
_NARROWEST = 60
# Severities whose findings are told in full.
_IN_FULL = (BAD, WARN)
_WORDS = {BAD: "failed", WARN: "warning", UNKNOWN: "unknown", INFO: "note", OK: "ok"}
# Those whose word has a plural.
_PLURAL = (WARN, INFO)

_Paint = Callable[[str, str], str]


def _plain(text: str, severity: str) -> str:
    return text


def text(
    facts: HostFacts, findings: Sequence[Diagnosis], *, width: int = WIDTH, paint: _Paint = _plain
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


def _head(facts: HostFacts, findings: Sequence[Diagnosis], width: int) -> str:
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
