"""What `sm12x bundle` shows while it works."""

from __future__ import annotations

import pytest

from sm12x.commands import bundle


@pytest.mark.parametrize(("every", "shown"), [(0.0, 2), (1e9, 0)])
def test_off_a_terminal_a_long_phase_says_now_and_then_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], every: float, shown: int
) -> None:
    monkeypatch.setattr(bundle, "_EVERY", every)
    with bundle._Report().phase("wheel") as note:
        note("compile: 1 of 28")
        note("compile: 9 of 28")
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "of 28" in line]) == shown
    assert len(lines) == shown + 2
