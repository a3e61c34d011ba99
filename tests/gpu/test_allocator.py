"""The defects of the allocator's patches through PyTorch's own MemPool, on real hardware."""

from __future__ import annotations

import gc
import importlib
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.gpu import rig
from tests.gpu.rig import GIB, MIB, Gpu


def oversized(gpu: Gpu) -> None:
    """An allocation that no device can serve; PyTorch tries twice."""
    with pytest.raises(gpu.torch.OutOfMemoryError):
        gpu.torch.empty(gpu.free() + 8 * GIB, dtype=gpu.torch.uint8, device="cuda")


def test_an_oversized_allocation_leaves_no_record(gpu: Gpu) -> None:
    with gpu.allocator.use_memory_pool("weights"):
        first = gpu.tensor(64 * MIB, 1)
        oversized(gpu)
        second = gpu.tensor(64 * MIB, 2)
    assert gpu.recorded() <= 256 * MIB, f"{gpu.recorded() / GIB:.1f} GiB are recorded"
    # As a server does. Without it the first sleep computes its digests by PyTorch, whose kernels
    # take 90 MiB when they are loaded, once; those of `intact` are the same.
    gpu.prepare_sleep()
    for cycle in range(3):
        before = gpu.free()
        gpu.allocator.sleep(("weights",))
        gained = gpu.free() - before
        assert gained >= 120 * MIB, f"sleep {cycle}: {gained / MIB:.1f} MiB"
        gpu.allocator.wake_up()
        assert gpu.intact(first, 1)
        assert gpu.intact(second, 2)
        gpu.torch.cuda.empty_cache()


def test_a_failed_load_can_be_repeated(gpu: Gpu) -> None:
    def load(fails: bool) -> object:
        with gpu.allocator.use_memory_pool("weights"):
            tensor = gpu.tensor(256 * MIB, 3)
            if fails:
                gpu.torch.empty(gpu.free() + 8 * GIB, dtype=gpu.torch.uint8, device="cuda")
            return tensor

    with pytest.raises(gpu.torch.OutOfMemoryError):
        load(fails=True)
    gc.collect()
    before = gpu.free()
    tensor = load(fails=False)
    # What the first one left unused went back before the second took as much.
    assert gpu.free() >= before - 32 * MIB, f"{(before - gpu.free()) / MIB:.0f} MiB more are used"
    gpu.allocator.sleep(("weights",))
    gpu.allocator.wake_up()
    assert gpu.intact(tensor, 3)


def test_a_wake_without_memory_rolls_back(gpu: Gpu) -> None:
    with gpu.allocator.use_memory_pool("weights"):
        tensors = [gpu.tensor(GIB, seed) for seed in range(4)]
    gpu.allocator.sleep(("weights",))
    # Another tenant leaves room for two blocks of the four.
    tenant = gpu.torch.empty(gpu.free() - 2 * GIB - 256 * MIB, dtype=gpu.torch.uint8, device="cuda")
    before = gpu.free()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory") as raised:
            gpu.allocator.wake_up()
        assert str(GIB) in str(raised.value), f"does not name the size: {raised.value}"
        assert gpu.free() >= before - 16 * MIB, "the blocks that woke keep their memory"
    del tenant
    gpu.torch.cuda.empty_cache()
    gpu.allocator.wake_up()
    assert all(gpu.intact(tensor, seed) for seed, tensor in enumerate(tensors))


def test_sleep_and_wake_can_be_repeated(gpu: Gpu) -> None:
    with gpu.allocator.use_memory_pool("weights"):
        tensor = gpu.tensor(GIB, 5)
    with gpu.allocator.use_memory_pool("kv_cache"):
        cache = gpu.tensor(GIB, 6)
    gpu.allocator.sleep(("weights",))
    gpu.allocator.sleep(("weights",))
    gpu.allocator.wake_up(["weights"])
    gpu.allocator.wake_up(["weights"])
    gpu.allocator.sleep(("weights",))
    gpu.allocator.wake_up()
    gpu.allocator.wake_up()
    assert gpu.intact(tensor, 5)
    cache.fill_(1)


