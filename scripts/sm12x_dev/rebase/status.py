"""The outcome of each patch on each release: patches/status.toml, and the table made from it.

`sm12x-dev rebase` records its outcomes there, also those of releases no base is kept for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tomlkit
from packaging.version import Version
from pydantic import Field

from sm12x.core import declared, files
from sm12x.core.declared import Declared, one_of
from sm12x.stack.model import series
from sm12x.stack.model.base import Base, require_version
from sm12x_dev.rebase import porting, verdict

NAME = "status.toml"
# The text of verdict.PatchVerdict.summary for a red witness.
_RED = re.compile(r"^(\d+) of (\d+) red(?:, (\d+) could not run)?$")
_APPLIED = "applied"
NEEDED = "needed"
UPSTREAM = "upstream"
CONFLICT = "conflict"
FOLLOWS = "follows"
UNKNOWN = "unknown"
LEGEND = {
    _APPLIED: "in the stack of that base",
    NEEDED: "the defect is there, and no stack is kept for that release",
    UPSTREAM: "the release does it itself",
    CONFLICT: "needed, and to be written anew for that release",
    FOLLOWS: "needed, and merges once the patches in conflict before it are in",
    UNKNOWN: "not tried, or its witness could not run",
}
_HEAD = (
    "# Made by `sm12x-dev rebase`; do not edit. What became of the patches of a base on releases "
    "they\n# were tried on: `verdict` is what the witnesses say of the untouched release, `text` "
    "what git says.\n"
)


@dataclass(frozen=True, kw_only=True)
class RebaseOutcome(Declared):
    """One patch of ``base`` on ``release``: ``verdict`` of verdict.py, ``text`` of porting.py.

    ``text`` is "" where only the witnesses were run. ``since`` is the first release known to do it
    itself, for what is upstream.
    """

    patch: str
    base: str
    release: str
    verdict: Annotated[str, one_of(verdict.NEEDED, verdict.UPSTREAM, verdict.UNKNOWN)]
    text: Annotated[str, one_of("", *porting.STATES)]
    witness: str
    since: str
    why: str

    def __post_init__(self) -> None:
        require_version("base", self.base)
        require_version("release", self.release)

    @property
    def state(self) -> str:
        return decide(self.verdict, self.text)


@dataclass(frozen=True, kw_only=True)
class Outcomes(Declared):
    """``status.toml``."""

    schema: Literal[1]
    outcomes: Annotated[tuple[RebaseOutcome, ...], Field(alias="outcome")] = ()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``state`` is one of LEGEND; ``doubt`` where no witness has said that it is needed.

    ``part`` is such as "6/10" where only some of the witness's tests show the defect.
    """

    state: str
    doubt: bool = False
    part: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class StatusTable:
    """``rows`` has, by patch, a cell for each of the ``releases``."""

    releases: tuple[str, ...]
    rows: Mapping[str, tuple[Cell, ...]]


def decide(needed: str, text: str) -> str:
    """A patch's outcome in a rebase: "needed", "upstream", "conflict", "follows" or "unknown".

    A text that does not merge says nothing of a patch that is not known to be needed.
    """
    if needed == verdict.UPSTREAM:
        return UPSTREAM
    if text == porting.PRESENT:
        # The release has all of its text: a red witness means that the text alone does not fix it.
        return CONFLICT if needed == verdict.NEEDED else UPSTREAM
    if needed == verdict.UNKNOWN:
        return UNKNOWN
    return {porting.CONFLICT: CONFLICT, porting.FOLLOWS: FOLLOWS}.get(text, NEEDED)


def slug(name: str) -> str:
    """A patch's file name without number and suffix: the same in every base."""
    return name.removesuffix(".patch").partition("-")[2] or name


def read(path: Path) -> tuple[RebaseOutcome, ...]:
    """The recorded outcomes; none where there is no such file. Raises BadFileError."""
    if not path.is_file():
        return ()
    return declared.read_toml(Outcomes, path, next_step="restore it with git").outcomes


