"""A KV cache in blocks of the allocator, and the bytes that each of its blocks has to contain."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import EMPTY, Block, World, expect

KEPT = "vllm_sleep_keep.kept_kv"
# Bytes of a piece of host memory here: rows end in other pieces than they begin in.
PIECE = 12 << 10


@dataclass(frozen=True, kw_only=True)
class Region:
    """Where a region begins in the memory of an allocation, and the shape of it."""

    allocation: int
    offset: int
    size: int
    stride: int = 0


# Of a KV cache of BLOCKS blocks.
BLOCKS = 40
LAYOUTS: dict[str, tuple[Region, ...]] = {
    # Layers one after another, as full attention has them.
    "layers": tuple(
        Region(allocation=0, offset=n * BLOCKS * 1000, size=1000) for n in range(5)
    ),
    # All layers of a block together.
    "packed": (Region(allocation=0, offset=64, size=6000),),
    # Two page sizes in one memory, rows farther apart than they are long.
    "strided": (
        Region(allocation=0, offset=0, size=1536, stride=4096),
        Region(allocation=0, offset=1536, size=1536, stride=4096),
        Region(allocation=0, offset=3100, size=900, stride=4096),
    ),
    # Layers of three sizes in two allocations, at unequal distances.
    "apart": (
        Region(allocation=0, offset=0, size=2000),
        Region(allocation=0, offset=BLOCKS * 2000 + 512, size=2000),
        Region(allocation=1, offset=0, size=2000),
        Region(allocation=1, offset=BLOCKS * 2000, size=2000),
        Region(allocation=1, offset=BLOCKS * 4000, size=77),
    ),
}  # fmt: skip


@dataclass
class Cache:
    """A KV cache that ``make`` has put into the allocator.

    ``content`` is what a block id has to contain, the bytes of all regions in their order; a block
    that is not in it may contain anything.
    """

    world: World
    backend: Any
    weights: list[Block]
    memory: list[Block]
    regions: dict[str, Any]
    content: dict[int, bytes] = field(default_factory=dict)
    written: int = 0
    # Of a driver that has refused to wait, and may be thought to have failed for good.
    violations: int = 0

    @property
    def per_block(self) -> int:
        return sum(region.shape[1] for region in self.regions.values())

    def places(self, block: int) -> list[tuple[int, int]]:
        """The address and the bytes of a block in each region."""
        return [
            (region.data_ptr() + block * region.stride(0), region.shape[1])
            for region in self.regions.values()
        ]

    def write(self, *blocks: int) -> None:
        for block in blocks:
            self.written += 1
            text = b""
            for address, size in self.places(block):
                some = f"{self.written}.{block}.{len(text)}.".encode() * (size // 4 + 1)
                assert self.world.fake.write(address, some[:size]) == 0, "the KV cache is asleep"
                text += some[:size]
            self.content[block] = text

    def read(self, block: int) -> bytes:
        parts = [self.world.fake.read(address, size) for address, size in self.places(block)]
        assert None not in parts, "the KV cache is asleep"
        return b"".join(part for part in parts if part is not None)

    def expect_content(self) -> None:
        wrong = [block for block, text in self.content.items() if self.read(block) != text]
        expect("blocks with other bytes", wrong, [])

    def keep(self, blocks: Sequence[int] | None = None) -> None:
        """Keep blocks with content; the others have none from here on."""
        self.backend.keep_kv(self.regions, sorted(self.content if blocks is None else blocks))

    def expect_restored(self) -> None:
        """Wake everything up: all that was kept, and the weights, have their bytes."""
        self.backend.resume()
        self.backend.restore_kv()
        self.expect_content()
        expect("what is still kept", self.backend.kept_kv(), (0, 0))
        self.world.expect_awake(*self.weights)
        expect("memory given up in use", self.world.fake.violations(), self.violations)

    def swap(self) -> None:
        """Keep all content over a sleep and a wake-up, after which it is dropped."""
        self.keep()
        self.backend.suspend(1)
        expect("physical memory asleep", self.world.fake.alive().physical, 0)
        expect("kept", self.backend.kept_kv(), self.size())
        self.expect_restored()
        self.backend.drop_kv()

    def size(self) -> tuple[int, int]:
        return len(self.content), len(self.content) * self.per_block

    def wait(self) -> None:
        """Until no host memory is taken in the background."""
        thread = self.backend.copies._preparation
        if thread is not None:
            thread.join()

    def held(self) -> int:
        """Bytes of host memory for the KV cache."""
        return sum(len(piece) for piece in self.backend.copies._pieces)

    def close(self) -> None:
        """Free everything: nothing is left of it, on the host too."""
        for block in (*self.weights, *self.memory):
            self.world.free(block)
        self.backend.suspend(2)
        self.backend.resume()
        # A handle whose release failed is released when PyTorch allocates or frees next.
        self.world.free(self.world.block())
        expect("what the driver holds in the end", self.world.fake.alive(), EMPTY)
        expect("registered host memory in the end", self.world.fake.registered(), 0)
        expect("memory given up in use", self.world.fake.violations(), self.violations)


def region_of(world: World, memory: Sequence[Block], region: Region) -> Any:
    """The region as a tensor, as vLLM derives it from its KV cache's storage."""
    block = memory[region.allocation]
    stride = region.stride or region.size
    length = (BLOCKS - 1) * stride + region.size
    assert region.offset + length <= block.size
    raw = (ctypes.c_char * length).from_address(block.address + region.offset)
    tensor = world.torch.frombuffer(raw, dtype=world.torch.int8)
    return tensor.as_strided((BLOCKS, region.size), (stride, 1))


def make(world: World, layout: str = "layers", *, setting: str = "auto", weights: int = 2) -> Cache:
    """A KV cache of this layout beside weights, with the package's backend and no growth."""
    backend = world.use_plugin(setting)
    kept: Any = importlib.import_module(KEPT)
    kept.PIECE = PIECE
    # Growth goes on beside the test: those that look at it say so.
    kept.GROWTH = 0
    used = [world.block("weights") for _ in range(weights)]
    regions = LAYOUTS[layout]
    memory = [
        world.block("kv_cache", GRANULARITY) for _ in range(1 + max(r.allocation for r in regions))
    ]
    tensors = {f"layer.{n}": region_of(world, memory, one) for n, one in enumerate(regions)}
    return Cache(world=world, backend=backend, weights=used, memory=memory, regions=tensors)
