# SPDX-License-Identifier: Apache-2.0
"""Blocks of the KV cache that are kept on the host while the KV cache sleeps.

`keep_kv` begins to copy the blocks that have content, `sleep` or `discard` waits for
these copies before it unmaps the KV cache, and `restore_kv` copies them back once a
wake_up has mapped the memory again. Which blocks have content, and whether their
content may still be used, is known to vLLM's engine alone.

The blocks of a kept KV cache lie one after another in pieces of registered host memory,
without gaps. Consecutive block ids are one row of a region; the rows of regions that
lie at equal distances, as the layers of a KV cache do, are copied by one call.
"""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch

from vllm_sleep_keep import host_copies
from vllm_sleep_keep.host_copies import GIB, MIB, Copy, HostCopies

# Host memory is taken in pieces of so many bytes, each registered by itself: copies to
# the first begin while the last is taken, and a sleep waits for one at most.
PIECE = 64 * MIB
# Pieces that are touched and registered at a time: all that a sleep waits for, and few
# beside a model that serves.
AHEAD, BESIDE_SERVING = host_copies.THREADS, 2
# In the background memory is taken for so many times the largest KV cache kept so far.
GROWTH = 1.25
# CUDA copies no rows that are farther apart by one call (cudaDevAttrMaxPitch).
MOST_PITCH = (1 << 31) - 1
WEIGHTS = "weights"


