"""How many releases the bases are behind the newest one, and whether their patches apply to it.

A patch is tried as in a rebase, but nothing is written and no witness runs: the result tells
whether its text merges, not whether its defect still exists.
"""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version
from pydantic import Field

from sm12x.core import listing
from sm12x.core import text as texts
from sm12x.core.declared import Machine, one_of, shown
from sm12x.core.errors import FetchError
from sm12x.core.listing import WHEEL, ListedFile
from sm12x.stack.model.base import MACHINES, Base
from sm12x.stack.model.series import Stack
from sm12x.stack.worktree import tree
from sm12x_dev.rebase import base_draft, porting, status
from sm12x_dev.rebase.base_draft import Release
from sm12x_dev.rebase.porting import PortResult
from sm12x_dev.rebase.status import RebaseOutcome

# How many releases there may be after the default base: one is on its way to become a base.
_ALLOWED = 1
# Digits that the name of a patch begins with.
_NUMBER = 4
_LEGEND = {
    porting.APPLIES: "applies as it is",
    porting.MERGES: "git merges it without a conflict",
    porting.PRESENT: "the release has all of its text",
    porting.FOLLOWS: "merges once the patches in conflict before it are resolved",
    porting.CONFLICT: "to be resolved by hand",
}


@dataclass(frozen=True, kw_only=True)
class BaseAge:
    """A base, and how many final releases the index has after it."""

    version: str
    released: datetime.date
    behind: Annotated[int, Field(ge=0)]
    default: bool


@dataclass(frozen=True, kw_only=True)
class PatchTrial:
    """One patch of ``base`` on the newest release. ``text`` is one of porting.STATES.

    ``recorded`` is its state there (a key of status.LEGEND) from a base or from an earlier rebase
    with witnesses, "" where there is none. ``conflicts`` are paths, ``follows`` patches.
    """

    base: str
    patch: str
    text: Annotated[str, one_of(*porting.STATES)]
    recorded: Annotated[str, one_of("", *status.LEGEND)] = ""
    conflicts: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NewestReport:
    """The newest final release against the bases.

    ``wheels`` has, by machine, the official wheel that the Python of the newest base can install,
    None where there is none; ``missing`` says why.
    """

    schema: Literal[1] = 1
    project: str
    newest: str
    released: datetime.date | None
    wheels: Mapping[Machine, str | None]
    missing: tuple[str, ...]
    bases: tuple[BaseAge, ...]
    trials: tuple[PatchTrial, ...]
    allowed: int = _ALLOWED

    @property
    def default(self) -> BaseAge:
        return next(base for base in self.bases if base.default)

    @property
    def last(self) -> BaseAge:
        """The newest base."""
        return max(self.bases, key=lambda base: Version(base.version))

    @shown
    def current(self) -> bool:
        """Whether the default base is no more than ``allowed`` releases behind."""
        return self.default.behind <= self.allowed


def find(listed: Sequence[ListedFile], project: str) -> Release:
    """The newest final release of ``project``. Raises FetchError where the index has none."""
    versions = listing.releases(tuple(listed))
    if not versions:
        raise FetchError(
            f"the package index lists no final release of {project} with an sdist",
            next_step="check the index address in the settings of pip or uv",
        )
    return base_draft.release(listed, versions[-1], project=project)


def compare(
    listed: Sequence[ListedFile],
    found: Release,
    known: Sequence[Base],
    *,
    default: str,
    project: str,
    trials: Sequence[PatchTrial] = (),
) -> NewestReport:
    """The report on ``found``, the newest release in ``listed``, without trying anything."""
    after = [Version(version) for version in listing.releases(tuple(listed))]
    newest = max(known, key=lambda base: Version(base.version))
    wheels, missing = _wheels(listed, found, newest)
    return NewestReport(
        project=project,
        newest=found.version,
        released=found.released,
        wheels=wheels,
        missing=missing,
        bases=tuple(
            BaseAge(
                version=base.version,
                released=base.released,
                behind=sum(version > Version(base.version) for version in after),
                default=base.version == default,
            )
            for base in known
        ),
        trials=tuple(trials),
    )


def attempt(
    base: Base,
    stack: Stack,
    source: Path,
    target: Path,
    found: Release,
    recorded: Mapping[str, str],
    *,
    root: Path,
) -> tuple[PatchTrial, ...]:
    """Try every patch of ``stack`` on the release ``found``.

    Args:
        source: the sdist of ``base``; ``target`` is that of ``found``.
        recorded: what is known of patches on that release, by status.slug of their names.
        root: the checkout that the witnesses' paths are in.

    Raises: as porting.port does.
    """
    with tempfile.TemporaryDirectory(prefix="sm12x-check-") as scratch:
        old, new = Path(scratch) / "source", Path(scratch) / "untouched"
        tree.unpack(source, old)
        tree.unpack(target, new)
        report = porting.port(
            base,
            stack,
            old,
            new,
            leave_out=lambda patch: False,
            root=root,
            label=found.sdist.name,
        )
    return tuple(_trial(base, one, recorded) for one in report.results)


