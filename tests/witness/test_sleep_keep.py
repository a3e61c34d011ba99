"""The sleep-mode backend of scripts/sleep-keep, on the release's registry and allocator.

The package is made for an untouched release too: what holds there as well is a guard.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.fuzz import Fuzzer, Settings, seeds
from tests.witness.interrupt import walk
from tests.witness.world import GIB, INTEGRATED, PLUGIN, Block, World, expect, raised

WORKER = "vllm.v1.worker.gpu_worker"
COPIES = "vllm_sleep_keep.host_copies"
# The package writes to vLLM's log, by this name.
LOGGER = "vllm.device_allocator.host_copies"
OFFLOAD = ("weights", "runtime", "cudagraph")


def copies(world: World) -> int:
    return sum(world.fake.calls(name) for name in ("cudaMemcpy", "cudaMemcpyAsync"))


def registered(world: World) -> Any:
    """The registry, with the package's backend, and the backend."""
    backend = world.use_plugin()
    module: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    importlib.import_module("vllm_sleep_keep").register()
    # All of vLLM's processes call it, one of them may twice.
    importlib.import_module("vllm_sleep_keep").register()
    return module.SleepModeBackendFactory, backend


@pytest.mark.guard
def test_the_backend_is_in_the_registry(world: World) -> None:
    factory, backend = registered(world)
    expect("the backend's class", factory.get_backend_class("keep"), type(backend))
    made = factory.create_backend(SimpleNamespace(sleep_mode_backend="keep"))
    expect("its class", type(made), type(backend))
    expect("its state", made.state(), "RUNNING")


@pytest.mark.guard
def test_the_package_names_what_is_missing(world: World) -> None:
    sys.path.append(str(PLUGIN))
    sys.modules["vllm.device_allocator.sleep_mode_backend"] = None  # type: ignore[assignment]
    problem = raised(lambda: importlib.import_module("vllm_sleep_keep").register())
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    assert "no sleep-mode backends" in str(problem)


@pytest.mark.guard
def test_sleep_and_wake_up(world: World) -> None:
    """The backend's calls, with the release's own allocator and tags."""
    backend = world.use_plugin()
    blocks = [*world.blocks(), world.block("runtime")]
    saved = ("weights", "runtime")
    for i in range(3):
        world.fake.forget_calls()
        backend.suspend(1)
        expect("copies in a sleep", copies(world), 0 if i else 4)
        expect("state", backend.state(), "SUSPENDED")
        expect("physical memory asleep", world.fake.alive().physical, 0)
        backend.resume(["weights"])
        world.expect_awake(*(b for b in blocks if b.tag in saved), bytes_of=saved)
        world.expect_asleep(*(b for b in blocks if b.tag == "kv_cache"))
        backend.resume()
        world.expect_awake(*blocks, bytes_of=saved)
        expect("state", backend.state(), "RUNNING")
    # In place, by no call that anybody hears of.
    new = Block(address=blocks[0].address, size=blocks[0].size, tag="weights", data=blocks[3].data)
    world.fill(new)
    world.fake.forget_calls()
    backend.suspend(1)
    expect("copies after a change", copies(world), 1)
    backend.resume()
    world.expect_awake(new, *blocks[1:], bytes_of=saved)


@pytest.mark.guard
def test_level_2(world: World) -> None:
    backend = world.use_plugin()
    blocks = [*world.blocks(), world.block("runtime")]
    backend.suspend(1)
    backend.resume()
    backend.suspend(2)
    size = sum(block.size for block in blocks if block.tag == "runtime")
    expect("registered host memory after level 2", world.fake.registered(), size)
    backend.resume()
    world.expect_awake(*blocks, bytes_of=("runtime",))


@pytest.mark.guard
def test_release_kv_cache_memory(world: World) -> None:
    backend = world.use_plugin()
    world.use_cuda_platform()
    blocks = world.blocks()
    backend.discard(("kv_cache",))
    world.expect_asleep(*(b for b in blocks if b.tag == "kv_cache"))
    backend.resume(["kv_cache"])
    world.expect_awake(*blocks)


