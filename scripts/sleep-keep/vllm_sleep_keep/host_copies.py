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

# vLLM's log configuration covers loggers below "vllm".
logger = logging.getLogger("vllm.device_allocator.host_copies")

SETTING = "SLEEP_MODE_HOST_COPY"
SETTINGS = ("auto", "keep", "release")

MIB = 1 << 20
GIB = 1 << 30
HUGE_PAGE = 2 * MIB
# Bytes of host memory in one cudaHostRegister call, and in one call that touches pages.
REGION = GIB
TOUCHED = 64 * MIB
THREADS = 16
# "auto" leaves this much host memory, or a tenth of the whole where that is more,
# because several workers take memory at the same time.
RESERVE = 4 * GIB
# Copies take turns on these streams, so that one begins while another ends.
STREAMS = 2
# A digest has one number for each row of WORDS 32-bit words. A program of the kernel
# computes KERNEL_ROWS rows; without the kernel PyTorch computes ROWS rows in 48 MiB.
WORDS = 4096
KERNEL_ROWS = 8
KERNEL = {"width": WORDS, "height": KERNEL_ROWS, "step": 512, "num_warps": 8}
ROWS = 1024

MADV_POPULATE_WRITE = 23
EINVAL = 22


def setting() -> str:
    """Return the value of `SETTING`; ValueError for one not in `SETTINGS`."""
    value = os.environ.get(SETTING, "auto")
    if value not in SETTINGS:
        raise ValueError(f"{SETTING}={value}: it is one of {', '.join(SETTINGS)}")
    return value


# ---- the host's memory ----


class NoHostMemoryError(RuntimeError):
    """The host has too little memory for the copies."""


