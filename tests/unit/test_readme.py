"""The README's generated tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def _runs(native: int, ptx: int, none: int) -> dict[str, Any]:
    return {"units": {"native": native, "ptx": ptx, "none": none, "unknown": 0}}


def _report(*libraries: tuple[str, float, dict[str, Any], dict[str, Any]]) -> str:
    found = [
        {"path": path, "size": int(mib * 1024**2), "runs": {"12.0": on_120, "12.1": on_121}}
        for path, mib, on_120, on_121 in libraries
    ]
    return json.dumps({"schema": 1, "devices": ["12.0", "12.1"], "libraries": found})


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path))
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    return folder


def test_the_audit_before_and_after(benchmarks: Path) -> None:
    host = _runs(0, 0, 0)
    before = (
        ("vllm/_C.so", 84, _runs(40, 20, 22), _runs(40, 20, 22)),
        ("vllm/fa2.so", 181.9, _runs(0, 52, 0), _runs(0, 52, 0)),
        ("vllm/host.so", 1, host, host),
    )
    after = (
        ("vllm/_C.so", 60.5, _runs(60, 0, 2), _runs(58, 2, 2)),
        ("vllm/fa2.so", 181.9, _runs(0, 52, 0), _runs(0, 52, 0)),
    )
    (benchmarks / "2026-11-20-audit-official.json").write_text(_report(*before))
    (benchmarks / "2026-11-20-audit-full.json").write_text(_report(*after))
    (benchmarks / "2026-11-19-audit-full.json").write_text("older")
    assert readme.audit_table().splitlines()[2:] == [
        "| `vllm/_C.so` | 40 → 60 | 40 → 58 | 20 → 0/2 | 22 → 2 | 84.0 → 60.5 |",
        "| `vllm/fa2.so` | 0 | 0 | 52 | 0 | 181.9 |",
        "| all | 40 → 60 | 40 → 58 | 72 → 52/54 | 22 → 2 | 265.9 → 242.4 |",
    ]
    (benchmarks / "2026-11-20-audit-official.json").unlink()
    with pytest.raises(BadFileError, match=r"audit-official\.json is not an audit of"):
        readme.audit_table()


def test_a_table_without_data_has_no_block(
    benchmarks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "TABLES", {"audit": readme.audit_table})
    assert readme.rendered("no table", PATH) == "no table"
    with pytest.raises(BadFileError, match="there is no data for the table 'audit'"):
        readme.rendered("<!-- generated: audit -->\n<!-- end -->", PATH)
