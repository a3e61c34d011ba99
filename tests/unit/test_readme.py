"""The README's generated tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm12x import layout, readme
from sm12x.core.errors import BadFileError

PATH = Path("README.md")


def test_a_cell_cannot_break_its_table() -> None:
    assert readme.markdown(("a",), [("x | y\nz",)]) == "| a |\n| --- |\n| x \\| y z |\n"


def test_only_what_stands_between_the_marks_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "TABLES", {"t": lambda: "new\n"})
    text = "before\n<!-- generated: t -->\nold\n<!-- end -->\nafter\n"
    assert (
        readme.rendered(text, PATH) == "before\n<!-- generated: t -->\nnew\n<!-- end -->\nafter\n"
    )


def test_an_unknown_or_missing_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "TABLES", {"t": lambda: "new\n"})
    with pytest.raises(BadFileError, match="no generator makes the table 'u'"):
        readme.rendered("<!-- generated: u -->\n<!-- end -->", PATH)
    with pytest.raises(BadFileError, match=r"no block for the generated table\(s\) t"):
        readme.rendered("nothing here", PATH)


def test_the_committed_readme_is_up_to_date() -> None:
    path = layout.root() / "README.md"
    text = path.read_text(encoding="utf-8")
    assert readme.rendered(text, path) == text
