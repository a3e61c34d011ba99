"""The report of a rebase as text, for what made-up releases in git do not bring about."""

from __future__ import annotations

from pathlib import Path

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


def _report(fate: Fate, folder: Path = Path("patches/9.9")) -> RebaseReport:
    return RebaseReport(
        source="1.0",
        version="9.9",
        folder=folder,
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