def test_a_sleeping_block_can_be_freed(gpu: Gpu) -> None:
    with gpu.allocator.use_memory_pool("weights"):
        tensor = gpu.tensor(GIB, 7)
    gpu.allocator.sleep(("weights",))
    del tensor
    # The pool ends, and frees its segments.
    gpu.allocator.allocator_and_pools.clear()
    gc.collect()
    assert gpu.recorded() == 0
    with gpu.allocator.use_memory_pool("weights"):
        tensor = gpu.tensor(GIB, 8)
    gpu.allocator.sleep(("weights",))
    gpu.allocator.wake_up()
    assert gpu.intact(tensor, 8)


def test_a_pool_that_ends_frees_unused_segments_once(gpu: Gpu) -> None:
    before = gpu.free()
    with gpu.allocator.use_memory_pool("weights"):
        tensor = gpu.tensor(256 * MIB, 9)
        unused = gpu.tensor(512 * MIB, 10)
        del unused
    del tensor
    gpu.allocator.allocator_and_pools.clear()
    gc.collect()
    assert gpu.recorded() == 0
    assert gpu.free() >= before - 16 * MIB


def test_unused_memory_waits_for_its_kernels(gpu: Gpu) -> None:
    # A transient of weight conversion: freed on the host, its kernel is still in flight.
    with gpu.allocator.use_memory_pool("weights"):
        transient = gpu.torch.empty(256 * MIB, dtype=gpu.torch.uint8, device="cuda")
        gpu.write_late(transient)
        del transient
    gpu.torch.cuda.synchronize()


def test_sleep_waits_for_kernels(gpu: Gpu) -> None:
    with gpu.allocator.use_memory_pool("kv_cache"):
        cache = gpu.torch.empty(256 * MIB, dtype=gpu.torch.uint8, device="cuda")
    gpu.write_late(cache)
    gpu.allocator.sleep(())
    gpu.torch.cuda.synchronize()


def test_a_pool_that_ends_waits_for_kernels(gpu: Gpu) -> None:
    with gpu.allocator.use_memory_pool("weights"):
        tensor = gpu.torch.empty(256 * MIB, dtype=gpu.torch.uint8, device="cuda")
    gpu.write_late(tensor)
    del tensor
    gpu.allocator.allocator_and_pools.clear()
    gc.collect()
    gpu.torch.cuda.synchronize()


@pytest.mark.guard
def test_bytes_survive_ten_cycles(gpu: Gpu) -> None:
    with gpu.allocator.use_memory_pool("weights"):
        tensors = [gpu.tensor(size * MIB, seed) for seed, size in enumerate((2, 30, 700, 1024))]
    with gpu.allocator.use_memory_pool("kv_cache"):
        cache = gpu.tensor(GIB, 20)
    free_when_awake: list[int] = []
    for _ in range(11):
        asleep_from = gpu.free()
        gpu.allocator.sleep(("weights",))
        assert gpu.free() >= asleep_from + 2 * GIB
        gpu.allocator.wake_up(["weights"])
        assert all(gpu.intact(tensor, seed) for seed, tensor in enumerate(tensors))
        gpu.allocator.wake_up(["kv_cache"])
        cache.fill_(3)
        gpu.torch.cuda.empty_cache()
        free_when_awake.append(gpu.free())
    # The first cycle loads the kernels that compare, and they stay.
    lost = free_when_awake[0] - free_when_awake[-1]
    assert lost <= 16 * MIB, f"{lost} bytes were lost in ten cycles: {free_when_awake}"


