"""The picture of a plan: matplotlib looks for fonts with a program of the system's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tests.unit.planning import flash, hardware, spark

from sm12x import plan
from sm12x.plan import chart


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    four = dataclasses.replace(hardware("rtx-pro-6000"), gpus=4, ram=256.0)
    chart.write(plan.make(four, [flash("a"), flash("b", outside=None)]), path)
    chart.write(plan.make(hardware("gb10"), [spark()]), tmp_path / "other.png")

    assert path.read_bytes().startswith(b"\x89PNG")