def record(
    path: Path, fresh: Iterable[RebaseOutcome], stacks: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Add outcomes; each takes the place of an older one of its patch, base and release.

    An outcome without a verdict of a witness does not replace one that has it.

    Args:
        stacks: the patches of each base there is: outcomes of others of its patches are dropped.
    """
    known = {(o.base, o.release, slug(o.patch)): o for o in read(path)}
    for outcome in fresh:
        key = (outcome.base, outcome.release, slug(outcome.patch))
        before = known.get(key)
        known[key] = _merged(before, outcome) if before else outcome
    kept = {base: {slug(name) for name in names} for base, names in (stacks or {}).items()}
    ordered = sorted(
        (o for o in known.values() if o.base not in kept or slug(o.patch) in kept[o.base]),
        key=lambda o: (Version(o.base), o.patch, Version(o.release)),
    )
    entries = [{**asdict(o), "why": verdict.without_addresses(o.why)} for o in ordered]
    files.write_text(path, _HEAD + tomlkit.dumps({"schema": 1, "outcome": entries}))


def contradictions(bases: Sequence[Base], outcomes: Sequence[RebaseOutcome]) -> list[str]:
    """Where a base has "upstream since", and a witness has shown the defect in a later release."""
    found: list[str] = []
    for base in bases:
        for entry in base.dropped:
            if entry.state != UPSTREAM or not entry.since:
                continue
            for o in outcomes:
                if (
                    slug(o.patch) == slug(entry.patch)
                    and o.verdict == verdict.NEEDED
                    and Version(entry.since) <= Version(o.release) <= Version(base.version)
                ):
                    found.append(
                        f"{entry.patch}: upstream since {entry.since} for {base.version}, and its "
                        f"witness shows the defect on {o.release} ({o.witness})"
                    )
    return found


def _merged(before: RebaseOutcome, after: RebaseOutcome) -> RebaseOutcome:
    """``after``, with what only ``before`` knows, an outcome of the same base and release."""
    silent = after.verdict == verdict.UNKNOWN and (
        before.verdict != verdict.UNKNOWN or not after.witness
    )
    said = before if silent else after
    return replace(said, patch=after.patch, text=after.text or before.text)


def since(patch: str, release: str, outcomes: Iterable[RebaseOutcome]) -> str:
    """The first release known to have what ``patch`` does, ``release`` being one that does.

    Only as far back as every release that was tried had it.
    """
    tried = {
        Version(o.release): o.verdict
        for o in outcomes
        if slug(o.patch) == slug(patch) and o.verdict != verdict.UNKNOWN
    }
    first = Version(release)
    for version in sorted((v for v in tried if v < first), reverse=True):
        if tried[version] != verdict.UPSTREAM:
            break
        first = version
    return str(first) if first != Version(release) else release


def table(bases: Sequence[Base], outcomes: Sequence[RebaseOutcome]) -> StatusTable:
    """Patches by release: those of every base, and those that were tried elsewhere."""
    by_release = {base.version: base for base in bases}
    releases = sorted({*by_release, *(o.release for o in outcomes)}, key=Version)
    stacks = {base.version: series.read(base)[0] for base in bases}
    names: dict[str, str] = {}
    for base in sorted(bases, key=lambda b: Version(b.version)):
        for name in (*stacks[base.version], *(entry.patch for entry in base.dropped)):
            names.setdefault(slug(name), name)
    for outcome in outcomes:
        names.setdefault(slug(outcome.patch), outcome.patch)
    rows = {
        name: tuple(
            _cell(name, release, by_release.get(release), stacks, outcomes) for release in releases
        )
        for name in names.values()
    }
    return StatusTable(releases=tuple(releases), rows=rows)


def _cell(
    name: str,
    release: str,
    base: Base | None,
    stacks: dict[str, list[str]],
    outcomes: Sequence[RebaseOutcome],
) -> Cell:
    if base is not None:
        if slug(name) in map(slug, stacks[base.version]):
            return Cell(state=_APPLIED)
        for entry in base.dropped:
            if slug(entry.patch) == slug(name):
                note = f"since {entry.since}" if entry.since else entry.why
                return Cell(state=entry.state, note=note)
    # The patch of the newest base is the one that is kept up.
    for outcome in sorted(outcomes, key=lambda o: Version(o.base), reverse=True):
        if slug(outcome.patch) == slug(name) and outcome.release == release:
            note = f"since {outcome.since}" if outcome.since else outcome.why
            doubt = outcome.verdict == verdict.UNKNOWN and outcome.state != UNKNOWN
            return Cell(state=outcome.state, doubt=doubt, part=_part(outcome), note=note)
    return Cell(state=UNKNOWN)


def _part(outcome: RebaseOutcome) -> str:
    match = _RED.match(outcome.witness)
    if match is None:
        return ""
    # A test that could not run does not mean that upstream has a part of the fix.
    total = int(match[2]) - int(match[3] or 0)
    return f"{match[1]}/{total}" if 0 < int(match[1]) < total else ""
