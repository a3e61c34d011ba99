"""Unused segments of a pool are given back while it is in use, as PyTorch itself keeps them all.

Each function runs with PyTorch's own caching allocator, of the version that the base is locked to.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.witness.caching import Caching, Rig
from tests.witness.world import GIB, MIB, raised

# Under which vLLM loads.
CAP = "max_split_size_mb:20"
RECLAIM = "vllm.device_allocator.segment_reclaim"


def pools(rig: Rig, tag: str = "weights") -> int:
    return len(rig.allocator.allocator_and_pools[tag])


def load(rig: Rig, rounds: int = 60) -> list[Any]:
    """Temporary tensors of 1.3 to 2 GiB, and tensors of 100 MiB that stay."""
    chosen = random.Random(0)  # noqa: S311
    kept = []
    for _ in range(rounds):
        temporary = rig.empty(chosen.randrange(1331, 2048) * MIB)
        kept.append(rig.empty(100 * MIB))
        del temporary
    return kept


def expect_whole(rig: Rig, tensors: list[Any]) -> None:
    for seed, tensor in enumerate(tensors):
        assert rig.holds(tensor, seed % 251), f"tensor {seed} is not what it was"


def expect_left(rig: Rig) -> None:
    """After the context: nothing goes to its pools, and another context works."""
    outside = rig.empty(30 * MIB)
    assert outside.data_ptr() not in rig.allocator.pointer_to_data, "still in the pool"
    assert rig.allocator.pools_in_use == []
    with rig.allocator.use_memory_pool("weights"):
        inside = rig.empty(30 * MIB)
    assert inside.data_ptr() in rig.allocator.pointer_to_data, "not in the pool"
    for entries in rig.allocator.allocator_and_pools.values():
        for pool, _ in entries:
            assert pool.use_count() == 1, "PyTorch counts a user that is gone"


# ---- a load maps little more than it needs ----


def churn(rig: Rig) -> None:
    with rig.allocator.use_memory_pool("weights"):
        kept = load(rig)
    assert rig.peak <= 9.5 * GIB, f"{rig.peak / GIB:.1f} GiB were mapped for 5.9 GiB"
    assert rig.mapped() == len(kept) * 100 * MIB


def test_a_load_maps_little_more_than_it_needs(caching: Caching) -> None:
    caching.run(__file__, "churn", CAP)


def repack(rig: Rig) -> None:
    """All weights are loaded, and then each layer is replaced by another form of it."""
    with rig.allocator.use_memory_pool("weights"):
        layers = [rig.empty(512 * MIB) for _ in range(32)]
        for i in range(len(layers)):
            packed = rig.empty((400 + 2 * i) * MIB)
            rig.write(packed, i)
            layers[i] = packed
            del packed
        assert rig.peak <= 19 * GIB, f"{rig.peak / GIB:.1f} GiB were mapped for 16 GiB"
    assert rig.mapped() == sum(400 + 2 * i for i in range(len(layers))) * MIB
    expect_whole(rig, layers)


def test_weights_that_are_repacked_go_back_as_they_are_replaced(caching: Caching) -> None:
    caching.run(__file__, "repack", CAP)


# ---- out of memory ----


def out_of_memory(rig: Rig) -> None:
    rig.fake.set_capacity(16 * GIB)
    with rig.allocator.use_memory_pool("weights"):
        kept = rig.empty(12 * GIB)
        small = [rig.empty(5 * MIB) for _ in range(5)]
        for seed, tensor in enumerate((kept, *small)):
            rig.write(tensor, seed)
        unused = rig.empty(1200 * MIB)
        del unused
        # 2.8 GiB are free.
        served = rig.empty(3500 * MIB)
        rig.write(served, 6)
        # By the allocator itself: newer PyTorch gives back other memory, and calls once more.
        assert rig.torch.cuda.memory_stats()["num_alloc_retries"] == 0
        # Nothing is unused: one look, and the error as ever.
        creates = rig.fake.calls("cuMemCreate")
        before = pools(rig)
        assert isinstance(raised(lambda: rig.empty(8 * GIB)), rig.torch.OutOfMemoryError)
        tried = rig.fake.calls("cuMemCreate") - creates
        assert tried <= 2, f"mapping was tried {tried} times"
        assert pools(rig) == before
        del served
        again = rig.empty(3600 * MIB)
        rig.write(again, 6)
    expect_whole(rig, [kept, *small, again])
    rig.fake.set_capacity(0)
    expect_left(rig)


def test_out_of_memory_in_the_pool_is_tried_again_once(caching: Caching) -> None:
    caching.run(__file__, "out_of_memory")


@pytest.mark.patched_only
def test_out_of_memory_is_tried_again_without_splits_too(caching: Caching) -> None:
    """Newer PyTorch serves this one by itself."""
    caching.run(__file__, "out_of_memory", CAP)


# ---- nothing is lost ----


def dense(rig: Rig) -> None:
    looks = []
    snapshot = rig.torch.cuda.memory_snapshot

    def counted(*arguments: Any, **options: Any) -> Any:
        looks.append(arguments)
        return snapshot(*arguments, **options)

    rig.torch.cuda.memory_snapshot = counted
    with rig.allocator.use_memory_pool("weights"):
        kept = [rig.empty((4 + 40 * (i % 7)) * MIB) for i in range(300)]
        assert not looks, f"{len(looks)} snapshots of a load that frees nothing"
    assert rig.mapped() <= sum(tensor.numel() for tensor in kept) + 40 * MIB


@pytest.mark.guard
def test_a_load_that_frees_nothing_is_left_alone(caching: Caching) -> None:
    caching.run(__file__, "dense", CAP)


def split(rig: Rig) -> None:
    with rig.allocator.use_memory_pool("weights"):
        load(rig)
        assert pools(rig) == 1


@pytest.mark.patched_only
def test_a_pool_whose_segments_are_split_stays(caching: Caching) -> None:
    caching.run(__file__, "split")


def limited(rig: Rig) -> None:
    rig.torch.cuda.set_per_process_memory_fraction(0.98)
    with rig.allocator.use_memory_pool("weights"):
        load(rig)
        assert pools(rig) == 1


@pytest.mark.patched_only
def test_a_limit_of_pytorch_s_own_counts_no_segment_twice(caching: Caching) -> None:
    caching.run(__file__, "limited", CAP)


# ---- no memory is handed out that is not there ----


def eager() -> None:
    """Pools are replaced for little."""
    module: Any = sys.modules.get(RECLAIM)
    if module is not None:
        module.LOOK = module.LEAST = 4 * MIB
        module.SHARE = 1


def shuffled(rig: Rig) -> None:
    eager()
    chosen = random.Random(7)  # noqa: S311
    sizes = (512, 40_000, MIB, 3 * MIB, 9 * MIB, 25 * MIB, 60 * MIB, 130 * MIB)
    held: dict[int, Any] = {}
    # PyTorch splits segments without the cap: then only a full device replaces a pool.
    rig.fake.set_capacity(600 * MIB)
    failures = 0
    with rig.allocator.use_memory_pool("weights"):
        for n in range(3000):
            if held and chosen.random() < 0.5:
                del held[chosen.choice(list(held))]
                continue
            size = chosen.choice(sizes) + 512 * chosen.randrange(2000)
            try:
                tensor = rig.empty(size)
            except rig.torch.OutOfMemoryError:
                failures += 1
                if held:
                    held.popitem()
                continue
            rig.write(tensor, n % 251)
            held[n] = tensor
            if n % 50 == 0:
                wrong = [seed for seed, other in held.items() if not rig.holds(other, seed % 251)]
                assert not wrong, f"tensors {wrong} are not what they were"
    module = sys.modules.get(RECLAIM)
    assert module is None or pools(rig) > 3, "no pool was replaced: nothing was tested"
    for seed, tensor in held.items():
        assert rig.holds(tensor, seed % 251), f"tensor {seed} is not what it was"
    assert failures < 1000
    rig.fake.set_capacity(0)
    held.clear()
    expect_left(rig)


@pytest.mark.patched_only
@pytest.mark.parametrize("settings", [CAP, ""])
def test_tensors_keep_their_bytes_and_their_places(caching: Caching, settings: str) -> None:
    caching.run(__file__, "shuffled", settings)


def nested(rig: Rig) -> None:
    """PyTorch allocates from the outer pool: it stays, and the inner one too."""
    with rig.allocator.use_memory_pool("weights"):
        with rig.allocator.use_memory_pool("kv_cache"):
            load(rig, 10)
            assert pools(rig) == pools(rig, "kv_cache") == 1
        kept = load(rig, 10)
        for seed, tensor in enumerate(kept):
            rig.write(tensor, seed)
    expect_whole(rig, kept)
    expect_left(rig)


@pytest.mark.patched_only
def test_contexts_in_one_another_keep_their_pools(caching: Caching) -> None:
    caching.run(__file__, "nested", CAP)


def threads(rig: Rig) -> None:
    """Another thread's tensors are not the pool's, before and after it was replaced."""
    outside = []
    with rig.allocator.use_memory_pool("weights"):
        for _ in range(3):
            kept = load(rig, 8)
            thread = threading.Thread(target=lambda: outside.append(rig.empty(40 * MIB)))
            thread.start()
            thread.join()
        assert all(tensor.data_ptr() in rig.allocator.pointer_to_data for tensor in kept)
    assert len(outside) == 3
    assert not any(tensor.data_ptr() in rig.allocator.pointer_to_data for tensor in outside)


@pytest.mark.guard
def test_other_threads_allocate_as_before(caching: Caching) -> None:
    caching.run(__file__, "threads", CAP)


# ---- failures ----


@contextmanager
def broken(rig: Rig, name: str, error: type[BaseException], *, after: bool) -> Iterator[list[str]]:
    """The first call of a function of PyTorch raises, before or after it has done its work."""
    real = getattr(rig.torch._C, name)
    met: list[str] = []

    def call(*arguments: Any) -> Any:
        if met:
            return real(*arguments)
        met.append(name)
        if after:
            real(*arguments)
        raise error("broken")

    setattr(rig.torch._C, name, call)
    try:
        yield met
    finally:
        setattr(rig.torch._C, name, real)


def interrupted(rig: Rig) -> None:
    names = ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool")
    for error in (RuntimeError, KeyboardInterrupt):
        for name in names:
            for after in (False, True):
                kept: list[Any] = []
                with rig.allocator.use_memory_pool("weights"):
                    temporary = rig.empty(2 * GIB)
                    kept.append(rig.empty(100 * MIB))
                    rig.write(kept[0], 0)
                    del temporary
                    with broken(rig, name, error, after=after) as met:
                        kept.append(rig.empty(1500 * MIB))
                    assert met, f"{name} was not called"
                    kept += load(rig, 5)
                    # Either pool may serve it from the segment that was unused.
                    kept.append(rig.empty(2 * GIB))
                    for seed, tensor in enumerate(kept):
                        rig.write(tensor, seed)
                expect_whole(rig, kept)
                expect_left(rig)
                kept.clear()


@pytest.mark.patched_only
def test_a_replacement_that_fails_or_is_interrupted_loses_nothing(caching: Caching) -> None:
    caching.run(__file__, "interrupted", CAP)


def load_fails(rig: Rig) -> None:
    """A load that ends with an exception, after pools were replaced."""

    def attempt() -> None:
        with rig.allocator.use_memory_pool("weights"):
            load(rig, 10)
            raise ValueError("no such weight")

    for _ in range(3):
        assert isinstance(raised(attempt), ValueError)
    expect_left(rig)
    assert rig.mapped() <= 5 * GIB, f"{rig.mapped() / GIB:.1f} GiB stay after loads that failed"


@pytest.mark.patched_only
def test_a_load_that_fails_leaves_its_pools(caching: Caching) -> None:
    caching.run(__file__, "load_fails", CAP)


def unmap_fails(rig: Rig) -> None:
    """What the driver does not unmap stays known, and is put to sleep with the rest."""
    with rig.allocator.use_memory_pool("weights"):
        temporary = rig.empty(2 * GIB)
        kept = [rig.empty(100 * MIB)]
        rig.write(kept[0], 0)
        del temporary
        rig.fake.fail("cuMemUnmap", 1, 999, 1)
        kept += load(rig, 4)
        for seed, tensor in enumerate(kept):
            rig.write(tensor, seed)
    expect_whole(rig, kept)
    rig.allocator.sleep(("weights",))
    assert rig.mapped() == 0
    rig.allocator.wake_up()
    expect_whole(rig, kept)


@pytest.mark.patched_only
def test_memory_that_cannot_be_unmapped_stays_known(caching: Caching) -> None:
    caching.run(__file__, "unmap_fails", CAP)
