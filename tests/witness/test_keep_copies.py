"""Host copies of scripts/sleep-keep: a later sleep copies what has changed, and nothing else.

All of it holds on an untouched release too, but for what its own allocator does not survive: an
interrupt, a driver that refuses a call, and a block that is freed by another thread meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.fuzz import Fuzzer, Settings, seeds
from tests.witness.interrupt import walk
from tests.witness.kernels import SM12X_SHARED, Gpu, KernelProcess
from tests.witness.test_sleep_keep import COPIES, LOGGER, WORKER, loaded_worker
from tests.witness.world import (
    EMPTY,
    GIB,
    INTEGRATED,
    MIB,
    PLUGIN,
    Block,
    World,
    expect,
    raised,
    sweep,
)

OFFLOAD = ("weights",)
EVERYTHING = ("weights", "kv_cache")
# One row of a digest, and one of its words.
ROW, WORD = 16 << 10, 4


def kept(world: World, *, setting: str = "auto") -> list[Block]:
    """Blocks that have slept and are awake, with their host copies."""
    world.use_plugin(setting)
    blocks = world.blocks()
    world.allocator.sleep(OFFLOAD)
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.fake.forget_calls()
    return blocks


def copies(world: World) -> int:
    return sum(world.fake.calls(name) for name in ("cudaMemcpy", "cudaMemcpyAsync"))


@contextlib.contextmanager
def copying_by(world: World, call: Callable[..., None]) -> Iterator[None]:
    """Sleep and wake_up copy by ``call``, whose first argument is what copies otherwise."""
    owner, name = world.copier
    copy = getattr(owner, name)
    setattr(owner, name, functools.partial(call, copy))
    try:
        yield
    finally:
        setattr(owner, name, copy)


def rewritten(world: World, block: Block, change: Callable[[bytearray], None]) -> Block:
    """The block with its bytes changed in place."""
    data = bytearray(block.data)
    change(data)
    assert bytes(data) != block.data
    new = Block(address=block.address, size=block.size, tag=block.tag, data=bytes(data))
    world.fill(new)
    return new


def warned(call: Callable[[], object]) -> list[str]:
    """The warnings that the module logs during the call."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    call()
    logger.removeHandler(handler)
    return texts


def weights(blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block.tag == "weights"]


def expect_sleep_and_wake(world: World, blocks: list[Block]) -> None:
    world.allocator.sleep(OFFLOAD)
    world.expect_asleep(*blocks)
    expect("physical memory asleep", world.fake.alive().physical, 0)
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.expect_alive(*blocks)
    expect("blocks unmapped in use", world.fake.violations(), 0)


@pytest.mark.guard
def test_a_later_sleep_copies_nothing(world: World) -> None:
    blocks = kept(world)
    for _ in range(3):
        world.fake.forget_calls()
        world.allocator.sleep(OFFLOAD)
        expect("copies in a later sleep", copies(world), 0)
        world.expect_asleep(*blocks)
        world.allocator.wake_up()
        expect("copies in a wake_up", copies(world), len(weights(blocks)))
        world.expect_awake(*blocks)
        world.expect_alive(*blocks)
    world.expect_usable(*blocks)