def recorded(
    release: str, known: Sequence[Base], outcomes: Sequence[RebaseOutcome]
) -> dict[str, str]:
    """The recorded state of each patch on ``release``, by status.slug of its name."""
    found = status.table(known, outcomes)
    if release not in found.releases:
        return {}
    at = found.releases.index(release)
    return {
        status.slug(name): row[at].state
        for name, row in found.rows.items()
        if row[at].state != status.UNKNOWN
    }


def text(report: NewestReport) -> str:
    """The report as tables."""
    day = f", {report.released}" if report.released else ""
    lines = [f"newest release on the index: {report.project} {report.newest}{day}"]
    lines += [f"  {machine}: {name}" for machine, name in report.wheels.items() if name]
    lines += [f"  {why}" for why in report.missing]
    rows = [
        (base.version, str(base.released), str(base.behind), "default" if base.default else "")
        for base in report.bases
    ]
    lines += ["", texts.columns(rows, head=("base", "released", "releases behind", "")).rstrip()]
    last = report.last
    if not last.behind:
        lines += ["", f"no release is newer than base {last.version}"]
    if not report.trials:
        return "\n".join(lines) + "\n"
    rows = [
        (trial.base, trial.patch.removesuffix(".patch"), trial.text, trial.recorded or "-")
        for trial in report.trials
    ]
    head = ("base", "patch", f"text on {report.newest}", "recorded")
    lines += ["", texts.columns(rows, head=head).rstrip(), ""]
    used = {trial.text for trial in report.trials}
    lines += [f"{word:9} {meaning}" for word, meaning in _LEGEND.items() if word in used]
    lines.append("recorded  its state there, from a base or from a rebase with witnesses; - none")
    open_ = [trial for trial in report.trials if trial.conflicts or trial.follows]
    if open_:
        lines += ["", "in conflict:"]
    for trial in open_:
        numbers = ", ".join(name[:_NUMBER] for name in trial.follows)
        where = ", ".join(trial.conflicts) or f"waits for {numbers}"
        lines.append(f"  {trial.base} {trial.patch[:_NUMBER]}: {where}")
    return "\n".join(lines) + "\n"


def _trial(base: Base, one: PortResult, known: Mapping[str, str]) -> PatchTrial:
    return PatchTrial(
        base=base.version,
        patch=one.patch.name,
        text=one.state,
        recorded=known.get(status.slug(one.patch.name), ""),
        conflicts=tuple(dict.fromkeys(conflict.path for conflict in one.conflicts)),
        follows=one.follows if one.state == porting.FOLLOWS else (),
    )


def _wheels(
    listed: Sequence[ListedFile], found: Release, base: Base
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """By machine the wheel that ``base``'s Python can install, and why there is none elsewhere."""
    python = base.python
    wheels: dict[str, str | None] = {}
    missing: list[str] = []
    if not _allowed(found.sdist.requires_python, python):
        missing.append(
            f"Python {python}, that of base {base.version}: the release asks for Python "
            f"{found.sdist.requires_python}"
        )
    for machine in MACHINES:
        of_machine = [
            file
            for file in listed
            if file.version == found.version
            and file.kind == WHEEL
            and not file.yanked
            and base_draft.is_for(file.name, machine)
        ]
        fitting = [file for file in of_machine if _fits(file, python)]
        best = max(fitting, key=lambda file: parse_wheel_filename(file.name)[2], default=None)
        wheels[machine] = best.name if best else None
        if best is None:
            there = texts.first_of([file.name for file in of_machine], 3)
            what = f"no wheel for Python {python} (there is {there})" if there else "no wheel"
            missing.append(f"{machine}: the release has {what}: no base can be made of it there")
    return wheels, tuple(missing)


def _allowed(requires: str, python: str) -> bool:
    try:
        return not requires or SpecifierSet(requires).contains(python, prereleases=True)
    except InvalidSpecifier:
        return True


def _fits(file: ListedFile, python: str) -> bool:
    """Whether CPython ``python`` ("3.13") can install the wheel, its platform aside."""
    if not _allowed(file.requires_python, python):
        return False
    try:
        tags = parse_wheel_filename(file.name)[3]
    except InvalidWheelFilename:
        return False
    minor = int(python.partition(".")[2].partition(".")[0])
    for tag in tags:
        own = tag.interpreter in ("py3", f"cp3{minor}", f"py3{minor}")
        if own and tag.abi in ("none", "abi3", f"cp3{minor}"):
            return True
        # The stable ABI of a Python is that of every later one (PEP 384).
        number = tag.interpreter.removeprefix("cp3")
        if tag.abi == "abi3" and number.isdecimal() and int(number) <= minor:
            return True
    return False
