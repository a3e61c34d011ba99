"""SECURITY.md names tests that exist, and every advisory that is accepted."""

from __future__ import annotations

import re

from sm12x import layout
from sm12x_dev import advisories

TEXT = (layout.root() / "SECURITY.md").read_text(encoding="utf-8")


def test_each_test_that_the_threat_model_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) > 15
    for path, name in named:
        assert f"def {name}(" in (layout.root() / path).read_text(encoding="utf-8"), (path, name)


def test_each_row_says_what_stops_them() -> None:
    rows = re.findall(r"^\| (.+) \|$", TEXT, re.MULTILINE)
    assert rows[0] == "who | what they can reach | what stops them | which test shows it"
    for row in rows[2:]:
        cells = row.split(" | ")
        assert len(cells) == 4
        # Without a test there is something that only a setting of the user's stops.
        assert re.search(r"test_\w+", cells[3]) or "(none)" in cells[2], cells[0]


def test_each_accepted_advisory_is_listed() -> None:
    for one in advisories.load(layout.patches() / advisories.NAME).accepted:
        number = one.id.removeprefix("PYSEC-2026-")
        known = {"2300": "CVE-2026-41523", "2301": "CVE-2026-47155", "3408": "CVE-2026-54236"}
        assert known.get(number, number) in TEXT, one.id