@pytest.mark.guard
def test_a_thousand_cycles_take_no_memory(gpu: Gpu) -> None:
    with gpu.allocator.use_memory_pool("weights"):
        tensors = [gpu.tensor(4 * MIB, seed) for seed in range(16)]
    with gpu.allocator.use_memory_pool("kv_cache"):
        cache = gpu.tensor(64 * MIB, 20)
    free_asleep: list[int] = []
    for cycle in range(1000):
        gpu.allocator.sleep(("weights",))
        free_asleep.append(gpu.free())
        gpu.allocator.wake_up()
        if cycle % 100 == 99:
            assert all(gpu.intact(tensor, seed) for seed, tensor in enumerate(tensors))
            cache.fill_(3)
    # The first cycles load kernels, which stay.
    lost = free_asleep[100] - free_asleep[-1]
    assert lost <= 2 * MIB, f"{lost} bytes were lost in 900 cycles"


class Interrupt:
    """A real signal at a random time of a call; ``hits`` counts the calls it has ended."""

    def __init__(self, seed: int) -> None:
        self.hits = 0
        self._random = random.Random(seed)  # noqa: S311
        self._armed = False
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt

    def during(self, call: Callable[[], None], seconds: float) -> bool:
        """Run ``call``, which takes ``seconds``; return whether the signal has ended it."""
        try:
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, self._random.uniform(1e-6, 1.1 * seconds))
                call()
            finally:
                self._armed = False
        except KeyboardInterrupt:
            self.hits += 1
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    def chance(self) -> bool:
        return self._random.random() < 0.5


def test_interrupts_of_sleep_and_wake_lose_nothing(gpu: Gpu) -> None:
    """100 calls of each are ended by a signal; the same call or its opposite goes on from there."""
    sizes = (2, 4, 8, 16, 32, 64)
    with gpu.allocator.use_memory_pool("weights"):
        tensors = [gpu.tensor(size * MIB, seed) for seed, size in enumerate(sizes)]
    with gpu.allocator.use_memory_pool("kv_cache"):
        cache = gpu.tensor(64 * MIB, 99)

    def sleep() -> None:
        gpu.allocator.sleep(("weights",))

    def wake_up() -> None:
        gpu.allocator.wake_up()

    def timed(call: Callable[[], None]) -> float:
        began = time.monotonic()
        call()
        return time.monotonic() - began

    # sleep and wake_up collect garbage; what torch's import has made is not looked through again.
    gc.freeze()
    for _ in range(2):
        seconds = {sleep: timed(sleep)}
        asleep = gpu.free()
        seconds[wake_up] = timed(wake_up)
        assert all(gpu.intact(tensor, seed) for seed, tensor in enumerate(tensors))
    interrupt = Interrupt(seed=0)
    for call, opposite in ((sleep, wake_up), (wake_up, sleep)):
        interrupt.hits = 0
        for attempt in range(2000):
            if interrupt.hits == 100:
                break
            if call is wake_up:
                sleep()
            ended = interrupt.during(call, seconds[call])
            if ended and interrupt.chance():
                opposite()
            # Wherever it was ended: asleep in full frees all, awake in full has all bytes.
            sleep()
            kept = (asleep - gpu.free()) / MIB
            assert kept <= 1, f"{kept:.0f} MiB stay mapped asleep after call {attempt}"
            wake_up()
            wrong = [n for n, tensor in enumerate(tensors) if not gpu.intact(tensor, n)]
            assert not wrong, f"call {attempt} of {call.__name__} lost tensors {wrong}"
        cache.fill_(1)
        assert interrupt.hits == 100, f"only {interrupt.hits} signals met {call.__name__}"


@pytest.mark.guard
def test_what_is_written_between_two_sleeps_comes_back(gpu: Gpu) -> None:
    """With host copies that are kept: in place, whole, and as two halves that are exchanged."""
    with gpu.allocator.use_memory_pool("weights"):
        tensors = [gpu.tensor(64 * MIB, seed) for seed in range(4)]
    for cycle in range(3):
        gpu.allocator.sleep(("weights",))
        gpu.allocator.wake_up()
        for i, tensor in enumerate(tensors):
            assert gpu.intact(tensor, i + (cycle if i == 1 else 0)), f"tensor {i}, cycle {cycle}"
        tensors[1].add_(1)
    half = tensors[2].numel() // 2
    tensors[2].copy_(gpu.torch.cat((tensors[2][half:], tensors[2][:half])))
    gpu.allocator.sleep(("weights",))
    gpu.allocator.wake_up()
    tensors[2].copy_(gpu.torch.cat((tensors[2][half:], tensors[2][:half])))
    assert gpu.intact(tensors[2], 2)


