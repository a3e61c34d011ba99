"""What a witness's process can do to itself is an outcome, not the end of pytest."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

import pytest
from tests.witness import forked


def crash() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def hang() -> None:
    time.sleep(60)


def leave() -> None:
    os._exit(0)


def fail() -> None:
    assert False, "what was expected"  # noqa: B011, PT015


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (crash, "killed by SIGSEGV"),
        (abort, "killed by SIGABRT"),
        (hang, "hangs: no end after 0.5 s"),
        (leave, "exit code 0"),
        (fail, "what was expected"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_case_that_does_not_return_has_failed(function: Callable[[], None], text: str) -> None:
    outcome = forked.run(function, seconds=0.5 if function is hang else 20)
    assert not outcome.passed
    assert text in outcome.text


def test_a_case_that_only_waits_is_ended_before_its_time() -> None:
    """Two locks that wait for each other: no processor time, and no end."""

    def deadlock() -> None:
        lock = threading.Lock()
        lock.acquire()
        waiting = threading.Thread(target=lock.acquire, daemon=True)
        waiting.start()
        waiting.join()

    start = time.monotonic()
    outcome = forked.run(deadlock, seconds=60, idle=1)
    assert "nothing done for 1 s" in outcome.text
    assert time.monotonic() - start < 30


def work(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_a_case_whose_child_works_does_not_wait() -> None:
    def nested() -> bool:
        return forked.run(lambda: work(3), seconds=60).passed

    assert forked.run(nested, seconds=60, idle=1).value is True


def test_a_case_that_waits_now_and_then_goes_on() -> None:
    def turns() -> bool:
        for _ in range(4):
            time.sleep(0.6)
            work(0.1)
        return True

    assert forked.run(turns, seconds=60, idle=2).value is True


def test_what_a_case_returns_and_prints_stays_apart() -> None:
    def speak() -> dict[str, int]:
        os.write(1, b"noise " * 20000)
        return {"calls": 3}

    assert forked.run(speak, seconds=20) == forked.Outcome(passed=True, value={"calls": 3})
