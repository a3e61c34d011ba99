"""Interrupts at every step of a call, and at random times: what a signal can do to sleep.

A signal's exception comes between two bytecodes, also between the return of a C call and whatever
notes that it returned. So the walk raises at every call, line, opcode and return of the tree's own
sleep and wake code, one event at a time, for as long as there are events.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Of the opcodes, every n-th is interrupted at: a prime, so that loops are met at different ones.
STRIDE = 23
# The files whose functions are walked through.
WALKED = ("cumem.py", "host_copies.py", "kept_kv.py", "sleep_mode_backend.py", "gpu_worker.py")


class Walker:
    """A trace function that counts events, and raises KeyboardInterrupt at the ``at``-th."""

    def __init__(self, at: int, *, opcodes: bool, files: tuple[str, ...] = WALKED) -> None:
        self.at = at
        self.files = files
        self.opcodes = opcodes
        self.seen = 0
        self.where = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        frame.f_trace_opcodes = self.opcodes
        if event != "exception":
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{event} in {frame.f_code.co_name}, line {frame.f_lineno}"
                raise KeyboardInterrupt(self.where)
        return self


def raise_at(
    call: Callable[[], object],
    at: int,
    *,
    opcodes: bool,
    files: tuple[str, ...] = WALKED,
    again: int = 0,
) -> Walker:
    """Make the call, and interrupt it at its ``at``-th event.

    With ``again``, a second time: so many calls and returns later, of C functions too. Errors of
    the call are swallowed. ``where`` of the result is "" where it has fewer events.
    """
    walker = Walker(at, opcodes=opcodes, files=files)
    left = again

    def second(frame: FrameType, event: str, argument: Any) -> None:
        # A trace function that raises is not called any more: hence one of another kind.
        nonlocal left
        if walker.where and left and frame.f_code.co_filename.endswith(files):
            left -= 1
            if not left:
                raise KeyboardInterrupt(f"again, at a {event} in {frame.f_code.co_name}")

    if again:
        sys.setprofile(second)
    sys.settrace(walker)
    try:
        call()
    except (KeyboardInterrupt, RuntimeError):
        pass
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return walker


def walk(
    prepare: Callable[[], Any],
    operate: Callable[[Any], object],
    *checks: Callable[[Any], None],
    files: tuple[str, ...] = WALKED,
    stride: int = STRIDE,
    part: int = 0,
    parts: int = 1,
    again: int = 0,
) -> int:
    """Interrupt ``operate`` at every line, and at every ``stride``-th opcode; the number of cases.

    A walk that takes long is divided: of its cases, part ``part`` of ``parts`` takes every
    ``parts``-th.

    The checks take turns: each is made after every second line where there are two, after the same
    lines however a walk is divided. With SM12X_WALK=all each one is made after every line and every
    opcode.
    """
    everything = os.environ.get("SM12X_WALK") == "all"
    failures: list[str] = []
    cases = 0
    for opcodes in (False, True):
        unit = stride if opcodes and not everything else 1
        at = 1 + part * unit
        ended = False
        while not ended:
            turn = (at - 1) // unit % len(checks)
            for check in checks if everything else checks[turn : turn + 1]:
                state = prepare()
                call = functools.partial(operate, state)
                walker = raise_at(call, at, opcodes=opcodes, files=files, again=again)
                try:
                    check(state)
                except Exception as error:
                    failures.append(f"{walker.where or 'no interrupt'}: {error}".splitlines()[0])
                    if len(failures) >= 5:
                        # The state that the next case would begin with may be anything.
                        raise AssertionError(
                            f"after {cases} cases:\n  " + "\n  ".join(failures)
                        ) from None
                ended = not walker.where
                cases += not ended
            at += parts * unit
    assert not failures, f"{len(failures)} of {cases} cases fail:\n  " + "\n  ".join(failures)
    assert cases > 1, "nothing of the tree was walked through"
    return cases


@contextlib.contextmanager
def interrupter() -> Iterator[Callable[[float], None]]:
    """A process that sends this one a SIGINT, as many seconds after it was asked as it was told."""
    reader, writer = os.pipe()
    target = os.getpid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child = os.fork()
    if child == 0:
        os.close(writer)
        while delay := os.read(reader, 8):
            time.sleep(struct.unpack("d", delay)[0])
            os.kill(target, signal.SIGINT)
        os._exit(0)
    os.close(reader)
    try:
        yield lambda seconds: (os.write(writer, struct.pack("d", seconds)), None)[1]
    finally:
        os.close(writer)
        os.waitpid(child, 0)