def test_a_later_sleep_copies_nothing(gpu: Gpu) -> None:
    """By time: unmapping 4 GiB takes milliseconds, copying it a tenth of a second."""
    with gpu.allocator.use_memory_pool("weights"):
        tensors = [gpu.tensor(GIB // 4, seed) for seed in range(16)]
    first = later = 0.0
    for cycle in range(4):
        start = time.monotonic()
        gpu.allocator.sleep(("weights",))
        took = time.monotonic() - start
        gpu.allocator.wake_up()
        first = first or took
        later = took if cycle < 2 else min(later, took)
    assert all(gpu.intact(tensor, seed) for seed, tensor in enumerate(tensors))
    assert later < 0.06, f"the first sleep took {first:.3f} s, a later one {later:.3f} s"


def test_the_digest_of_the_kernel_is_that_of_torch(gpu: Gpu) -> None:
    torch = gpu.torch
    rig.keep_backend()
    copies: Any = importlib.import_module("vllm_sleep_keep.host_copies")
    for rows in (1, 7, 8, 128, 1000):
        words = torch.randint(-(2**31), 2**31 - 1, (rows * copies.WORDS,), device="cuda").int()
        factors = copies.multipliers(words.device)
        mine, theirs = (torch.zeros(rows, dtype=torch.int64, device="cuda") for _ in range(2))
        for digest, numbers in ((copies.digest_by_kernel, mine), (copies.digest_by_torch, theirs)):
            digest(words.data_ptr(), 4 * len(words), factors, numbers)
        assert torch.equal(mine, theirs), f"{rows} rows"
        assert len(set(mine.tolist())) == rows


def set_allocator(gpu: Gpu, settings: str) -> None:
    """PyTorch reads PYTORCH_CUDA_ALLOC_CONF when it is imported, which has been."""
    setter = getattr(gpu.torch._C, "_accelerator_setAllocatorSettings", None)
    (setter or gpu.torch.cuda.memory._set_allocator_settings)(settings)


def test_a_load_maps_little_more_than_it_needs(gpu: Gpu) -> None:
    """Temporary tensors of 60 sizes, and tensors that stay, without segments that are split."""
    set_allocator(gpu, "max_split_size_mb:20")
    sizes = random.Random(0)  # noqa: S311
    kept = []
    peak = 0
    with gpu.allocator.use_memory_pool("weights"):
        for seed in range(60):
            size = sizes.randrange(1331, 2048) * MIB
            temporary = gpu.torch.empty(size, dtype=gpu.torch.uint8, device="cuda")
            peak = max(peak, gpu.recorded())
            temporary.fill_(seed)
            del temporary
            kept.append(gpu.tensor(100 * MIB, seed))
            peak = max(peak, gpu.recorded())
    assert peak <= 9.5 * GIB, f"{peak / GIB:.1f} GiB were mapped for 5.9 GiB"
    assert all(gpu.intact(tensor, seed) for seed, tensor in enumerate(kept))
    gpu.allocator.sleep(("weights",))
    gpu.allocator.wake_up()
    assert all(gpu.intact(tensor, seed) for seed, tensor in enumerate(kept))


def test_out_of_memory_in_the_pool_is_tried_again_once(gpu: Gpu) -> None:
    """What is free and three unused segments are enough together, and neither alone."""
    with gpu.allocator.use_memory_pool("weights"):
        kept = gpu.tensor(512 * MIB, 1)
        unused = [gpu.tensor(900 * MIB, seed) for seed in range(3)]
        free = gpu.free()
        del unused
        large = gpu.torch.empty(free + 2000 * MIB, dtype=gpu.torch.uint8, device="cuda")
        large.fill_(7)
        oversized(gpu)
        del large
        after = gpu.tensor(GIB, 2)
    assert gpu.intact(kept, 1)
    assert gpu.intact(after, 2)
