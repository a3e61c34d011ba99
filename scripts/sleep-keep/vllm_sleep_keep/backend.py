"""vLLM's backend for its CuMemAllocator, with sleep and wake_up of `HostCopies`."""

import torch
from vllm.device_allocator import DEFERRABLE_TAGS, cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from vllm_sleep_keep.host_copies import HostCopies

# Tags that CuMemBackend offloads at every level; level 1 adds the weights.
OFFLOADED = ("runtime", "cudagraph")


# vLLM is not installed where types are checked: its class is Any there.
class KeepBackend(CuMemBackend):  # type: ignore[misc]
    """Put the blocks of vLLM's CuMemAllocator to sleep with kept host copies."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = HostCopies(
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

    def kept_on_host(self) -> list[torch.Tensor]:
        """Return the host memory that is held, also while blocks are awake."""
        return self.copies.held()

    @classmethod
    def is_supported(cls) -> bool:
        return bool(cumem.cumem_available and torch.version.hip is None)