@pytest.mark.guard
@pytest.mark.parametrize("kv_cache_alone", [False, True])
def test_one_memory_for_gpu_and_host(world: World, kv_cache_alone: bool) -> None:
    """A wake_up has no more than one block twice, and leaves no host memory taken."""
    backend = world.use_plugin()
    world.use_cuda_platform()
    blocks = world.blocks()
    limit = world.share_memory_of(blocks)
    for _ in range(3):
        if kv_cache_alone:
            backend.discard(("kv_cache",))
            backend.resume(["kv_cache"])
        backend.suspend(1)
        world.expect_asleep(*blocks)
        expect("physical memory asleep", world.fake.alive().physical, 0)
        backend.resume()
        world.expect_awake(*blocks)
        world.expect_alive(*blocks)
        expect("host memory of a server that is awake", world.fake.registered(), 0)
    assert world.fake.shared_peak() <= limit


@pytest.mark.guard
def test_vllm_s_own_backend_has_weights_twice_in_one_memory(world: World) -> None:
    """What the backend is for there: the release's own finds no memory to wake up in."""
    module: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
    own = module.CuMemBackend()
    world.use_cuda_platform()
    world.share_memory_of(world.blocks())
    own.suspend(1)
    problem = raised(own.resume)
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    assert "out of memory" in str(problem)


@pytest.mark.guard
def test_a_wake_up_that_fails_is_rolled_back(world: World) -> None:
    """Also on the untouched release, whose own wake_up keeps what it has mapped."""
    backend = world.use_plugin()
    blocks = world.blocks()
    backend.suspend(1)
    world.fake.fail("cudaMemcpyAsync", nth=2, error=2)
    problem = raised(backend.resume)
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    assert "out of memory" in str(problem)
    expect("state", backend.state(), "SUSPENDED")
    expect("physical memory", world.fake.alive().physical, 0)
    backend.resume()
    world.expect_awake(*blocks)


# ---- blocks of which some sleep already ----


@pytest.mark.guard
@pytest.mark.parametrize("setting", ["auto", "release"])
def test_a_sleep_while_some_blocks_sleep(world: World, setting: str) -> None:
    """The release's own allocator unmaps a block once, and refuses to do so again."""
    backend = world.use_plugin(setting)
    blocks = world.blocks()
    for _ in range(2):
        backend.suspend(1)
        backend.suspend(1)
        world.expect_asleep(*blocks)
        backend.resume(["weights"])
        world.expect_awake(*(b for b in blocks if b.tag == "weights"))
        backend.suspend(1)
        expect("physical memory asleep", world.fake.alive().physical, 0)
        backend.resume()
        world.expect_awake(*blocks)
        world.expect_alive(*blocks)
        backend.discard(("kv_cache",))
        expect("state", backend.state(), "SUSPENDED")
        world.expect_asleep(*(b for b in blocks if b.tag == "kv_cache"))
        backend.discard(("kv_cache",))
        backend.suspend(1)
        expect("physical memory asleep", world.fake.alive().physical, 0)
        backend.resume()
        world.expect_awake(*blocks)
        world.expect_alive(*blocks)


@pytest.mark.guard
def test_a_block_is_unmapped_once(world: World) -> None:
    """As a stock allocator needs it; a patched one knows what is mapped, and is asked again."""
    backend = world.use_plugin()
    backend.copies._knows_mapped = False
    blocks = world.blocks()
    unmap = backend.copies._unmap_and_release
    unmapped: list[int] = []

    def noted(handle: Any) -> None:
        unmapped.append(handle[2])
        unmap(handle)

    backend.copies._unmap_and_release = noted
    for _ in range(2):
        backend.suspend(1)
        backend.discard(("kv_cache",))
        backend.suspend(2)
        expect("unmapped", sorted(unmapped), sorted(block.address for block in blocks))
        unmapped.clear()
        backend.resume()
        expect("unmapped by a wake_up", unmapped, [])


@pytest.mark.guard
def test_a_sleep_without_host_memory_is_refused(world: World) -> None:
    """Before anything sleeps, and before memory is taken that the host does not have."""
    backend = world.use_plugin()
    blocks = world.blocks()
    world.host_memory = GIB
    problem = raised(lambda: backend.suspend(1))
    assert isinstance(problem, RuntimeError), f"raised {problem!r}"
    expect("registered host memory", world.fake.registered(), 0)
    world.expect_awake(*blocks, bytes_of=("weights", "kv_cache"))


