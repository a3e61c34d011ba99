"""tests.gpu.rotate with servers that play vLLM: what it does, and that it sees what is wrong."""

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
# What a played server takes to answer is the machine's doing alone.
UNTIMED = ("--min-speed=0", "--max-sleep=60", "--max-wake=60", "--max-swap=120")
PLAYED = Path(__file__).parent / "vllmserver" / "released"
STEPS = [
    "smoke of 14 layers started", "smoke of 14 layers asleep", "smoke of 12 layers started",
    "after the turns", "smoke of 14 layers killed asleep", "smoke of 12 layers asleep",
    "smoke of 14 layers started again", "smoke of 14 layers killed awake",
    "smoke of 12 layers awake",
]  # fmt: skip


def free_port() -> int:
    """A port with the one that is 50 higher free too, as far as one can know."""
    for _ in range(50):
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port: int = low.getsockname()[1]
            try:
                high.bind(("127.0.0.1", port + 50))
            except OSError:
                continue
            return port
    pytest.fail("no two free ports")


def rotate(folder: Path, servers: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Exit code and report, with the settings of the servers of models 0 and 1."""
    (folder / "memory").mkdir()
    out = folder / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.rotate", "--model", "smoke", "--cycles", "2",
         *(f"--verify={flag}" for flag in UNTIMED), "--out", f"{out}"],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{PLAYED / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{PLAYED}:{ROOT}:{ROOT / 'scripts'}",
            "SM12X_TEST_MEMORY": f"{folder / 'memory'}",
            "SM12X_TEST_PORT": f"{free_port()}",
            "SM12X_TEST_SERVERS": json.dumps(servers),
        },
        check=False,
    )  # fmt: skip
    return done.returncode, json.loads(out.read_text())


def test_turns_and_ends(tmp_path: Path) -> None:
    code, report = rotate(tmp_path, {})
    assert (code, report["wrong"], report["finished"]) == (0, [], True)
    assert [step["step"] for step in report["steps"]] == STEPS
    assert report["verify"]["turns"]
    # 40 GiB awake and 2 asleep, of one server or of both.
    gib = [step["used_mib"] // 1024 for step in report["steps"]]
    assert gib == [40, 2, 42, 42, 40, 2, 42, 2, 40]


@pytest.mark.parametrize(
    ("servers", "fact"),
    [
        ({"1": {"other_text_after": 1}}, "after the turns"),
        ({"1": {"refuse": {"wake_up": 500}}}, "sm12x verify"),
        ({"0": {"says": "1"}}, "both models"),
        ({"0": {"unsteady": True}}, "without a sleep"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, servers: dict[str, Any], fact: str) -> None:
    code, report = rotate(tmp_path, servers)
    assert code == 1
    assert report["wrong"]
    assert any(fact in problem for problem in report["wrong"])


def test_a_server_that_dies_at_start(tmp_path: Path) -> None:
    code, report = rotate(tmp_path, {"1": {"die": "health"}})
    assert (code, report["finished"]) == (2, False)
    assert [step["step"] for step in report["steps"]] == STEPS[:2]
