"""What the benchmark of a load takes and writes; it measures on a GPU."""

from __future__ import annotations

import pytest
from benchmarks import load_churn


def test_a_case_is_a_name_and_a_tree() -> None:
    assert load_churn.tree_of("stock=../tree") == ("stock", "../tree")


@pytest.mark.parametrize("text", ["tree", "=tree", "a="])
def test_what_is_no_case_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="TREE"):
        load_churn.tree_of(text)


def test_every_run_has_the_same_sizes() -> None:
    sizes = load_churn.sizes(60)
    assert sizes == load_churn.sizes(60)
    assert len(set(sizes)) > 50
    assert load_churn.sizes(3) == sizes[:3]


def test_the_report_has_a_line_for_each_case() -> None:
    # GIVEN a case that was measured and one that failed
    measured = load_churn.Case(
        name="patched",
        tree="/a",
        cap=20,
        mapped_peak_gib=7.44,
        used_peak_gib=7.5,
        live_gib=5.86,
        mapped_after_gib=5.86,
        seconds=0.51,
        device="A GPU",
        torch="1.2",
    )
    failed = load_churn.Case(name="stock", tree="/b", cap=0, error="ended with -6")
    # WHEN they are reported
    lines = load_churn.report([measured, failed], "the command").splitlines()
    # THEN both are there
    assert any(line.startswith("A GPU, torch 1.2") for line in lines)
    assert "Command: `the command`" in lines
    assert lines[-2] == "| patched | 20 | 7.4 | 7.5 | 5.9 | 5.9 | 0.5 |"
    assert lines[-1].startswith("| stock | - | ended with -6 |")
