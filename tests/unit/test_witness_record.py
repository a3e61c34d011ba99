"""What a witness's outcome on the untouched release depends on, and what is recorded of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sm12x import layout
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x_dev.witness import imports, record
from sm12x_dev.witness.record import Outcomes

WITNESS = "tests/witness/test_it.py"
FILES = {
    WITNESS: "from tests.witness.test_other import X\nfrom tests.witness import rig\n",
    "tests/witness/test_other.py": "import sm12x.audit.fatbin as f\n",
    "tests/witness/test_apart.py": "",
    "tests/witness/rig.py": "WORKER = 'tests.witness.test_by_name.Worker'\n",
    "tests/witness/test_by_name.py": "",
    "scripts/sm12x/__init__.py": "",
    "scripts/sm12x/audit/__init__.py": "",
    "scripts/sm12x/audit/fatbin.py": "from sm12x.core import text\n",
    "scripts/sm12x/core/__init__.py": "",
    "scripts/sm12x/core/text.py": "",
    "scripts/sm12x/core/errors.py": "",
    "scripts/sm12x/layout.py": "",
    "patches/1.0/base.toml": "",
    "patches/1.0/include/a.h": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def _inputs(root: Path, edits: Mapping[str, str]) -> str:
    for path, text in edits.items():
        (root / path).write_text(text)
    imports.names.cache_clear()
    base = cast(bases.Base, SimpleNamespace(folder=root / "patches/1.0"))
    return record.witness_inputs(base, WITNESS, root=root)


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        (WITNESS, True),
        ("tests/witness/test_other.py", True),
        ("tests/witness/test_by_name.py", True),
        ("scripts/sm12x/audit/fatbin.py", True),
        ("scripts/sm12x/core/text.py", True),
        ("scripts/sm12x/core/__init__.py", True),
        ("tests/witness/test_apart.py", False),
        ("scripts/sm12x/core/errors.py", False),
        # It does not import what finds the data of a base.
        ("patches/1.0/base.toml", False),
    ],
)
def test_a_witness_depends_on_what_it_imports(root: Path, path: str, counts: bool) -> None:
    before = _inputs(root, {})
    assert (_inputs(root, {path: f"{FILES[path]}# other\n"}) != before) is counts


@pytest.mark.parametrize("path", ["patches/1.0/base.toml", "patches/1.0/include/a.h"])
def test_a_witness_that_finds_the_data_of_a_base_depends_on_it(root: Path, path: str) -> None:
    before = _inputs(root, {WITNESS: "from sm12x import layout\n"})
    assert _inputs(root, {path: "x = 1\n"}) != before


def test_outcomes_are_the_same_in_any_order_and_only_then() -> None:
    first = Outcomes.of({"test_x": "failed", "test_y": "passed"})
    assert first == Outcomes.of({"test_y": "passed", "test_x": "failed"})
    assert (first.tests, first.passed) == (2, 1)
    others: list[dict[str, Any]] = [
        {"outcomes": {"test_x": "passed", "test_y": "failed"}},
        {"outcomes": {"test_x": "failed"}},
        {"outcomes": {"test_x": "failed", "test_y": "passed"}, "problem": "crashed"},
        {"outcomes": {"test_x": "failed", "test_y": "passed"}, "inputs": "a"},
    ]
    for other in others:
        assert Outcomes.of(other.pop("outcomes"), **other) != first


@pytest.mark.parametrize("version", bases.versions())
def test_the_record_is_of_these_witnesses(version: str) -> None:
    """A stale record costs CI the time of the untouched release again."""
    base = bases.load(version)
    known = record.load(base, record.WITNESSES, "sm12x-dev witness")
    if known is None:
        pytest.skip("a base that was just drafted: its witnesses run on both trees")
    witnesses = {path for patch in series.load(base).patches for path in patch.witnesses}
    stale = [
        path
        for path in sorted(witnesses)
        if path not in known.files
        or known.files[path].inputs != record.witness_inputs(base, path, root=layout.root())
    ]
    assert not stale, f"sm12x-dev witness --base {version} --record"