@pytest.mark.guard
def test_a_wake_up_that_cannot_be_rolled_back(world: World) -> None:
    """A block that the driver does not unmap is mapped once, not twice, by the next wake_up."""
    backend = world.use_plugin()
    blocks = world.blocks()
    backend.suspend(1)
    world.fake.fail("cudaMemcpyAsync", nth=2, error=2)
    world.fake.fail("cuMemUnmap", error=999)
    assert raised(backend.resume) is not None
    expect("blocks that stay mapped", world.fake.alive().mappings, 1)
    backend.resume()
    world.expect_awake(*blocks)
    world.expect_alive(*blocks)


@pytest.mark.guard
@pytest.mark.parametrize("seed", seeds(3))
def test_random_operations_without_trouble(world: World, seed: int) -> None:
    """What the untouched allocator survives: no interrupt, and no call that fails."""
    Fuzzer(world, Settings(operations=200, seed=seed, plugin=True, trouble=False)).run()


@pytest.mark.patched_only
@pytest.mark.parametrize("seed", seeds(3))
def test_random_operations(world: World, seed: int) -> None:
    """The untouched allocator does not survive its part of it."""
    Fuzzer(world, Settings(operations=200, seed=seed, plugin=True)).run()


@pytest.mark.guard
@pytest.mark.parametrize("level", [1, 2])
def test_what_is_kept_at_each_level(world: World, level: int) -> None:
    """As CuMemBackend does: graphs and the runtime's memory at both, weights at level 1."""
    backend = world.use_plugin()
    blocks = [world.block(tag) for tag in ("weights", "kv_cache", "runtime", "cudagraph")]
    backend.suspend(level)
    backend.resume()
    world.expect_awake(*blocks, bytes_of=OFFLOAD if level == 1 else OFFLOAD[1:])


@pytest.mark.guard
@pytest.mark.parametrize("call", ["suspend", "discard"])
def test_a_sleep_waits_for_the_device(world: World, call: str) -> None:
    """Also where nothing is copied: what is under way uses blocks that are to be unmapped."""
    backend = world.use_plugin()
    blocks = world.blocks()
    for _ in range(2):
        for block in blocks:
            world.fake.begin_work(block.address, block.size)
        if call == "suspend":
            backend.suspend(1)
        else:
            backend.discard(("kv_cache",))
        backend.resume()
    expect("blocks unmapped in use", world.fake.violations(), 0)
    world.expect_awake(*blocks)


@pytest.mark.guard
def test_nothing_is_prepared_where_nothing_is_kept(world: World) -> None:
    world.fake.set_attribute(INTEGRATED, 1)
    backend = world.use_plugin()
    world.blocks()
    backend.prepare()
    backend.copies._wait_for_preparation()
    expect("calls", world.fake.calls("cudaHostRegister"), 0)
    expect("host memory", backend.kept_on_host(), [])


@pytest.mark.guard
@pytest.mark.parametrize("ends", ["prepared", "no host memory"])
def test_the_backend_says_while_it_prepares(world: World, ends: str) -> None:
    """A report of host memory that is still being taken changes, and is not to be kept."""
    backend = world.use_plugin()
    module: Any = importlib.import_module(COPIES)
    go = threading.Event()

    def available(reserve: bool = False) -> int:
        assert go.wait(20), "nobody lets it go on"
        return 0 if ends == "no host memory" else 64 * GIB

    module.available_host_memory = available
    world.blocks()
    expect("before", backend.is_preparing(), False)
    backend.prepare()
    expect("meanwhile", backend.is_preparing(), True)
    go.set()
    backend.copies._wait_for_preparation()
    expect("afterwards", backend.is_preparing(), False)


