"""A random driver of allocator operations against a model of what every block has to contain.

Deterministic by seed, but for the operations in which threads or signals take part: those end at
any time, and the model does not depend on when.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.fakecuda.standin import GRANULARITY
from tests.witness.interrupt import raise_at
from tests.witness.world import EMPTY, World, expect

TAGS = ("weights", "kv_cache", "runtime")
FUNCTIONS = (
    "*", "cuMemCreate", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemRelease",
    "cuMemAddressFree", "cuMemAddressReserve", "cudaMemcpy", "cudaDeviceSynchronize",
)  # fmt: skip
# ... and what kept host copies take.
MORE_FUNCTIONS = (
    "cudaMemcpyAsync", "cudaMemcpyAsync", "cudaStreamSynchronize", "cudaHostRegister",
    "cudaSetDevice",
    "cudaStreamCreateWithFlags", "cudaDeviceGetPCIBusId", "cudaDeviceGetAttribute",
)  # fmt: skip
ERRORS = (2, 700, 999)
MOST = 8


@dataclass(eq=False)
class Modelled:
    """A block. ``data`` is what its first bytes have to be; None after they were discarded."""

    address: int
    size: int
    tag: str
    data: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    operations: int
    seed: int
    # Keep host copies, by the package's backend.
    plugin: bool = False
    # Failing calls of the driver, interrupts, and threads.
    trouble: bool = True
    # Also two interrupts in a row, and threads that free and allocate all the time.
    rough: bool = False


@dataclass
class Fuzzer:
    world: World
    settings: Settings
    blocks: list[Modelled] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    history: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.settings.seed)  # noqa: S311 - reproducible, not secret
        self.written = 0
        # Whether a call of the driver may have failed.
        self.failed = False
        if self.settings.plugin:
            self.world.use_plugin()
            if self.chance.random() < 0.5:
                # A sleep that was not prepared has the kernel compiled in the background.
                self.world.host_copies._compiled.clear()

    # ---- the model ----

    def record(self, block: Modelled) -> Any:
        return self.world.allocator.pointer_to_data.get(block.address)

    def write(self, block: Modelled) -> None:
        self.written += 1
        block.data = f"{self.settings.seed}.{self.written}.".encode() * 16
        code = self.world.fake.write(block.address, block.data)
        assert code == 0, f"{block.tag} {block.address:#x} is awake and cannot be written: {code}"

    def look(self) -> None:
        """Every block has a record, and is readable with its bytes where it counts as awake."""
        for block in self.blocks:
            record = self.record(block)
            assert record is not None, f"{block.tag} {block.address:#x} has no record"
            if record.is_asleep:
                continue
            length = len(block.data or b"") or 1
            got = self.world.fake.read(block.address, length)
            assert got is not None, f"{block.tag} {block.address:#x} is awake and not mapped"
            if block.data is not None:
                assert got == block.data, (
                    f"{block.tag} {block.address:#x} lost its bytes: {got[:12]!r} instead of "
                    f"{block.data[:12]!r}"
                )

    def forget_discarded(self, awake_before: set[int], kept: tuple[str, ...]) -> None:
        """What went to sleep, and was not to be kept, may contain anything from now on."""
        for block in self.blocks:
            record = self.record(block)
            if record is None or not record.is_asleep or block.tag in kept:
                continue
            if block.address in awake_before:
                block.data = None

    # ---- one operation ----

    def step(self) -> None:
        name = self.chance.choice(
            ("malloc", "malloc", "free", "rewrite", "sleep", "sleep", "wake", "wake", "discard")
        )
        getattr(self, name)()
        self.look()

    def trouble(self) -> str:
        """What is done to the next call: nothing, a failing driver, an interrupt, a thread."""
        if not self.settings.trouble:
            return ""
        kinds = ["", "", "driver", "interrupt", "both", "thread"]
        # The older drivers keep the operations of their seeds.
        if self.settings.plugin:
            kinds += ["twice", "order"]
        if self.settings.rough:
            kinds += ["twice", "twice", "threads", "threads"]
        kind = self.chance.choice(kinds)
        if kind in ("driver", "both"):
            more = MORE_FUNCTIONS if self.settings.plugin else ()
            function = self.chance.choice(FUNCTIONS + more)
            self.world.fake.fail(
                function,
                nth=self.chance.randint(1, 12),
                error=self.chance.choice(ERRORS),
                count=self.chance.choice((1, 1, 2, 50)),
            )
        return kind

    def calm(self) -> None:
        self.world.fake.fail_nothing()

    def under_trouble(self, what: str, call: Any) -> BaseException | None:
        """Make the call of sleep, wake_up or discard; what it raised."""
        self.world.fake.forget_calls()
        kind = self.trouble()
        self.history.append(f"{what} {kind}")
        self.counts[what.split()[0]] += 1
        problem: list[BaseException] = []

        def guarded() -> None:
            try:
                call()
            except BaseException as error:
                problem.append(error)
                raise

        if kind in ("interrupt", "both", "twice"):
            opcodes = self.chance.random() < 0.5
            at = self.chance.randint(1, 700 if opcodes else 120)
            again = self.chance.randint(1, 40) if kind == "twice" else 0
            if raise_at(guarded, at, opcodes=opcodes, again=again).where:
                self.counts["interrupts"] += 1
        elif kind == "thread":
            self.with_thread(guarded)
        elif kind == "order":
            self.with_forced_order(guarded)
        elif kind == "threads":
            self.with_threads(guarded)
        else:
            try:
                guarded()
            except RuntimeError:
                self.counts["failures"] += 1
        self.calm()
        self.failed |= kind in ("driver", "both")
        # A driver that has refused to wait may be thought to have failed for good.
        if not self.failed:
            expect("memory given up in use", self.world.fake.violations(), 0)
        return problem[0] if problem else None

    def with_thread(self, call: Any) -> None:
        """Another thread frees a block, and allocates one where it may be, during a copy."""
        if not self.blocks:
            call()
            return
        victim = self.blocks.pop(self.chance.randrange(len(self.blocks)))
        at = self.chance.randint(1, 4)
        size = self.chance.choice((victim.size, GRANULARITY))
        owner, name = self.world.copier
        copy = getattr(owner, name)
        made: list[Modelled] = []
        copies: list[int] = []

        def other() -> None:
            self.world.free_raw(victim.address, victim.size)
            address = self.world.malloc(size)
            if address:
                made.append(Modelled(address, size, self.world.allocator.current_tag))
                self.write(made[0])

        def and_meanwhile(to: Any, source: Any, size: int, *stream: Any) -> None:
            copies.append(size)
            if len(copies) == at:
                thread = threading.Thread(target=other)
                thread.start()
                thread.join()
            copy(to, source, size, *stream)

        setattr(owner, name, and_meanwhile)
        try:
            call()
        except RuntimeError:
            self.counts["failures"] += 1
        finally:
            setattr(owner, name, copy)
            if len(copies) < at:
                other()
            self.blocks += made
            self.counts["threads"] += 1

    def with_forced_order(self, call: Any) -> None:
        """Another thread frees a block; where it waits for the device, it lets the call go on.

        So copies are issued between that wait and whatever the free callback does after it.
        """
        if not self.blocks:
            call()
            return
        victim = self.blocks.pop(self.chance.randrange(len(self.blocks)))
        first, more = self.chance.randint(1, 3), self.chance.randint(1, 3)
        owner, name = self.world.copier
        copy, wait = getattr(owner, name), self.world.synchronize
        accelerator = self.world.torch.accelerator
        started, issued = threading.Event(), threading.Event()
        copies: list[int] = []

        def waits_and_lets_go_on(device: Any = None) -> None:
            wait(device)
            if threading.current_thread() is thread:
                started.set()
                # The call may have no copy left.
                issued.wait(0.05)

        def free() -> None:
            self.world.free_raw(victim.address, victim.size)
            started.set()

        def counted(*arguments: Any) -> None:
            copies.append(0)
            if len(copies) == first:
                thread.start()
                started.wait(1)
            copy(*arguments)
            if len(copies) == first + more:
                issued.set()

        thread = threading.Thread(target=free)
        setattr(owner, name, counted)
        accelerator.synchronize = waits_and_lets_go_on
        try:
            call()
        except RuntimeError:
            self.counts["failures"] += 1
        finally:
            setattr(owner, name, copy)
            issued.set()
            if thread.ident is None:
                free()
            else:
                thread.join()
            accelerator.synchronize = wait
            self.counts["orders"] += 1

    def with_threads(self, call: Any) -> None:
        """Two threads free blocks of their own and allocate others until the call ends."""
        begun, stop = threading.Event(), threading.Event()
        kept = len(self.blocks) // 2
        left: list[Modelled] = []

        def churn(own: list[Modelled], chance: random.Random) -> None:
            begun.wait()
            while own and not stop.is_set():
                block = own.pop(chance.randrange(len(own)))
                self.world.free_raw(block.address, block.size)
                size = GRANULARITY * chance.randint(1, 3)
                address = self.world.malloc(size)
                if address:
                    own.append(Modelled(address, size, self.world.allocator.current_tag))
                    self.write(own[-1])
                time.sleep(chance.random() * 0.0003)
            left.extend(own)  # a thread that could not begin has freed none

        threads = [
            threading.Thread(
                target=churn,
                args=(self.blocks[kept + i :: 2], random.Random(self.chance.random())),  # noqa: S311
            )
            for i in (0, 1)
        ]
        del self.blocks[kept:]
        # From the first step on the call knows its blocks: one that is allocated then is none.
        steps = [(self.world.cumem, name) for name in ("create_and_map", "unmap_and_release")]
        steps.append(self.world.copier)
        real = [getattr(owner, name) for owner, name in steps]

        def noted(function: Any) -> Any:
            def call_noted(*arguments: Any) -> Any:
                begun.set()
                return function(*arguments)

            return call_noted

        for (owner, name), function in zip(steps, real, strict=True):
            setattr(owner, name, noted(function))
        for thread in threads:
            thread.start()
        try:
            call()
        except RuntimeError:
            self.counts["failures"] += 1
        finally:
            stop.set()
            begun.set()
            for thread in threads:
                thread.join()
            for (owner, name), function in zip(steps, real, strict=True):
                setattr(owner, name, function)
            self.blocks += left
            self.counts["threads"] += 1

    # ---- operations ----

    def malloc(self) -> None:
        if len(self.blocks) >= MOST:
            return
        tag = self.chance.choice(TAGS)
        size = GRANULARITY * self.chance.choice((1, 1, 1, 2))
        self.world.allocator.current_tag = tag
        kind = self.trouble()
        self.history.append(f"malloc {tag} {kind}")
        address = self.world.malloc(size)
        self.calm()
        self.counts["malloc"] += 1
        if not address:
            self.counts["failures"] += 1
            return
        block = Modelled(address, size, tag)
        self.blocks.append(block)
        self.write(block)

    def free(self) -> None:
        # An untouched allocator does not survive that a block is freed while it sleeps.
        blocks = self.blocks if self.settings.trouble else self.awake()
        if not blocks:
            return
        block = blocks[self.chance.randrange(len(blocks))]
        self.blocks.remove(block)
        kind = self.trouble()
        self.history.append(f"free {block.tag} {kind}")
        if kind == "thread":
            thread = threading.Thread(target=self.world.free_raw, args=(block.address, block.size))
            thread.start()
            thread.join()
        else:
            self.world.free_raw(block.address, block.size)
        self.calm()
        self.counts["free"] += 1

    def awake(self) -> list[Modelled]:
        return [block for block in self.blocks if not self.record(block).is_asleep]

    def rewrite(self) -> None:
        for block in self.awake():
            if self.chance.random() < 0.5:
                self.write(block)

    def sleep(self) -> None:
        tags = tuple(tag for tag in TAGS if self.chance.random() < 0.6)
        awake = {block.address for block in self.awake()}
        problem = self.under_trouble(f"sleep {tags}", lambda: self.world.allocator.sleep(tags))
        self.forget_discarded(awake, tags)
        if problem is None and self.blocks and not self.had_thread:
            self.world.allocator.sleep(tags)
            # What could not be given back is tried when PyTorch allocates or frees next.
            self.world.free_raw(self.world.malloc(GRANULARITY), GRANULARITY)
            late = self.world.fake.alive().physical
            expect("physical memory after a sleep that succeeded", late, 0)

    @property
    def had_thread(self) -> bool:
        """Whether the last call had a thread beside it, whose block may be awake."""
        return self.history[-1].endswith((" thread", " threads", " order"))

    def wake(self) -> None:
        tags = self.chance.choice((None, None, ["weights"], ["kv_cache"], list(TAGS)))
        capacity = 0
        if self.chance.random() < 0.2:
            capacity = GRANULARITY * self.chance.randint(1, MOST)
            self.world.fake.set_capacity(capacity)
        problem = self.under_trouble(f"wake {tags}", lambda: self.world.allocator.wake_up(tags))
        self.world.fake.set_capacity(0)
        if problem is None:
            for block in self.blocks:
                if tags is None or block.tag in tags:
                    assert not self.record(block).is_asleep, (
                        f"{block.tag} {block.address:#x} sleeps after a wake_up that succeeded"
                    )

    def discard(self) -> None:
        tag = self.chance.choice(TAGS)
        awake = {block.address for block in self.awake()}
        self.under_trouble(f"discard {tag}", lambda: self.world.allocator.discard((tag,)))
        kept = tuple(other for other in TAGS if other != tag)
        self.forget_discarded(awake, kept)
        return

    # ---- a run ----

    def settle(self) -> None:
        """Without trouble, everything works, and nothing is left of it."""
        self.world.allocator.wake_up()
        self.look()
        self.world.allocator.sleep(TAGS)
        self.world.allocator.wake_up()
        self.look()
        for block in self.blocks:
            assert not self.record(block).is_asleep, f"{block.tag} does not wake"
            self.world.free_raw(block.address, block.size)
        self.blocks.clear()
        # What could not be given back is given back with the next operations.
        for _ in range(2):
            self.world.free_raw(self.world.malloc(GRANULARITY), GRANULARITY)
        expect("what the driver holds in the end", self.world.fake.alive(), EMPTY)
        expect("the records in the end", self.world.records(), set())

    def run(self) -> Counter[str]:
        try:
            for n in range(self.settings.operations):
                self.step()
                if n % 60 == 59:
                    self.settle()
            self.settle()
        except Exception as error:
            last = " | ".join(self.history[-8:])
            raise AssertionError(f"seed {self.settings.seed}, after {last}: {error}") from error
        return self.counts


def seeds(few: int) -> range:
    """The seeds a test goes through; SM12X_SEEDS sets another number, for a longer run."""
    return range(int(os.environ.get("SM12X_SEEDS", str(few))))