def one_bit(data: bytearray) -> None:
    data[len(data) // 2 + 7] ^= 0x80


def last_word(data: bytearray) -> None:
    data[-WORD:] = bytes(255 - byte for byte in data[-WORD:])


def words_exchanged(data: bytearray) -> None:
    """As EPLB does with what is small for each expert."""
    data[:WORD], data[WORD : 2 * WORD] = data[WORD : 2 * WORD], data[:WORD]


def rows_exchanged(data: bytearray) -> None:
    """As EPLB does with experts."""
    data[:ROW], data[ROW : 2 * ROW] = data[ROW : 2 * ROW], data[:ROW]


def halves_exchanged(data: bytearray) -> None:
    half = len(data) // 2
    data[:half], data[half:] = data[half:], data[:half]


def signs(data: bytearray) -> None:
    """Two bf16 values of two words get another sign: what both add cancels with equal factors."""
    for at in (3, 3 + WORD):
        data[at] ^= 0x80


def everything(data: bytearray) -> None:
    data[:] = data.translate(bytes(range(255, -1, -1)))


CHANGES = {
    change.__name__: change
    for change in (
        one_bit, last_word, words_exchanged, rows_exchanged, halves_exchanged, signs, everything,
    )
}  # fmt: skip


@pytest.mark.guard
@pytest.mark.parametrize("name", list(CHANGES))
def test_weights_changed_in_place(world: World, name: str) -> None:
    """Between two sleeps, by no call that anybody hears of; what is unchanged is not copied."""
    blocks = kept(world)
    blocks[1] = rewritten(world, blocks[1], CHANGES[name])
    world.allocator.sleep(OFFLOAD)
    expect("copies in a sleep after one block has changed", copies(world), 1)
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    # ... and from now on the copy is the one of the new bytes.
    world.fake.forget_calls()
    world.allocator.sleep(OFFLOAD)
    expect("copies in the sleep after that", copies(world), 0)
    world.allocator.wake_up()
    world.expect_awake(*blocks)


@pytest.mark.guard
def test_a_change_taken_back(world: World) -> None:
    """LoRA that is merged for a while: the first copy is gone by then."""
    blocks = kept(world)
    before = blocks[0]
    blocks[0] = rewritten(world, before, everything)
    expect_sleep_and_wake(world, blocks)
    world.fill(before)
    blocks[0] = before
    world.fake.forget_calls()
    expect_sleep_and_wake(world, blocks)
    expect("copies, the other way one of each", copies(world), 1 + len(weights(blocks)))


@pytest.mark.guard
def test_another_block_at_the_address(world: World) -> None:
    """Freed and allocated anew, as a reload may do: the old copy is of another block."""
    blocks = kept(world)
    world.free(blocks[0])
    blocks[0] = world.block()
    expect_sleep_and_wake(world, blocks)
    # One in, three out: nothing was kept of a block that is gone.
    expect("copies", copies(world), 1 + len(weights(blocks)))
    expect_sleep_and_wake(world, blocks)


@pytest.mark.guard
def test_a_level_2_sleep_gives_the_host_memory_back(world: World) -> None:
    blocks = kept(world)
    size = sum(block.size for block in weights(blocks))
    expect("registered host memory", world.fake.registered(), size)
    world.allocator.sleep(())
    expect("registered host memory after level 2", world.fake.registered(), 0)
    world.allocator.wake_up()
    for block in blocks:
        world.fill(block)
    expect_sleep_and_wake(world, blocks)
    expect("registered host memory", world.fake.registered(), size)


def is_mapped(address: int) -> bool:
    ranges = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.mark.guard
def test_memory_that_cannot_be_unregistered_stays_mapped(world: World) -> None:
    """CUDA copies to the pages that it knows for an address, whatever is mapped there."""
    blocks = kept(world)
    addresses = [copy.data_ptr() for copy in world.host_copies.held()]
    size = world.fake.registered()
    world.fake.fail("cudaHostUnregister", nth=1, error=700, count=50)
    world.allocator.sleep(())
    world.fake.fail_nothing()
    expect("registered host memory", world.fake.registered(), size)
    expect("mapped", [is_mapped(address) for address in addresses], [True] * len(addresses))
    world.allocator.wake_up()
    world.allocator.sleep(())
    expect("registered after the next sleep", world.fake.registered(), 0)
    world.allocator.wake_up()
    for block in blocks:
        world.fill(block)
    expect_sleep_and_wake(world, blocks)


@pytest.mark.guard
def test_what_sleeps_with_a_copy_keeps_it_through_a_level_2_sleep(world: World) -> None:
    blocks = kept(world)
    world.allocator.sleep(OFFLOAD)
    world.allocator.sleep(())
    expect("copies", copies(world), 0)
    world.allocator.wake_up()
    world.expect_awake(*blocks)


@pytest.mark.guard
def test_host_memory_is_prepared(world: World) -> None:
    """In the background, also while a CUDA graph is captured: the first sleep takes none."""
    world.use_plugin()
    blocks = world.blocks()
    world.fake.capture(True)
    prepare_sleep(world)
    world.fake.capture(False)
    size = sum(block.size for block in weights(blocks))
    expect("registered host memory", world.fake.registered(), size)
    world.fake.forget_calls()
    expect_sleep_and_wake(world, blocks)
    expect("registered by the first sleep", world.fake.calls("cudaHostRegister"), 0)
    # A block that came later gets its own.
    blocks.append(world.block())
    expect_sleep_and_wake(world, blocks)
    expect("registered for one block", world.fake.calls("cudaHostRegister"), 1)


@pytest.mark.loads(WORKER)
def test_the_first_sleep_after_a_load_takes_no_host_memory(world: World) -> None:
    worker, blocks = loaded_worker(world)
    world.fake.forget_calls()
    worker.sleep_mode_backend.suspend(1)
    expect("registered by the first sleep", world.fake.calls("cudaHostRegister"), 0)
    world.expect_asleep(*blocks)
    worker.sleep_mode_backend.resume()
    world.expect_awake(*blocks)


@pytest.mark.guard
def test_a_sleep_during_the_preparation(world: World) -> None:
    world.use_plugin()
    blocks = world.blocks()
    world.allocator.prepare_sleep()
    expect_sleep_and_wake(world, blocks)
    size = sum(block.size for block in weights(blocks))
    expect("registered host memory", world.fake.registered(), size)


@pytest.mark.guard
@pytest.mark.parametrize("prepared", [True, False])
def test_too_little_host_memory(world: World, prepared: bool) -> None:
    """The sleep is refused, with the sizes: nothing is pinned, and all are awake."""
    world.use_plugin()
    blocks = world.blocks()
    # Enough for the copies, not for what has to stay available.
    world.host_memory = 1 << 30
    problem: list[Exception | None] = []

    def twice() -> None:
        if prepared:
            prepare_sleep(world)
        problem.extend(raised(lambda: world.allocator.sleep(OFFLOAD)) for _ in range(2))

    texts = warned(twice)
    expect("warnings", len(texts), int(prepared))
    expect("refusals", ["0.00 GiB are available" in str(p) for p in problem], [True, True])
    world.expect_awake(*blocks, bytes_of=EVERYTHING)
    expect("registered host memory", world.fake.registered(), 0)
    # Once there is enough, it is taken.
    world.host_memory = 64 << 30
    expect_sleep_and_wake(world, blocks)
    assert world.fake.registered() > 0, "no host memory is taken"


@pytest.mark.guard
@pytest.mark.parametrize("integrated", [False, True])
def test_too_little_host_memory_for_copies_of_one_sleep(world: World, integrated: bool) -> None:
    """On an integrated GPU a block frees what the copy of the next one takes."""
    world.fake.set_attribute(INTEGRATED, int(integrated))
    world.use_plugin("release")
    blocks = world.blocks()
    world.host_memory = max(block.size for block in blocks)
    problem = raised(lambda: world.allocator.sleep(OFFLOAD))
    expect("whether it is refused", problem is not None, not integrated)
    if problem is not None:
        assert "GiB are available" in str(problem), problem
        world.expect_awake(*blocks, bytes_of=EVERYTHING)
    world.allocator.wake_up()
    world.host_memory = 1 << 30
    expect_sleep_and_wake(world, blocks)


@pytest.mark.guard
def test_keep_leaves_nothing_available(world: World) -> None:
    world.host_memory = 1 << 30
    kept(world, setting="keep")
    assert world.fake.registered() > 0, "no host memory is taken"


@pytest.mark.guard
@pytest.mark.parametrize("setting", ["auto", "keep"])
def test_an_integrated_gpu(world: World, setting: str) -> None:
    """Its memory is the host's: a copy would take what sleep frees, unless asked for."""
    world.fake.set_attribute(INTEGRATED, 1)
    blocks = kept(world, setting=setting)
    wanted = sum(block.size for block in weights(blocks)) if setting == "keep" else 0
    expect("registered host memory", world.fake.registered(), wanted)
    expect_sleep_and_wake(world, blocks)


@pytest.mark.guard
def test_release_copies_each_time(world: World) -> None:
    blocks = kept(world, setting="release")
    expect_sleep_and_wake(world, blocks)
    expect("copies", copies(world), 2 * len(weights(blocks)))
    expect("registered host memory", world.fake.registered(), 0)


@pytest.mark.guard
def test_another_setting_is_an_error(world: World) -> None:
    problem = raised(lambda: world.use_plugin("always"))
    assert isinstance(problem, ValueError), f"raised {problem!r}"
    assert "auto, keep, release" in str(problem)


@pytest.mark.guard
def test_weights_are_restored_before_the_cache_is_mapped(world: World) -> None:
    """The cache is mapped while weights are copied, and nothing waits in between."""
    blocks = kept(world)
    world.allocator.sleep(OFFLOAD)
    world.fake.forget_calls()
    world.allocator.wake_up()
    lines = [line.split("(")[0] for line in world.fake.trace().splitlines()]
    order = [name for name in lines if name in ("cuMemMap", "cudaMemcpyAsync")]
    wanted = ["cuMemMap", "cudaMemcpyAsync"] * len(weights(blocks)) + ["cuMemMap"]
    expect("maps and copies of a wake_up", order, wanted)
    last = max(i for i, name in enumerate(lines) if name == "cuMemMap")
    waits = [i for i, name in enumerate(lines) if "Synchronize" in name]
    assert waits, "the wake_up waits for no copy"
    assert min(waits) > last, "the wake_up waits before everything is mapped"


@pytest.mark.guard
def test_copies_go_to_several_streams(world: World) -> None:
    world.use_plugin()
    blocks = [world.block() for _ in range(4)]
    seen: list[int] = []

    def noted(copy: Callable[..., None], to: int, source: int, size: int, *stream: int) -> None:
        seen.extend(stream)
        copy(to, source, size, *stream)

    with copying_by(world, noted):
        expect_sleep_and_wake(world, blocks)
    expect("streams of copies", len(set(seen)), 2)


@pytest.mark.guard
def test_a_digest_without_memory_copies(world: World) -> None:
    blocks = kept(world)
    module: Any = importlib.import_module(COPIES)

    def short(*block: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    by_torch, module.digest_by_torch = module.digest_by_torch, short
    world.host_copies._digest = short
    blocks[1] = rewritten(world, blocks[1], one_bit)
    texts = warned(lambda: expect_sleep_and_wake(world, blocks))
    expect("warnings", [text for text in texts if "CUDA out of memory" in text], texts)
    expect("warnings", len(texts), 1)
    module.digest_by_torch = by_torch
    world.host_copies._digest = by_torch
    expect_sleep_and_wake(world, blocks)
    world.fake.forget_calls()
    expect_sleep_and_wake(world, blocks)
    expect("copies, of a wake_up alone", copies(world), len(weights(blocks)))


@pytest.mark.guard
def test_a_digest_without_its_kernel(world: World) -> None:
    """PyTorch computes it, from there on; one warning says so."""
    blocks = kept(world)
    calls = 0

    def fails(*block: Any) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("no C compiler")

    world.host_copies._digest = fails
    blocks[1] = rewritten(world, blocks[1], one_bit)
    texts = warned(lambda: expect_sleep_and_wake(world, blocks))
    expect("copies, of one block and of a wake_up", copies(world), 1 + len(weights(blocks)))
    texts += warned(lambda: expect_sleep_and_wake(world, blocks))
    expect("warnings", [text for text in texts if "no C compiler" in text], texts)
    expect("warnings", len(texts), 1)
    expect("calls of the kernel", calls, 1)


def noted_digests(world: World) -> list[str]:
    """From here on, what computes a digest, and each compilation of its kernel."""
    world.use_plugin()
    module: Any = importlib.import_module(COPIES)
    done: list[str] = []
    digest = module.digest_by_torch

    def noted(name: str) -> Callable[..., None]:
        def compute(*block: Any) -> None:
            done.append(name)
            digest(*block)

        return compute

    module.digest_by_torch = noted("PyTorch")
    module.compile_digest = lambda device: done.append("compiled")
    world.host_copies._digest = noted("kernel")
    world.host_copies._compiled.clear()
    return done


def prepare_sleep(world: World) -> None:
    world.allocator.prepare_sleep()
    world.host_copies._wait_for_preparation()


@pytest.mark.guard
@pytest.mark.parametrize("prepared", [True, False])
def test_a_sleep_does_not_wait_for_its_kernel(world: World, prepared: bool) -> None:
    """PyTorch computes the digests of a first sleep that was not prepared: the same ones."""
    done = noted_digests(world)
    blocks = world.blocks()
    count = len(weights(blocks))
    if prepared:
        prepare_sleep(world)
    expect_sleep_and_wake(world, blocks)
    world.host_copies._wait_for_preparation()
    # Before and after the copies.
    first = ["compiled", *["kernel"] * 2 * count]
    if not prepared:
        first = [*["PyTorch"] * 2 * count, "compiled"]
    expect("done by a first sleep", done, first)
    done.clear()
    world.fake.forget_calls()
    blocks[1] = rewritten(world, blocks[1], one_bit)
    expect_sleep_and_wake(world, blocks)
    expect("done by a later sleep", done, ["kernel"] * (count + 1))
    expect("copies, of one block and of a wake_up", copies(world), 1 + count)


@pytest.mark.guard
def test_the_kernel_computes_where_pytorch_has_no_memory(world: World) -> None:
    done = noted_digests(world)
    module: Any = importlib.import_module(COPIES)

    def short(*block: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    module.digest_by_torch = short
    blocks = world.blocks()
    expect("warnings", warned(lambda: expect_sleep_and_wake(world, blocks)), [])
    expect("done", done, ["compiled", *["kernel"] * 2 * len(weights(blocks))])


@pytest.mark.guard
@pytest.mark.parametrize("prepared", [True, False])
def test_a_kernel_that_is_not_compiled_is_no_failure(world: World, prepared: bool) -> None:
    """PyTorch computes digests then, and one warning says so."""
    done = noted_digests(world)
    module: Any = importlib.import_module(COPIES)

    def fails(device: int) -> None:
        raise RuntimeError("no C compiler")

    module.compile_digest = fails
    blocks = world.blocks()
    size = sum(block.size for block in weights(blocks))
    texts = []
    if prepared:
        texts = warned(lambda: prepare_sleep(world))
        expect("registered host memory", world.fake.registered(), size)
    for _ in range(2):
        texts += warned(lambda: expect_sleep_and_wake(world, blocks))
        texts += warned(lambda: world.host_copies._wait_for_preparation())
    expect("warnings", ["no C compiler" in text for text in texts], [True])
    expect("done", done, ["PyTorch"] * 3 * len(weights(blocks)))


@pytest.mark.guard
def test_an_interrupt_while_a_thread_is_started(world: World) -> None:
    def check(_: None) -> None:
        world.host_copies._wait_for_preparation()
        prepare_sleep(world)

    walk(world.use_plugin, lambda _: world.host_copies._prepare_by(lambda: None), check)


def package() -> Any:
    """The package's module, in a process that has loaded the release for its kernels."""
    sys.path.append(str(PLUGIN))
    return importlib.import_module(COPIES)


def digests(gpu: Gpu, rows: int) -> list[bool]:
    """Whether kernel and PyTorch agree with the definition, on Python's whole numbers."""
    torch: Any = importlib.import_module("torch")
    module = package()
    gpu.become((12, 0))
    words = torch.randint(-(2**31), 2**31, (rows * module.WORDS,)).to(torch.int32)
    words[:3] = torch.tensor([-(2**31), 2**31 - 1, -1])
    factors = module.multipliers(words.device)
    module.words_of = lambda address, size, device: words
    # The interpreter takes addresses of tensors only.
    module.Words = lambda address: words
    found = []
    for digest in (module.digest_by_kernel, module.digest_by_torch):
        # One number more on each side, which is not to be written to.
        numbers = torch.full((rows + 2,), 77, dtype=torch.int64)
        digest(words.data_ptr(), 4 * len(words), factors, numbers[1:-1])
        found.append(numbers.tolist())
    exact = [
        (sum(a * b for a, b in zip(row, factors.tolist(), strict=True)) + 2**63) % 2**64 - 2**63
        for row in words.view(rows, module.WORDS).tolist()
    ]
    return [numbers == [77, *exact, 77] for numbers in found]


@pytest.mark.guard
@pytest.mark.parametrize("rows", [1, 7, 8, 19])
def test_the_kernel_computes_what_is_said(interpreted: KernelProcess, rows: int) -> None:
    assert interpreted.call(digests, rows=rows) == [True, True]


def spills(gpu: Gpu, capability: list[int]) -> dict[str, int]:
    torch: Any = importlib.import_module("torch")
    module = package()
    gpu.become((capability[0], capability[1]))
    module.on_device = lambda device: contextlib.nullcontext()
    module.compile_digest(0)
    cache = module.digest_kernel.device_caches[gpu.index][0]
    compiled = len(cache)
    loaded = sum(kernel.module is not None for kernel in cache.values())
    rows = 2 << 20 >> 14
    words, numbers = torch.zeros(rows << 12, dtype=torch.int32), torch.zeros(rows).long()
    module.Words = lambda address: words
    module.digest_by_kernel(0, 2 << 20, module.multipliers(words.device), numbers)
    (launch,) = gpu.launches
    return {
        **launch.resources(),
        "programs": launch.grid[0],
        "shared": launch.shared,
        # What was compiled before is what is launched.
        "compiled": compiled,
        "loaded": loaded,
        "compiled again": len(cache) - compiled,
    }


@pytest.mark.guard
@pytest.mark.parametrize("capability", [[12, 0], [12, 1]])
def test_the_kernel_is_compiled_before_the_first_sleep(
    compiled: KernelProcess, capability: list[int]
) -> None:
    found = compiled.call(spills, capability=capability)
    assert (found["compiled"], found["loaded"], found["compiled again"]) == (1, 1, 0)
    assert (found["LOCAL"], found["STACK"]) == (0, 0)
    assert found["programs"] == 16
    assert found["shared"] <= SM12X_SHARED


@pytest.mark.guard
def test_wake_up_takes_back_what_pytorch_keeps(world: World) -> None:
    """Only where memory is missing: to look for garbage takes longer than the rest of the call."""
    blocks = kept(world)
    world.allocator.sleep(OFFLOAD)
    rest = world.fake.alive().physical
    world.fake.set_capacity(sum(block.size for block in blocks) + rest)
    hoard = world.take(4 * GRANULARITY)
    emptied = 0

    def empty_cache() -> None:
        nonlocal emptied
        emptied += 1
        if emptied == 1:
            world.take_back(hoard)

    world.torch.cuda.empty_cache = empty_cache
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    expect("times PyTorch's cache was emptied", emptied, 1)
    world.allocator.sleep(OFFLOAD)
    emptied = 5
    world.allocator.wake_up()
    expect("times, of a wake_up with enough memory", emptied, 5)


@pytest.mark.guard
def test_later_collections_spare_what_the_first_sleep_found(world: World) -> None:
    before = gc.get_freeze_count()
    blocks = kept(world)
    count = gc.get_freeze_count()
    assert count > before
    expect_sleep_and_wake(world, blocks)
    expect("objects that collections spare", gc.get_freeze_count(), count)


@pytest.mark.guard
def test_one_memory_for_gpu_and_host(world: World) -> None:
    """A wake_up has no more than one block twice, and leaves no host memory taken."""
    world.use_plugin()
    blocks = world.blocks()
    limit = world.share_memory_of(blocks)
    for _ in range(3):
        expect_sleep_and_wake(world, blocks)
        expect("host memory of a server that is awake", world.fake.registered(), 0)
    assert world.fake.shared_peak() <= limit


@pytest.mark.guard
def test_one_memory_of_which_another_takes_some(world: World) -> None:
    """What is restored by then stays awake; the same call goes on from there."""
    world.use_plugin()
    blocks = [world.block(tag) for tag in ("weights", "kv_cache", "weights", "kv_cache", "weights")]
    world.share_memory(6 * GRANULARITY)
    world.allocator.sleep(OFFLOAD)
    taken = world.take(2 * GRANULARITY)
    problem = raised(world.allocator.wake_up)
    assert "kv_cache block" in str(problem), problem
    world.expect_awake(*weights(blocks))
    world.expect_asleep(*(block for block in blocks if block.tag == "kv_cache"))
    world.take_back(taken)
    world.allocator.wake_up()
    world.expect_awake(*blocks)
    world.expect_alive(*blocks)


# ---- the host's memory ----


def host(folder: Path, *, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc with 100 GiB available, and a /sys/fs/cgroup with these files."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {200 * MIB} kB\nMemFree: 5 kB\nMemAvailable: {100 * MIB} kB\n"
    )
    (proc / "self" / "cgroup").write_text(cgroup)
    cgroups.mkdir()
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return proc, cgroups


V2 = {
    "a/memory.max": f"{50 * GIB}\n",
    "a/memory.current": f"{48 * GIB}\n",
    "a/memory.stat": f"anon 7\nactive_file {GIB}\ninactive_file {2 * GIB}\nfile 9\n",
    "a/b/memory.max": "max\n",
}
V1 = {
    "memory/memory.limit_in_bytes": f"{1 << 62}\n",
    "memory/memory.usage_in_bytes": "0\n",
    "memory/memory.stat": "total_inactive_file 0\n",
    "memory/a/memory.limit_in_bytes": f"{9 * GIB}\n",
    "memory/a/memory.usage_in_bytes": f"{5 * GIB}\n",
    "memory/a/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file 0\n",
}
HOSTS = {
    # A limit of a group above, whose files can go.
    "v2": ("0::/a/b\n", V2, 5),
    # What counts is the machine's memory.
    "no limit": ("0::/\n", {"a/memory.max": "1"}, 100),
    "v1": ("12:cpu,memory:/a\n3:cpuset:/x\n0::/\n", V1, 5),
    # In a container, where the path is the host's and the limit is at the top.
    "container": ("0::/../../docker/1\n", {f"{n[2:]}": t for n, t in V2.items()}, 5),
    "over the limit": ("0::/a\n", V2 | {"a/memory.current": f"{60 * GIB}"}, 0),
    # What cannot be read is nothing that could be taken.
    "not readable": ("0::/a\n", V2 | {"a/memory.current": "?"}, 0),
}


@pytest.mark.guard
@pytest.mark.parametrize("name", list(HOSTS))
def test_the_host_memory_that_is_available(world: World, name: str) -> None:
    world.use_plugin()
    available = importlib.reload(sys.modules[COPIES]).available_host_memory
    cgroup, files, wanted = HOSTS[name]
    with tempfile.TemporaryDirectory() as folder:
        proc, cgroups = host(Path(folder), cgroup=cgroup, files=files)
        expect("GiB available", available(False, proc, cgroups) // GIB, wanted)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("limit", "left"),
    [
        # A tenth of 200 GiB of memory, of which 100 are available.
        ("max", 80),
        # A tenth of a limit, and 4 GiB of a smaller one.
        (f"{70 * GIB}", 62),
        (f"{20 * GIB}", 15),
    ],
)
def test_the_reserve_of_host_memory(world: World, limit: str, left: int) -> None:
    world.use_plugin()
    available = importlib.reload(sys.modules[COPIES]).available_host_memory
    files = {"a/memory.max": limit, "a/memory.current": f"{GIB}", "a/memory.stat": "file 0\n"}
    with tempfile.TemporaryDirectory() as folder:
        proc, cgroups = host(Path(folder), cgroup="0::/a\n", files=files)
        expect("GiB available", available(True, proc, cgroups) // GIB, left)


@pytest.mark.guard
def test_the_cpus_of_a_device(world: World) -> None:
    """Those of its NUMA node that this process may use; none where that is not known."""
    world.use_plugin()
    module: Any = importlib.import_module(COPIES)
    own = min(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        sys = Path(folder)
        for bus, node in (("0000:01:00.0", "1"), ("0000:02:00.0", "-1")):
            (sys / "bus/pci/devices" / bus).mkdir(parents=True)
            (sys / "bus/pci/devices" / bus / "numa_node").write_text(f"{node}\n")
        (sys / "devices/system/node/node1").mkdir(parents=True)
        text = f"{own},70000-70002\n"
        (sys / "devices/system/node/node1/cpulist").write_text(text)
        expect("near the first", module.cpus_near("0000:01:00.0", sys), {own})
        expect("near one of no node", module.cpus_near("0000:02:00.0", sys), set())
        expect("near one that is not there", module.cpus_near("FFFF:01:00.0", sys), set())


@pytest.mark.guard
def test_memory_comes_in_regions(world: World) -> None:
    """Blocks share a region up to a size, and each part is its own."""
    world.use_plugin()
    module: Any = importlib.import_module(COPIES)
    module.REGION = 4 * GRANULARITY
    sizes = [n * GRANULARITY for n in (1, 3, 1, 5, 1)]
    parts: list[Any] = []
    parts.extend(module.host_memory(sizes, world.host_copies._runtime, 0, True))
    expect("sizes", [len(part) for part in parts], sizes)
    expect("regions registered", world.fake.calls("cudaHostRegister"), 4)
    expect("registered host memory", world.fake.registered(), sum(sizes))
    for i, part in enumerate(parts):
        part.fill_(i)
    expect(
        "what is in them",
        [set(part.unique().tolist()) for part in parts],
        [{0}, {1}, {2}, {3}, {4}],
    )
    expect("huge pages", [part.region.address % (2 * MIB) for part in parts], [0] * 5)
    runtime = world.host_copies._runtime
    del parts[0], part
    runtime.give_back()
    expect("with a part left", world.fake.registered(), sum(sizes))
    parts.clear()
    runtime.give_back()
    expect("with none left", world.fake.registered(), 0)


@pytest.mark.guard
def test_memory_is_given_back_by_two_at_a_time(world: World) -> None:
    """New memory gets an address that one of them has given back, and stays registered."""
    world.use_plugin()
    module: Any = importlib.import_module(COPIES)
    runtime = world.host_copies._runtime

    def regions() -> list[Any]:
        made = [module.Region(GRANULARITY, runtime, 0) for _ in range(3)]
        for region in made:
            region.register()
        return made

    give_back, listed, free = runtime._give_back, threading.Event(), threading.Event()

    def late(*arguments: Any) -> None:
        listed.set()
        free.wait(10)
        give_back(*arguments)

    regions()
    runtime._give_back = late
    thread = threading.Thread(target=runtime.give_back)
    thread.start()
    listed.wait(10)
    runtime._give_back = give_back
    runtime.give_back()
    expect("registered host memory", world.fake.registered(), 0)
    later = regions()
    free.set()
    thread.join()
    expect("registered host memory", world.fake.registered(), 3 * GRANULARITY)
    expect("mapped", [is_mapped(region.address) for region in later], [True] * 3)
    later.clear()
    runtime.give_back()
    expect("registered in the end", world.fake.registered(), 0)


def in_small_regions(world: World, count: int = 5) -> list[Block]:
    """Blocks of weights, each of which fills a region of host memory."""
    world.use_plugin()
    module: Any = importlib.import_module(COPIES)
    module.REGION = GRANULARITY
    return [world.block() for _ in range(count)]


@pytest.mark.guard
def test_blocks_are_copied_while_more_memory_is_taken(world: World) -> None:
    """The first of five before there is memory for the last."""
    blocks = in_small_regions(world)
    module: Any = importlib.import_module(COPIES)
    touch, copied, touches = module.touch, threading.Event(), iter(range(4))
    came: list[bool] = []
    registered: list[int] = []

    def last_waits(address: int, size: int) -> None:
        if next(touches, None) is None:
            came.append(copied.wait(10))
        touch(address, size)

    def noted(copy: Callable[..., None], *arguments: Any) -> None:
        copy(*arguments)
        registered.append(world.fake.calls("cudaHostRegister"))
        copied.set()

    module.touch = last_waits
    with copying_by(world, noted):
        world.allocator.sleep(OFFLOAD)
    expect("copies", len(registered), len(blocks))
    assert registered[0] < len(blocks), f"registered at each copy: {registered}"
    expect("whether a copy came before the last touch", came, [True])
    world.expect_asleep(*blocks)
    world.allocator.wake_up()
    free_all(world, blocks)


@pytest.mark.guard
def test_memory_is_taken_while_digests_are_computed(world: World) -> None:
    blocks = in_small_regions(world)
    module: Any = importlib.import_module(COPIES)
    touch, digest, touched = module.touch, world.host_copies._digest, threading.Event()
    came: list[bool] = []

    def noted(address: int, size: int) -> None:
        touched.set()
        touch(address, size)

    def waits(*block: Any) -> None:
        came.append(touched.wait(10))
        digest(*block)

    module.touch, world.host_copies._digest = noted, waits
    world.allocator.sleep(OFFLOAD)
    expect("whether a touch came before each digest", came, [True] * 2 * len(blocks))
    world.allocator.wake_up()
    free_all(world, blocks)


@pytest.mark.guard
def test_host_memory_that_ends_half_way(world: World) -> None:
    """The sleep is refused, and what it had taken by then is given back."""
    blocks = in_small_regions(world)
    module: Any = importlib.import_module(COPIES)
    rooms = iter([64 << 30] * 4)
    available, module.available_host_memory = (
        module.available_host_memory,
        lambda reserve: next(rooms, 0),
    )
    problem = raised(lambda: world.allocator.sleep(OFFLOAD))
    assert "0.00 GiB are available" in str(problem), problem
    expect("registered host memory", world.fake.registered(), 0)
    world.expect_awake(*blocks)
    module.available_host_memory = available
    expect_sleep_and_wake(world, blocks)
    free_all(world, blocks)


@pytest.mark.guard
def test_memory_that_the_kernel_does_not_map(world: World) -> None:
    """As too little memory: the sleep is refused, and nothing is held."""
    blocks = in_small_regions(world)
    module: Any = importlib.import_module(COPIES)
    mmap, maps = module.mmap.mmap, iter(range(2))

    def strict(*arguments: Any, **more: Any) -> Any:
        if next(maps, None) is None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return mmap(*arguments, **more)

    module.mmap.mmap = strict
    try:
        problem = raised(lambda: world.allocator.sleep(OFFLOAD))
    finally:
        module.mmap.mmap = mmap
    assert "the kernel maps none" in str(problem), problem
    expect("registered host memory", world.fake.registered(), 0)
    world.expect_awake(*blocks)
    expect_sleep_and_wake(world, blocks)
    free_all(world, blocks)


@pytest.mark.guard
def test_memory_that_cannot_be_registered(world: World) -> None:
    """Copies are made anew each time, without it, and one warning says so."""
    blocks = in_small_regions(world)
    world.fake.fail("cudaHostRegister", nth=3, error=801, count=1000)
    texts = warned(lambda: expect_sleep_and_wake(world, blocks))
    texts += warned(lambda: expect_sleep_and_wake(world, blocks))
    expect("warnings", ["could be registered" in text for text in texts], [True])
    world.fake.fail_nothing()
    expect_sleep_and_wake(world, blocks)
    free_all(world, blocks)


@pytest.mark.guard
def test_a_copy_that_fails_is_no_lack_of_host_memory(world: World) -> None:
    blocks = in_small_regions(world)

    def failing(*_: Any) -> None:
        raise RuntimeError("CUDA Error: unknown error")

    problems: list[Exception | None] = []
    with copying_by(world, failing):
        texts = warned(lambda: problems.append(raised(lambda: world.allocator.sleep(OFFLOAD))))
    expect("warnings", texts, [])
    assert "All keep their memory" in str(problems[0]), problems
    world.expect_awake(*blocks)
    expect_sleep_and_wake(world, blocks)


# ---- failures, interrupts, threads ----


def changed(world: World) -> list[Block]:
    """Awake blocks with copies, one of which is of older bytes."""
    blocks = kept(world)
    blocks[3] = rewritten(world, blocks[3], words_exchanged)
    return blocks


def check(world: World) -> Callable[[list[Block], Exception | None], None]:
    def after(blocks: list[Block], problem: Exception | None) -> None:
        if problem is not None:
            assert "out of memory" in str(problem) or "synchronize failed" in str(problem), problem
        world.allocator.wake_up()
        world.expect_awake(*blocks, bytes_of=OFFLOAD)
        # A handle whose release failed is released when PyTorch allocates or frees next.
        world.free(world.block())
        world.expect_alive(*blocks)
        expect("blocks unmapped in use", world.fake.violations(), 0)
        world.expect_usable(*blocks)

    return after


@pytest.mark.patched_only
@pytest.mark.parametrize("regions", ["one region", "a region each"])
def test_every_call_of_a_first_sleep(world: World, regions: str) -> None:
    def prepare() -> list[Block]:
        if regions == "a region each":
            return in_small_regions(world)
        world.use_plugin()
        return world.blocks()

    sweep(world, prepare, lambda blocks: world.allocator.sleep(OFFLOAD), check(world))


@pytest.mark.patched_only
def test_every_call_of_a_later_sleep(world: World) -> None:
    sweep(
        world,
        lambda: changed(world),
        lambda blocks: world.allocator.sleep(OFFLOAD),
        check(world),
    )


@pytest.mark.patched_only
def test_every_call_of_wake_up(world: World) -> None:
    """Rolled back: all is asleep, as before, and the same call works later."""

    def asleep() -> list[Block]:
        blocks = changed(world)
        world.allocator.sleep(OFFLOAD)
        return blocks

    def after(blocks: list[Block], problem: Exception | None) -> None:
        if problem is not None:
            world.expect_asleep(*blocks)
            world.expect_alive(asleep=tuple(blocks))
        check(world)(blocks, problem)

    sweep(world, asleep, lambda blocks: world.allocator.wake_up(), after)


@pytest.mark.patched_only
def test_every_call_of_the_preparation(world: World) -> None:
    def prepare() -> list[Block]:
        world.use_plugin()
        return world.blocks()

    def operate(blocks: list[Block]) -> None:
        prepare_sleep(world)

    def after(blocks: list[Block], problem: Exception | None) -> None:
        expect("what a preparation that fails raises", problem, None)
        expect_sleep_and_wake(world, blocks)

    sweep(world, prepare, operate, after)


def two_blocks(world: World) -> list[Block]:
    world.use_plugin()
    return [world.block("weights"), world.block("kv_cache")]


def free_all(world: World, blocks: list[Block]) -> None:
    world.expect_awake(*blocks)
    world.expect_alive(*blocks)
    expect("blocks unmapped in use", world.fake.violations(), 0)
    for block in blocks:
        world.free(block)
    expect("what the driver holds in the end", world.fake.alive(), EMPTY)


@pytest.mark.patched_only
@pytest.mark.parametrize("call", ["first sleep", "later sleep", "wake_up"])
def test_an_interrupt_anywhere(world: World, call: str) -> None:
    """Then the same call goes on from there; or the other one, after new bytes were written."""

    def prepare() -> list[Block]:
        blocks = two_blocks(world)
        if call == "first sleep":
            prepare_sleep(world)
        else:
            world.allocator.sleep(OFFLOAD)
        if call == "later sleep":
            world.allocator.wake_up()
            blocks[0] = rewritten(world, blocks[0], everything)
        return blocks

    def operate(blocks: list[Block]) -> None:
        if call == "wake_up":
            world.allocator.wake_up()
        else:
            world.allocator.sleep(OFFLOAD)

    def then_same(blocks: list[Block]) -> None:
        operate(blocks)
        if call != "wake_up":
            expect("physical memory asleep", world.fake.alive().physical, 0)
        world.allocator.wake_up()
        free_all(world, blocks)

    def then_opposite(blocks: list[Block]) -> None:
        world.allocator.wake_up()
        world.expect_awake(*blocks)
        # Where an earlier sleep has kept these bytes, they are the ones it has kept.
        blocks[0] = rewritten(world, blocks[0], everything)
        world.allocator.sleep(OFFLOAD)
        expect("physical memory asleep", world.fake.alive().physical, 0)
        world.allocator.wake_up()
        free_all(world, blocks)

    world.digested = 4 * ROW
    walk(prepare, operate, then_same, then_opposite)


@pytest.mark.patched_only
@pytest.mark.parametrize("part", range(3))
def test_an_interrupt_while_blocks_are_copied_and_memory_is_taken(world: World, part: int) -> None:
    """With a region touched, one registered and one copied to at a time.

    The rest of a sleep is the same as after a preparation.
    """

    def copy(blocks: list[Block]) -> None:
        data = [world.allocator.pointer_to_data[block.address] for block in blocks]
        world.host_copies._save(world.allocator, data)

    def check(blocks: list[Block]) -> None:
        world.allocator.sleep(OFFLOAD)
        expect("physical memory asleep", world.fake.alive().physical, 0)
        world.allocator.wake_up()
        free_all(world, blocks)

    def prepare() -> list[Block]:
        blocks = in_small_regions(world, 3)
        # The walks through a whole sleep include these.
        world.host_copies._digests = lambda allocator, blocks: {}
        return blocks

    walk(prepare, copy, check, part=part, parts=3)


def free_one_with_a_copy(world: World) -> None:
    """A block is freed after a sleep, when nothing has looked at its copy yet."""
    world.use_plugin()
    block = world.block()
    world.allocator.sleep(OFFLOAD)
    world.allocator.wake_up()
    world.free(block)


@pytest.mark.guard
def test_an_interrupt_while_the_memory_of_a_freed_block_is_kept(world: World) -> None:
    """Two new blocks do not both get it."""

    def prepare() -> list[Block]:
        free_one_with_a_copy(world)
        return [world.block(), world.block()]

    def check(blocks: list[Block]) -> None:
        world.allocator.sleep(OFFLOAD)
        world.allocator.wake_up()
        free_all(world, blocks)

    walk(prepare, lambda blocks: world.host_copies._forget_freed(world.allocator), check)


@pytest.mark.guard
def test_an_interrupt_while_host_memory_is_given_back(world: World) -> None:
    def prepare() -> list[int]:
        free_one_with_a_copy(world)
        world.host_copies._forget_freed(world.allocator)
        return [copy.data_ptr() for copy in world.host_copies.held()]

    def give_back() -> None:
        world.host_copies._forget_discarded()
        world.host_copies._runtime.give_back()

    def check(addresses: list[int]) -> None:
        if world.fake.registered():
            expect("mapped", [is_mapped(address) for address in addresses], [True])
        give_back()
        expect("registered host memory", world.fake.registered(), 0)

    walk(prepare, lambda _: give_back(), check)


@pytest.mark.guard
def test_an_interrupt_while_host_memory_is_taken(world: World) -> None:
    def operate(blocks: list[Block]) -> None:
        data = [world.allocator.pointer_to_data[block.address] for block in blocks]
        world.host_copies._take_memory(data)

    def check(blocks: list[Block]) -> None:
        world.allocator.sleep(OFFLOAD)
        world.allocator.wake_up()
        free_all(world, blocks)
        world.allocator.sleep(OFFLOAD)
        expect("registered host memory in the end", world.fake.registered(), 0)

    world.digested = 4 * ROW
    walk(lambda: two_blocks(world), operate, check)


@pytest.mark.patched_only
@pytest.mark.parametrize("thread", [True, False])
@pytest.mark.parametrize(
    ("victim", "call"),
    [
        (0, "sleep"),
        (1, "sleep"),
        (2, "sleep"),
        (0, "wake_up"),
        (1, "wake_up"),
        (2, "wake_up"),
    ],
)
def test_a_block_freed_in_the_midst(world: World, call: str, thread: bool, victim: int) -> None:
    """Before, in and after its own copy, with copies under way."""
    world.use_plugin()
    blocks = [world.block(), world.block(), world.block()]
    fresh: list[Block] = []
    if call == "wake_up":
        world.allocator.sleep(OFFLOAD)
    made: list[int] = []

    def free() -> None:
        world.free(blocks[victim])
        fresh.append(world.block())

    def and_meanwhile(
        copy: Callable[..., None], to: int, source: int, size: int, *stream: int
    ) -> None:
        copy(to, source, size, *stream)
        made.append(to)
        if len(made) == 2:
            if thread:
                other = threading.Thread(target=free)
                other.start()
                other.join()
            else:
                free()

    operate = world.allocator.wake_up if call == "wake_up" else world.allocator.sleep
    arguments = () if call == "wake_up" else (OFFLOAD,)
    with copying_by(world, and_meanwhile):
        expect("what it raised", raised(lambda: operate(*arguments)), None)
    expect("blocks unmapped in use", world.fake.violations(), 0)
    left = [block for i, block in enumerate(blocks) if i != victim] + fresh
    # What could not be freed at once is freed when PyTorch calls next.
    world.free(world.block())
    world.allocator.wake_up()
    world.expect_awake(*left)
    world.expect_alive(*left)
    expect_sleep_and_wake(world, left)
    expect_sleep_and_wake(world, left)
    for block in left:
        world.free(block)
    expect("what the driver holds in the end", world.fake.alive(), EMPTY)


@pytest.mark.patched_only
@pytest.mark.parametrize("seed", seeds(3))
def test_random_operations(world: World, seed: int) -> None:
    Fuzzer(world, Settings(operations=200, seed=seed, plugin=True)).run()
    world.host_copies.sleep(world.allocator, ())
    expect("registered host memory in the end", world.fake.registered(), 0)
