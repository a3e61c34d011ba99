"""The defects of the allocator's patches through PyTorch's own MemPool, on real hardware."""

from __future__ import annotations

import gc

import pytest
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
    before = gpu.free()
    gpu.allocator.sleep(("weights",))
    assert gpu.free() >= before + 128 * MIB
    gpu.allocator.wake_up()
    assert gpu.intact(first, 1)
    assert gpu.intact(second, 2)


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
