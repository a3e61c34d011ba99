"""A random driver of what is kept of a KV cache, against a model of the content of each block.

It calls as vLLM's engine does: blocks are written while all is awake and restored or dropped, a
sleep that is not to keep them drops them first, and so does what ends with an error. Deterministic
by seed.
"""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.fakecuda.standin import GRANULARITY
from tests.witness.interrupt import raise_at
from tests.witness.kv_rig import BLOCKS, KEPT, LAYOUTS, PIECE, Cache, make
from tests.witness.world import GIB, Block, World, expect

FUNCTIONS = (
    "*", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemRelease",
    "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaMemcpy2DAsync", "cudaMemcpyBatchAsync",
    "cudaStreamSynchronize", "cudaStreamSynchronize", "cudaHostRegister", "cudaHostRegister",
    "cudaDeviceSynchronize", "cudaSetDevice", "cudaStreamCreateWithFlags",
)  # fmt: skip
ERRORS = (2, 700, 999)
MOST_WEIGHTS = 4


class KvFuzzer:
    """One run. ``trouble`` are failing calls of the driver, interrupts, and missing memory."""

    def __init__(self, world: World, seed: int, *, trouble: bool) -> None:
        self.world, self.seed = world, seed
        self.chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self.trouble = trouble
        self.cache: Cache = make(world, self.chance.choice(list(LAYOUTS)), weights=2)
        self.backend = self.cache.backend
        module: Any = importlib.import_module(KEPT)
        if self.chance.random() < 0.3:
            module.MOST_PITCH = 999
        if self.chance.random() < 0.5:
            module.GROWTH = 1.5
        world.digested = 4 << 14
        # What is kept, None where nothing is, and the weights by address when it was.
        self.kept: dict[int, bytes] | None = None
        self.weights_then = self.weights_now()
        self.history: list[str] = []
        self.counts: Counter[str] = Counter()

    # ---- the state of the allocator ----

    def is_asleep(self, blocks: list[Block]) -> bool:
        """Whether any of the blocks is."""
        records = self.world.allocator.pointer_to_data
        return any(records[block.address].is_asleep for block in blocks)

    @property
    def is_awake(self) -> bool:
        return not self.is_asleep([*self.cache.memory, *self.cache.weights])

    def weights_now(self) -> dict[int, bytes]:
        return {block.address: block.data for block in self.cache.weights}

    def look(self) -> None:
        """What is awake has its bytes, and what counts as kept is what the model says."""
        if not self.is_asleep(self.cache.memory):
            self.cache.expect_content()
        for block in self.cache.weights:
            if not self.is_asleep([block]):
                assert self.world.intact(block), "weights lost their bytes"
        expect("memory given up in use", self.world.fake.violations(), self.cache.violations)

    def note_kept(self) -> None:
        """A call that failed has dropped all, or nothing."""
        blocks, size = self.backend.kept_kv()
        if self.kept is not None and blocks == 0:
            self.kept = None
        count = len(self.kept or ())
        expect("kept", (blocks, size), (count, count * self.cache.per_block))

    def note_sleep(self) -> None:
        """The content of memory that sleeps is gone."""
        if self.is_asleep(self.cache.memory):
            self.cache.content.clear()
        self.note_kept()

    # ---- one call ----

    def call(self, name: str, function: Callable[[], object]) -> bool:
        """Make a call, perhaps with trouble; whether it has returned."""
        kinds = ["", "", "driver", "interrupt", "memory"] if self.trouble else [""]
        kind = self.chance.choice(kinds)
        self.history.append(f"{name} {kind}")
        self.counts[name] += 1
        returned: list[bool] = []

        def noted() -> None:
            function()
            returned.append(True)

        self.world.fake.forget_calls()
        if kind == "driver":
            self.world.fake.fail(
                self.chance.choice(FUNCTIONS),
                nth=self.chance.randint(1, 9),
                error=self.chance.choice(ERRORS),
                count=self.chance.choice((1, 1, 2, 50)),
            )
        if kind == "memory":
            self.world.host_memory = 4 * GIB + PIECE * self.chance.choice((0, 1, 5, 20))
        if kind == "interrupt":
            opcodes = self.chance.random() < 0.5
            at = self.chance.randint(1, 900 if opcodes else 250)
            if raise_at(noted, at, opcodes=opcodes).where:
                self.counts["interrupts"] += 1
        else:
            try:
                noted()
            except RuntimeError:
                self.counts["failures"] += 1
        self.world.fake.fail_nothing()
        self.world.host_memory = 64 * GIB
        if kind == "driver" and name.startswith("wake"):
            # Its undoing unmaps also where the driver refuses to wait.
            self.cache.violations = self.world.fake.violations()
        return bool(returned)

    # ---- operations ----

    def write(self) -> None:
        if self.is_awake and self.kept is None:
            self.cache.write(*self.chance.sample(range(BLOCKS), self.chance.randint(1, 9)))

    def forget(self) -> None:
        """Blocks that the prefix cache evicts."""
        for block in self.chance.sample(sorted(self.cache.content), len(self.cache.content) // 3):
            del self.cache.content[block]

    def rewrite(self) -> None:
        block = self.chance.choice(self.cache.weights)
        if self.is_asleep([block]):
            return
        data = block.data[1:] + block.data[:1]
        new = Block(address=block.address, size=block.size, tag=block.tag, data=data)
        self.world.fill(new)
        self.cache.weights[self.cache.weights.index(block)] = new

    def malloc(self) -> None:
        if self.is_awake and len(self.cache.weights) < MOST_WEIGHTS:
            size = GRANULARITY * self.chance.randint(1, 2)
            self.cache.weights.append(self.world.block("weights", size))

    def free(self) -> None:
        if self.is_awake and len(self.cache.weights) > 1:
            index = self.chance.randrange(len(self.cache.weights))
            self.world.free(self.cache.weights.pop(index))

    def room(self) -> None:
        self.call("room", lambda: self.backend.kv_room(self.cache.per_block, None))

    def prepare(self) -> None:
        self.call("prepare", lambda: self.backend.prepare_kv(PIECE * self.chance.randint(1, 30)))

    def keep(self) -> None:
        """A sleep that keeps blocks, if the KV cache is awake and has what is kept of it."""
        if self.is_asleep(self.cache.memory) or self.kept is not None:
            return
        if self.chance.random() < 0.3:
            self.forget()
        if self.call("keep", self.cache.keep) and self.cache.content:
            self.kept = dict(self.cache.content)
        elif self.backend.kept_kv() != (0, 0):
            # An interrupt came after all was done.
            self.kept = dict(self.cache.content)
        self.note_kept()
        self.weights_then = self.weights_now()
        if self.kept is not None and self.chance.random() < 0.1:
            # Another rank could not keep its blocks.
            self.drop()
        self.sleep()

    def sleep(self) -> None:
        level = self.chance.choice((1, 1, 1, 0, 0, 2))
        if self.kept is None or level == 2:
            self.backend.drop_kv()
            self.kept = None
        if level == 0:
            self.to_begin("discard", lambda: self.backend.discard(("kv_cache",)))
        elif level == 1:
            self.to_begin("suspend", lambda: self.backend.suspend(1))
        else:
            # Weights that sleep at level 1 keep their copies; awake ones are discarded.
            awake = [block for block in self.cache.weights if not self.is_asleep([block])]
            self.call("deep", lambda: self.backend.suspend(2))
            if any(self.is_asleep([block]) for block in awake):
                self.recover(awake)
        self.note_sleep()

    def to_begin(self, name: str, function: Callable[[], object]) -> None:
        """Make a call of a sleep, again where an interrupt came before anything was done.

        Digests are of the weights at the first sleep that begins after blocks were kept.
        """
        done = False
        while not done:
            kept = self.backend.copies._kept
            done = self.call(name, function) or kept is None or kept.has_begun

    def recover(self, blocks: list[Block]) -> None:
        """Load weights again that a level-2 sleep has discarded."""
        self.backend.resume()
        self.cache.content.clear()
        for block in blocks:
            self.world.fill(block)

    def wake(self) -> None:
        tags = self.chance.choice((None, None, None, ["weights"], ["kv_cache"]))
        capacity = GRANULARITY * self.chance.randint(1, 9) if self.chance.random() < 0.2 else 0
        self.world.fake.set_capacity(capacity)
        done = self.call(f"wake {tags}", lambda: self.backend.resume(tags))
        self.world.fake.set_capacity(0)
        self.note_kept()
        if self.is_asleep(self.cache.memory):
            return
        if self.is_awake or (done and self.chance.random() < 0.3):
            self.restore()

    def restore(self) -> None:
        if self.kept is None:
            return
        if self.chance.random() < 0.5:
            self.ask()
        while not self.call("restore", self.backend.restore_kv):
            # Until it succeeds; sometimes the engine drops them instead.
            if self.backend.kept_kv() == (0, 0):
                break
            if self.chance.random() < 0.2:
                self.drop()
                return
        self.cache.content = dict(self.kept)
        self.look()
        if self.backend.copies._kept is None:
            # They could not be kept, and have never been unmapped.
            self.drop()
            return
        self.ask()
        if self.chance.random() < 0.2:
            # Another rank could not wake: this one sleeps again, without keeping anew.
            kept = self.kept
            self.call("again", lambda: self.backend.suspend(1))
            if self.is_asleep(self.cache.memory):
                self.cache.content.clear()
                blocks = len(kept)
                expect("kept", self.backend.kept_kv(), (blocks, blocks * self.cache.per_block))
                return
        self.drop()

    def ask(self) -> None:
        """Weights that have changed are never missed; unchanged ones may be, where calls fail."""
        changed = self.backend.weights_changed()
        if self.weights_now() != self.weights_then:
            expect("whether weights changed", changed, True)
        elif not self.trouble:
            expect("whether weights changed", changed, False)

    def drop(self) -> None:
        self.call("drop", self.backend.drop_kv)
        self.backend.drop_kv()
        self.kept = None

    # ---- a run ----

    def settle(self) -> None:
        """Without trouble everything works."""
        self.backend.resume()
        if self.kept is not None:
            self.backend.restore_kv()
            self.cache.content = dict(self.kept)
        self.drop()
        self.look()
        # A handle whose release failed is released when PyTorch allocates or frees next.
        self.world.free(self.world.block())
        self.cache.write(*range(0, BLOCKS, 7))
        self.cache.swap()

    def run(self, operations: int) -> Counter[str]:
        names: tuple[str, ...] = ("write",) * 4 + ("keep",) * 5 + ("wake",) * 5
        names += ("rewrite", "malloc", "free", "room", "prepare", "sleep")
        try:
            for _ in range(operations):
                name = self.chance.choice(names)
                self.history.append(name)
                getattr(self, name)()
                self.look()
            self.settle()
            self.cache.wait()
            self.cache.close()
        except Exception as error:
            last = " | ".join(self.history[-14:])
            raise AssertionError(f"seed {self.seed}, after {last}: {error}") from error
        return self.counts
