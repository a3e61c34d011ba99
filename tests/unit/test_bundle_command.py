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


def test_off_a_terminal_a_long_phase_says_now_and_then_where_it_is() -> None:
    said: list[str] = []
    with bundle.ticker(said.append, every=0.001) as note:
        note("compile: 1 of 28")
        note("compile: 9 of 28")
        # Twice, though nothing new was noted: a long step notes itself once.
        until = time.monotonic() + 10
        while said.count("compile: 9 of 28 (0 min)") < 2 and time.monotonic() < until:
            time.sleep(0.001)
    assert said.count("compile: 9 of 28 (0 min)") >= 2
    count = len(said)
    time.sleep(0.01)
    assert len(said) == count