def available_host_memory(
    reserve: bool,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the bytes that the host's memory and the cgroups' limits have left.

    With `reserve`, 4 GiB of them stay free, or a tenth of the limit where that is more.
    Returns 0 where /proc or the cgroup cannot be read.
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
    """Yield each limit of a line of /proc/self/cgroup, and the bytes left under it."""
    _, controllers, path = line.split(":", 2)
    if controllers == "":
        top, limit, usage, prefix = root, "memory.max", "memory.current", ""
    elif "memory" in controllers.split(","):
        top, prefix = root / "memory", "total_"
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
    else:
        return
    # In a container the path may be one of the host's: then the container's own cgroup
    # is mounted at the top.
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
    """Return the bytes of cached files, which the kernel drops before a limit."""
    names = (f"{prefix}active_file", f"{prefix}inactive_file")
    fields = (line.split() for line in stat.read_text().splitlines())
    return sum(int(value) for name, value in fields if name in names)


def cpus_near(bus_id: str, sys: Path = Path("/sys")) -> set[int]:
    """Return the CPUs of a PCI device's NUMA node; none where the node is unknown."""
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
    """Run this thread on these CPUs, so that new pages are near them."""
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.debug("Cannot choose the CPUs of a thread: %s", error)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def touch(address: int, size: int) -> None:
    """Let the kernel allocate the pages of this memory; the call releases the GIL."""
    if _libc.madvise(address, size, MADV_POPULATE_WRITE) == 0:
        return
    error = ctypes.get_errno()
    if error != EINVAL:
        raise NoHostMemoryError(f"the kernel gave no pages: {os.strerror(error)}")
    # Kernels before 5.14 do not know MADV_POPULATE_WRITE.
    ctypes.memset(address, 0, size)


class Runtime:
    """Call the functions of libcudart that host copies need, and raise their errors."""

    INTEGRATED = 18
    RELAXED = 2
    NON_BLOCKING = 1
    PORTABLE = 1
    ANY_DIRECTION = 4
    # The first cudaRuntimeGetVersion whose cudaMemcpyBatchAsync has these arguments.
    BATCHES = 13000
    # cudaMemcpyAttributes: a source is read in the stream's order; no hints, no flags.
    IN_STREAM_ORDER = (1, 0, 0, 0, 0, 0)
    # Codes of cudaHostUnregister after which the memory is not registered.
    UNREGISTERED = (0, 1, 713)

    def __init__(self, path: str) -> None:
        # A separate library object, because argument types are set on its functions.
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
            (
                "cudaMemcpy2DAsync",
                [pointer, size, pointer, size, size, size, number, pointer],
            ),
            ("cudaRuntimeGetVersion", [pointer]),
            ("cudaThreadExchangeStreamCaptureMode", [pointer]),
            ("cudaGetLastError", []),
        ):
            function = getattr(self._library, name)
            function.restype, function.argtypes = number, arguments
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.cudaGetErrorString.argtypes = [number]
        version = number()
        self._library.cudaRuntimeGetVersion(ctypes.byref(version))
        self._has_batches = version.value >= self.BATCHES
        if self._has_batches:
            batch = self._library.cudaMemcpyBatchAsync
            batch.restype = number
            batch.argtypes = (*[pointer] * 3, size, pointer, pointer, size, pointer)
        # Each region by address, with its device and its memory, until `give_back`.
        self._held: dict[int, tuple[weakref.ref[Region], int, mmap.mmap]] = {}

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            # PyTorch would report this error after one of its own calls.
            self._library.cudaGetLastError()
            text = self._library.cudaGetErrorString(code).decode()
            raise RuntimeError(f"CUDA Error: {text} in {name}")

    def begin_thread(self, device: int) -> None:
        self.call("cudaSetDevice", device)
        # Without the relaxed mode calls fail while another thread captures a CUDA
        # graph.
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
        """Issue a copy, which ends at the latest when `wait` returns for its stream."""
        self.call("cudaMemcpyAsync", to, source, size, self.ANY_DIRECTION, stream)

    def copy_rows(
        self,
        to: int,
        to_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
    ) -> None:
        """Issue a copy of `height` rows of `width` bytes, as far apart as the pitches.

        CUDA takes no pitch below the width, and none of 2 GiB or more.
        """
        self.call(
            "cudaMemcpy2DAsync",
            *(to, to_pitch, source, source_pitch, width, height),
            *(self.ANY_DIRECTION, stream),
        )

    def copy_all(self, copies: list[tuple[int, int, int]], stream: int) -> None:
        """Issue copies, each of (to, source, size), by one call where CUDA has one."""
        if not self._has_batches:
            for copy in copies:
                self.copy(*copy, stream)
            return
        count = len(copies)
        to, source, size = zip(*copies, strict=True)
        self.call(
            "cudaMemcpyBatchAsync",
            (ctypes.c_void_p * count)(*to),
            (ctypes.c_void_p * count)(*source),
            (ctypes.c_size_t * count)(*size),
            count,
            (ctypes.c_uint * len(self.IN_STREAM_ORDER))(*self.IN_STREAM_ORDER),
            (ctypes.c_size_t * 1)(0),
            1,
            stream,
        )

    def wait(self, stream: int) -> None:
        self.call("cudaStreamSynchronize", stream)

    def register(self, address: int, size: int) -> None:
        self.call("cudaHostRegister", address, size, self.PORTABLE)

    def hold(self, region: "Region", device: int, memory: mmap.mmap) -> None:
        """Keep memory mapped until the region is gone and CUDA has unregistered it.

        CUDA goes on to copy to the pages that it registered for an address, even if
        other memory is mapped at that address later.
        """
        self._held[region.address] = weakref.ref(region), device, memory

    def give_back(self) -> None:
        """Unregister and unmap the memory of the regions that are gone.

        Threads of their devices do it, and not the thread that drops a region: there
        CUDA would create a context on GPU 0. Memory that CUDA refuses to unregister
        stays for the next call.
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
        # Another thread may give the same regions back, as an interrupted call leaves
        # its thread running. `ended` keeps the memory mapped until this call returns,
        # so that no new region gets one of these addresses.
        for address, _ in ended:
            code = self._library.cudaHostUnregister(address)
            if code != 0:
                self._library.cudaGetLastError()
            if code in self.UNREGISTERED:
                self._held.pop(address, None)


class DeviceThreads(ThreadPoolExecutor):
    """Make calls for a device in threads of their own.

    The calling thread keeps its device: setting it back afterwards would create a
    context on a device where the thread has none yet.
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
    """Own host memory that CUDA can register, in huge pages where possible."""

    def __init__(self, size: int, runtime: Runtime, device: int) -> None:
        try:
            memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE)
        except OSError as error:
            # As with vm.overcommit_memory=2, where memory that is free may not count.
            raise NoHostMemoryError(
                f"host copies take {size / GIB:.2f} GiB more of host memory, and the "
                f"kernel maps none: {error}"
            ) from error
        # A fork would copy every registered page at once. A forked process does not
        # need the memory, because it cannot use CUDA.
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
        # Before `register`, because an exception can come right after that call.
        runtime.hold(self, device, memory)

    def take(self, threads: DeviceThreads) -> Future[None]:
        """Touch the pages of the memory, then register it, in these threads."""
        end = self.address + self.size
        touches = [
            threads.start(touch, at, min(TOUCHED, end - at))
            for at in range(self.address, end, TOUCHED)
        ]
        # The threads take tasks in order, so all touches have begun by then.
        return threads.start(self.register, touches)

    def register(self, touches: Iterable[Future[None]] = ()) -> None:
        for touched in touches:
            touched.result()
        self._runtime.register(self.address, self.size)

    def part(self, offset: int, size: int) -> torch.Tensor:
        part = self._tensor[offset : offset + size]
        # A part keeps its region alive.
        part.region = self
        return part


