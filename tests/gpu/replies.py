"""A reply of a worker to a `collective_rpc` that is large until the engine has it."""

from __future__ import annotations

import pickle
import random
import zlib
from dataclasses import asdict, dataclass
from typing import Any, SupportsIndex

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Received:
    """What arrived of a large reply: from which rank, to which call, and its bytes."""

    rank: int
    number: int
    size: int
    checksum: int

    @classmethod
    def of(cls, rank: int, number: int, content: Any) -> Received:
        with memoryview(content) as view:
            return cls(rank=rank, number=number, size=view.nbytes, checksum=zlib.crc32(view))


class LargeReply:
    """A reply of so many MiB to a call of this number: large on its way from a worker to the
    engine, and a small dictionary once it has arrived, which an HTTP answer has room for.
    """

    def __init__(self, rank: int, number: int, mib: int) -> None:
        self.rank, self.number = rank, number
        # No two calls and no two ranks have the same.
        self.content = random.Random(f"{rank} {number}").randbytes(MIB) * mib  # noqa: S311

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return _received, (self.rank, self.number, pickle.PickleBuffer(self.content))

    def received(self) -> Received:
        """What has to arrive of it."""
        return Received.of(self.rank, self.number, self.content)


def _received(rank: int, number: int, content: Any) -> dict[str, int]:
    return asdict(Received.of(rank, number, content))
