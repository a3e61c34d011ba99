"""The backend: vLLM's own, with sleep and wake_up of `HostCopies`."""

import torch
from vllm.device_allocator import DEFERRABLE_TAGS, cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from vllm_sleep_keep.host_copies import HostCopies

# What CuMemBackend offloads at each level, and weights at level 1.
OFFLOADED = ("runtime", "cudagraph")


# vLLM is not installed where types are checked: its class is Any there.
class KeepBackend(CuMemBackend):  # type: ignore[misc]
    """A CuMemBackend to vLLM: the blocks are those of its CuMemAllocator."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = HostCopies(
            runtime_path=cumem.libcudart.lib._name,
            # By name, each time: a test puts its own there.
            create_and_map=lambda handle: cumem.create_and_map(handle),
            unmap_and_release=lambda handle: cumem.unmap_and_release(handle),
            # vLLM with patches that keep a block in hand; a stock one has none.
            knows_mapped=hasattr(cumem.CuMemAllocator.get_instance(), "in_hand"),
            always_woken=lambda tag: tag not in DEFERRABLE_TAGS,
        )

    def prepare(self) -> None:
        """What vLLM with a hook for it calls after the weights are loaded."""
        self.copies.prepare(cumem.CuMemAllocator.get_instance())

    def is_preparing(self) -> bool:
        """Whether host memory is still being taken: a report of it will change."""
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
                # What the call was to wake is asleep as before.
                self._state = "SUSPENDED"

    def discard(self, tags: tuple[str, ...]) -> None:
        self.copies.discard(cumem.CuMemAllocator.get_instance(), tags)
        self._state = "SUSPENDED"

    def kept_on_host(self) -> list[torch.Tensor]:
        """Host memory that is held while blocks are awake, too, for vLLM's report."""
        return self.copies.held()

    @classmethod
    def is_supported(cls) -> bool:
        return bool(cumem.cumem_available and torch.version.hip is None)
