"""Known advisories of what the locks pin, by pip-audit, and those that are accepted for a time.

pip-audit ends with 0 and "No known vulnerabilities found" where its service knows none of the
packages (a mirror without PyPI's JSON pages, say): what was not looked up is counted here.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import Field

from sm12x import layout
from sm12x.core import declared, lockfile, process, text
from sm12x.core.declared import Declared, KeyFaultError
from sm12x.core.errors import ToolFailedError, ToolMissingError
from sm12x.stack.model.base import Base

NAME = "advisories.toml"
# Seconds for one lock: a request for each package.
_TIMEOUT = 600.0
_LEAST_REASON = 40
_Text = Annotated[str, Field(min_length=1)]
# A lock's packages, name -> version.
Pins = Mapping[str, str]


def _day(value: str, key: str) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise KeyFaultError(key, f"is {value!r}, and no date such as 2026-11-28") from None


@dataclass(frozen=True, kw_only=True)
class Accepted(Declared):
    """An advisory that a pinned version keeps for now.

    Args:
        id: of pip-audit's service (PYSEC, GHSA), or an alias (CVE).
        versions: the pinned versions that it is accepted for.
        why: the reason, from the advisory's own text.
        on: when that was read, and ``review`` by when it has to be read again (ISO 8601).
    """

    id: _Text
    package: _Text
    versions: Annotated[tuple[_Text, ...], Field(min_length=1)]
    why: Annotated[str, Field(min_length=_LEAST_REASON)]
    on: str
    review: str

    def __post_init__(self) -> None:
        if _day(self.review, "review") <= _day(self.on, "on"):
            raise KeyFaultError("review", f"is {self.review}, and not after {self.on}")


@dataclass(frozen=True, kw_only=True)
class AcceptedAdvisories(Declared):
    """The file ``patches/advisories.toml``."""

    accepted: tuple[Accepted, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Advisory:
    """``ids`` are its names, the service's first; ``fixed`` the versions that have a fix."""

    package: str
    version: str
    ids: tuple[str, ...]
    fixed: tuple[str, ...]
    locks: tuple[str, ...]
    accepted: str | None


@dataclass(frozen=True, kw_only=True)
class AdvisoryReport:
    """``unseen`` are pins that the service did not know, "name==version"; ``why`` is the reason
    where it did not answer at all. ``stale`` says what is wrong with accepted entries."""

    pins: int
    unseen: tuple[str, ...]
    why: str
    advisories: tuple[Advisory, ...]
    stale: tuple[str, ...]

    @property
    def open(self) -> tuple[Advisory, ...]:
        return tuple(one for one in self.advisories if one.accepted is None)


def load(path: Path) -> AcceptedAdvisories:
    """Raises BadFileError for a file that cannot be read or has a fault."""
    step = f"correct it; {NAME} in patches/ shows the layout"
    return declared.read_toml(AcceptedAdvisories, path, next_step=step)


def locks(bases: Iterable[Base]) -> dict[str, Pins]:
    """The pins of every lock: of the bases, of development, benchmark and witness tools.

    A base's own release is not in its lock, as the wheel made here takes its place.
    """
    root = layout.root()
    every: dict[str, Pins] = {}
    for base in bases:
        for path in sorted(base.folder.glob("*.lock")):
            project = {base.sdist.name.rpartition("-")[0]: base.version}
            own = project if path.name.startswith("requirements-") else {}
            every[f"{base.version}/{path.name}"] = {**lockfile.read(path).versions, **own}
    tools = ("scripts/requirements-dev.lock", "scripts/sm12x/data/bench/requirements.lock")
    for path in (*(root / name for name in tools), *(root / "tests/witness").glob("*.lock")):
        if path.is_file():
            every[path.relative_to(root).as_posix()] = lockfile.read(path).versions
    return every


_Ask = Callable[[Pins], Any]


def ask_pip_audit(pins: Pins, *, service: str = "pypi") -> Any:
    """The JSON of pip-audit for these pins.

    Raises:
        ToolMissingError: pip-audit is not installed.
        ToolFailedError: it gives no report: its service cannot be reached, say.
    """
    program = Path(sys.executable).with_name("pip-audit")
    audit = str(program) if program.is_file() else shutil.which("pip-audit")
    if audit is None:
        raise ToolMissingError(
            "pip-audit is not installed", next_step="run `make .venv/.installed` again"
        )
    with TemporaryDirectory(prefix="sm12x-advisories-") as folder:
        path = Path(folder, "requirements.txt")
        path.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
        words = [audit, "--format", "json", "--progress-spinner", "off", "--disable-pip"]
        words += ["--no-deps", "--vulnerability-service", service, "--requirement", str(path)]
        done = process.run(words, check=False, timeout=_TIMEOUT)
    try:
        # 1: it has found some.
        return json.loads(done.stdout if done.returncode in (0, 1) else "")
    except ValueError:
        rows = done.stderr.strip().splitlines()
        raise ToolFailedError(
            f"pip-audit gives no report: {rows[-1] if rows else f'exit status {done.returncode}'}",
            next_step="check the network on the way to the advisory service",
        ) from None


