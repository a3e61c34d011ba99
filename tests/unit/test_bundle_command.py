"""What `sm12x bundle` shows while it works."""

from __future__ import annotations

import time

import pytest

from sm12x.commands import bundle


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("native: RUN python -m x", "native: RUN python -m x"),
        ("compile: 0 of 0", "compile: 0 of 0"),
        (
            "compile: 7 of 28, about 20 min left",
            f"{'━' * 5}{'─' * 15} compile: 7 of 28, about 20 min left",
        ),
        ("compile: 28 of 28", f"{'━' * 20} compile: 28 of 28"),
    ],
)
def test_units_are_shown_as_a_bar(text: str, shown: str) -> None:
    assert bundle.with_bar(text) == shown


def test_off_a_terminal_a_long_phase_says_now_and_then_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 10.0, 61.0, 61.0, 70.0, 130.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    report = bundle._Report(quiet=False)
    with report.phase("wheel") as step:
        step("compile: 1 of 28")
        step("compile: 9 of 28")
        step("compile: 10 of 28")
    assert capsys.readouterr().err.splitlines() == [
        "wheel ...",
        "wheel: compile: 9 of 28",
        "wheel: 130.0 s",
    ]
