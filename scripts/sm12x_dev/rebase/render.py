"""The outcome of a rebase, and the table of outcomes, as text and as data. Returns strings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field

from sm12x import layout
from sm12x.core import text as texts
from sm12x_dev.rebase import porting, status, verdict
from sm12x_dev.rebase.conflicts import PortReport, Stop
from sm12x_dev.rebase.merge import FileConflict
from sm12x_dev.rebase.rebase import PatchOutcome, RebaseReport, quote
from sm12x_dev.rebase.status import Cell, StatusTable
from sm12x_dev.rebase.verdict import PatchVerdict

# Files of one name that are offered for one that is gone; __init__.py is everywhere.
_CANDIDATES = 4
_TEXTS = {
    porting.APPLIES: "applies as it is",
    porting.MERGES: "merges; exported anew",
    porting.PRESENT: "all of its text is there",
    porting.FOLLOWS: "merges once the conflicts before it are resolved",
    porting.CONFLICT: "does not merge",
}
_STATES = {
    status.NEEDED: "kept",
    status.UNKNOWN: "kept",
    status.UPSTREAM: "left out: upstream",
    status.CONFLICT: "CONFLICT",
    status.FOLLOWS: "FOLLOWS",
}
_OPEN_UNKNOWN = "UNKNOWN"


def report(done: RebaseReport) -> str:
    """Patch by patch, then the values that a person must check, then the conflicts."""
    lines = [f"{done.source} -> {done.version}"]
    for outcome in done.outcomes:
        lines += _outcome(outcome)
    lines += ["", f"{done.folder}: stack {done.stack_id}, {_kept(done)}"]
    if done.to_check:
        lines += ["to be checked before it is committed:"]
        lines += [f"  {line}" for line in done.to_check]
    if done.port is not None:
        lines += ["", *_port(done.port)]
    elif done.outcomes and not done.open and done.unrun is None:
        lines += [f"next: {line}" for line in _next(done)]
    return "\n".join(lines) + "\n"


def ported(done: PortReport) -> str:
    """The state of a port: the next conflict, or that it is done, and the next command."""
    return "\n".join(_port(done)) + "\n"


@dataclass(frozen=True, kw_only=True)
class PortData:
    """What `sm12x-dev continue --json` prints. ``patch`` is the one in conflict, if any;
    ``stack`` the id of what was exported at the end, null before.
    """

    tree: Path
    folder: Path
    patches: Mapping[str, str]
    patch: str | None
    conflicts: tuple[FileConflict, ...]
    stack: str | None
    saved: str

    @classmethod
    def of(cls, done: PortReport) -> Self:
        stop = done.port.stop
        return cls(
            tree=done.directory,
            folder=done.port.folder,
            patches={step.name: step.state for step in done.port.steps},
            patch=stop.name if stop else None,
            conflicts=stop.conflicts if stop else (),
            stack=done.refresh.stack_id if done.refresh else None,
            saved=done.saved,
        )


@dataclass(frozen=True, kw_only=True)
class PatchData:
    """One patch on the new release: ``text``: how it applies; ``witness``: whether it is needed."""

    patch: str
    state: str
    since: str
    text: str
    witness: PatchVerdict
    conflicts: tuple[str, ...]
    clean: tuple[str, ...]
    follows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RebaseData:
    """What `sm12x-dev rebase --json` prints; ``unknown`` is why no witness could run."""

    source: Annotated[str, Field(alias="from")]
    version: str
    folder: Path
    stack: str
    patches: tuple[PatchData, ...]
    port: PortData | None
    unknown: str | None
    to_check: tuple[str, ...]

    @classmethod
    def of(cls, done: RebaseReport) -> Self:
        return cls(
            source=done.source,
            version=done.version,
            folder=done.folder,
            stack=done.stack_id,
            patches=tuple(
                PatchData(
                    patch=outcome.patch.name,
                    state=outcome.state,
                    since=outcome.since,
                    text=outcome.port.state,
                    witness=outcome.verdict,
                    conflicts=tuple(conflict.path for conflict in outcome.port.conflicts),
                    clean=outcome.port.clean,
                    follows=outcome.port.follows,
                )
                for outcome in done.outcomes
            ),
            port=PortData.of(done.port) if done.port else None,
            unknown=done.unrun.message if done.unrun else None,
            to_check=done.to_check,
        )


def table(found: StatusTable) -> str:
    """The table of patches by release, with a legend."""
    if not found.rows:
        return "no base lists a patch\n"
    head = ["patch", *found.releases]
    rows = [[name.removesuffix(".patch"), *map(_cell, row)] for name, row in found.rows.items()]
    lines = [texts.columns(rows, head=head)]
    cells = [cell for row in found.rows.values() for cell in row]
    used = {cell.state for cell in cells}
    lines.append("")
    lines += [f"{word:9} {text}" for word, text in status.LEGEND.items() if word in used]
    if any(cell.part for cell in cells):
        lines.append("n/m       only n of its m tests show the defect: upstream has part of it")
    if any(cell.doubt for cell in cells):
        lines.append("?         no result of a witness: whether it is needed is unknown")
    return "\n".join(lines) + "\n"


def _cell(cell: Cell) -> str:
    """Such as "needed", "needed 6/10" where only so many tests are red, "conflict?"."""
    text = f"{cell.state} {cell.part}" if cell.part else cell.state
    return f"{text}?" if cell.doubt else text


def _outcome(outcome: PatchOutcome) -> list[str]:
    since = f" since {outcome.since}" if outcome.since else ""
    unknown = outcome.open and outcome.state == status.UNKNOWN
    lines = [f"{outcome.patch.name}: {_OPEN_UNKNOWN if unknown else _STATES[outcome.state]}{since}"]
    lines.append(f"  text     {_TEXTS[outcome.port.state]}")
    if outcome.port.follows:
        lines.append(f"           after {', '.join(outcome.port.follows)}")
    # Those of a patch that is upstream are of no interest.
    if outcome.open:
        lines += [f"           {line}" for line in _files(outcome.port.conflicts)]
    doubt = "unknown" if outcome.verdict.state == verdict.UNKNOWN else ""
    lines.append(f"  witness  {', '.join(filter(None, (doubt, outcome.verdict.summary)))}")
    if len(outcome.patch.witnesses) > 1:
        lines += [f"           {line}" for line in _by_witness(outcome.verdict)]
    if outcome.verdict.why:
        lines.append(f"           {outcome.verdict.why}")
    return lines


def _by_witness(said: PatchVerdict) -> list[str]:
    """How much of each witness is red: a shared witness may be red because of another patch."""
    total = Counter(name.split("::")[0] for name in (*said.red, *said.green, *said.silent))
    red = Counter(name.split("::")[0] for name in said.red)
    return [f"{path}: {red[path]} of {count}" for path, count in total.items()]


def _files(conflicts: tuple[FileConflict, ...]) -> list[str]:
    """The files in conflict, in how many places; lines are told where the tree has them."""
    found: list[str] = []
    for conflict in conflicts:
        count = len(conflict.places)
        where = f"{count} conflict{'s' if count > 1 else ''}" if count else ""
        found.append(f"{conflict.path}: {', '.join(filter(None, (where, _why(conflict))))}")
    return found


def _why(conflict: FileConflict) -> str:
    named = " or ".join(conflict.candidates[:_CANDIDATES])
    more = " or another of that name" if len(conflict.candidates) > _CANDIDATES else ""
    return f"{conflict.why}; perhaps {named}{more}" if named else conflict.why


def _port(done: PortReport) -> list[str]:
    port = done.port
    lines: list[str] = []
    if done.saved:
        lines.append(
            f"the last run was stopped; the tree is set back, its files are in commit {done.saved}"
        )
    if port.stop is not None:
        return lines + _stop(done, port.stop)
    assert done.refresh is not None  # noqa: S101 - a port without a stop is exported
    lines += [f"left out: {name}" for name in done.dropped]
    lines.append(
        f"{port.count('done')} of {len(port.steps)} patches of {port.source} are on "
        f"{port.version}; {port.folder} is now stack {done.refresh.stack_id}"
    )
    moves = _move(port.folder, port.version)
    return lines + [
        f"next: {line}" for line in (*moves, f"sm12x-dev witness --base {port.version}")
    ]


def _stop(done: PortReport, stop: Stop) -> list[str]:
    number = next(n for n, s in enumerate(done.port.steps, start=1) if s.name == stop.name)
    lines = [
        f"conflicts of {stop.name} ({number} of {len(done.port.steps)}) are in {done.directory}:"
    ]
    for conflict in stop.conflicts:
        for line in conflict.places:
            lines.append(f"  {conflict.path}:{line}")
        if conflict.why:
            reject = f"{conflict.path}.rej"
            left = f" (its part is in {reject})" if reject in stop.rejects else ""
            lines.append(f"  {conflict.path}: {_why(conflict)}{left}")
    tree = quote(done.directory)
    lines += [
        "next: edit these files; take the markers out, and delete each *.rej",
        f"next: sm12x-dev continue {tree}  # or with --skip, to leave the patch out",
    ]
    return lines


def _next(done: RebaseReport) -> list[str]:
    return [*_move(done.folder, done.version), f"sm12x-dev witness --base {done.version}"]


def _move(folder: Path, version: str) -> list[str]:
    """The commands that bring the new folder to where bases are, if it is elsewhere."""
    patches = layout.patches()
    if folder.parent.resolve() == patches.resolve():
        return []
    home = patches / version
    lines = [f"mv {quote(folder.absolute())} {quote(home)}"]
    if home.exists():
        aside = layout.root().parent / f"{version}-before"
        lines.insert(0, f"mv {quote(home)} {quote(aside)}  # the one there")
    return lines


def _kept(done: RebaseReport) -> str:
    kept = sum(outcome.kept for outcome in done.outcomes)
    left = len(done.open)
    rest = len(done.outcomes) - kept - left
    return f"{kept} kept, {rest} upstream, {left} to resolve"
