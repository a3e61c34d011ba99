# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake_up with host copies that are kept from one sleep to the next.

The first sleep copies weights to the host. A later one finds that the copy still
holds what is on the device, and only unmaps. Nothing announces a write to
weights: a reload, a weight transfer, LoRA or EPLB write in place, and so may any
code. So each sleep computes a digest of every block on the device, and copies a
block anew unless its digest is the one of the copy.
"""

import contextlib
import ctypes
import functools
import gc
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON, tl, triton

# By this name it is written to vLLM's log.
logger = logging.getLogger("vllm.device_allocator.host_copies")

SETTING = "SLEEP_MODE_HOST_COPY"
SETTINGS = ("auto", "keep", "release")

MIB = 1 << 20
GIB = 1 << 30
HUGE_PAGE = 2 * MIB
# Bytes of host memory that are registered in one call, and touched by one.
REGION = GIB
TOUCHED = 64 * MIB
THREADS = 16
# What "auto" leaves of the host's memory, or a tenth of it where that is more: several
# workers take theirs at a time.
RESERVE = 4 * GIB
# Copies are issued to these in turn, so that one begins while another ends.
STREAMS = 2
# A digest has a number for each row of so many 32-bit words. The kernel computes
# so many rows at a time; without it PyTorch does, and 1024 rows take 48 MiB.
WORDS = 4096
KERNEL_ROWS = 8
KERNEL = {"width": WORDS, "height": KERNEL_ROWS, "step": 512, "num_warps": 8}
ROWS = 1024

MADV_POPULATE_WRITE = 23
EINVAL = 22


def setting() -> str:
    """What the environment asks for; ValueError where that is none of `SETTINGS`."""
    value = os.environ.get(SETTING, "auto")
    if value not in SETTINGS:
        raise ValueError(f"{SETTING}={value}: it is one of {', '.join(SETTINGS)}")
    return value


# ---- the host's memory ----


class NoHostMemoryError(RuntimeError):
    """The host has no room for copies."""


def available_host_memory(
    reserve: bool,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Bytes that can be taken before the host's memory or a cgroup's limit ends.

    With `reserve`, 4 GiB of it are left, or a tenth where that is more. 0 where the
    host does not say.
    """
    try:
        meminfo = (line.split() for line in (proc / "meminfo").read_text().splitlines())
        sizes = {fields[0]: int(fields[1]) * 1024 for fields in meminfo}
        rooms = [(sizes["MemTotal:"], sizes["MemAvailable:"])]
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            rooms += _cgroup_rooms(line, cgroups)
    except (OSError, LookupError, ValueError) as error:
        logger.warning("Cannot tell how much host memory is available: %s", error)
        return 0
    left = [room - reserve * max(RESERVE, total // 10) for total, room in rooms]
    return max(0, min(left))


def require_host_memory(size: int, reserve: bool) -> None:
    """Raise NoHostMemoryError where fewer bytes than `size` can be taken."""
    available = available_host_memory(reserve)
    if available < size:
        left = " beside the reserve of 4 GiB or a tenth of it" if reserve else ""
        raise NoHostMemoryError(
            f"host copies take {size / GIB:.2f} GiB of host memory, and "
            f"{available / GIB:.2f} GiB are available{left}"
        )


def _cgroup_rooms(line: str, root: Path) -> Iterator[tuple[int, int]]:
    """Each limit of one line of /proc/self/cgroup, and what is left under it."""
    _, controllers, path = line.split(":", 2)
    if controllers == "":
        top, limit, usage, prefix = root, "memory.max", "memory.current", ""
    elif "memory" in controllers.split(","):
        top, prefix = root / "memory", "total_"
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
    else:
        return
    # In a container the path may be the host's. Then the top is the container's.
    folders = [top]
    for part in Path(path).parts[1:]:
        if part == ".." or not (folders[-1] / part).is_dir():
            break
        folders.append(folders[-1] / part)
    for folder in folders:
        if not (folder / limit).is_file():
            continue
        value = (folder / limit).read_text().strip()
        if value != "max":
            used = int((folder / usage).read_text())
            used -= _page_cache(folder / "memory.stat", prefix)
            yield int(value), int(value) - used


def _page_cache(stat: Path, prefix: str) -> int:
    """Bytes of files: the kernel drops those before a limit is reached."""
    names = (f"{prefix}active_file", f"{prefix}inactive_file")
    fields = (line.split() for line in stat.read_text().splitlines())
    return sum(int(value) for name, value in fields if name in names)


def cpus_near(bus_id: str, sys: Path = Path("/sys")) -> set[int]:
    """The CPUs of the NUMA node of a PCI device; none where that is not known."""
    try:
        device = sys / "bus" / "pci" / "devices" / bus_id.lower()
        node = int((device / "numa_node").read_text())
        if node < 0:
            return set()
        cpus: set[int] = set()
        folder = sys / "devices" / "system" / "node" / f"node{node}"
        for part in (folder / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return cpus & os.sched_getaffinity(0)


def _run_on(cpus: set[int]) -> None:
    """Run this thread on these CPUs: what it touches first is in their memory."""
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.debug("Cannot choose the CPUs of a thread: %s", error)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def touch(address: int, size: int) -> None:
    """Have the kernel give this memory its pages, without the GIL."""
    if _libc.madvise(address, size, MADV_POPULATE_WRITE) == 0:
        return
    error = ctypes.get_errno()
    if error != EINVAL:
        raise NoHostMemoryError(f"the kernel gave no pages: {os.strerror(error)}")
    # A kernel before 5.14.
    ctypes.memset(address, 0, size)


class Runtime:
    """What copies take of libcudart, with its errors raised."""

    INTEGRATED = 18
    RELAXED = 2
    NON_BLOCKING = 1
    PORTABLE = 1
    ANY_DIRECTION = 4
    # What cudaHostUnregister answers where nothing is registered, or any more.
    UNREGISTERED = (0, 1, 713)

    def __init__(self, path: str) -> None:
        # A library object of its own: argument types are set on it.
        self._library = ctypes.CDLL(path)
        number, size, pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
        for name, arguments in (
            ("cudaSetDevice", [number]),
            ("cudaDeviceGetAttribute", [pointer, number, number]),
            ("cudaDeviceGetPCIBusId", [pointer, number, number]),
            ("cudaHostRegister", [pointer, size, ctypes.c_uint]),
            ("cudaHostUnregister", [pointer]),
            ("cudaStreamCreateWithFlags", [pointer, ctypes.c_uint]),
            ("cudaStreamSynchronize", [pointer]),
            ("cudaMemcpyAsync", [pointer, pointer, size, number, pointer]),
            ("cudaThreadExchangeStreamCaptureMode", [pointer]),
            ("cudaGetLastError", []),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = number, arguments
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaGetErrorString.argtypes = [number]
        # By address, the device and memory of each region, which `give_back` unmaps.
        self._held: dict[int, tuple[weakref.ref[Region], int, mmap.mmap]] = {}

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            # So that no later call of PyTorch reports it.
            self._library.cudaGetLastError()
            text = self._library.cudaGetErrorString(code).decode()
            raise RuntimeError(f"CUDA Error: {text} in {name}")

    def begin_thread(self, device: int) -> None:
        self.call("cudaSetDevice", device)
        # While another thread captures a CUDA graph, calls are refused without.
        mode = ctypes.c_int(self.RELAXED)
        self.call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def is_integrated(self, device: int) -> bool:
        value = ctypes.c_int()
        self.call(
            "cudaDeviceGetAttribute", ctypes.byref(value), self.INTEGRATED, device
        )
        return value.value != 0

    def bus_id(self, device: int) -> str:
        text = ctypes.create_string_buffer(32)
        self.call("cudaDeviceGetPCIBusId", text, len(text), device)
        return text.value.decode()

    def stream(self) -> int:
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreateWithFlags", ctypes.byref(stream), self.NON_BLOCKING)
        return stream.value or 0

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Issue a copy; it is done once the stream is waited for."""
        self.call("cudaMemcpyAsync", to, source, size, self.ANY_DIRECTION, stream)

    def wait(self, stream: int) -> None:
        self.call("cudaStreamSynchronize", stream)

    def register(self, address: int, size: int) -> None:
        self.call("cudaHostRegister", address, size, self.PORTABLE)

    def hold(self, region: "Region", device: int, memory: mmap.mmap) -> None:
        """Keep memory mapped until the region is gone and CUDA does not know it.

        CUDA copies to the pages it has registered for an address, also where other
        memory is mapped to the address by now.
        """
        self._held[region.address] = weakref.ref(region), device, memory

    def give_back(self) -> None:
        """Unregister and unmap the memory of the regions that are gone.

        That is done in threads of their devices, and not where a region goes: in
        another thread CUDA creates a context, on GPU 0. What CUDA refuses is left for
        the next call.
        """
        gone: dict[int, list[tuple[int, mmap.mmap]]] = {}
        for address, (region, device, memory) in self._held.copy().items():
            if region() is None:
                gone.setdefault(device, []).append((address, memory))
        for device, ended in gone.items():
            with (
                contextlib.suppress(RuntimeError),
                DeviceThreads(self, device, 1) as threads,
            ):
                threads.start(self._give_back, ended).result()

    def _give_back(self, ended: list[tuple[int, mmap.mmap]]) -> None:
        # Another thread may give the same back: an interrupted call leaves one. `ended`
        # keeps the memory mapped, so that no new region has one of its addresses.
        for address, _ in ended:
            code = self._library.cudaHostUnregister(address)
            if code != 0:
                self._library.cudaGetLastError()
            if code in self.UNREGISTERED:
                self._held.pop(address, None)


class DeviceThreads(ThreadPoolExecutor):
    """Threads for calls that are made for a device.

    The thread that asks keeps its own device: to set that again would create a
    context where it has none yet.
    """

    def __init__(
        self, runtime: Runtime, device: int, count: int, cpus: Iterable[int] = ()
    ) -> None:
        super().__init__(count, "sleep-host-copies")
        self._runtime = runtime
        self._device = device
        self._cpus = set(cpus)
        self._begun = threading.local()

    def __exit__(self, *error: object) -> None:
        self.shutdown(cancel_futures=True)

    def start(self, call: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        return self.submit(self._on_device, call, *arguments)

    def _on_device(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if not hasattr(self._begun, "yes"):
            _run_on(self._cpus)
            self._runtime.begin_thread(self._device)
            self._begun.yes = True
        return call(*arguments)


class Region:
    """Host memory with huge pages where there are any, registered with CUDA."""

    def __init__(self, size: int, runtime: Runtime, device: int) -> None:
        memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE)
        # A fork would copy each page that is registered, at once. A forked process
        # does not have this memory; it cannot use CUDA either.
        memory.madvise(mmap.MADV_DONTFORK)
        start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        skipped = -start % HUGE_PAGE
        self._runtime = runtime
        self._tensor = torch.frombuffer(
            memory, dtype=torch.uint8, count=size, offset=skipped
        )
        self.address = start + skipped
        self.size = size
        _libc.madvise(self.address, size, mmap.MADV_HUGEPAGE)
        # In any case: an exception can come right after the call that registers.
        runtime.hold(self, device, memory)

    def take(self, threads: DeviceThreads) -> Future[None]:
        """Give the memory its pages, and register it, in these threads."""
        end = self.address + self.size
        touches = [
            threads.start(touch, at, min(TOUCHED, end - at))
            for at in range(self.address, end, TOUCHED)
        ]
        # It comes to a thread after them.
        return threads.start(self.register, touches)

    def register(self, touches: Iterable[Future[None]] = ()) -> None:
        for touched in touches:
            touched.result()
        self._runtime.register(self.address, self.size)

    def part(self, offset: int, size: int) -> torch.Tensor:
        part = self._tensor[offset : offset + size]
        # The memory can be given back once its last part is gone.
        part.region = self
        return part


def _groups(sizes: Iterable[int]) -> Iterator[list[int]]:
    """Sizes in their order, as many together as a region has room for."""
    group: list[int] = []
    for size in sizes:
        if group and sum(group) + size > REGION:
            yield group
            group = []
        group.append(size)
    if group:
        yield group


def host_memory(
    sizes: list[int], runtime: Runtime, device: int, reserve: bool
) -> Iterator[torch.Tensor]:
    """Take registered host memory, near to the device: bytes for each of the sizes.

    Each tensor comes once it can be copied to; more memory is touched and registered
    meanwhile. Raises NoHostMemoryError where less is available, beside the `reserve`,
    and RuntimeError where CUDA does not register it.
    """
    left = sum(sizes)
    near = cpus_near(runtime.bus_id(device))
    count = min(THREADS, len(near or os.sched_getaffinity(0)))
    taken: deque[tuple[Region, Future[None], list[int]]] = deque()
    with DeviceThreads(runtime, device, count, near) as threads:
        for group in [*_groups(sizes), []]:
            if group:
                # Before each region: other workers take theirs at the same time.
                require_host_memory(left, reserve)
                left -= sum(group)
                region = Region(sum(group), runtime, device)
                taken.append((region, region.take(threads), group))
            # One is touched and one registered while another is used.
            while len(taken) > (2 if group else 0):
                region, done, parts = taken.popleft()
                done.result()
                for size, end in zip(parts, accumulate(parts), strict=True):
                    yield region.part(end - size, size)


# ---- what a block contains ----


def words_of(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Device memory as 32-bit words; nothing is copied."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (size // 4,),
            "typestr": "<i4",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=device)


def device_of(index: int) -> torch.device:
    return torch.device("cuda", index)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The kernel is launched on the current device."""
    return torch.cuda.device(device)


def multipliers(device: torch.device) -> torch.Tensor:
    """Random odd 64-bit numbers, the same in every call: one for each word of a row."""
    generator = torch.Generator().manual_seed(0x5EED)
    numbers = torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=generator)
    return (numbers | 1).to(device)


@triton.jit
def digest_kernel(
    words,
    factors,
    numbers,
    count,
    width: tl.constexpr,
    height: tl.constexpr,
    step: tl.constexpr,
):
    """`digest_by_kernel` of rows of `width` words; a program takes `height` of them."""
    rows = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    live = rows < count
    columns = tl.arange(0, step)
    sums = tl.zeros((height, step), tl.int64)
    for start in range(0, width, step):
        some = tl.load(
            words + rows[:, None] * width + start + columns[None, :],
            mask=live[:, None],
            other=0,
        )
        sums += some.to(tl.int64) * tl.load(factors + start + columns)[None, :]
    tl.store(numbers + rows, tl.sum(sums, 1), mask=live)


@dataclass(frozen=True)
class Words:
    """Device memory as the kernel takes it; `words_of` takes longer than the digest."""

    address: int
    dtype = torch.int32

    def data_ptr(self) -> int:
        return self.address


def digest_by_kernel(
    address: int, size: int, factors: torch.Tensor, numbers: torch.Tensor
) -> None:
    """Compute one 64-bit number for each row of a block, on its device.

    A number is the sum of the row's words, each times its factor, modulo 2**64. With
    one word changed it changes for certain; otherwise two rows have the same number
    with a probability of 2**-32 at most, also if one has the words of the other in
    another order.

    `size` is in bytes, the device is the current one, `factors` are `multipliers`, and
    `numbers` are written to.
    """
    count = len(numbers)
    digest_kernel[(triton.cdiv(count, KERNEL_ROWS),)](
        Words(address),
        factors,
        numbers,
        count,
        **KERNEL,
    )


def digest_by_torch(
    address: int, size: int, factors: torch.Tensor, numbers: torch.Tensor
) -> None:
    """As `digest_by_kernel`, in nine times the memory traffic."""
    rows = words_of(address, size, factors.device).view(-1, WORDS)
    count = min(ROWS, len(rows))
    products = torch.empty(count, WORDS, dtype=torch.int64, device=rows.device)
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        torch.mul(some, factors, out=products[: len(some)])
        torch.sum(products[: len(some)], dim=1, out=numbers[start : start + len(some)])


def compile_digest(device: int) -> None:
    """Compile and load the kernel of `digest_by_kernel`; nothing is launched."""
    if not HAS_TRITON:
        return
    with on_device(device_of(device)):
        compiled = digest_kernel.warmup(
            torch.int32,
            torch.int64,
            torch.int64,
            # Divisible by 16, as the count of a block's rows is.
            16 * KERNEL_ROWS,
            **KERNEL,
            grid=(1,),
        )
        # What can be launched is loaded; some versions compile C for it, too.
        compiled[(1, 1, 1)]


# ---- sleep and wake_up ----


@dataclass(eq=False)
class Copy:
    """The host memory of one block. `data` is the allocator's record of the block:
    another block may get its address."""

    data: Any
    tensor: torch.Tensor
    # Of what the memory holds; None where that is not known.
    digest: bytes | None = None


def _named(data: Any) -> str:
    return f"{data.tag} block {data.handle[2]:#x} of {data.handle[1]} bytes"


class HostCopies:
    """The sleep and wake_up of a CuMemAllocator, with copies that are kept.

    The blocks are the allocator's: `is_asleep` and `cpu_backup_tensor` of its
    records say what is asleep, and what it is restored from. A kept copy is not
    more than memory that may hold what a block contains.

    An exception can come between any two steps (a signal, for one). So host copy
    and state are recorded before a block is unmapped, and a copy loses its digest
    before it is written.
    """

    def __init__(
        self,
        *,
        runtime_path: str,
        create_and_map: Callable[[Any], None],
        unmap_and_release: Callable[[Any], None],
        knows_mapped: bool,
        always_woken: Callable[[str], bool] = lambda tag: False,
    ) -> None:
        """`knows_mapped`: the allocator maps and unmaps a block only where it has to.

        `always_woken` tells of a tag whether each wake_up wakes it."""
        self.setting = setting()
        self._runtime = Runtime(runtime_path)
        self._create_and_map = create_and_map
        self._unmap_and_release = unmap_and_release
        self._knows_mapped = knows_mapped
        self._always_woken = always_woken
        self._copies: dict[int, Copy] = {}
        # Memory whose block is gone, by size, for a block that is new.
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._streams: dict[int, list[int]] = {}
        # The host memory of copies that may be under way.
        self._in_flight: list[torch.Tensor] = []
        self._is_integrated = functools.cache(self._runtime.is_integrated)
        self._preparation: threading.Thread | None = None
        self._digest = digest_by_kernel if HAS_TRITON else digest_by_torch
        # The devices that have the kernel.
        self._compiled: set[int] = set()
        # Why host memory could not be taken in the background.
        self._lack = ""
        self._warned: set[str] = set()
        self._has_frozen = False

    # -- before the first sleep --

    def prepare(self, allocator: Any, tag: str = "weights") -> None:
        """Take the host memory for the blocks of a tag, in the background.

        What fails is logged: the first sleep takes the memory, or says why not.
        """
        try:
            self._wait_for_preparation()
            gc.collect()
            gc.freeze()
            self._forget_freed(allocator)
            records = list(allocator.pointer_to_data.values())
            blocks = [data for data in records if data.tag == tag]
            blocks = [data for data in blocks if self._keeps(data.handle[0])]
            if blocks:
                self._prepare_by(self._prepare, blocks)
        except Exception as error:
            self._warn(f"Host memory for sleep was not prepared: {error}")

    def is_preparing(self) -> bool:
        preparation = self._preparation
        return preparation is not None and preparation.is_alive()

    def _prepare_by(self, call: Callable[..., None], *arguments: Any) -> None:
        self._preparation = threading.Thread(
            target=call, args=arguments, name="sleep-host-copies"
        )
        self._preparation.start()

    def _prepare(self, blocks: list[Any]) -> None:
        self._compile(self._not_compiled(blocks))
        missing = [data for data in blocks if data.handle[2] not in self._copies]
        try:
            self._take_memory(missing)
            return
        except Exception as error:
            self._warn(f"Host memory for sleep was not prepared: {error}")
        self._give_up_memory(missing)

    def _wait_for_preparation(self) -> None:
        # An interrupt can have left a thread that was not started.
        if self._preparation is not None and self._preparation.is_alive():
            self._preparation.join()
        self._preparation = None

    def _not_compiled(self, blocks: list[Any]) -> set[int]:
        """The devices of blocks that are to have the kernel of digests."""
        if self._digest is digest_by_torch:
            return set()
        devices = {data.handle[0] for data in blocks} - self._compiled
        return {device for device in devices if self._keeps(device)}

    def _compile(self, devices: Iterable[int]) -> None:
        try:
            for device in devices:
                with DeviceThreads(self._runtime, device, 1) as threads:
                    threads.start(compile_digest, device).result()
                self._compiled.add(device)
        except Exception as error:
            self._do_without_kernel(error)

    def _do_without_kernel(self, error: Exception) -> None:
        """It cannot be compiled or launched here, and will not be later."""
        self._digest = digest_by_torch
        self._warn(f"Sleep computes digests without a kernel for it: {error}")

    # -- sleep --

    def sleep(self, allocator: Any, offload_tags: tuple[str, ...]) -> None:
        """Put every block to sleep: with a host copy, or discarded.

        A block that is asleep keeps the content it went to sleep with; what it
        still has mapped is given back. After any exception sleep goes on from
        there, and wake_up takes it back.
        """
        # Blocks to offload go first: what fails for want of host memory then
        # fails before anything is discarded.
        blocks = sorted(
            allocator.pointer_to_data.values(),
            key=lambda data: data.tag not in offload_tags,
        )
        self._wait_for_preparation()
        self._synchronize(blocks)
        self._wait_for_copies()
        self._forget_freed(allocator)
        offloaded = [data for data in blocks if data.tag in offload_tags]
        awake = [data for data in offloaded if not data.is_asleep]
        saved = self._save(allocator, awake)
        self._put_all_to_sleep(allocator, blocks, offload_tags, saved)
        self._forget_discarded()
        gc.collect()
        if not self._has_frozen:
            # Each collection of all objects takes 75 ms. A capture of CUDA graphs ends
            # the freeze of `prepare`, and vLLM's own is not made in every process.
            self._has_frozen = True
            gc.freeze()
        torch.cuda.empty_cache()
        self._runtime.give_back()
        devices = self._not_compiled(offloaded)
        if devices:
            # That takes longer than the digests themselves: a sleep does not wait.
            self._prepare_by(self._compile, devices)

    def discard(self, allocator: Any, tags: tuple[str, ...]) -> None:
        """Put the blocks of these tags to sleep, and discard what is in them."""
        records = list(allocator.pointer_to_data.values())
        blocks = [data for data in records if data.tag in tags]
        self._synchronize(blocks)
        self._put_all_to_sleep(allocator, blocks, (), {})

    def _put_all_to_sleep(
        self,
        allocator: Any,
        blocks: list[Any],
        offload_tags: tuple[str, ...],
        saved: dict[int, Copy],
    ) -> None:
        conflict = False
        total = backup = 0
        for data in blocks:
            offload = data.tag in offload_tags
            offloaded = data.cpu_backup_tensor is not None
            conflict |= data.is_asleep and offload != offloaded
            if self._put_to_sleep(allocator, data, offload, saved):
                total += data.handle[1]
                backup += data.handle[1] if offload else 0
        logger.info(
            "Sleep freed %.2f GiB of memory: %.2f GiB have a copy in host memory, "
            "the rest is discarded.",
            total / GIB,
            backup / GIB,
        )
        if conflict:
            logger.warning(
                "Sleep cannot change whether a block that is asleep has a host copy."
            )

    def _put_to_sleep(
        self, allocator: Any, data: Any, offload: bool, saved: dict[int, Copy]
    ) -> bool:
        """Put one block to sleep and return whether it was awake."""
        try:
            if not self._take_in_hand(allocator, data):
                return False
            was_awake = not data.is_asleep
            if was_awake:
                data.is_unmapped = False
                data.cpu_backup_tensor = None
                if offload:
                    data.cpu_backup_tensor = self._copy_of(data, saved)
                data.is_asleep = True
            try:
                self._unmap(data)
            except RuntimeError:
                # The driver refused and nothing changed: the content is there.
                if was_awake:
                    data.is_asleep = False
                    data.cpu_backup_tensor = None
                raise
        except Exception as error:
            raise RuntimeError(
                f"Sleep failed at {_named(data)}: {error}. It keeps its memory; "
                "sleep goes on from here, wake_up takes it back."
            ) from error
        finally:
            allocator.in_hand = None
        return was_awake

    def _copy_of(self, data: Any, saved: dict[int, Copy]) -> torch.Tensor:
        """The copy of a block: the kept one, or one for this sleep alone."""
        device, size, address = data.handle[:3]
        if address in saved:
            return saved[address].tensor
        require_host_memory(size, reserve=False)
        # Not PyTorch's pinned memory, which it keeps when the copy is given up.
        region = Region(size, self._runtime, device)
        touch(region.address, size)
        try:
            region.register()
        except RuntimeError:
            # Without that the driver copies in pieces, through memory of its own.
            if self._is_integrated(device):
                raise
        tensor = region.part(0, size)
        self._copy(data, tensor, 0, to_host=True)
        self._wait_for_copies()
        return tensor

    def _save(self, allocator: Any, blocks: list[Any]) -> dict[int, Copy]:
        """Bring the kept copies of these blocks up to date; the copies by address.

        Raises NoHostMemoryError where there is too little memory, also for others.
        """
        if self.setting == "release":
            # On an integrated GPU each block frees what the copy of the next takes.
            others = [b.handle for b in blocks if not self._is_integrated(b.handle[0])]
            require_host_memory(sum(size for _, size, *_ in others), reserve=False)
        blocks = [data for data in blocks if self._keeps(data.handle[0])]
        if not blocks:
            return {}
        missing = [data for data in blocks if data.handle[2] not in self._copies]
        addresses = {data.handle[2] for data in blocks} & self._copies.keys()
        kept = {address: self._copies[address] for address in addresses}
        taken = self._take_in_background(missing) if missing else ()
        digests = self._digests(allocator, blocks)
        changed = [
            copy.data
            for address, copy in kept.items()
            if copy.digest is None or copy.digest != digests.get(address)
        ]
        if not changed and not missing:
            return kept
        copied = self._copy_to_host(allocator, chain(changed, taken))
        self._wait_for_preparation()
        if missing and self._lack:
            copied.clear()
            self._give_up_memory(missing)
            raise NoHostMemoryError(f"Sleep is refused: {self._lack}")
        # A digest is of what was copied only if nothing was written in between.
        blocks = [data for data in blocks if data.handle[2] in copied]
        again = self._digests(allocator, blocks)
        for address, copy in copied.items():
            if again.get(address) == digests.get(address):
                copy.digest = again.get(address)
        return kept | copied

    def _take_in_background(self, blocks: list[Any]) -> Iterator[Any]:
        """Take host memory for blocks; of the result is each that has its own."""
        taken: SimpleQueue[Any] = SimpleQueue()
        self._lack = ""
        self._prepare_by(self._take, blocks, taken)
        return iter(taken.get, None)

    def _take(self, blocks: list[Any], taken: "SimpleQueue[Any]") -> None:
        try:
            self._take_memory(blocks, taken.put)
        except NoHostMemoryError as error:
            self._lack = str(error)
        except Exception as error:
            self._warn(
                f"Sleep takes its host copies anew each time, and each takes "
                f"longer: no host memory could be registered for them: {error}"
            )
        finally:
            taken.put(None)

    def _copy_to_host(self, allocator: Any, blocks: Iterable[Any]) -> dict[int, Copy]:
        """Copy blocks, which have host memory; the copies by address."""
        copied: dict[int, Copy] = {}
        data: Any = None
        try:
            for data in blocks:
                copy = self._copies[data.handle[2]]
                if not self._take_in_hand(allocator, data):
                    continue
                copy.digest = None
                self._copy(data, copy.tensor, len(copied), to_host=True)
                copied[data.handle[2]] = copy
            allocator.in_hand = None
            if copied:
                self._wait_for_copies()
        except Exception as error:
            raise RuntimeError(
                f"Sleep failed at {_named(data)}: {error}. All keep their memory."
            ) from error
        finally:
            allocator.in_hand = None
        return copied

    def _digests(self, allocator: Any, blocks: list[Any]) -> dict[int, bytes]:
        """By address; none where they cannot be computed."""
        try:
            try:
                return self._digests_by_device(allocator, blocks)
            except Exception as error:
                if self._digest is digest_by_torch:
                    raise
                devices = self._not_compiled(blocks)
                if devices:
                    # The kernel takes no memory for products.
                    self._compile(devices)
                else:
                    self._do_without_kernel(error)
                return self._digests_by_device(allocator, blocks)
        except Exception as error:
            # Out of memory, for one: there is no room for the products. Without a
            # digest everything is copied, which is never wrong.
            self._warn(f"Sleep copies also what it may have a copy of: {error}")
            return {}
        finally:
            allocator.in_hand = None

    def _digests_by_device(self, allocator: Any, blocks: list[Any]) -> dict[int, bytes]:
        digests: dict[int, bytes] = {}
        for index in {data.handle[0] for data in blocks}:
            group = [
                data
                for data in blocks
                if data.handle[0] == index and data.handle[1] % (4 * WORDS) == 0
            ]
            digest = self._digest if index in self._compiled else digest_by_torch
            device = device_of(index)
            with on_device(device):
                factors = multipliers(device)
                rows = [data.handle[1] // (4 * WORDS) for data in group]
                numbers = torch.empty(sum(rows), dtype=torch.int64, device=device)
                ends: dict[int, tuple[int, int]] = {}
                for data, end, count in zip(group, accumulate(rows), rows, strict=True):
                    _, size, address = data.handle[:3]
                    if self._take_in_hand(allocator, data):
                        digest(address, size, factors, numbers[end - count : end])
                        ends[address] = 8 * (end - count), 8 * end
                allocator.in_hand = None
                # To the host in one go.
                found = numbers.cpu().numpy().tobytes()
            digests |= {
                address: found[start:end] for address, (start, end) in ends.items()
            }
        return digests

    # -- wake_up --

    def wake_up(self, allocator: Any, tags: list[str] | None) -> None:
        """Map what is asleep, and restore what has a host copy.

        Blocks that are awake stay as they are. If a block cannot be woken, all
        those of this call are asleep again, with their host copies, and the same
        call can be made again.

        On an integrated GPU the host copy takes memory that the next block needs.
        A copy that is not kept is given up when its block is restored, so that no
        more than one block is there twice; the block then stays awake.
        """
        if self._in_flight:
            # Of a call that was interrupted, to or from what is mapped anew here.
            self._wait_for_copies()
        woken: list[Any] = []
        allocator.is_waking = True
        try:
            # What is restored goes first: the rest is mapped during its copies.
            for data in sorted(
                allocator.pointer_to_data.values(),
                key=lambda data: data.cpu_backup_tensor is None,
            ):
                if not data.is_asleep:
                    # An interrupted call may have left one.
                    data.cpu_backup_tensor = None
                elif tags is None or data.tag in tags or self._always_woken(data.tag):
                    woken.append(data)
                    self._map_and_restore(allocator, data, len(woken))
                    if (
                        data.cpu_backup_tensor is not None
                        and data.handle[2] not in self._copies
                        and self._is_integrated(data.handle[0])
                    ):
                        self._wait_for_copies()
                        # In this order: an interrupt leaves it to be restored again.
                        woken.pop()
                        data.is_asleep = False
                        data.cpu_backup_tensor = None
                        self._runtime.give_back()
            allocator.in_hand = None
            self._wait_for_copies()
        except BaseException as error:
            self._undo_wake_up(allocator, woken)
            if not isinstance(error, Exception) or not woken:
                raise
            raise RuntimeError(
                f"Wake_up failed at {_named(woken[-1])}: {error}. What is not restored "
                "is asleep as before; free memory and call it again."
            ) from error
        finally:
            allocator.in_hand = None
        # Only now: until all are awake, the host copies are the way back.
        for data in woken:
            data.is_asleep = False
            data.cpu_backup_tensor = None
        allocator.is_waking = False
        self._runtime.give_back()

    def _map_and_restore(self, allocator: Any, data: Any, turn: int) -> None:
        if not self._take_in_hand(allocator, data):
            return
        try:
            self._map(data)
        except RuntimeError:
            # PyTorch may keep what is missing, also for garbage. Not before: to
            # look for it takes longer than to map a hundred blocks.
            gc.collect()
            torch.cuda.empty_cache()
            self._map(data)
        if data.cpu_backup_tensor is not None:
            self._copy(data, data.cpu_backup_tensor, turn, to_host=False)

    def _undo_wake_up(self, allocator: Any, woken: list[Any]) -> None:
        """Unmap again what a failing wake_up has mapped.

        A block that stays mapped, because unmapping it failed or this was
        interrupted, is asleep all the same: the next sleep unmaps it, the next
        wake_up copies its content anew.
        """
        try:
            self._synchronize(woken)
        except RuntimeError as error:
            # Nothing can be under way on a device that has failed for good.
            logger.warning("Wake_up cannot wait for the device: %s", error)
        for data in reversed(woken):
            if not self._take_in_hand(allocator, data):
                continue
            try:
                self._unmap(data)
            except RuntimeError as error:
                logger.warning("%s keeps its memory for now: %s", _named(data), error)
        allocator.is_waking = False

    # -- what both take --

    @staticmethod
    def _take_in_hand(allocator: Any, data: Any) -> bool:
        """False once the block was freed. Otherwise an allocator that knows
        `in_hand` frees it when that has changed, and not before."""
        allocator.in_hand = data.handle[2]
        return allocator.pointer_to_data.get(data.handle[2]) is data

    @staticmethod
    def _synchronize(blocks: Iterable[Any]) -> None:
        """Wait for what may still use the blocks."""
        for device in {data.handle[0] for data in blocks}:
            torch.cuda.synchronize(device)

    def _unmap(self, data: Any) -> None:
        """Unmap a block: of a stock allocator, which cannot do so twice, once."""
        if self._knows_mapped or not getattr(data, "is_unmapped", False):
            self._unmap_and_release(data.handle)
            data.is_unmapped = True

    def _map(self, data: Any) -> None:
        if not self._knows_mapped:
            with contextlib.suppress(RuntimeError):
                # What the driver has left mapped.
                self._unmap(data)
        data.is_unmapped = False
        try:
            self._create_and_map(data.handle)
        except RuntimeError:
            data.is_unmapped = True
            raise

    def _copy(self, data: Any, memory: torch.Tensor, turn: int, to_host: bool) -> None:
        """Issue a copy of a block to host memory, or back; it is held until then."""
        device, size, address = data.handle[:3]
        stream = self._stream(device, turn)
        self._in_flight.append(memory)
        to, source = memory.data_ptr(), address
        if not to_host:
            to, source = source, to
        self._runtime.copy(to, source, size, stream)

    def _stream(self, device: int, turn: int) -> int:
        if device not in self._streams:
            with DeviceThreads(self._runtime, device, 1) as threads:
                made = [threads.start(self._runtime.stream) for _ in range(STREAMS)]
                self._streams[device] = [one.result() for one in made]
        return self._streams[device][turn % STREAMS]

    def _wait_for_copies(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                self._runtime.wait(stream)
        self._in_flight.clear()

    def _keeps(self, device: int) -> bool:
        """On an integrated GPU the copies take the memory that sleep is to free."""
        if self.setting == "auto":
            return not self._is_integrated(device)
        return self.setting == "keep"

    def _take_memory(
        self, blocks: list[Any], use: Callable[[Any], None] = lambda data: None
    ) -> None:
        """Host memory for blocks without any. `use` gets each block that has its own.

        Raises RuntimeError where there is none for the others.
        """
        # Memory of tags apart: a sleep of level 2 gives back the one's.
        groups: dict[tuple[int, str], list[Any]] = {}
        for data in blocks:
            device, size, address = data.handle[:3]
            spare = self._spare.get(size)
            if spare:
                self._copies[address] = Copy(data, spare.pop())
                use(data)
            else:
                groups.setdefault((device, data.tag), []).append(data)
        for (device, _), group in groups.items():
            sizes = [data.handle[1] for data in group]
            memory = host_memory(sizes, self._runtime, device, self.setting == "auto")
            for data, tensor in zip(group, memory, strict=True):
                self._copies[data.handle[2]] = Copy(data, tensor)
                use(data)

    def _give_up_memory(self, blocks: Iterable[Any]) -> None:
        """Give back the host memory that was taken for blocks, as others have none."""
        for data in blocks:
            self._copies.pop(data.handle[2], None)
        # The frames of what failed hold some.
        gc.collect()
        self._runtime.give_back()

    def _forget_freed(self, allocator: Any) -> None:
        for address, copy in list(self._copies.items()):
            if allocator.pointer_to_data.get(address) is not copy.data:
                # In this order: an interrupt in between must not leave it in both.
                del self._copies[address]
                size = copy.data.handle[1]
                self._spare.setdefault(size, []).append(copy.tensor)

    def _forget_discarded(self) -> None:
        """Give back the memory of what a sleep has discarded, and what is spare."""
        self._spare.clear()
        for address, copy in list(self._copies.items()):
            if copy.data.is_asleep and copy.data.cpu_backup_tensor is None:
                del self._copies[address]

    def held(self) -> list[torch.Tensor]:
        """The host memory that is held, whether blocks are asleep or awake."""
        # Copies of what another thread may change meanwhile.
        kept = [copy.tensor for copy in list(self._copies.values())]
        return [*kept, *chain.from_iterable(list(self._spare.values()))]

    def _warn(self, text: str) -> None:
        """Once for each kind of trouble."""
        kind = text.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)
