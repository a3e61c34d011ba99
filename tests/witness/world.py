"""The world a witness sees: the tree's real allocator, native and Python, over the stand-in driver.

What the real driver alone could answer in torch (synchronize, empty_cache, mem_get_info, MemPool)
is answered here, by the stand-in.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.fakecuda.standin import DEVICES, GRANULARITY, Alive, Standin
from tests.witness import forked
from tests.witness.native import ALLOCATOR, ROCM_ALLOCATOR, WITH_EXCEPTION

MIB = 1 << 20
GIB = 1 << 30
# The size of a chunk on ROCm, which is set in whole MiB.
CHUNK = 2 * MIB
# The package with the sleep-mode backend: the tree's own where it has one, which may be mutated.
PACKAGE = "scripts/sleep-keep"
PLUGIN = next(
    place / PACKAGE
    for place in (Path(os.environ.get("SM12X_TREE", "/")), Path(__file__).resolve().parents[2])
    if (place / PACKAGE).is_dir()
)
# CU_DEVICE_ATTRIBUTE_INTEGRATED
INTEGRATED = 18
EMPTY = Alive(handles=0, mappings=0, reservations=0, physical=0)
# Seconds one forked case of a sweep may take; it needs milliseconds.
CASE_LIMIT = 60.0
# What a device without a set capacity says it has.
ROOMY = 64 << 30


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The modules, loaded once; a World is made of them after every fork."""

    fake: Standin
    torch: Any
    cumem: Any
    library: ctypes.CDLL
    rocm_path: Path
    with_exception: Path


def load(tree: Path, libraries: Path) -> Loaded:
    """Load the stand-in, torch, and from ``tree`` vLLM's cumem.py with the compiled allocator."""
    fake = Standin(libraries)
    fake.initialize()
    torch = importlib.import_module("torch")
    # Last: the tree has a package named tests, too.
    sys.path.append(str(tree))
    importlib.import_module("vllm")
    sys.modules["vllm.cumem_allocator"] = _extension(libraries / ALLOCATOR)
    # torch has loaded the real libcudart, which cannot run on a stand-in.
    wrapper: Any = importlib.import_module("vllm.distributed.device_communicators.cuda_wrapper")
    wrapper.find_loaded_library = lambda name: str(fake.runtime_path)
    cumem: Any = importlib.import_module("vllm.device_allocator.cumem")
    assert cumem.cumem_available
    # Pinned memory takes a real driver.
    cumem.PIN_MEMORY = False
    return Loaded(
        fake=fake,
        torch=torch,
        cumem=cumem,
        library=_calls(libraries / ALLOCATOR),
        rocm_path=libraries / ROCM_ALLOCATOR,
        with_exception=libraries / WITH_EXCEPTION,
    )


