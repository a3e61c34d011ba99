"""The outcome of a rebase, and the table of outcomes, as text and as data. Returns strings."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from sm12x import layout
from sm12x.stack import carry, need, status
from sm12x.stack.carry import Carried, FileConflict
from sm12x.stack.merge import Region
from sm12x.stack.need import Need
from sm12x.stack.rebase import Fate, RebaseReport
from sm12x.stack.status import Cell, StatusTable

# Longer texts are cut; the whole is in the tree that the commands make.
_LINES = 24
# Files of one name that are offered for one that is gone; __init__.py is everywhere.
_CANDIDATES = 4
_TEXTS = {
    carry.APPLIES: "applies as it is",
    carry.MERGES: "merges; exported anew",
    carry.PRESENT: "all of its text is there",
    carry.CONFLICT: "does not merge",
}
_STATES = {
    status.NEEDED: "kept",
    status.UNKNOWN: "kept",
    status.UPSTREAM: "left out: upstream",
    status.CONFLICT: "CONFLICT",
}


def report(done: RebaseReport) -> str:
    """Patch by patch, then what to do about each conflict, then what a person has to check."""
    lines = [f"{done.source} -> {done.version}"]
    for fate in done.fates:
        lines += _fate(fate)
    for fate in done.conflicts:
        lines += ["", *_conflicts(fate, done)]
    if done.conflicts:
        lines += ["", *_commands(done)]
    lines += ["", f"{done.folder}: stack {done.stack_id}, {_kept(done)}"]
    if done.to_check:
        lines += ["to be checked before it is committed:"]
        lines += [f"  {line}" for line in done.to_check]
    if done.fates and not done.conflicts:
        lines += [
            f"next: {line.strip()}"
            for line in (*_move(done), f"sm12x patch witness --base {done.version}")
        ]
    return "\n".join(lines) + "\n"


def as_data(done: RebaseReport) -> dict[str, Any]:
    """The report for --json."""
    return {
        "from": done.source,
        "version": done.version,
        "folder": str(done.folder),
        "stack": done.stack_id,
        "patches": [
            {
                "patch": fate.patch.name,
                "state": fate.state,
                "since": fate.since,
                "text": fate.carried.state,
                "witness": asdict(fate.need),
                "conflicts": [asdict(conflict) for conflict in fate.carried.conflicts],
                "clean": list(fate.carried.clean),
                "follows": list(fate.carried.follows),
            }
            for fate in done.fates
        ],
        "commands": _commands(done) if done.conflicts else [],
        "to_check": list(done.to_check),
    }


def table(found: StatusTable) -> str:
    """Patch by release, and what the words mean."""
    if not found.rows:
        return "no base lists a patch\n"
    head = ["patch", *found.releases]
    rows = [[row.patch.removesuffix(".patch"), *map(_cell, row.cells)] for row in found.rows]
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *rows)
    ]
    used = {cell.state for row in found.rows for cell in row.cells}
    lines.append("")
    lines += [f"{word:9} {text}" for word, text in status.LEGEND.items() if word in used]
    if any(cell.part for row in found.rows for cell in row.cells):
        lines.append("n/m       only n of its m tests show the defect: upstream has part of it")
    if any(cell.doubt for row in found.rows for cell in row.cells):
        lines.append("?         no witness has said whether it is needed")
    return "\n".join(lines) + "\n"


def table_data(found: StatusTable) -> dict[str, Any]:
    """The table for --json: patch -> release -> state, doubt and note."""
    return {
        row.patch: {
            release: asdict(cell) for release, cell in zip(found.releases, row.cells, strict=True)
        }
        for row in found.rows
    }


def _cell(cell: Cell) -> str:
    """Such as "needed", "needed 6/10" where only so many tests are red, "conflict?"."""
    text = f"{cell.state} {cell.part}" if cell.part else cell.state
    return f"{text}?" if cell.doubt else text


def _fate(fate: Fate) -> list[str]:
    since = f" since {fate.since}" if fate.since else ""
    lines = [f"{fate.patch.name}: {_STATES[fate.state]}{since}"]
    lines.append(f"  text     {_TEXTS[fate.carried.state]}")
    doubt = "unknown" if fate.need.state == need.UNKNOWN else ""
    lines.append(f"  witness  {', '.join(filter(None, (doubt, fate.need.summary)))}")
    if len(fate.patch.witnesses) > 1:
        lines += [f"           {line}" for line in _by_witness(fate.need)]
    if fate.need.why:
        lines.append(f"           {fate.need.why}")
    return lines


def _by_witness(said: Need) -> list[str]:
    """How much of each witness is red: one that patches share may be red for another's sake."""
    total = Counter(name.split("::")[0] for name in (*said.red, *said.green, *said.silent))
    red = Counter(name.split("::")[0] for name in said.red)
    return [f"{path}: {red[path]} of {count}" for path, count in total.items()]