class Rows(NamedTuple):
    """Rows of device memory, all of `width` bytes, that begin `pitch` bytes apart."""

    address: int
    width: int
    height: int
    pitch: int

    def cut(self, left: int) -> "list[Rows]":
        """Split off what fits `left` bytes, at least one: that comes first."""
        fits = min(self.height, left // self.width)
        if fits == self.height:
            return [self]
        below = self.address + fits * self.pitch
        if fits:
            return [
                self._replace(height=fits),
                self._replace(address=below, height=self.height - fits),
            ]
        parts = [
            self._replace(width=left, height=1),
            self._replace(
                address=self.address + left, width=self.width - left, height=1
            ),
        ]
        if self.height > 1:
            parts.append(
                self._replace(address=self.address + self.pitch, height=self.height - 1)
            )
        return parts


class Series(NamedTuple):
    """Regions of equal shape at equal distances: `regions` of them, `step` bytes apart.

    A block takes `size` bytes of each region, and the next one begins `stride` bytes
    later.
    """

    address: int
    size: int
    stride: int
    regions: int
    step: int

    def rows(self, first: int, count: int) -> Iterator[Rows]:
        """Yield the memory of consecutive blocks, in as few pieces as possible."""
        address = self.address + first * self.stride
        if self.stride == self.size:
            yield Rows(address, count * self.size, self.regions, self.step)
            return
        for n in range(self.regions):
            yield Rows(address + n * self.step, self.size, count, self.stride)


def series_of(regions: Iterable[tuple[int, int, int]]) -> Iterator[Series]:
    """Group regions, each of (address, bytes of a block, stride), into series."""
    ordered = sorted({(size, stride, address) for address, size, stride in regions})
    for (size, stride), group in groupby(ordered, key=lambda region: region[:2]):
        addresses = [address for _, _, address in group]
        while addresses:
            step = addresses[1] - addresses[0] if len(addresses) > 1 else 0
            count = 1
            while count < len(addresses) and (
                addresses[count] == addresses[0] + count * step
            ):
                count += 1
            yield Series(addresses[0], size, stride, count, step)
            del addresses[:count]


def ranges_of(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Merge sorted block ids into ranges, each of (first id, number of ids)."""
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        first, count = ranges[-1] if ranges else (block, 0)
        if block == first + count:
            ranges[-1:] = [(first, count + 1)]
        else:
            ranges.append((block, 1))
    return ranges


def ranks_here() -> int:
    """Return how many ranks of this server may take this host's memory at a time."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    here: int = min(distributed.get_world_size(), torch.cuda.device_count())
    return max(1, here)


@dataclass(eq=False)
class KeptBlocks:
    """The blocks of one `keep_kv`.

    `records` are the allocator's, of the memory that the blocks are in; `parts` are the
    copies: an index of `records`, the rows on the device, and their host address.
    """

    records: list[Any]
    blocks: int
    size: int
    parts: list[tuple[int, Rows, int]] = field(default_factory=list)
    # Host memory of the copies, which stays even where the server's budget shrinks.
    pieces: list[torch.Tensor] = field(default_factory=list)
    is_restored: bool = False
    # Whether a sleep has begun, and its digests of the weights by address: None where
    # it has not come so far.
    has_begun: bool = False
    weights: dict[int, bytes | None] | None = None
    # Whether the weights are others since, and whether that has to be looked at.
    has_other_weights: bool = False
    is_unsure: bool = False


class KvCopies(HostCopies):
    """Host copies of weights and, while the KV cache sleeps, of its blocks.

    An exception, such as that of a signal, can come between any two steps. Therefore
    blocks count as kept only once all of their copies are issued, host memory stays for
    as long as the device may use it, and they are kept until their restoration is
    complete.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._kept: KeptBlocks | None = None
        # Host memory for blocks, also while nothing is kept.
        self._pieces: list[torch.Tensor] = []
        self._kv_streams: dict[int, list[int]] = {}
        # Host memory of copies that may not have ended, and the blocks they are of.
        self._kv_in_flight: list[torch.Tensor] = []
        self._kv_in_use: list[Any] = []
        # Whether the device was idle when the copies that are under way were issued.
        self._is_keeping = False
        # Ends the growth of host memory in the background.
        self._halt = False
        # Bytes: the largest use so far, all of the KV cache, and the server's budget.
        self._most_kept = 0
        self._kv_size = 0
        self._limit: int | None = None

    # -- host memory --

    def kv_room(
        self,
        allocator: Any,
        offload_tags: tuple[str, ...],
        block_bytes: int,
        limit: int | None,
    ) -> tuple[int, str]:
        """Return the bytes of KV cache that can be kept now, and else 0 and the reason.

        Counted are the memory that is held for it, and this rank's share of what is
        available beside the reserve and the copies that blocks of `offload_tags` still
        lack. `block_bytes` are those of a block over all regions; `limit` is the
        server's budget for this rank.
        """
        self._wait_for_preparation()
        self._limit = limit
        records = list(allocator.pointer_to_data.values())
        try:
            if reason := self._refusal(records):
                return 0, reason
        except RuntimeError as error:
            return 0, f"the driver does not say what kind of GPU this is: {error}"
        if limit is not None and self._kept is None:
            del self._pieces[-(-limit // PIECE) :]
        room = self._held_for_kv() + self._pieces_left(records, offload_tags) * PIECE
        reason = f"{room / GIB:.2f} GiB of host memory can be taken for the KV cache"
        if limit is not None and limit < room:
            room = limit
            reason = f"{room / GIB:.2f} GiB are the budget of the KV cache"
        room = room // block_bytes * block_bytes
        return room, "" if room else f"{reason}, and a block takes {block_bytes} bytes"

    def _refusal(self, records: Iterable[Any]) -> str:
        """Return why blocks cannot be kept on the host at all, else an empty text."""
        if self.setting == "release":
            return f"{host_copies.SETTING}=release keeps nothing on the host"
        for device in {data.handle[0] for data in records}:
            if self._is_integrated(device):
                return f"GPU {device} and the host share one memory: a copy frees none"
        return ""

    def _pieces_left(self, records: Iterable[Any], offload_tags: Iterable[str]) -> int:
        """Return how many pieces this rank can take beside all else it needs."""
        available = host_copies.available_host_memory(self.setting == "auto")
        needed: int = sum(
            data.handle[1]
            for data in records
            if data.tag in offload_tags and data.handle[2] not in self._copies
        )
        return max(0, available // ranks_here() - needed) // PIECE

    def _held_for_kv(self) -> int:
        return len(self._pieces) * PIECE

    def prepare_kv(self, allocator: Any, size: int) -> None:
        """Take host memory for so many bytes of KV cache in the background.

        Memory for the weights that is being taken comes first, and less is taken where
        less is available. A failure is only logged: the sleep takes the memory, or
        keeps nothing.
        """
        try:
            records = list(allocator.pointer_to_data.values())
            if size > self._held_for_kv() and records and not self._refusal(records):
                self._halt = False
                self._prepare_by(self._grow, records, size, self._preparation)
        except Exception as error:
            self._warn(f"Host memory for the KV cache was not prepared: {error}")

    def _grow(
        self, records: list[Any], size: int, before: threading.Thread | None
    ) -> None:
        try:
            # An interrupt may have left a thread object that was never started.
            if before is not None and before.is_alive():
                before.join()
            if self._limit is not None:
                size = min(size, self._limit)
            left = self._pieces_left(records, (WEIGHTS,))
            count = min(left, -(-size // PIECE) - len(self._pieces))
            if count <= 0 or self._halt:
                return
            for _ in self._take_pieces(records[0].handle[0], count, BESIDE_SERVING):
                if self._halt:
                    return
        except Exception as error:
            self._warn(f"Host memory for the KV cache was not prepared: {error}")

    def _take_pieces(
        self, device: int, count: int, ahead: int
    ) -> Iterator[torch.Tensor]:
        memory = host_copies.host_memory(
            [PIECE] * count,
            self._runtime,
            device,
            self.setting == "auto",
            region_size=PIECE,
            ahead=ahead,
        )
        for piece in memory:
            self._pieces.append(piece)
            yield piece

    def _wait_for_preparation(self) -> None:
        self._halt = True
        super()._wait_for_preparation()

    def release_kv(self) -> None:
        """Forget the kept blocks; the next sleep gives back their host memory."""
        self._forget_kv()
        self._pieces = []

    def _release_spare_pieces(self) -> None:
        self._pieces = list(self._kept.pieces) if self._kept else []

    def _save(self, allocator: Any, blocks: list[Any]) -> dict[int, Copy]:
        lacking = sum(
            data.handle[1] for data in blocks if data.handle[2] not in self._copies
        )
        if self._pieces and lacking > host_copies.available_host_memory(
            self.setting == "auto"
        ):
            # Copies of weights go before memory for what may be kept later.
            self._release_spare_pieces()
            self._runtime.give_back()
        return super()._save(allocator, blocks)

    def held(self) -> list[torch.Tensor]:
        """Return the host memory that is held, for weights and for the KV cache."""
        kept = self._kept
        pieces = chain(list(self._pieces), kept.pieces if kept else ())
        memory = {piece.data_ptr(): piece for piece in pieces}
        return [*super().held(), *memory.values()]

    # -- to the host --

    def keep_kv(
        self, allocator: Any, regions: Mapping[str, torch.Tensor], blocks: Sequence[int]
    ) -> None:
        """Begin to copy blocks of all regions to the host, in place of any kept before.

        `regions` are int8 tensors of shape [number of blocks, bytes of a block] in
        memory of the allocator, whose rows may be farther apart than they are long;
        `blocks` are sorted ids. Nothing may be launched on the device between this call
        and the sleep, which waits for the copies before it unmaps the KV cache.

        Raises RuntimeError, with the sizes, where host memory is missing or a copy
        cannot be issued: then nothing is kept, and nothing was unmapped. Also where the
        KV cache is asleep: what is kept stays.
        """
        self._wait_for_preparation()
        ids = sorted(set(blocks))
        size = sum(region.shape[1] for region in regions.values()) * len(ids)
        self._kv_size = sum(region.numel() for region in regions.values())
        try:
            placed = self._placed_regions(allocator, regions, ids)
            # From here on nothing is kept until all copies are issued.
            self._forget_kv()
            if size:
                self._keep(allocator, placed, ids, size)
        except Exception as error:
            raise RuntimeError(
                f"{len(ids)} blocks of the KV cache, {size / GIB:.2f} GiB, cannot "
                f"be kept on the host: {error}. They stay where they are."
            ) from error
        finally:
            allocator.in_hand = None

    def _placed_regions(
        self, allocator: Any, regions: Mapping[str, torch.Tensor], blocks: Sequence[int]
    ) -> list[tuple[Any, list[Series]]]:
        """Return the allocator's records that regions are in, each with its series.

        Raises RuntimeError for a region that is not in memory that is awake, and
        ValueError for a block that a region does not have.
        """
        records = list(allocator.pointer_to_data.values())
        if reason := self._refusal(records):
            raise RuntimeError(reason)
        # Those of weights are many, and no region is in them.
        records.sort(key=lambda data: data.tag == WEIGHTS)
        places: dict[int, list[tuple[int, int, int]]] = {}
        for name, region in regions.items():
            count, size = region.shape
            start = region.data_ptr()
            # The stride of a single row has no meaning.
            stride = region.stride(0) if count > 1 else size
            if blocks and not 0 <= blocks[0] <= blocks[-1] < count:
                raise ValueError(f"{name} has blocks 0 to {count - 1}")
            end = start + (count - 1) * stride + size
            for data in records:
                if data.handle[2] <= start and end <= data.handle[2] + data.handle[1]:
                    break
            else:
                raise RuntimeError(f"{name} is not in memory that sleeps")
            if data.is_asleep:
                raise RuntimeError(f"{name} is asleep")
            places.setdefault(data.handle[2], []).append((start, size, stride))
        return [
            (data, list(series_of(places[data.handle[2]])))
            for data in records
            if data.handle[2] in places
        ]

    def _keep(
        self,
        allocator: Any,
        placed: list[tuple[Any, list[Series]]],
        blocks: Sequence[int],
        size: int,
    ) -> None:
        records = [data for data, _ in placed]
        self._synchronize(records)
        self._wait_for_kv()
        self._kv_in_use = records
        kept = KeptBlocks(records, len(blocks), size)
        pieces = self._pieces_for(size, records[0].handle[0])
        ranges = ranges_of(blocks)
        left = host = 0
        for index, (data, series) in enumerate(placed):
            if not self._take_in_hand(allocator, data):
                raise RuntimeError("the KV cache was freed meanwhile")
            todo = [
                rows
                for one in reversed(series)
                for first, count in reversed(ranges)
                for rows in one.rows(first, count)
            ]
            while todo:
                if not left:
                    piece = next(pieces)
                    kept.pieces.append(piece)
                    # In this order the device writes to no memory that may go.
                    self._kv_in_flight.append(piece)
                    host, left = piece.data_ptr(), len(piece)
                rows, *rest = todo.pop().cut(left)
                todo += reversed(rest)
                kept.parts.append((index, rows, host))
                self._copy_part(kept, len(kept.parts) - 1, to_host=True)
                host += rows.width * rows.height
                left -= rows.width * rows.height
        self._most_kept = max(self._most_kept, size)
        self._kept = kept
        self._is_keeping = True

    def _pieces_for(self, size: int, device: int) -> Iterator[torch.Tensor]:
        """Yield pieces of host memory for so many bytes, taking those that are missing.

        Raises NoHostMemoryError before the first where not all can be had.
        """
        count = -(-size // PIECE)
        held = self._pieces[:count]
        missing = count - len(held)
        if missing:
            host_copies.require_host_memory(missing * PIECE, self.setting == "auto")
        return chain(held, self._take_pieces(device, missing, AHEAD))

    def _copy_part(self, kept: KeptBlocks, number: int, to_host: bool) -> None:
        """Issue the copy of one part of the kept blocks, to the host or back."""
        index, rows, host = kept.parts[number]
        device = kept.records[index].handle[0]
        if device not in self._kv_streams:
            self._kv_streams[device] = self._new_streams(device)
        stream = self._kv_streams[device][number % host_copies.STREAMS]
        address, width, height, pitch = rows
        if height == 1:
            to, source = (host, address) if to_host else (address, host)
            self._runtime.copy(to, source, width, stream)
        elif width <= pitch <= MOST_PITCH:
            places = (host, width), (address, pitch)
            (to, to_pitch), (source, source_pitch) = (
                places if to_host else reversed(places)
            )
            self._runtime.copy_rows(
                to, to_pitch, source, source_pitch, width, height, stream
            )
        else:
            pairs = [(host + n * width, address + n * pitch) for n in range(height)]
            self._runtime.copy_all(
                [(*(pair if to_host else pair[::-1]), width) for pair in pairs], stream
            )

    def _wait_for_kv(self) -> None:
        """Wait for all copies of blocks; their host memory may go afterwards."""
        try:
            for stream in chain.from_iterable(self._kv_streams.values()):
                self._runtime.wait(stream)
        except RuntimeError as error:
            if not self._is_keeping:
                raise
            # The copies on the host may have any content.
            self._forget_kv()
            raise RuntimeError(
                f"copies of the KV cache to the host failed: {error}; none is kept"
            ) from error
        self._kv_in_flight.clear()
        self._is_keeping = False

    def kept_kv(self) -> tuple[int, int]:
        """Return how many blocks and bytes wait for their restoration."""
        kept = self._kept
        if kept is None or kept.is_restored:
            return 0, 0
        return kept.blocks, kept.size

    def drop_kv(self) -> None:
        """Forget the blocks that are kept; the host memory stays for the next ones.

        Copies of an interrupted call have ended when this returns, so that the KV cache
        can be written to.
        """
        self._forget_kv()
        self._wait_for_kv()

    def _forget_kv(self) -> None:
        self._kept = None
        self._is_keeping = False

    # -- asleep --

    def _wait_for_device(self, blocks: Iterable[Any]) -> None:
        # `keep_kv` has waited, and a wait for the whole device would include the
        # copies of blocks, beside which digests are computed and weights unmapped.
        if not self._is_keeping:
            super()._wait_for_device(blocks)

    def sleep(self, allocator: Any, offload_tags: tuple[str, ...]) -> None:
        with self._weights_noted(allocator):
            super().sleep(allocator, offload_tags)

    def discard(self, allocator: Any, tags: tuple[str, ...]) -> None:
        with self._weights_noted(allocator):
            super().discard(allocator, tags)

    @contextlib.contextmanager
    def _weights_noted(self, allocator: Any) -> Iterator[None]:
        """Have the first sleep compute digests of the weights, also where it fails."""
        kept = self._kept
        if kept is not None:
            if kept.has_begun and kept.weights is None:
                # An interrupt came before the digests, which now come too late.
                kept.has_other_weights = True
            kept.has_begun = True
        try:
            yield
        except Exception:
            if kept is not None and kept.weights is None:
                self._note_weights(kept, self._weights(allocator, computed=False))
            raise

    def _put_all_to_sleep(
        self,
        allocator: Any,
        blocks: list[Any],
        offload_tags: tuple[str, ...],
        saved: dict[int, Copy],
    ) -> None:
        kept = self._kept
        if kept is not None:
            # Those of a level-1 sleep were computed for its own copies of weights.
            digests = self._weights(allocator, computed=WEIGHTS in offload_tags)
            self._note_weights(kept, digests)
        super()._put_all_to_sleep(allocator, blocks, offload_tags, saved)

    def _before_unmapping(self, data: Any) -> None:
        if self._kv_in_flight and any(data is used for used in self._kv_in_use):
            self._wait_for_kv()
        kept = self._kept
        if kept is not None and any(data is record for record in kept.records):
            # A wake_up that another rank could not follow is taken back.
            kept.is_restored = False

    # -- back --

    def wake_up(self, allocator: Any, tags: list[str] | None) -> None:
        if self._kept is not None and any(
            data.tag == WEIGHTS and not data.is_asleep
            for data in list(allocator.pointer_to_data.values())
        ):
            # Weights that this call restores are those of the sleep; those that were
            # awake before it may have been written to.
            self._kept.is_unsure = True
        super().wake_up(allocator, tags)

    def restore_kv(self, allocator: Any) -> None:
        """Copy the kept blocks back, after a wake_up has mapped their memory.

        The copies stay until `drop_kv`, which has to be called once all ranks have
        restored theirs and before anything writes to the KV cache: if the KV cache
        sleeps without that, its blocks are kept again, and the next wake_up needs them.

        Raises RuntimeError where a copy fails, and where memory of the KV cache is
        asleep or was freed: the blocks are kept as before, and the call can be
        repeated.
        """
        kept = self._kept
        if kept is None or kept.is_restored:
            return
        # Those to the host may still be under way, and fail.
        self._wait_for_kv()
        try:
            for data in kept.records:
                if data.is_asleep:
                    raise RuntimeError(f"{host_copies._named(data)} is asleep")
            # Not beside the copies: what digests allocate and copy would wait for them.
            self._look_at_weights(allocator, kept)
            self._kv_in_use = kept.records
            self._kv_in_flight += kept.pieces
            at = -1
            for number, (index, _, _) in enumerate(kept.parts):
                if index != at:
                    at = index
                    if not self._take_in_hand(allocator, kept.records[index]):
                        raise RuntimeError("the KV cache was freed since")
                self._copy_part(kept, number, to_host=False)
            allocator.in_hand = None
            self._wait_for_kv()
        except BaseException as error:
            # The call may be repeated at any time.
            kept.is_unsure = True
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(
                f"{kept.blocks} blocks of the KV cache, {kept.size / GIB:.2f} GiB, are "
                f"not restored: {error}. They stay on the host; call it again."
            ) from error
        finally:
            allocator.in_hand = None
        kept.is_restored = True
        self.prepare_kv(allocator, min(self._kv_size, int(self._most_kept * GROWTH)))

    # -- whether the weights are the same --

    def weights_changed(self, allocator: Any) -> bool:
        """Return whether the weights are others than when the blocks were kept.

        A sleep compares the digests of the weights that were awake before it. Weights
        that a wake_up restores are the same by construction; where they were awake
        before the KV cache, their digests are computed and compared by `restore_kv`,
        or here if this is called first. True also where a digest is unknown.
        """
        kept = self._kept
        if kept is None:
            return False
        self._look_at_weights(allocator, kept)
        return kept.has_other_weights

    def _look_at_weights(self, allocator: Any, kept: KeptBlocks) -> None:
        if kept.weights is None:
            kept.has_other_weights = True
        if kept.is_unsure and not kept.has_other_weights:
            self._note_weights(kept, self._weights(allocator, computed=False))
        kept.is_unsure = False

    @staticmethod
    def _note_weights(kept: KeptBlocks, digests: dict[int, bytes | None]) -> None:
        if kept.weights is None:
            kept.weights = digests
        elif kept.weights != digests or None in digests.values():
            kept.has_other_weights = True

    def _weights(self, allocator: Any, computed: bool) -> dict[int, bytes | None]:
        """Return the digests of all weights by address, None for one that is unknown.

        Those of weights that sleep are the digests of their copies, and so are those of
        weights awake where these were `computed` just now.
        """
        records = list(allocator.pointer_to_data.values())
        blocks = [data for data in records if data.tag == WEIGHTS]
        digests: dict[int, bytes | None] = {}
        for data in blocks:
            copy = self._copies.get(data.handle[2])
            digests[data.handle[2]] = copy.digest if copy else None
        awake = [data for data in blocks if not data.is_asleep]
        if awake and not computed:
            current = self._digests(allocator, awake)
            digests |= {data.handle[2]: current.get(data.handle[2]) for data in awake}
        return digests