def look_up(
    locked: Mapping[str, Pins], accepted: AcceptedAdvisories, ask: _Ask, *, today: date
) -> AdvisoryReport:
    """Ask for the pins of all locks, each once, and compare with what is accepted.

    The release comes first: a service that does not know it is not asked for the rest.
    """
    where: dict[tuple[str, str], list[str]] = {}
    for lock, pins in locked.items():
        for pin in pins.items():
            where.setdefault(pin, []).append(lock)
    unseen: set[tuple[str, str]] = set()
    advisories: list[Advisory] = []
    why = ""
    rounds = _rounds(where)
    for number, pins in enumerate(rounds):
        try:
            answer = _answers(ask(pins))
        except (ToolFailedError, ToolMissingError) as error:
            answer, why = {}, error.message
        unseen |= {pin for pin in pins.items() if answer.get(pin) is None}
        for pin in sorted(pins.items()):
            for ids, fixed in answer.get(pin) or ():
                advisories.append(_advisory(pin, ids, fixed, where[pin], accepted))
        if why or (number == 0 and len(unseen) == len(pins)):
            why = why or "the service knows none of the packages that it was asked for first"
            unseen |= {pin for rest in rounds[number + 1 :] for pin in rest.items()}
            break
    return AdvisoryReport(
        pins=len(where),
        unseen=tuple(f"{name}=={version}" for name, version in sorted(unseen)),
        why=why,
        advisories=tuple(advisories),
        stale=tuple(_stale(accepted, advisories, where, unseen, today)),
    )


def _rounds(where: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """The pins in as few parts as have each name once; the first is a probe of a single one."""
    pins = sorted(where)
    probe = next((pin for pin in pins if pin[0] == "vllm"), pins[0])
    rounds: list[dict[str, str]] = [dict([probe])]
    for name, version in pins:
        if (name, version) == probe:
            continue
        part = next((one for one in rounds[1:] if name not in one), None)
        if part is None:
            rounds.append(part := {})
        part[name] = version
    return rounds


_Vulnerabilities = list[tuple[tuple[str, ...], tuple[str, ...]]]


def _answers(document: Any) -> dict[tuple[str, str], _Vulnerabilities]:
    """(name, version) -> its advisories, for what was looked up. Raises ToolFailedError."""
    try:
        return {
            (str(one["name"]), str(one["version"])): [
                ((str(bug["id"]), *map(str, bug["aliases"])), tuple(map(str, bug["fix_versions"])))
                for bug in one["vulns"]
            ]
            for one in document["dependencies"]
            if "skip_reason" not in one
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ToolFailedError(
            f"pip-audit's report has another form: {error!r}",
            next_step="install the pip-audit of scripts/requirements-dev.lock",
        ) from None


def _advisory(
    pin: tuple[str, str],
    ids: Sequence[str],
    fixed: Sequence[str],
    where: Sequence[str],
    accepted: AcceptedAdvisories,
) -> Advisory:
    entry = next((one for one in accepted.accepted if _is_of(one, pin, ids)), None)
    return Advisory(
        package=pin[0],
        version=pin[1],
        ids=tuple(ids),
        fixed=tuple(fixed),
        locks=tuple(where),
        accepted=entry.why if entry else None,
    )


def _is_of(entry: Accepted, pin: tuple[str, str], ids: Sequence[str]) -> bool:
    return entry.package == pin[0] and pin[1] in entry.versions and entry.id in ids


def _stale(
    accepted: AcceptedAdvisories,
    advisories: Sequence[Advisory],
    where: Iterable[tuple[str, str]],
    unseen: set[tuple[str, str]],
    today: date,
) -> Iterable[str]:
    pinned = set(where)
    for entry in accepted.accepted:
        if date.fromisoformat(entry.review) <= today:
            yield f"{entry.id} of {entry.package}: its review was due on {entry.review}"
        for version in entry.versions:
            pin = (entry.package, version)
            if pin not in pinned:
                yield f"{entry.id}: no lock pins {entry.package}=={version} any longer"
            elif pin not in unseen and not any(
                _is_of(entry, (one.package, one.version), one.ids) for one in advisories
            ):
                yield f"{entry.id}: the service has no such advisory of {entry.package}=={version}"


def render(report: AdvisoryReport) -> str:
    """The report as lines: what is open, what is accepted, what was not looked up."""
    lines = []
    for one in report.advisories:
        fix = f"fixed in {', '.join(one.fixed)}" if one.fixed else "no release has a fix"
        state = f"accepted: {one.accepted}" if one.accepted is not None else "NOT ACCEPTED"
        lines.append(f"{one.package}=={one.version}  {', '.join(one.ids)}  {fix}")
        lines.append(f"    {', '.join(one.locks)}")
        lines.append(f"    {state}")
    lines += [f"stale: {line}" for line in report.stale]
    if report.unseen:
        reason = f" ({report.why})" if report.why else ""
        lines.append(
            f"NOT LOOKED UP: {len(report.unseen)} of {report.pins} pins{reason}: "
            f"{text.first_of(report.unseen, 5)}"
        )
    lines.append(
        f"{text.counted(len(report.advisories), 'known advisory', 'known advisories')}, "
        f"{len(report.open)} not accepted, in {report.pins - len(report.unseen)} of {report.pins} "
        "pins looked up"
    )
    return "".join(f"{line}\n" for line in lines)