def _groups(sizes: Iterable[int], limit: int) -> Iterator[list[int]]:
    """Split the sizes, in their order, into groups of at most `limit` bytes each."""
    group: list[int] = []
    for size in sizes:
        if group and sum(group) + size > limit:
            yield group
            group = []
        group.append(size)
    if group:
        yield group


def host_memory(
    sizes: list[int],
    runtime: Runtime,
    device: int,
    reserve: bool,
    region_size: int | None = None,
    ahead: int = 2,
) -> Iterator[torch.Tensor]:
    """Take registered host memory, near to the device: bytes for each of the sizes.

    Each tensor comes once it can be copied to; the memory of `ahead` regions is touched
    and registered meanwhile. A region has several of the sizes, up to `region_size`
    bytes (REGION where None). Raises NoHostMemoryError where less is available, beside
    the `reserve`, and RuntimeError where CUDA does not register it.
    """
    left = sum(sizes)
    near = cpus_near(runtime.bus_id(device))
    count = min(THREADS, len(near or os.sched_getaffinity(0)))
    taken: deque[tuple[Region, Future[None], list[int]]] = deque()
    with DeviceThreads(runtime, device, count, near) as threads:
        for group in [*_groups(sizes, region_size or REGION), []]:
            if group:
                # Checked before each region, because other workers take memory
                # meanwhile.
                require_host_memory(left, reserve)
                left -= sum(group)
                region = Region(sum(group), runtime, device)
                taken.append((region, region.take(threads), group))
            # Of two, one is touched and one registered while the caller uses a third.
            while len(taken) > (ahead if group else 0):
                region, done, parts = taken.popleft()
                done.result()
                for size, end in zip(parts, accumulate(parts), strict=True):
                    yield region.part(end - size, size)


# ---- what a block contains ----


