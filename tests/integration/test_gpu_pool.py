"""tests.gpu.pool with servers that play vLLM: what it does, and that it sees what is wrong."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAYED = Path(__file__).parent / "pool" / "released"

pytestmark = pytest.mark.xdist_group("vllm serve")


def run(folder: Path, **settings: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and report, with the settings of the played servers."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1] % 50_000 + 1024
    out = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.pool", "--model", "smoke", "--swaps", "4",
         "--seconds", "2", "--no-foreign", "--out", f"{out}"],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{PLAYED}:{ROOT}:{ROOT / 'scripts'}",
            "SM12X_TEST_PORT": f"{port}",
            "PLAYED": json.dumps(settings),
            "TMPDIR": str(folder),
        },
        check=False,
    )  # fmt: skip
    return done.returncode, json.loads(out.read_text())


def test_it_takes_all_steps_and_finds_nothing_wrong(tmp_path: Path) -> None:
    code, report = run(tmp_path, token_seconds=0.003)
    assert (code, report["wrong"], report["finished"]) == (0, [], True)
    assert [*report][2:] == [
        *("start", "level_1", "frozen", "kv_cache", "traffic", "killed asleep", "killed awake")
    ]
    for rung in ("level_1", "kv_cache"):
        assert len(report[rung]["swaps"]) == 4
        assert report[rung]["hold_by_calls"] >= 1
    assert set(report["traffic"]["answers"]) <= {"200", "stream"}


def test_a_model_that_answers_differently_is_seen(tmp_path: Path) -> None:
    code, report = run(tmp_path, drifts=True)
    assert code == 1
    assert any("answers differently" in text for text in report["wrong"])
