"""vLLM's backend for its CuMemAllocator, with sleep and wake_up of `KvCopies`."""

from collections.abc import Mapping, Sequence

import torch
from vllm.device_allocator import DEFERRABLE_TAGS, cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from vllm_sleep_keep.kept_kv import KvCopies

# Tags that CuMemBackend offloads at every level; level 1 adds the weights.
OFFLOADED = ("runtime", "cudagraph")


# vLLM is not installed where types are checked: its class is Any there.
class KeepBackend(CuMemBackend):  # type: ignore[misc]
    """Put the blocks of vLLM's CuMemAllocator to sleep with kept host copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = KvCopies(
            runtime_path=cumem.libcudart.lib._name,
            # Looked up in each call, because tests replace these functions.
            create_and_map=lambda handle: cumem.create_and_map(handle),
            unmap_and_release=lambda handle: cumem.unmap_and_release(handle),
            # Only the patched allocator has `in_hand`; it also knows what is mapped.
            knows_mapped=hasattr(cumem.CuMemAllocator.get_instance(), "in_hand"),
            always_woken=lambda tag: tag not in DEFERRABLE_TAGS,
        )

    def prepare(self) -> None:
        """Take host memory; a patched vLLM calls this after loading the weights."""
        self.copies.prepare(cumem.CuMemAllocator.get_instance())

    def is_preparing(self) -> bool:
        """Return whether host memory is still being taken, so that reports change."""
        return self.copies.is_preparing()

    def suspend(self, level: int = 1) -> None:
        self._state = "SUSPENDED"
        tags = ("weights", *OFFLOADED) if level == 1 else OFFLOADED
        if level != 1:
            self.copies.release_kv()
        self.copies.sleep(cumem.CuMemAllocator.get_instance(), tags)

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        try:
            self.copies.wake_up(cumem.CuMemAllocator.get_instance(), tags)
            self._state = "RUNNING"
        finally:
            if self._state == "RESUMING":
                # The blocks that the call was to wake are asleep as before.
                self._state = "SUSPENDED"

    def discard(self, tags: tuple[str, ...]) -> None:
        self.copies.discard(cumem.CuMemAllocator.get_instance(), tags)
        self._state = "SUSPENDED"

    # What is kept of the KV cache while it sleeps: see KvCopies.

    def kv_room(self, block_bytes: int, limit: int | None) -> tuple[int, str]:
        """Return the bytes of KV cache that can be kept now, or 0 and the reason.

        `block_bytes` are those of one block over all regions of this rank; `limit` is
        the server's budget for this rank in bytes.
        """
        allocator = cumem.CuMemAllocator.get_instance()
        tags = ("weights", *OFFLOADED)
        return self.copies.kv_room(allocator, tags, block_bytes, limit)

    def prepare_kv(self, size: int) -> None:
        """Take host memory for so many bytes of KV cache in the background."""
        self.copies.prepare_kv(cumem.CuMemAllocator.get_instance(), size)

    def keep_kv(
        self, regions: Mapping[str, torch.Tensor], blocks: Sequence[int]
    ) -> None:
        """Begin to copy blocks to the host; `suspend` or `discard` comes right after.

        `regions` are int8 tensors of shape [number of blocks, bytes of a block].
        Raises RuntimeError, with the sizes: then nothing is kept, nothing unmapped.
        """
        self.copies.keep_kv(cumem.CuMemAllocator.get_instance(), regions, blocks)

    def restore_kv(self) -> None:
        """Copy the kept blocks back, after `resume` has mapped their memory.

        Raises RuntimeError: they stay on the host, and the call can be repeated.
        """
        self.copies.restore_kv(cumem.CuMemAllocator.get_instance())

    def drop_kv(self) -> None:
        """Forget the kept blocks, also those restored, before the cache is written."""
        self.copies.drop_kv()

    def kept_kv(self) -> tuple[int, int]:
        """Return how many blocks and bytes wait for their restoration."""
        return self.copies.kept_kv()

    def weights_changed(self) -> bool:
        """Return whether the weights are others than when the blocks were kept."""
        return self.copies.weights_changed(cumem.CuMemAllocator.get_instance())

    def kept_on_host(self) -> list[torch.Tensor]:
        """Return the host memory that is held, also while blocks are awake."""
        return self.copies.held()

    @classmethod
    def is_supported(cls) -> bool:
        return bool(cumem.cumem_available and torch.version.hip is None)
