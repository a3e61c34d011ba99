"""The report of a rebase as text, for what made-up releases in git do not bring about."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import declared
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.series import Patch
from sm12x_dev.rebase import porting, render, status, verdict
from sm12x_dev.rebase.conflicts import Port, PortReport, PortStep, Stop
from sm12x_dev.rebase.merge import FileConflict
from sm12x_dev.rebase.porting import PortResult
from sm12x_dev.rebase.rebase import PatchOutcome, RebaseReport
from sm12x_dev.rebase.verdict import PatchVerdict
from sm12x_dev.worktree.export import RefreshReport


def _patch() -> Patch:
    """A real patch that has more than one witness."""
    stack = series.load(bases.load(bases.versions()[0]))
    return next(patch for patch in stack.patches if len(patch.witnesses) > 1)


def _report(outcome: PatchOutcome, folder: Path | None = None) -> RebaseReport:
    return RebaseReport(
        source="1.0",
        version="9.9",
        folder=folder or layout.patches() / "9.9",
        stack_id="00000000",
        outcomes=(outcome,),
        to_check=("image: the base image is that of 1.0",),
    )


def test_each_witness_is_counted_by_itself() -> None:
    patch = _patch()
    one, two = patch.witnesses[:2]
    said = PatchVerdict(state=verdict.NEEDED, red=(f"{one}::a", f"{one}::b"), green=(f"{two}::c",))
    outcome = PatchOutcome(
        patch=patch,
        state=status.NEEDED,
        verdict=said,
        port=PortResult(patch=patch, state=porting.APPLIES),
        since="",
    )
    text = render.report(_report(outcome))
    assert f"  witness  2 of 3 red\n           {one}: 2 of 2\n           {two}: 0 of 1\n" in text
    assert "next: sm12x-dev witness --base 9.9\n" in text
    assert "to resolve" not in text.replace("0 to resolve", "")


def _open(state: str, *conflicts: FileConflict, follows: tuple[str, ...] = ()) -> PatchOutcome:
    patch = _patch()
    text = porting.CONFLICT if conflicts else porting.FOLLOWS
    return PatchOutcome(
        patch=patch,
        state=state,
        verdict=PatchVerdict(state=verdict.NEEDED, red=("t::a",)),
        port=PortResult(patch=patch, state=text, conflicts=conflicts, follows=follows),
        since="",
    )


def _port(directory: Path, folder: Path, *conflicts: FileConflict) -> PortReport:
    name = _patch().name
    stop = Stop(name=name, ready=True, conflicts=conflicts, rejects=("a/none.py.rej",))
    port = Port(
        source="1.0",
        version="9.9",
        label="new",
        folder=folder,
        stack="0",
        tip="0",
        steps=(
            PortStep(name="0001-x.patch", commit="0", state="done"),
            PortStep(name=name, commit="1"),
        ),
        stop=stop if conflicts else None,
    )
    done = RefreshReport(stack_id="abc", unchanged=(), rewritten=(), added=(), removed=())
    return PortReport(directory=directory, port=port, refresh=None if conflicts else done)


CONFLICTS = (
    FileConflict(path="a/b.py", why="", places=(7, 70)),
    FileConflict(path="a/none.py", why="there is no such file"),
    FileConflict(path="a/many.py", why="gone", candidates=tuple(f"{n}/many.py" for n in range(9))),
)


def test_only_what_conflicts_is_listed_with_its_lines() -> None:
    outcome = _open(status.CONFLICT, *CONFLICTS, follows=("0001-Other.patch",))
    report = dataclasses.replace(
        _report(outcome), port=_port(Path("/some where/9.9"), layout.patches() / "9.9", *CONFLICTS)
    )
    text = render.report(report)
    assert "           after 0001-Other.patch\n           a/b.py: 2 conflicts\n" in text
    assert "  a/b.py:7\n  a/b.py:70\n" in text
    assert "  a/none.py: there is no such file (its part is in a/none.py.rej)\n" in text
    assert "perhaps 0/many.py or 1/many.py or 2/many.py or 3/many.py or another of that" in text
    assert "next: sm12x-dev continue '/some where/9.9'" in text
    data = json.loads(declared.to_json(render.RebaseData.of(report)))
    assert data["from"] == report.source
    assert data["port"]["conflicts"][0]["places"] == [7, 70]
    assert "patch witness" not in text


def test_a_patch_that_follows_names_what_it_waits_for() -> None:
    text = render.report(_report(_open(status.FOLLOWS, follows=("0001-Other.patch",))))
    assert ": FOLLOWS\n  text     merges once the conflicts before it are resolved\n" in text
    assert "           after 0001-Other.patch\n" in text


def test_what_does_not_merge_and_may_not_be_needed_is_unknown() -> None:
    text = render.report(_report(_open(status.UNKNOWN, *CONFLICTS)))
    assert ": UNKNOWN\n  text     does not merge\n" in text


@pytest.mark.parametrize("ported", [False, True])
def test_a_folder_elsewhere_is_moved_first(
    ported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = _patch()
    outcome = PatchOutcome(
        patch=patch,
        state=status.NEEDED,
        verdict=PatchVerdict(state=verdict.NEEDED, red=("t::a",)),
        port=PortResult(patch=patch, state=porting.APPLIES),
        since="",
    )
    root = tmp_path / "check out"
    # Called patches as well, and not those of the checkout.
    folder = tmp_path / "patches" / "9.9"
    port = _port(tmp_path, folder)
    monkeypatch.setenv("SM12X_ROOT", str(root))
    report = _report(outcome, folder)

    def lines() -> list[str]:
        text = render.ported(port) if ported else render.report(report)
        return [line.removeprefix("next:").strip() for line in text.splitlines()]

    move = lines().index(f"mv {folder} '{root}/patches/9.9'")
    assert move < lines().index("sm12x-dev witness --base 9.9")
    (root / "patches/9.9").mkdir(parents=True)
    move = lines().index(f"mv {folder} '{root}/patches/9.9'")
    assert lines()[move - 1].startswith(f"mv '{root}/patches/9.9' {tmp_path}/9.9-before")
    here = dataclasses.replace(report, folder=root / "patches/9.9")
    assert "mv " not in render.report(here)


def test_text_that_is_there_while_its_witness_is_red_is_said() -> None:
    patch = _patch()
    outcome = PatchOutcome(
        patch=patch,
        state=status.CONFLICT,
        verdict=PatchVerdict(state=verdict.NEEDED, red=("t::a",)),
        port=PortResult(patch=patch, state=porting.PRESENT),
        since="",
    )
    text = render.report(_report(outcome))
    assert ": CONFLICT\n  text     all of its text is there\n" in text
    assert "1 to resolve" in text


def test_the_committed_record_reads_and_names_patches_of_its_bases() -> None:
    for outcome in status.read(layout.patches() / status.NAME):
        names, _ = series.read(bases.load(outcome.base))
        assert status.slug(outcome.patch) in map(status.slug, names)