@pytest.mark.guard
@pytest.mark.parametrize("failing", ["a thread", "cudaDeviceGetAttribute", "cudaSetDevice"])
def test_a_preparation_that_fails_is_no_failure_of_the_load(world: World, failing: str) -> None:
    backend = world.use_plugin()
    blocks = world.blocks()
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(LOGGER).addHandler(handler)
    thread: Any = threading.Thread
    start = thread.start

    def refused(one: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if failing == "a thread":
        thread.start = refused
    else:
        world.fake.fail(failing, count=50)
    for _ in range(2):
        backend.prepare()
        backend.copies._wait_for_preparation()
    thread.start = start
    world.fake.fail_nothing()
    expect("warnings", ["was not prepared" in text for text in texts], [True])
    backend.suspend(1)
    backend.resume()
    world.expect_awake(*blocks)


# ---- what another thread or process has of host memory ----


@pytest.mark.guard
@pytest.mark.parametrize("call", ["prepare", "suspend"])
@pytest.mark.parametrize("ends", ["no room", "cudaHostRegister"])
def test_memory_is_given_back_by_a_thread_of_its_device(world: World, call: str, ends: str) -> None:
    """In a thread that has set no device, CUDA creates a context on GPU 0, of half a GiB there."""
    world.fake.runtime.cudaSetDevice(1)
    backend = world.use_plugin()
    module: Any = importlib.import_module(COPIES)
    module.REGION = GRANULARITY
    blocks = [world.block(device=1) for _ in range(5)]
    rooms = iter([64 * GIB] * 3)
    if ends == "no room":
        module.available_host_memory = lambda reserve=False: next(rooms, 0)
    else:
        world.fake.fail(ends, nth=3, error=2, count=1000)
    world.fake.contexts()
    if call == "prepare":
        backend.prepare()
        backend.copies._wait_for_preparation()
    else:
        raised(lambda: backend.suspend(1))
    world.fake.fail_nothing()
    kept = sum(len(memory) for memory in backend.kept_on_host())
    expect("registered beside what is kept", world.fake.registered() - kept, 0)
    backend.resume()
    for block in blocks:
        thread = threading.Thread(target=world.free, args=(block, 1))
        thread.start()
        thread.join()
    expect("devices with a context", world.fake.contexts(), {1})


def mapping(address: int, process: int | str = "self") -> str | None:
    """The flags of the mapping that an address is in, None where it is in none."""
    inside = False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return " ".join(rest)
    return None


@pytest.mark.guard
@pytest.mark.parametrize("setting", ["auto", "release"])
def test_a_fork_does_not_copy_host_memory(world: World, setting: str) -> None:
    """CUDA's pages are copied at once where a fork copies the mapping: 8 GiB took 7 s."""
    backend = world.use_plugin(setting)
    blocks = world.blocks()
    backend.suspend(1)
    memory = [
        data.cpu_backup_tensor
        for data in world.allocator.pointer_to_data.values()
        if data.cpu_backup_tensor is not None
    ]
    ends = [tensor.data_ptr() + offset for tensor in memory for offset in (0, len(tensor) - 1)]
    expect("ends of copies", len(ends), 2 * len([b for b in blocks if b.tag == "weights"]))
    for address in ends:
        assert "dc" in str(mapping(address)).split(), mapping(address)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        # Without another call, which could map memory where the parent has the copies.
        os.read(reader, 1)
        os._exit(0)
    expect("in the child", [mapping(address, child) for address in ends], [None] * len(ends))
    os.close(writer)
    os.waitpid(child, 0)
    backend.resume()
    world.expect_awake(*blocks)


# ---- writers and interrupts during a sleep ----


@pytest.mark.guard
def test_a_write_between_digest_and_copy(world: World) -> None:
    """The copy is of newer bytes than the digest; the older ones come back later."""
    backend = world.use_plugin()
    blocks = world.blocks()
    old = blocks[0]
    new = Block(address=old.address, size=old.size, tag=old.tag, data=blocks[3].data)
    owner, name = world.copier
    copy = getattr(owner, name)

    def after_a_write(to: int, source: int, size: int, stream: int) -> None:
        if source == old.address:
            world.fill(new)
        copy(to, source, size, stream)

    setattr(owner, name, after_a_write)
    backend.suspend(1)
    setattr(owner, name, copy)
    backend.resume()
    world.expect_awake(new, *blocks[1:])
    world.fill(old)
    backend.suspend(1)
    backend.resume()
    world.expect_awake(*blocks)


@pytest.mark.patched_only
@pytest.mark.parametrize(("setting", "again"), [("auto", 0), ("auto", 2), ("release", 1)])
def test_an_interrupt_while_a_copy_is_under_way(world: World, setting: str, again: int) -> None:
    """The memory that the device writes to is not given back; also after two interrupts in a row.

    On an integrated GPU, where `auto` keeps nothing, and with `release`.
    """

    def prepare() -> list[Block]:
        world.fake.set_attribute(INTEGRATED, int(setting == "auto"))
        world.use_plugin(setting)
        return [world.block(), world.block("kv_cache")]

    def operate(blocks: list[Block]) -> None:
        world.allocator.sleep(("weights",))
        world.allocator.wake_up()

    def check(blocks: list[Block]) -> None:
        world.host_copies._runtime.give_back()
        expect("memory given up in use", world.fake.violations(), 0)
        world.allocator.sleep(("weights",))
        world.allocator.wake_up()
        world.expect_awake(*blocks)
        for block in blocks:
            world.free(block)
        expect("memory given up in use", world.fake.violations(), 0)

    walk(prepare, operate, check, again=again)


@pytest.mark.guard
@pytest.mark.parametrize("size", [1, 3])
def test_a_block_of_another_size_at_a_freed_address(world: World, size: int) -> None:
    """The host memory of the freed block is none of the new one's: it ends before, or after it."""
    backend = world.use_plugin()
    blocks = [world.block(size=2 * GRANULARITY), world.block(size=2 * GRANULARITY)]
    blocks += [world.block("runtime") for _ in range(2)]
    backend.suspend(1)
    backend.resume()
    # Two in a row, so that the address has room for a larger one.
    first = min(block.address for block in blocks[:2])
    for block in blocks[:2]:
        world.free(block)
    blocks[:2] = [world.block(size=size * GRANULARITY), world.block(size=GRANULARITY)]
    expect("the address of the new block", blocks[0].address, first)
    for _ in range(2):
        backend.suspend(1)
        expect("physical memory asleep", world.fake.alive().physical, 0)
        backend.resume()
        world.expect_awake(*blocks, bytes_of=OFFLOAD)
    lengths = {copy.data.handle[2]: len(copy.tensor) for copy in backend.copies._copies.values()}
    expect("sizes of copies", lengths, {block.address: block.size for block in blocks})


def loaded_worker(world: World) -> tuple[Any, list[Block]]:
    """A worker that has loaded these blocks, with the package's backend."""
    registered(world)
    module: Any = importlib.import_module(WORKER)
    module.set_current_vllm_config = lambda config: contextlib.nullcontext()
    module.has_ec_transfer = lambda: False
    module.set_torch_threads_for_runtime = lambda: None
    worker: Any = module.Worker.__new__(module.Worker)
    worker._maybe_get_memory_pool_context = lambda tag: contextlib.nullcontext()
    worker._scoped_allocator_max_split = lambda max_split_size_mb: contextlib.nullcontext()
    worker._sleep_mode_backend = None
    blocks: list[Block] = []
    worker.model_runner = SimpleNamespace(load_model=lambda **o: blocks.extend(world.blocks()))
    options = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="keep")
    worker.vllm_config = SimpleNamespace(model_config=options, weight_transfer_config=None)
    worker.load_model()
    worker.sleep_mode_backend.copies._wait_for_preparation()
    return worker, blocks


@pytest.mark.loads(WORKER)
def test_the_worker_prepares_after_the_load(world: World) -> None:
    worker, blocks = loaded_worker(world)
    size = sum(block.size for block in blocks if block.tag == "weights")
    expect("registered host memory", world.fake.registered(), size)
    worker.sleep_mode_backend.suspend(1)
    expect("registered in all", world.fake.registered(), size)
    # Without sleep mode there is nothing to prepare.
    worker._sleep_mode_backend = None
    worker.vllm_config.model_config.enable_sleep_mode = False
    worker.load_model()
    expect("the backend", worker._sleep_mode_backend, None)
