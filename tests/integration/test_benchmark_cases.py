"""Benchmarks' processes at a time: each has its GPU, and none waits for one that has failed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks import cases


@dataclass(kw_only=True)
class Seen(cases.Measured):
    gpu: str = ""
    steps: int = 0


def look(seen: Seen, together: Callable[[], object]) -> None:
    """What a process does; GPU 7 is ended by a signal, and on GPU 8 a step fails."""
    seen.gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    together()
    seen.steps = 1
    done = Path(os.environ["STEP_DONE"])
    (done / seen.gpu).touch()
    # A barrier that breaks fails also those it has let through, until they have run.
    while seen.gpu in ("7", "8") and len([*done.iterdir()]) < 2:
        time.sleep(0.001)
    if seen.gpu == "7":
        os.kill(os.getpid(), signal.SIGKILL)
    if seen.gpu == "8":
        raise RuntimeError("no memory")
    together()
    seen.steps = 2


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [Seen(gpu="0", steps=2), Seen(gpu="1", steps=2)]),
        ("4,5,6", [Seen(gpu="4", steps=2), Seen(gpu="5", steps=2)]),
        (
            "4,7",
            [Seen(gpu="4", steps=1, error="BrokenBarrierError: "), Seen(error="ended with -9")],
        ),
        (
            "8,4",
            [
                Seen(gpu="8", steps=1, error="RuntimeError: no memory"),
                Seen(gpu="4", steps=1, error="BrokenBarrierError: "),
            ],
        ),
        ("4", [Seen(error="2 GPUs are needed, 1 are visible")]),
    ],
)
def test_processes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, seen: list[Seen]
) -> None:
    monkeypatch.setenv("STEP_DONE", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cases.at_a_time(2, Seen(), look) == seen