def _conflicts(fate: Fate, done: RebaseReport) -> list[str]:
    lines = [f"{fate.patch.name} on {done.version}:"]
    if fate.carried.follows:
        lines.append(f"  may only follow from {', '.join(fate.carried.follows)}")
    if fate.carried.state == carry.PRESENT:
        lines.append("  all of its text is in the release, and its witness is red there")
    for conflict in fate.carried.conflicts:
        lines += _conflict(conflict, fate.carried, done)
    if fate.carried.clean:
        lines.append(f"  merges cleanly: {', '.join(fate.carried.clean)}")
    return lines


def _conflict(conflict: FileConflict, carried: Carried, done: RebaseReport) -> list[str]:
    if conflict.why:
        named = " or ".join(conflict.candidates[:_CANDIDATES])
        more = " or another of that name" if len(conflict.candidates) > _CANDIDATES else ""
        moved = f"; perhaps {named}{more}" if named else ""
        return [f"  {conflict.path}: {conflict.why}{moved}"]
    hunks = next(file.hunks for file in carried.patch.files if file.path == conflict.path)
    lines: list[str] = []
    for region in conflict.regions:
        lines.append(
            f"  {conflict.path} hunk {region.hunk} of {len(hunks)}, {region.header}: conflict at "
            f"line {region.line}"
        )
        lines += _region(region, done)
    return lines


def _region(region: Region, done: RebaseReport) -> list[str]:
    lines: list[str] = []
    for title, text in (
        (f"{done.source} has", region.expects),
        (f"{done.version} has", region.has),
        ("the patch puts there", region.leaves),
    ):
        if not text:
            lines.append(f"    {title}: nothing")
            continue
        lines.append(f"    {title}:")
        lines += [f"      | {line}".rstrip() for line in text[:_LINES]]
        if len(text) > _LINES:
            lines.append(f"      ... {len(text) - _LINES} more lines")
    return lines


def _commands(done: RebaseReport) -> list[str]:
    tree = f"../vllm-{done.version}"
    lines = ["to resolve, in the checkout:", *_move(done)]
    lines.append(f"  sm12x patch apply --base {done.version} --unpack {tree}")
    for fate in done.conflicts:
        patch = f"patches/{done.source}/{fate.patch.name}"
        lines += [
            f"  git -C {tree} apply --reject $PWD/{patch}  # what fits is changed, the rest is "
            "left in *.rej",
            *(
                line
                for conflict in fate.carried.conflicts
                if conflict.why
                for line in _carry_over(conflict, patch, tree)
            ),
            f"  $EDITOR {_paths(tree, fate.carried.conflicts)}  # put the rest in, delete the "
            "*.rej files",
            f"  sm12x patch new {tree} --base {done.version} --like {patch}",
        ]
    return [
        *lines,
        f"  $EDITOR patches/{done.version}/base.toml  # take out the [[dropped]] of what is now in "
        "the stack",
        f"  sm12x patch witness --base {done.version}",
    ]


def _move(done: RebaseReport) -> list[str]:
    """The commands that bring the new folder to where bases are, if it is elsewhere."""
    patches = layout.patches()
    if done.folder.parent.resolve() == patches.resolve():
        return []
    lines = [f"  mv {shlex.quote(str(done.folder.absolute()))} patches/"]
    if (patches / done.version).exists():
        lines.insert(0, f"  mv patches/{done.version} ../{done.version}-before  # the one there")
    return lines


def _carry_over(conflict: FileConflict, patch: str, tree: str) -> list[str]:
    """What to do with the hunks of a file that git writes no *.rej for."""
    if len(conflict.candidates) != 1:
        why = f"{conflict.path} leaves no *.rej ({conflict.why})"
        return [f"  # {why}: carry its hunks over by hand"]
    (new,) = conflict.candidates
    # Only where a file is named: the text of a hunk may have the path as well.
    names = shlex.quote(rf"/^\(diff\|---\|+++\) /s|{conflict.path}|{new}|g")
    return [
        f"  sed {names} {patch} | git -C {tree} apply --reject --include={shlex.quote(new)}"
        f"  # {PurePosixPath(conflict.path).name} has moved: its hunks"
    ]


def _paths(tree: str, conflicts: Sequence[FileConflict]) -> str:
    """The files to edit; for one that is gone, those it may have become."""
    paths: list[str] = []
    for conflict in conflicts:
        paths += conflict.candidates[:_CANDIDATES] if conflict.why else [conflict.path]
    return " ".join(f"{tree}/{path}" for path in dict.fromkeys(paths)) or tree


def _kept(done: RebaseReport) -> str:
    kept = sum(fate.kept for fate in done.fates)
    left = len(done.conflicts)
    rest = len(done.fates) - kept - left
    return f"{kept} kept, {rest} upstream, {left} to resolve"