def words_of(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return device memory as a tensor of 32-bit words, without a copy."""

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
    """Make the device current, as Triton launches kernels on the current device."""
    return torch.cuda.device(device)


def multipliers(device: torch.device) -> torch.Tensor:
    """Return a random odd 64-bit number for each word of a row, always the same."""
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
    """Compute the numbers of `digest_by_kernel`; a program takes `height` rows."""
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
    """Pass device memory to the kernel without a tensor, which takes long to make."""

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
    """Compute the numbers of `digest_by_kernel` with nine times its memory traffic."""
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
            # Triton compiles another kernel for a count that 16 does not divide.
            16 * KERNEL_ROWS,
            **KERNEL,
            grid=(1,),
        )
        # Loads the kernel; some versions of Triton compile C code here too.
        compiled[(1, 1, 1)]


# ---- sleep and wake_up ----


@dataclass(eq=False)
class Copy:
    """Hold the host memory of one block.

    `data` is the allocator's record, which identifies the block: another block may get
    its address later.
    """

    data: Any
    tensor: torch.Tensor
    # Digest of the memory's content; None where the content is unknown.
    digest: bytes | None = None


def _named(data: Any) -> str:
    return f"{data.tag} block {data.handle[2]:#x} of {data.handle[1]} bytes"


class HostCopies:
    """Put a CuMemAllocator to sleep and wake it up, and keep the host copies.

    The allocator's records stay authoritative: `is_asleep` says whether a block is
    asleep, `cpu_backup_tensor` what it is restored from. A kept copy is only memory
    that may hold the content of a block.

    An exception, such as that of a signal, can come between any two steps. Therefore
    host copy and state are recorded before a block is unmapped, and a copy loses its
    digest before it is written.
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
        """Create the copies of one allocator, without any memory yet.

        `knows_mapped` says that the allocator's C extension maps and unmaps a block
        only where necessary; `always_woken` says of a tag whether every wake_up wakes
        it.
        """
        self.setting = setting()
        self._runtime = Runtime(runtime_path)
        self._create_and_map = create_and_map
        self._unmap_and_release = unmap_and_release
        self._knows_mapped = knows_mapped
        self._always_woken = always_woken
        self._copies: dict[int, Copy] = {}
        # Memory of freed blocks by size, which new blocks reuse.
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._streams: dict[int, list[int]] = {}
        # Host memory of copies that may not have ended.
        self._in_flight: list[torch.Tensor] = []
        self._is_integrated = functools.cache(self._runtime.is_integrated)
        self._preparation: threading.Thread | None = None
        self._digest = digest_by_kernel if HAS_TRITON else digest_by_torch
        # Devices for which the digest kernel is compiled.
        self._compiled: set[int] = set()
        # Reason why the background thread could not take host memory.
        self._lack = ""
        self._warned: set[str] = set()
        self._has_frozen = False

    # -- before the first sleep --

    def prepare(self, allocator: Any, tag: str = "weights") -> None:
        """Take the host memory for the blocks of a tag in the background.

        A failure is only logged: the first sleep takes the memory, or raises.
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
        # An interrupt may have left a thread object that was never started.
        if self._preparation is not None and self._preparation.is_alive():
            self._preparation.join()
        self._preparation = None

    def _not_compiled(self, blocks: list[Any]) -> set[int]:
        """Return the devices of the blocks that still need the digest kernel."""
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
        """Compute digests by PyTorch from now on: the kernel does not run here."""
        self._digest = digest_by_torch
        self._warn(f"Sleep computes digests without a kernel for it: {error}")

    # -- sleep --

    def sleep(self, allocator: Any, offload_tags: tuple[str, ...]) -> None:
        """Put every block to sleep, with a host copy or without its content.

        A block that is asleep already keeps the content that it went to sleep with, and
        gives back memory that is still mapped. After an exception, another sleep goes
        on from there, and wake_up undoes it.
        """
        # Blocks to offload go first, so that a lack of host memory ends the sleep
        # before anything is discarded.
        blocks = sorted(
            allocator.pointer_to_data.values(),
            key=lambda data: data.tag not in offload_tags,
        )
        self._wait_for_preparation()
        self._wait_for_device(blocks)
        self._wait_for_copies()
        self._forget_freed(allocator)
        offloaded = [data for data in blocks if data.tag in offload_tags]
        awake = [data for data in offloaded if not data.is_asleep]
        saved = self._save(allocator, awake)
        self._put_all_to_sleep(allocator, blocks, offload_tags, saved)
        self._forget_discarded()
        gc.collect()
        if not self._has_frozen:
            # A collection of all objects takes 75 ms. Capturing CUDA graphs ends the
            # freeze of `prepare`, and vLLM freezes objects in some processes only.
            self._has_frozen = True
            gc.freeze()
        torch.cuda.empty_cache()
        self._runtime.give_back()
        devices = self._not_compiled(offloaded)
        if devices:
            # Compiling takes longer than the digests, so no sleep waits for it.
            self._prepare_by(self._compile, devices)

    def discard(self, allocator: Any, tags: tuple[str, ...]) -> None:
        """Put the blocks of these tags to sleep without their content."""
        records = list(allocator.pointer_to_data.values())
        blocks = [data for data in records if data.tag in tags]
        self._wait_for_device(blocks)
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
            self._before_unmapping(data)
            if was_awake:
                data.is_unmapped = False
                data.cpu_backup_tensor = None
                if offload:
                    data.cpu_backup_tensor = self._copy_of(data, saved)
                data.is_asleep = True
            try:
                self._unmap(data)
            except RuntimeError:
                # The driver refused and changed nothing, so the block has its content.
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
        """Return the kept copy of a block, or make one for this sleep alone."""
        device, size, address = data.handle[:3]
        if address in saved:
            return saved[address].tensor
        require_host_memory(size, reserve=False)
        # PyTorch would keep pinned memory of its own after this copy is dropped.
        region = Region(size, self._runtime, device)
        touch(region.address, size)
        try:
            region.register()
        except RuntimeError:
            # From unregistered memory the driver copies in pieces through its own
            # buffer.
            if self._is_integrated(device):
                raise
        tensor = region.part(0, size)
        self._copy(data, tensor, 0, to_host=True)
        self._wait_for_copies()
        return tensor

    def _save(self, allocator: Any, blocks: list[Any]) -> dict[int, Copy]:
        """Bring the kept copies of these blocks up to date; return them by address.

        Raises NoHostMemoryError where host memory is too small for all of the blocks.
        """
        if self.setting == "release":
            # On an integrated GPU a block that is unmapped frees memory for the next
            # copy.
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
        # A copy has its digest only if nothing was written between digest and copy.
        blocks = [data for data in blocks if data.handle[2] in copied]
        again = self._digests(allocator, blocks)
        for address, copy in copied.items():
            if again.get(address) == digests.get(address):
                copy.digest = again.get(address)
        return kept | copied

    def _take_in_background(self, blocks: list[Any]) -> Iterator[Any]:
        """Take host memory in a thread; yield each block once it has some."""
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
        """Copy blocks to the host memory they have; return the copies by address."""
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
        """Return the digests of blocks by address; none where that fails."""
        try:
            try:
                return self._digests_by_device(allocator, blocks)
            except Exception as error:
                if self._digest is digest_by_torch:
                    raise
                devices = self._not_compiled(blocks)
                if devices:
                    # Unlike PyTorch, the kernel needs no memory for products.
                    self._compile(devices)
                else:
                    self._do_without_kernel(error)
                return self._digests_by_device(allocator, blocks)
        except Exception as error:
            # For instance, memory for the products may be missing. Without digests
            # every block is copied, which is always correct.
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
                # One copy to the host for all blocks of the device.
                found = numbers.cpu().numpy().tobytes()
            digests |= {
                address: found[start:end] for address, (start, end) in ends.items()
            }
        return digests

    # -- wake_up --

    def wake_up(self, allocator: Any, tags: list[str] | None) -> None:
        """Map the blocks that are asleep, and restore those with a host copy.

        Blocks that are awake stay as they are. If one block cannot be woken, all blocks
        of this call are asleep again, with their host copies, and the call can be
        repeated.

        On an integrated GPU a host copy takes memory that the next block needs.
        Therefore a copy that is not kept is dropped once its block is restored, so that
        at most one block is in memory twice; that block then stays awake.
        """
        if self._in_flight:
            # An interrupted call left copies of memory that is mapped anew here.
            self._wait_for_copies()
        woken: list[Any] = []
        allocator.is_waking = True
        try:
            # Blocks with a copy go first: the others are mapped while copies run.
            for data in sorted(
                allocator.pointer_to_data.values(),
                key=lambda data: data.cpu_backup_tensor is None,
            ):
                if not data.is_asleep:
                    # An interrupted call may have left a host copy.
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
                        # In this order an interrupt only makes wake_up restore it
                        # again.
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
        # Until all blocks are awake, undoing this call needs the host copies.
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
            # PyTorch may hold the missing memory, some of it for garbage. This comes
            # only now, because a collection takes longer than mapping a hundred blocks.
            gc.collect()
            torch.cuda.empty_cache()
            self._map(data)
        if data.cpu_backup_tensor is not None:
            self._copy(data, data.cpu_backup_tensor, turn, to_host=False)

    def _undo_wake_up(self, allocator: Any, woken: list[Any]) -> None:
        """Unmap the blocks that a failing wake_up has mapped.

        A block whose unmapping fails or is interrupted counts as asleep although it is
        mapped: the next sleep unmaps it, the next wake_up copies its content again.
        """
        try:
            self._synchronize(woken)
        except RuntimeError as error:
            # A device that has failed for good runs no copies.
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

    def _wait_for_device(self, blocks: Iterable[Any]) -> None:
        """Wait until nothing uses the blocks that a sleep is to unmap."""
        self._synchronize(blocks)

    def _before_unmapping(self, data: Any) -> None:
        """Do what has to be done while the memory of a block is still mapped."""

    @staticmethod
    def _take_in_hand(allocator: Any, data: Any) -> bool:
        """Return whether the block still exists, and protect it from being freed.

        An allocator that knows `in_hand` frees a block only after `in_hand` has
        changed.
        """
        allocator.in_hand = data.handle[2]
        return allocator.pointer_to_data.get(data.handle[2]) is data

    @staticmethod
    def _synchronize(blocks: Iterable[Any]) -> None:
        """Wait for all work on the devices of the blocks."""
        for device in {data.handle[0] for data in blocks}:
            torch.cuda.synchronize(device)

    def _unmap(self, data: Any) -> None:
        """Unmap a block, once in a stock allocator, which fails the second time."""
        if self._knows_mapped or not getattr(data, "is_unmapped", False):
            self._unmap_and_release(data.handle)
            data.is_unmapped = True

    def _map(self, data: Any) -> None:
        if not self._knows_mapped:
            with contextlib.suppress(RuntimeError):
                # The driver may have left the block mapped.
                self._unmap(data)
        data.is_unmapped = False
        try:
            self._create_and_map(data.handle)
        except RuntimeError:
            data.is_unmapped = True
            raise

    def _copy(self, data: Any, memory: torch.Tensor, turn: int, to_host: bool) -> None:
        """Issue a copy of a block to host memory or back, and hold that memory."""
        device, size, address = data.handle[:3]
        stream = self._stream(device, turn)
        self._in_flight.append(memory)
        to, source = memory.data_ptr(), address
        if not to_host:
            to, source = source, to
        self._runtime.copy(to, source, size, stream)

    def _stream(self, device: int, turn: int) -> int:
        if device not in self._streams:
            self._streams[device] = self._new_streams(device)
        return self._streams[device][turn % STREAMS]

    def _new_streams(self, device: int) -> list[int]:
        with DeviceThreads(self._runtime, device, 1) as threads:
            made = [threads.start(self._runtime.stream) for _ in range(STREAMS)]
            return [one.result() for one in made]

    def _wait_for_copies(self) -> None:
        for streams in self._streams.values():
            for stream in streams:
                self._runtime.wait(stream)
        self._in_flight.clear()

    def _keeps(self, device: int) -> bool:
        """Return whether copies are kept: on an integrated GPU they undo the sleep."""
        if self.setting == "auto":
            return not self._is_integrated(device)
        return self.setting == "keep"

    def _take_memory(
        self, blocks: list[Any], use: Callable[[Any], None] = lambda data: None
    ) -> None:
        """Take host memory for blocks that have none, and call `use` for each in turn.

        Raises RuntimeError where memory is missing for the remaining blocks.
        """
        # Tags have separate regions, so that a level-2 sleep can give back those of
        # one.
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
        """Give back the host memory of blocks, after others could get none."""
        for data in blocks:
            self._copies.pop(data.handle[2], None)
        # The frames of the failed call still refer to regions.
        gc.collect()
        self._runtime.give_back()

    def _forget_freed(self, allocator: Any) -> None:
        for address, copy in list(self._copies.items()):
            if allocator.pointer_to_data.get(address) is not copy.data:
                # In this order an interrupt cannot leave the memory in both places.
                del self._copies[address]
                size = copy.data.handle[1]
                self._spare.setdefault(size, []).append(copy.tensor)

    def _forget_discarded(self) -> None:
        """Drop the copies of discarded blocks, and the spare memory."""
        self._spare.clear()
        for address, copy in list(self._copies.items()):
            if copy.data.is_asleep and copy.data.cpu_backup_tensor is None:
                del self._copies[address]

    def held(self) -> list[torch.Tensor]:
        """Return the host memory that is held for blocks, asleep or awake."""
        # Lists, because another thread may change the dictionaries meanwhile.
        kept = [copy.tensor for copy in list(self._copies.values())]
        return [*kept, *chain.from_iterable(list(self._spare.values()))]

    def _warn(self, text: str) -> None:
        """Log a warning once for each kind, the text before the first colon."""
        kind = text.partition(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)
