"""Random allocations, frees, pools, maps and unmaps, with random failures of the driver.

After every operation what PyTorch holds is mapped and has its bytes. From time to time nothing
fails any longer: then the driver holds what it should, and no more. SM12X_CHURN_SEEDS=67 makes a
run of 20,000 operations of each kind.
"""

from __future__ import annotations

import gc
import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY, Alive
from tests.witness.world import EMPTY, OutOfMemoryError, World, expect, raised

OPERATIONS = 300
SEEDS = int(os.environ.get("SM12X_CHURN_SEEDS", "3"))
# Operations between two looks at what the driver holds.
PERIOD = 25
# Of what memory comes in.
CAPACITY = 64
FUNCTIONS = (
    "*",
    "cuCtxGetCurrent",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cudaDeviceSynchronize",
)
TAGS = ("weights", "kv_cache")


@dataclass
class Churn:
    """PyTorch's side: blocks outside of pools, pools, and the bytes of each."""

    world: World
    random: random.Random
    bytes_of: dict[int, bytes] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    asleep: set[int] = field(default_factory=set)
    pools: list[Any] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def run(self, operations: int) -> None:
        gc.freeze()
        self.world.fake.set_capacity(CAPACITY * GRANULARITY)
        steps = (self.malloc, self.malloc, self.free, self.unmap, self.map, self.load, self.drop)
        for n in range(operations):
            step = self.random.choice(steps)
            if self.random.random() < 0.4:
                self.fail()
            self.done.append(step.__name__)
            try:
                step()
                self.look()
            except AssertionError as error:
                raise AssertionError(f"operation {n}, {self.done[-PERIOD:]}: {error}") from error
            if self.random.random() < 0.6:
                self.world.fake.fail_nothing()
            if n % PERIOD == PERIOD - 1:
                self.settle()
        self.end()

    def fail(self) -> None:
        count = self.random.choice((1, 1, 2, 3, 30))
        name = self.random.choice(FUNCTIONS)
        self.done.append(f"{name} fails {count} times")
        self.world.fake.fail(name, self.random.randint(1, 6), 999, count)

    def size(self) -> int:
        return self.random.randint(1, 4) * GRANULARITY

    # ---- operations ----

    def malloc(self) -> None:
        self.world.allocator.current_tag = self.random.choice(TAGS)
        size = self.size()
        address = self.world.malloc(size)
        if address:
            assert address not in self.held(), f"{address:#x} is another block's"
            self.sizes[address] = size
            self.write(address)

    def free(self) -> None:
        if self.sizes:
            address = self.random.choice(list(self.sizes))
            size = self.sizes.pop(address)
            self.bytes_of.pop(address)
            self.asleep.discard(address)
            self.world.free_raw(address, size)

    def unmap(self) -> None:
        address = self.pick(asleep=False)
        if address is None:
            return
        handle = self.world.allocator.pointer_to_data[address].handle
        if raised(lambda: self.world.cumem.unmap_and_release(handle)) is None:
            self.asleep.add(address)
            assert not self.world.fake.mapped(address), f"{address:#x} is still mapped"

    def map(self) -> None:
        address = self.pick(asleep=True)
        if address is None:
            return
        handle = self.world.allocator.pointer_to_data[address].handle
        if raised(lambda: self.world.cumem.create_and_map(handle)) is None:
            self.asleep.remove(address)
            self.write(address)

    def load(self) -> None:
        """Some tensors in a pool, which may be in a pool: some stay, and some are freed."""
        problem = raised(lambda: self.context(self.random.randint(1, 3)))
        assert problem is None or expected(problem), problem

    def context(self, depth: int) -> None:
        with self.world.allocator.use_memory_pool(self.random.choice(TAGS)):
            for _ in range(self.random.randint(1, 3)):
                self.tensor()
            if depth > 1:
                problem = raised(lambda: self.context(depth - 1))
                assert problem is None or expected(problem), problem
            self.tensor()

    def tensor(self) -> None:
        # Another one takes its place after an out-of-memory.
        pool = self.world.pools_in_use[-1]
        if not any(pool is known for known in self.pools):
            self.pools.append(pool)
        held = self.held() - set(pool.segments)
        address = pool.allocate(self.world, self.random.randint(1, 2) * GRANULARITY)
        assert address not in held, f"{address:#x} is another block's"
        self.write(address)
        if self.random.random() < 0.5:
            self.bytes_of.pop(address)
            pool.free(address)

    def drop(self) -> None:
        """A pool's last tensors are freed, and then it is."""
        if not self.pools:
            return
        pool = self.pools.pop(self.random.randrange(len(self.pools)))
        for address in pool.segments:
            self.bytes_of.pop(address, None)
            pool.free(address)
        for entries in self.world.allocator.allocator_and_pools.values():
            entries[:] = [entry for entry in entries if entry[0] is not pool]
        del pool, entries
        # An exception that left its context may hold it in a cycle.
        gc.collect()

    def held(self) -> set[int]:
        """The addresses that PyTorch has not freed."""
        return {*self.sizes, *(address for pool in self.pools for address in pool.segments)}

    def pick(self, *, asleep: bool) -> int | None:
        known = [address for address in self.sizes if (address in self.asleep) == asleep]
        return self.random.choice(known) if known else None

    def write(self, address: int) -> None:
        data = self.random.randbytes(64)
        expect(f"writing to {address:#x}", self.world.fake.write(address, data), 0)
        self.bytes_of[address] = data

    # ---- what has to hold ----

    def look(self) -> None:
        for address, data in self.bytes_of.items():
            if address not in self.asleep:
                expect(f"bytes at {address:#x}", self.world.fake.read(address, len(data)), data)
                assert address in self.world.records(), f"{address:#x} has no record"

    def settle(self) -> None:
        """With a driver that works again, all that was left is given back."""
        self.world.fake.fail_nothing()
        self.world.fake.set_capacity(0)
        for _ in range(2):
            self.world.free_raw(self.world.malloc(GRANULARITY), GRANULARITY)
        # One that could not be mapped may still be: each wakes and sleeps again.
        released = getattr(self.world.allocator, "released_segments", {})
        asleep = [self.world.allocator.pointer_to_data[address].handle for address in self.asleep]
        for handle in (*asleep, *released.values()):
            self.world.cumem.create_and_map(handle)
            self.world.cumem.unmap_and_release(handle)
        self.world.fake.set_capacity(CAPACITY * GRANULARITY)
        segments = {address: size for pool in self.pools for address, size in self.of(pool)}
        awake = [
            size
            for address, size in (*self.sizes.items(), *segments.items())
            if self.world.fake.mapped(address, size)
        ]
        known = self.world.records()
        assert known >= set(self.sizes), "a block has no record"
        assert known <= {*self.sizes, *segments}, "a record of nothing"
        expect("blocks that are awake", len(awake), len(known - self.asleep))
        expect(
            "what the driver holds",
            self.world.fake.alive(),
            Alive(
                handles=len(awake),
                mappings=len(awake),
                reservations=len(self.sizes) + len(segments),
                physical=sum(awake),
            ),
        )
        expect("what PyTorch asserts", self.world.problems, [])

    @staticmethod
    def of(pool: Any) -> list[tuple[int, int]]:
        return [(address, size) for address, (size, _) in pool.segments.items()]

    def end(self) -> None:
        self.world.fake.fail_nothing()
        while self.sizes:
            self.free()
        while self.pools:
            self.drop()
        for _ in range(2):
            self.world.free_raw(self.world.malloc(GRANULARITY), GRANULARITY)
        expect("what the driver holds in the end", self.world.fake.alive(), EMPTY)
        expect("the records in the end", self.world.records(), set())


def expected(problem: Exception) -> bool:
    """There was no memory, or a release that waits for all segments of a pool at once could not."""
    return isinstance(problem, OutOfMemoryError) or "the synchronize failed" in str(problem)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_churn(world: World, seed: int) -> None:
    Churn(world, random.Random(seed)).run(OPERATIONS)  # noqa: S311
