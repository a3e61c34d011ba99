"""The report of a rebase as text, for what made-up releases in git do not bring about."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.stack import base as bases
from sm12x.stack import carry, need, rebasetext, series, status
from sm12x.stack.carry import Carried, FileConflict
from sm12x.stack.merge import Region
from sm12x.stack.need import Need
from sm12x.stack.rebase import Fate, RebaseReport
from sm12x.stack.series import Patch


def _patch() -> Patch:
    """A real patch that has more than one witness."""
    stack = series.load(bases.load(bases.versions()[0]))
    return next(patch for patch in stack.patches if len(patch.witnesses) > 1)


def _report(fate: Fate, folder: Path | None = None) -> RebaseReport:
    return RebaseReport(
        source="1.0",
        version="9.9",
        folder=folder or layout.patches() / "9.9",
        stack_id="00000000",
        fates=(fate,),
        to_check=("image: the base image is that of 1.0",),
    )


def test_each_witness_is_counted_by_itself() -> None:
    patch = _patch()
    one, two = patch.witnesses[:2]
    said = Need(state=need.NEEDED, red=(f"{one}::a", f"{one}::b"), green=(f"{two}::c",))
    fate = Fate(
        patch=patch,
        state=status.NEEDED,
        need=said,
        carried=Carried(patch=patch, state=carry.APPLIES),
        since="",
    )
    text = rebasetext.report(_report(fate))
    assert f"  witness  2 of 3 red\n           {one}: 2 of 2\n           {two}: 0 of 1\n" in text
    assert "next: sm12x patch witness --base 9.9\n" in text
    assert "to resolve" not in text.replace("0 to resolve", "")


def test_long_texts_are_cut_and_what_cannot_be_merged_says_why() -> None:
    patch = _patch()
    path = patch.files[0].path
    long = tuple(f"line {n}" for n in range(30))
    region = Region(line=7, has=long, expects=(), leaves=("x",), hunk=1, header="@@ -1 +1 @@")
    gone = FileConflict(path="a/b.py", why="there is no such file in this release")
    fate = Fate(
        patch=patch,
        state=status.CONFLICT,
        need=Need(state=need.UNKNOWN, why="its witness was not run"),
        carried=Carried(
            patch=patch,
            state=carry.CONFLICT,
            conflicts=(FileConflict(path=path, why="", regions=(region,)), gone),
            follows=("0001-Other.patch",),
        ),
        since="",
    )
    text = rebasetext.report(_report(fate, Path("/elsewhere/9.9")))
    assert "  may only follow from 0001-Other.patch\n" in text
    assert (
        f"  {path} hunk 1 of {len(patch.files[0].hunks)}, @@ -1 +1 @@: conflict at line 7" in text
    )
    assert "    1.0 has: nothing\n    9.9 has:\n      | line 0\n" in text
    assert "      ... 6 more lines\n" in text
    assert "  a/b.py: there is no such file in this release\n" in text
    assert "  mv /elsewhere/9.9 patches/\n" in text
    assert (
        rebasetext.as_data(_report(fate))["patches"][0]["conflicts"][0]["regions"][0]["line"] == 7
    )


def _conflict(*conflicts: FileConflict) -> Fate:
    patch = _patch()
    return Fate(
        patch=patch,
        state=status.CONFLICT,
        need=Need(state=need.NEEDED, red=("t::a",)),
        carried=Carried(patch=patch, state=carry.CONFLICT, conflicts=conflicts),
        since="",
    )


def test_the_hunks_of_a_file_that_is_gone_are_carried_to_where_it_may_be() -> None:
    why = "there is no such file in this release"
    many = tuple(f"{n}/many.py" for n in range(9))
    fate = _conflict(
        FileConflict(path="a/one.py", why=why, candidates=("b/one.py",)),
        FileConflict(path="a/none.py", why=why),
        FileConflict(path="a/many.py", why=why, candidates=many),
    )
    text = rebasetext.report(_report(fate))
    patch = f"patches/1.0/{fate.patch.name}"
    assert (
        f"  sed '/^\\(diff\\|---\\|+++\\) /s|a/one.py|b/one.py|g' {patch} | git -C ../vllm-9.9 "
        "apply --reject --include=b/one.py  # one.py has moved: its hunks\n"
    ) in text
    for name in ("none", "many"):
        assert f"  # a/{name}.py leaves no *.rej ({why}): carry its hunks over by hand\n" in text
    # Only what is there is opened.
    opened = ["b/one.py", *many[:4]]
    assert f"  $EDITOR {' '.join(f'../vllm-9.9/{path}' for path in opened)}  #" in text
    assert "perhaps 0/many.py or 1/many.py or 2/many.py or 3/many.py or another of that" in text


def test_what_is_resolved_is_no_longer_dropped() -> None:
    lines = rebasetext.report(_report(_conflict())).splitlines()
    said = "  $EDITOR patches/9.9/base.toml  # take out the [[dropped]] of what is now in the stack"
    assert lines[lines.index(said) + 1] == "  sm12x patch witness --base 9.9"


@pytest.mark.parametrize("state", [status.CONFLICT, status.NEEDED])
def test_a_folder_elsewhere_is_moved_first(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fate = dataclasses.replace(_conflict(), state=state)
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path / "checkout"))
    report = _report(fate, tmp_path / "patches" / "9.9")
    # Called patches as well, and not those of the checkout.
    lines = [line.removeprefix("next:").strip() for line in rebasetext.report(report).splitlines()]
    move = lines.index(f"mv {tmp_path}/patches/9.9 patches/")
    assert move < lines.index("sm12x patch witness --base 9.9")
    (tmp_path / "checkout/patches/9.9").mkdir(parents=True)
    lines = [line.removeprefix("next:").strip() for line in rebasetext.report(report).splitlines()]
    move = lines.index(f"mv {tmp_path}/patches/9.9 patches/")
    assert lines[move - 1] == "mv patches/9.9 ../9.9-before  # the one there"
    here = dataclasses.replace(report, folder=tmp_path / "checkout/patches/9.9")
    assert "mv " not in rebasetext.report(here)


def test_text_that_is_there_while_its_witness_is_red_is_said() -> None:
    patch = _patch()
    fate = Fate(
        patch=patch,
        state=status.CONFLICT,
        need=Need(state=need.NEEDED, red=("t::a",)),
        carried=Carried(patch=patch, state=carry.PRESENT),
        since="",
    )
    text = rebasetext.report(_report(fate))
    assert "all of its text is in the release, and its witness is red there" in text


def test_the_committed_record_reads_and_names_patches_of_its_bases() -> None:
    for outcome in status.read(layout.patches() / status.NAME):
        names, _ = series.read(bases.load(outcome.base))
        assert status.slug(outcome.patch) in map(status.slug, names)
