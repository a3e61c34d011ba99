"""Counts, sizes, durations, lists, paragraphs and tables."""

from __future__ import annotations

import pytest

from sm12x.core import text


@pytest.mark.parametrize(
    ("number", "one", "wanted"),
    [
        (1, "file", "1 file"),
        (0, "file", "0 files"),
        (2, "patch", "2 patches"),
        (3, "library", "3 libraries"),
    ],
)
def test_a_count_has_its_plural(number: int, one: str, wanted: str) -> None:
    assert text.counted(number, one) == wanted


@pytest.mark.parametrize(
    ("count", "wanted"),
    [
        (0, "0.0 KiB"),
        (1536, "1.5 KiB"),
        (text.MIB // 10, "102.4 KiB"),
        (84.35 * text.MIB, "84.3 MiB"),
        (text.GIB - 1, "1024.0 MiB"),
        (3.25 * text.GIB, "3.2 GiB"),
        (-2 * text.GIB, "-2.0 GiB"),
    ],
)
def test_a_size_has_a_unit_that_fits(count: float, wanted: str) -> None:
    assert text.size(count) == wanted


def test_a_long_time_is_in_minutes() -> None:
    assert (text.duration(12), text.duration(150)) == ("12.0 s", "2.5 min")


def test_lists() -> None:
    assert [text.either(words) for words in ((), ("a",), ("a", "b", "c"))] == ["", "a", "a, b or c"]
    assert text.first_of(["a", "b", "c"], 2) == "a, b and 1 more"
    assert text.ranges({3, 1, 2}) == "1-3"
    assert text.ranges({0, 2}) == "0, 2"


def test_what_was_probably_meant() -> None:
    known = ["quick", "full", "auto"]
    assert text.near("fuul", known) == "full"
    assert text.perhaps("fuul", known).endswith("full")
    assert text.perhaps("xyz", known) == text.near("xyz", known) == ""
    assert text.near("recipe-a", ["recipe-b", "recipe-c"], shown=2).count(" or ") == 1


def test_columns_keep_cells_whole_and_without_markup() -> None:
    long = "[red]" + "x" * 300
    first, second = text.columns([[long, "1"], ["a", "2"]], indent=2).splitlines()
    assert first == f"  {long}  1"
    assert second.index("2") == first.index("1", 300)
    assert not second.endswith(" ")


def test_a_page_breaks_lines_at_its_width() -> None:
    page = text.Page(20)
    page.add("word " * 10)
    page.add()
    page.add("[not markup]")
    lines = page.text.splitlines()
    assert max(map(len, lines)) <= 20
    assert lines[-1] == "[not markup]"
