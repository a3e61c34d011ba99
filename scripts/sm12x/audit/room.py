"""The memory that a packed library is read into: its size, within the free memory."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from sm12x.core import machine, text
from sm12x.core.errors import NoSpaceError

_BLOCK = 1 << 20


class Share:
    """A memory budget for threads: together they never hold more than the largest library."""

    def __init__(self) -> None:
        self._largest = 0
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Wait until ``size`` bytes of the budget are free."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + size <= self._largest)
            self._used += size
            self._largest = max(self._largest, size)
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


@contextmanager
def unpacked(handle: IO[bytes], head: bytes, size: int, name: str) -> Iterator[mmap.mmap]:
    """All of a stream, of which ``head`` is read already, in memory: ``size`` bytes in one place.

    Raises:
        NoSpaceError: there is not so much memory.
        EOFError: the stream ends before.
    """
    free = available()
    if size > free:
        raise no_memory(f"{name} unpacks to {text.size(size)}, {text.size(free)} are free")
    try:
        data = mmap.mmap(-1, size)
    except (OSError, OverflowError, ValueError):
        raise no_memory(f"{name} unpacks to {text.size(size)}") from None
    # Pages go back to the system at once, which a heap would keep.
    with data:
        data.write(head[:size])
        while data.tell() < size:
            block = handle.read(min(_BLOCK, size - data.tell()))
            if not block:
                raise EOFError(f"{data.tell()} of {size} bytes are there")
            data.write(block)
        # Read to the end, where a zip checks its CRC.
        handle.read(1)
        yield data


def no_memory(what: str) -> NoSpaceError:
    return NoSpaceError(
        f"{what}: not enough memory",
        next_step="free memory, raise the limit it runs under, or audit its files one by one",
    )


def is_refusal(error: BaseException) -> bool:
    """Whether the system refused memory, and nothing is wrong with the file."""
    return isinstance(error, OSError) and error.errno == errno.ENOMEM


def available() -> int:
    """Bytes that can be had without swapping; no bound where the system does not say."""
    free = machine.available()
    return 1 << 62 if free is None else free