def _extension(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("vllm.cumem_allocator", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, str(path), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _calls(path: Path) -> ctypes.CDLL:
    """What PyTorch calls of the allocator, as it calls it: without the GIL."""
    library = ctypes.CDLL(str(path))
    library.my_malloc.restype = ctypes.c_void_p
    library.my_malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    library.my_free.restype = None
    library.my_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    return library


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block as PyTorch knows it, and the bytes the witness wrote to it."""

    address: int
    size: int
    tag: str
    data: bytes


class OutOfMemoryError(RuntimeError):
    """What PyTorch raises when its second try failed too."""


class Pool:
    """A torch.cuda.MemPool: caches free segments, gives them back when it is destroyed."""

    def __init__(self, allocator: Any, world: World) -> None:
        self.segments: dict[int, tuple[int, bool]] = {}
        world.pools.append(weakref.ref(self))
        self.id = (0, len(world.pools))
        # As in PyTorch, where destroying a pool while any pool is in use ends the process.
        self._finish = weakref.finalize(self, _destroy, self.segments, world)
        self._finish.atexit = False

    def allocate(self, world: World, size: int) -> int:
        for address, (had, used) in self.segments.items():
            if had == size and not used:
                self.segments[address] = (had, True)
                return address
        # PyTorch's free-and-retry: nothing to free here, but the second call is made.
        address = world.malloc(size) or world.malloc(size)
        if not address:
            raise OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        self.segments[address] = (size, True)
        return address

    def free(self, address: int) -> None:
        """Free a tensor: the segment stays in the pool."""
        self.segments[address] = (self.segments[address][0], False)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        return [
            {
                "address": address,
                "total_size": size,
                "allocated_size": size if used else 0,
                "segment_pool_id": self.id,
                "stream": 0,
            }
            for address, (size, used) in self.segments.items()
        ]

    def use_count(self) -> int:
        return 1


def _destroy(segments: dict[int, tuple[int, bool]], world: World) -> None:
    if world.pools_in_use:
        world.problems.append("MemPool destroyed in use: captures_underway.empty() assert failed")
    for address, (size, _) in segments.items():
        world.free_raw(address, size)


class World:
    """One allocator, fresh, in a process of its own."""

    def __init__(self, loaded: Loaded) -> None:
        self.fake = loaded.fake
        self.torch = loaded.torch
        self.cumem = loaded.cumem
        self.library = loaded.library
        self._rocm_path = loaded.rocm_path
        # See with_exception.c.
        self.with_exception = loaded.with_exception
        self.problems: list[str] = []
        self.pools_in_use: list[Pool] = []
        self.pools: list[weakref.ref[Pool]] = []
        self._written = 0
        self._replace_in_torch()
        # What the host has available: see use_plugin.
        self.host_memory = 64 * GIB
        self.host_copies: Any = None
        # So much of a block goes into its digest: a test with many cases takes less.
        self.digested = GIB
        # What sleep and wake_up copy with.
        self.copier: tuple[Any, str] = (self.cumem.libcudart, "cudaMemcpy")
        self.cumem.CuMemAllocator.instance = None
        self.allocator: Any = self.cumem.CuMemAllocator.get_instance()
        self.cumem.init_module(
            self.allocator.python_malloc_callback, self.allocator.python_free_callback
        )

    def _compute_on_cpu(self, module: Any) -> None:
        """The stand-in's device memory is the host's: torch computes with it on the CPU."""

        def words(address: int, size: int, device: Any) -> Any:
            memory = (ctypes.c_char * size).from_address(address)
            # Its threads would wait for each other, on the cores of other tests.
            self.torch.set_num_threads(1)
            return self.torch.frombuffer(memory, dtype=self.torch.int32)

        def digest(address: int, size: int, factors: Any, numbers: Any) -> None:
            numbers.zero_()
            module.digest_by_torch(address, min(size, self.digested), factors, numbers)

        # Of which the package leaves a reserve, where it is asked to.
        module.available_host_memory = lambda reserve=False: max(
            0, self.host_memory - 4 * GIB * reserve
        )
        module.words_of = words
        module.device_of = lambda index: self.torch.device("cpu")
        module.on_device = lambda device: contextlib.nullcontext()
        module.compile_digest = lambda device: None
        self.host_copies._digest = digest
        self.host_copies._compiled = set(range(DEVICES))
        self.copier = (self.host_copies._runtime, "copy")

    def use_plugin(self, setting: str = "auto") -> Any:
        """From here on the sleep-mode backend of the package keeps host copies; that backend."""
        os.environ["SLEEP_MODE_HOST_COPY"] = setting
        if str(PLUGIN) not in sys.path:
            sys.path.append(str(PLUGIN))
        module: Any = importlib.import_module("vllm_sleep_keep.host_copies")
        backend: Any = importlib.import_module("vllm_sleep_keep.backend").KeepBackend()
        self.host_copies = backend.copies
        self._compute_on_cpu(module)

        def sleep(tags: str | tuple[str, ...]) -> None:
            tags = (tags,) if isinstance(tags, str) else tags
            self.host_copies.sleep(self.allocator, tags)

        def wake_up(tags: list[str] | None = None) -> None:
            self.host_copies.wake_up(self.allocator, tags)

        self.allocator.sleep = sleep
        self.allocator.wake_up = wake_up
        self.allocator.discard = lambda tags: self.host_copies.discard(self.allocator, tags)
        self.allocator.prepare_sleep = lambda: self.host_copies.prepare(self.allocator)
        return backend

    def share_memory(self, limit: int) -> None:
        """From here on the GPU is an integrated one, with ``limit`` bytes for it and the host.

        PyTorch keeps pinned memory that is freed; only emptying its cache gives that back.
        """
        self.fake.set_attribute(INTEGRATED, 1)
        self.fake.share(limit)
        empty = self.torch.empty
        cached: Counter[int] = Counter()

        def counted(*size: Any, **options: Any) -> Any:
            if options.get("device") != "cpu":
                return empty(*size, **options)
            if cached[size[0]]:
                cached[size[0]] -= 1
            elif not self.fake.take_host(size[0]):
                raise RuntimeError("CUDA error: out of memory")
            tensor = empty(*size, **options)
            weakref.finalize(tensor, cached.update, [size[0]]).atexit = False
            return tensor

        def empty_host_cache() -> None:
            for size, count in cached.items():
                self.fake.give_host(size * count)
            cached.clear()

        self.torch.empty = counted
        self.torch.accelerator.empty_host_cache = empty_host_cache

    def share_memory_of(self, blocks: list[Block]) -> int:
        """As share_memory, with room for the blocks and a copy of the largest: so many bytes."""
        sizes = [block.size for block in blocks]
        limit = sum(sizes) + max(sizes)
        self.share_memory(limit)
        return limit

    def use_cuda_platform(self) -> None:
        """Let vLLM find its allocator by its platform, which is none here."""
        allocators: Any = importlib.import_module("vllm.device_allocator")
        allocators.current_platform = SimpleNamespace(is_cuda_alike=lambda: True)

    def use_rocm(self) -> None:
        """From here on, the allocator is the one compiled for ROCm, in chunks of ``CHUNK``."""
        os.environ["VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE"] = str(CHUNK // MIB)
        module = _extension(self._rocm_path)
        self.library = _calls(self._rocm_path)
        for name in ("init_module", "python_create_and_map", "python_unmap_and_release"):
            setattr(self.cumem, name, getattr(module, name))
        # What the release asks of its platform beside the extension.
        self.cumem.current_platform = SimpleNamespace(is_rocm=lambda: True)
        self.cumem.init_module(
            self.allocator.python_malloc_callback, self.allocator.python_free_callback
        )

    def _replace_in_torch(self) -> None:
        cuda = self.torch.cuda
        cuda.synchronize = self.synchronize
        cuda.empty_cache = lambda: None
        cuda.mem_get_info = lambda device=None: self.memory()
        cuda.memory.MemPool = lambda allocator=None: Pool(allocator, self)
        cuda.memory.use_mem_pool = self._use_pool
        # What a pool that is in use is replaced with; see caching.py for PyTorch's own.
        cuda.is_current_stream_capturing = lambda: False
        cuda.memory_snapshot = self._snapshot
        functions = self.torch._C
        functions._cuda_beginAllocateCurrentThreadToPool = self._begin_pool
        functions._cuda_endAllocateToPool = self._end_pool
        functions._cuda_releasePool = lambda device, pool_id: None
        accelerator = self.torch.accelerator
        accelerator.synchronize = self.synchronize
        accelerator.empty_cache = lambda: None
        # Through torch.cuda, where a test puts its own.
        accelerator.get_memory_info = lambda device=None: cuda.mem_get_info()

    def _snapshot(self, pool_id: Any = None, include_traces: bool = True) -> list[dict[str, Any]]:
        alive = [pool for reference in self.pools if (pool := reference()) is not None]
        return [segment for pool in alive for segment in pool.snapshot()]

    def _begin_pool(self, device: int, pool_id: tuple[int, int]) -> None:
        pool = self.pools[pool_id[1] - 1]()
        assert pool is not None
        if pool in self.pools_in_use:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pools_in_use.append(pool)

    def _end_pool(self, device: int, pool_id: tuple[int, int]) -> None:
        pool = self.pools[pool_id[1] - 1]()
        if pool is None or pool not in self.pools_in_use:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools_in_use.remove(pool)

    @contextlib.contextmanager
    def _use_pool(self, pool: Pool, device: Any = None) -> Iterator[None]:
        self.pools_in_use.append(pool)
        try:
            yield
        finally:
            self.pools_in_use.pop()

    # ---- what torch would ask the driver ----

    def synchronize(self, device: Any = None) -> None:
        index = getattr(device, "index", device)
        self.fake.runtime.cudaSetDevice(int(index or 0))
        if self.fake.runtime.cudaDeviceSynchronize() != 0:
            raise RuntimeError("CUDA error: the synchronize failed")

    def memory(self) -> tuple[int, int]:
        total = self.fake.capacity() or ROOMY
        return total - self.fake.alive().physical, total

    # ---- what PyTorch does ----

    def malloc(self, size: int, device: int = 0) -> int:
        """my_malloc as PyTorch calls it, without the GIL; 0 where it returns null."""
        return self.library.my_malloc(size, device, None) or 0

    def free_raw(self, address: int, size: int, device: int = 0) -> None:
        self.library.my_free(address, size, device, None)

    def take(self, size: int) -> int:
        """Memory that another process takes; its address."""
        pointer = ctypes.c_uint64(0)
        code = self.fake.driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
        assert code == 0, f"the other process got error {code}"
        return pointer.value

    def take_back(self, address: int) -> None:
        assert self.fake.driver.cuMemFree_v2(ctypes.c_uint64(address)) == 0

    def block(self, tag: str = "weights", size: int = GRANULARITY, device: int = 0) -> Block:
        """A block filled with bytes of its own."""
        self.allocator.current_tag = tag
        address = self.malloc(size, device)
        assert address, f"my_malloc({size}) returned null"
        self._written += 1
        data = bytes((self._written * 37 + i) % 251 + 1 for i in range(509)) * (size // 509 + 1)
        block = Block(address=address, size=size, tag=tag, data=data[:size])
        self.fill(block)
        return block

    def blocks(self) -> list[Block]:
        """Weights and KV cache as a small model has them."""
        return [
            self.block("weights"),
            self.block("weights", 2 * GRANULARITY),
            self.block("kv_cache"),
            self.block("weights"),
        ]

    def fill(self, block: Block) -> None:
        assert self.fake.write(block.address, block.data) == 0, f"{block.tag} is not mapped"

    def free(self, block: Block, device: int = 0) -> None:
        self.free_raw(block.address, block.size, device)

    # ---- what a witness looks at ----

    def records(self) -> set[int]:
        return set(self.allocator.pointer_to_data)

    def intact(self, block: Block) -> bool:
        return self.fake.read(block.address, block.size) == block.data

    def expect_awake(self, *blocks: Block, bytes_of: tuple[str, ...] = ("weights",)) -> None:
        """Mapped, recorded, and with their bytes where their tag is one of ``bytes_of``."""
        for block in blocks:
            assert self.fake.mapped(block.address, block.size), f"{block.tag} is not mapped"
            assert block.address in self.records(), f"{block.tag} has no record"
            if block.tag in bytes_of:
                assert self.intact(block), f"bytes of {block.tag} at {block.address:#x} are lost"

    def expect_asleep(self, *blocks: Block) -> None:
        for block in blocks:
            assert not self.fake.mapped(block.address, 1), f"{block.tag} is still mapped"
            assert block.address in self.records(), f"{block.tag} has no record"

    def expect_alive(self, *awake: Block, asleep: tuple[Block, ...] = ()) -> None:
        """The driver holds exactly these blocks, and so do the records."""
        expect(
            "what the driver holds",
            self.fake.alive(),
            Alive(
                handles=len(awake),
                mappings=len(awake),
                reservations=len(awake) + len(asleep),
                physical=sum(block.size for block in awake),
            ),
        )
        expect("the records", self.records(), {block.address for block in (*awake, *asleep)})

    def expect_usable(self, *blocks: Block) -> None:
        """The allocator works from here on: a new block, sleep, wake, free, and nothing left."""
        every = (*blocks, self.block("weights"))
        for block in every:
            self.fill(block)
        self.allocator.sleep(("weights", "kv_cache"))
        expect("physical memory asleep", self.fake.alive().physical, 0)
        self.allocator.wake_up()
        self.expect_awake(*every, bytes_of=("weights", "kv_cache"))
        for block in every:
            self.free(block)
        expect("what the driver holds in the end", self.fake.alive(), EMPTY)
        expect("the records in the end", self.records(), set())


def expect(what: str, got: object, wanted: object) -> None:
    assert got == wanted, f"{what}: {got}, expected {wanted}"


def said(call: Callable[[], object]) -> str:
    """What is written to stderr during the call, by C too."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            call()
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return file.read().decode()


def raised(call: Callable[[], object]) -> Exception | None:
    """The exception the call raises, if it does."""
    try:
        call()
    except Exception as error:
        return error
    return None


def sweep(
    world: World,
    prepare: Callable[[], Any],
    operate: Callable[[Any], object],
    check: Callable[[Any, Exception | None], None],
    *,
    error: int = 2,
    count: int = 1,
) -> None:
    """Let every driver call that ``operate`` makes fail in turn, each time in a fork of its own.

    ``prepare`` makes the state and returns it, ``operate`` is the operation, ``check`` gets the
    state and what the operation raised. All failing cases are reported together.
    """

    def dry() -> dict[str, int]:
        state = prepare()
        world.fake.forget_calls()
        operate(state)
        return {name: world.fake.calls(name) for name in world.fake.functions()}

    clean = forked.run(dry, CASE_LIMIT, idle=forked.IDLE)
    assert clean.passed, f"without any failure:\n{clean.text}"
    cases = [(name, n) for name, calls in clean.value.items() for n in range(1, calls + 1)]
    assert cases, "the operation makes no driver call"
    failures: list[str] = []
    for name, n in cases:

        def case(name: str = name, n: int = n) -> None:
            state = prepare()
            world.fake.forget_calls()
            world.fake.fail(name, n, error, count)
            problem = raised(lambda: operate(state))
            world.fake.fail_nothing()
            check(state, problem)

        outcome = forked.run(case, CASE_LIMIT, idle=forked.IDLE)
        if not outcome.passed:
            lines = [line for line in outcome.text.splitlines() if line.strip()]
            failures.append(f"call {n} of {name}: {reason(lines)}")
    assert not failures, f"{len(failures)} of {len(cases)} cases fail:\n  " + "\n  ".join(failures)


def reason(lines: list[str]) -> str:
    """The one line of a case's output that says what went wrong."""
    for line in lines:
        if line.startswith(("killed by", "hangs")):
            return line
    return lines[-1] if lines else "no output"
