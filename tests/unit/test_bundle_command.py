"""What `sm12x bundle` shows while it works."""

from __future__ import annotations

import threading
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
    # A tick whenever the test asks for one.
    ask, said = threading.Event(), threading.Event()
    say = bundle._Report.say

    def waits(ended: threading.Event, _: float) -> bool:
        while not ask.is_set() and not ended.is_set():
            time.sleep(0.001)
        ask.clear()
        return ended.is_set()

    def tells(report: bundle._Report, text: str) -> None:
        say(report, text)
        said.set()

    monkeypatch.setattr(bundle, "_Ended", type("E", (threading.Event,), {"wait": waits}))
    monkeypatch.setattr(bundle._Report, "say", tells)
    report = bundle._Report()
    with report.phase("wheel") as step:
        step("compile: 1 of 28")
        step("compile: 9 of 28")
        said.clear()
        # Twice, though nothing new was noted: a long step notes itself once.
        for _ in range(2):
            ask.set()
            assert said.wait(10)
            said.clear()
        step("compile: 10 of 28")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["wheel ...", *["wheel: compile: 9 of 28 (0 min)"] * 2]
    assert len(lines) == 4
    assert lines[3].startswith("wheel: ")
