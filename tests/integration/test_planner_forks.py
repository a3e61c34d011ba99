"""The fork that answers a question of a plan: its limits, and what it refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sm12x.runtime import planner


def test_an_answer_comes_out_of_the_fork() -> None:
    assert planner.forked(lambda: b"answer", seconds=20) == b"answer"


def test_an_error_is_its_reason() -> None:
    def work() -> bytes:
        raise ValueError("64 heads\ncannot be split")

    assert planner.forked(work, seconds=20) == "ValueError: 64 heads cannot be split"


def test_a_loop_ends_with_its_forks() -> None:
    read, write = os.pipe()

    def work() -> bytes:
        if os.fork() == 0:
            time.sleep(600)
        os.write(write, b"1")
        time.sleep(600)
        return b""

    begin = time.monotonic()
    answer = planner.forked(work, seconds=1, memory=planner.MEMORY)
    os.close(write)
    assert isinstance(answer, str)
    # The end of the pipe: no fork is left that has it open.
    assert os.read(read, 9) == b"1"
    assert os.read(read, 9) == b""
    os.close(read)
    assert time.monotonic() - begin < 60


def test_a_busy_loop_ends() -> None:
    def work() -> bytes:
        while True:
            pass

    assert planner.forked(work, seconds=1) == "no answer within 1 s"


def test_memory_has_a_limit() -> None:
    answer = planner.forked(lambda: bytes(4 << 30), seconds=60, memory=1 << 30)
    assert isinstance(answer, str)


def test_a_crash_is_named() -> None:
    def work() -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""

    answer = planner.forked(work, seconds=20)
    assert isinstance(answer, str)
    assert "9" in answer


@pytest.mark.parametrize("kind", ["process", "connection", "code"])
def test_what_no_plan_needs_is_refused(tmp_path: Path, kind: str) -> None:
    code = tmp_path / "modeling.py"
    code.write_text("")

    def work() -> bytes:
        planner.guard(tmp_path)
        if kind == "process":
            subprocess.run([sys.executable, "-c", ""], check=False)
        elif kind == "connection":
            socket.create_connection(("127.0.0.1", 9))
        else:
            code.read_text()
        return b"done"

    answer = planner.forked(work, seconds=20)
    assert isinstance(answer, str)
    assert answer.startswith("RefusedError")
