"""Time how the package of the backend `keep` keeps blocks of a KV cache, without vLLM's server.

    python3 -m tests.gpu.kv_copies TREE --out FILE [--gib 4] [--cache 30] [--weights 8]

TREE is an unpacked release whose allocator is compiled here. A KV cache of --cache GiB in one
allocation, in 48 regions, and --weights GiB of weights beside it are put to sleep and woken up with
--gib GiB of blocks kept. Their bytes are compared after every restoration. FILE gets JSON:

- `bare`: seconds of one copy of as many bytes between registered host memory and the device, each
  way. `first`: seconds of the first call, which takes its host memory.
- `copies`: for blocks that are contiguous, in runs of eight, and all apart: seconds until all are
  on the host, and until all are back, and each beside the bare copy; of blocks apart also by the
  calls that CUDA has beside those that the package takes (`batch`, `single`).
- `sleep`, `kv_cache`: seconds of a sleep and a wake-up of everything, and of the KV cache alone,
  with nothing kept and with each kind of blocks; `over_bare` is what is added by keeping blocks,
  beside the two bare copies.
- `mapping`: seconds to create, map, unmap and release --cache GiB by the driver, in handles of
  several sizes and kinds and by several threads: what bounds a wake-up of the KV cache alone.

Each figure is the least of several. Exit code 1 where bytes differ or a call fails.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
REGIONS = 48
# Of one block in one region: 16 tokens with four heads of 128 for K and V, in 16 bits.
ROW = 32 << 10
REPEATS = 3


@dataclass(frozen=True)
class Setup:
    """A KV cache and weights in memory of the allocator.

    ``raw`` is all memory of the KV cache, int8 of shape [bytes]; ``synchronize`` waits for the
    device, ``bare`` returns the seconds of a copy of so many bytes to the host and back.
    """

    torch: Any
    backend: Any
    raw: Any
    synchronize: Callable[[], object]
    bare: Callable[[int], tuple[float, float]]

    @property
    def kept_kv(self) -> Any:
        return importlib.import_module(type(self.backend.copies).__module__)


def regions_of(raw: Any, count: int = REGIONS, row: int = ROW) -> dict[str, Any]:
    """The KV cache as so many layers, one after another."""
    blocks = raw.numel() // (count * row)
    layers = raw[: count * blocks * row].view(count, blocks, row)
    return {f"layer.{number}": layers[number] for number in range(count)}


def patterns(number: int, total: int) -> dict[str, list[int]]:
    """So many block ids of so many: next to each other, in runs of eight, and all apart."""
    apart = max(2, total // (number + 1))
    runs = [first + n for first in range(0, number * apart, 8 * apart) for n in range(8)]
    return {
        "contiguous": [*range(total // 3, total // 3 + number)],
        "runs of 8": runs[:number],
        "apart": [*range(0, number * apart, apart)],
    }


class Content:
    """What the blocks of one pattern contain: other bytes in each block of each region."""

    def __init__(self, setup: Setup, regions: dict[str, Any], blocks: Sequence[int]) -> None:
        self._torch = setup.torch
        self._words = [region.view(setup.torch.int32) for region in regions.values()]
        device = setup.raw.device
        self._index = setup.torch.tensor(blocks, device=device)
        width = self._words[0].shape[1]
        self._within = setup.torch.arange(width, dtype=setup.torch.int32, device=device)

    def _expected(self, number: int) -> Any:
        rows = (self._index * 40503 + number * 7919).to(self._torch.int32)
        return rows[:, None] + self._within[None, :]

    def write(self) -> None:
        for number, words in enumerate(self._words):
            words.index_copy_(0, self._index, self._expected(number))

    def spoil(self) -> None:
        """Overwrite the blocks, so that only a copy brings their bytes back."""
        for words in self._words:
            words.index_fill_(0, self._index, -1)

    def check(self, what: str) -> None:
        wrong = [
            number
            for number, words in enumerate(self._words)
            if not self._torch.equal(words.index_select(0, self._index), self._expected(number))
        ]
        if wrong:
            raise RuntimeError(f"{what}: the bytes of regions {wrong} differ")


def seconds(setup: Setup, call: Callable[[], object]) -> float:
    setup.synchronize()
    start = time.monotonic()
    call()
    setup.synchronize()
    return time.monotonic() - start


def settle(setup: Setup) -> None:
    """Wait until no host memory is taken in the background."""
    while setup.backend.is_preparing():
        time.sleep(0.005)


def measure_copies(
    setup: Setup, regions: dict[str, Any], blocks: Sequence[int], bare: tuple[float, float]
) -> dict[str, Any]:
    """Keep and restore blocks while the KV cache is awake."""
    backend = setup.backend
    content = Content(setup, regions, blocks)
    content.write()
    saves: list[float] = []
    restores: list[float] = []
    issues: list[float] = []

    def save() -> None:
        start = time.monotonic()
        backend.keep_kv(regions, blocks)
        issues.append(time.monotonic() - start)
        backend.copies._wait_for_kv()

    for _ in range(REPEATS):
        settle(setup)
        saves.append(seconds(setup, save))
        parts = len(backend.copies._kept.parts)
        content.spoil()
        restores.append(seconds(setup, backend.restore_kv))
        content.check("copies")
        backend.drop_kv()
    return {
        "blocks": len(blocks),
        "calls": parts,
        "issue": round(min(issues), 4),
        "save": round(min(saves), 4),
        "restore": round(min(restores), 4),
        "save_over_bare": round(min(saves) / bare[0], 3),
        "restore_over_bare": round(min(restores) / bare[1], 3),
    }


def by_other_calls(
    setup: Setup, regions: dict[str, Any], blocks: Sequence[int], bare: tuple[float, float]
) -> dict[str, Any]:
    """The copies of rows by batches and by single copies."""
    runtime, module = setup.backend.copies._runtime, setup.kept_kv
    most, has_batches = module.MOST_PITCH, runtime._has_batches
    results: dict[str, Any] = {}
    try:
        module.MOST_PITCH = 0
        for name, batches in (("batch", True), ("single", False)):
            if batches and not has_batches:
                continue
            runtime._has_batches = batches
            results[name] = measure_copies(setup, regions, blocks, bare)
    finally:
        module.MOST_PITCH, runtime._has_batches = most, has_batches
    return results


def measure_sleep(
    setup: Setup,
    regions: dict[str, Any],
    blocks: Sequence[int],
    *,
    alone: bool,
) -> dict[str, Any]:
    """A sleep and a wake-up with these blocks kept, of everything or of the KV cache alone."""
    backend = setup.backend
    content = Content(setup, regions, blocks) if blocks else None
    steps: dict[str, list[float]] = {"sleep": [], "wake": []}

    def sleep() -> None:
        if blocks:
            backend.keep_kv(regions, blocks)
        if alone:
            backend.discard(("kv_cache",))
        else:
            backend.suspend(1)

    def wake() -> None:
        backend.resume(["kv_cache"] if alone else None)
        backend.restore_kv()

    for _ in range(REPEATS):
        if content:
            content.write()
        settle(setup)
        steps["sleep"].append(seconds(setup, sleep))
        steps["wake"].append(seconds(setup, wake))
        if backend.weights_changed():
            raise RuntimeError("the weights count as changed")
        if content:
            content.check("sleep")
        backend.drop_kv()
    return {
        name: {"least": round(min(ones), 4), "median": round(statistics.median(ones), 4)}
        for name, ones in steps.items()
    }


def over_bare(kept: dict[str, Any], without: dict[str, Any], bare: tuple[float, float]) -> float:
    """Seconds that keeping adds to a sleep and a wake-up, beside those of the two bare copies."""
    added: float = sum(kept[step]["least"] - without[step]["least"] for step in ("sleep", "wake"))
    return round(added / sum(bare), 3)


# ---- what mapping costs ----


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


# CU_MEM_ALLOCATION_TYPE_PINNED, ..._LOCATION_TYPE_DEVICE and ..._ACCESS_FLAGS_PROT_READWRITE
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
# CU_MEM_HANDLE_TYPE_...: the allocator asks for fabric handles first, then for descriptors.
KINDS = {"none": 0, "descriptor": 1, "fabric": 8}
# CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
DIRECT_RDMA = 110
# So many handles of a kind that are made and mapped by so many threads.
MAPPINGS = (
    (1, 1, "descriptor"),
    (1, 1, "fabric"),
    (1, 1, "none"),
    (32, 1, "descriptor"),
    (32, 2, "descriptor"),
    (32, 4, "descriptor"),
    (480, 1, "descriptor"),
    (480, 4, "descriptor"),
)


class Mapping:
    """One range of device memory that is mapped in several handles by several threads."""

    def __init__(
        self, driver: ctypes.CDLL, size: int, handles: int, threads: int, kind: str
    ) -> None:
        self._driver = driver
        self._kind = KINDS[kind]
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        direct = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(direct), DIRECT_RDMA, 0)
        # As the allocator sets them: its second byte asks for GPUDirect RDMA.
        self._flags = (ctypes.c_ubyte * 8)(0, int(direct.value != 0))
        step = size // handles // (2 * MIB) * (2 * MIB)
        self._base = ctypes.c_uint64()
        self._size = step * handles
        size_t, address = ctypes.c_size_t, ctypes.c_uint64
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(self._base),
            *(size_t(self._size), size_t(0), address(0), address(0)),
        )
        self._step = step
        self._handles = [ctypes.c_uint64() for _ in range(handles)]
        self._places = [self._base.value + number * step for number in range(handles)]
        self._threads = threads

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: error {code}")

    def _create(self, number: int) -> None:
        properties = Properties(PINNED, self._kind, Location(ON_DEVICE, 0), None, self._flags)
        handle = ctypes.byref(self._handles[number])
        size = ctypes.c_size_t(self._step)
        self._call("cuMemCreate", handle, size, ctypes.byref(properties), ctypes.c_uint64(0))

    def _map(self, number: int) -> None:
        place, size = ctypes.c_uint64(self._places[number]), ctypes.c_size_t(self._step)
        nothing = ctypes.c_uint64(0)
        self._call("cuMemMap", place, size, ctypes.c_size_t(0), self._handles[number], nothing)

    def _access(self, number: int) -> None:
        place, size = ctypes.c_uint64(self._places[number]), ctypes.c_size_t(self._step)
        access = Access(Location(ON_DEVICE, 0), READ_WRITE)
        self._call("cuMemSetAccess", place, size, ctypes.byref(access), ctypes.c_size_t(1))

    def _unmap(self, number: int) -> None:
        place, size = ctypes.c_uint64(self._places[number]), ctypes.c_size_t(self._step)
        self._call("cuMemUnmap", place, size)

    def _release(self, number: int) -> None:
        self._call("cuMemRelease", self._handles[number])

    def _in_context(self, step: Callable[[int], None], numbers: Sequence[int]) -> None:
        self._call("cuCtxSetCurrent", self._context)
        for number in numbers:
            step(number)

    def timed(self) -> dict[str, float]:
        """Seconds of each step, all handles together; the range is free again afterwards."""
        times: dict[str, float] = {}
        shares = [[*range(n, len(self._handles), self._threads)] for n in range(self._threads)]
        with ThreadPoolExecutor(self._threads) as pool:
            for step in (self._create, self._map, self._access, self._unmap, self._release):
                start = time.monotonic()
                for done in [pool.submit(self._in_context, step, share) for share in shares]:
                    done.result()
                times[step.__name__.strip("_")] = round(time.monotonic() - start, 4)
        return times

    def close(self) -> None:
        self._call("cuMemAddressFree", self._base, ctypes.c_size_t(self._size))


def measure_mapping(driver: ctypes.CDLL, size: int) -> list[dict[str, Any]]:
    """Each kind of mapping twice: right after the memory was released, and half a second later."""
    results: list[dict[str, Any]] = []
    for handles, threads, kind in MAPPINGS:
        result: dict[str, Any] = {"handles": handles, "threads": threads, "kind": kind}
        results.append(result)
        mapping = Mapping(driver, size, handles, threads, kind)
        try:
            mapping.timed()
            result["at_once"] = mapping.timed()
            time.sleep(0.5)
            result["later"] = mapping.timed()
        except RuntimeError as error:
            # Such as fabric handles, which take permissions that few hosts give.
            result["error"] = str(error)
        else:
            mapping.close()
    return results


# ---- a run ----


def measured(setup: Setup, size: int, report: dict[str, Any]) -> None:
    """Fill the report; what it has by then stays in it where something fails."""
    regions = regions_of(setup.raw)
    number = size // (REGIONS * ROW)
    kinds = patterns(number, len(regions["layer.0"]))
    settle(setup)
    report["bare"] = bare = setup.bare(number * REGIONS * ROW)
    report["first"] = {"keep": round(first_keep(setup, regions, kinds["contiguous"]), 4)}
    report["copies"] = {
        name: measure_copies(setup, regions, blocks, bare) for name, blocks in kinds.items()
    }
    report["copies"] |= by_other_calls(setup, regions, kinds["apart"], bare)
    # The first sleep copies the weights.
    setup.backend.suspend(1)
    setup.backend.resume()
    for name, alone in (("sleep", False), ("kv_cache", True)):
        without = measure_sleep(setup, regions, (), alone=alone)
        report[name] = {"nothing": without}
        for kind, blocks in kinds.items():
            kept = measure_sleep(setup, regions, blocks, alone=alone)
            report[name][kind] = {**kept, "over_bare": over_bare(kept, without, bare)}


def first_keep(setup: Setup, regions: dict[str, Any], blocks: Sequence[int]) -> float:
    """Seconds of a call that takes its host memory, until all is on the host."""

    def keep() -> None:
        setup.backend.keep_kv(regions, blocks)
        setup.backend.copies._wait_for_kv()

    took = seconds(setup, keep)
    setup.backend.drop_kv()
    return took


def bare_on(torch: Any) -> Callable[[int], tuple[float, float]]:
    """The least seconds of one copy of so many bytes from the device, and to it."""

    def bare(size: int) -> tuple[float, float]:
        host = torch.zeros(size, dtype=torch.int8)
        device = torch.zeros(size, dtype=torch.int8, device="cuda")
        address = host.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, size, 0)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister: error {int(error)}")
        least = []
        for to, source in ((host, device), (device, host)):
            times = []
            for _ in range(REPEATS):
                torch.cuda.synchronize()
                start = time.monotonic()
                to.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                times.append(time.monotonic() - start)
            least.append(round(min(times), 4))
        torch.cuda.cudart().cudaHostUnregister(address)
        return least[0], least[1]

    return bare


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tree", help="an unpacked release")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--gib", type=float, default=4, help="of blocks that are kept")
    parser.add_argument("--cache", type=float, default=30, help="GiB of the KV cache")
    parser.add_argument("--weights", type=float, default=8, help="GiB of weights")
    options = parser.parse_args()
    from benchmarks import cases
    from tests.gpu import rig

    gpu = cases.load_tree(options.tree)
    torch = gpu.torch
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "gib": options.gib,
    }
    code = 0
    try:
        size = int(options.cache * GIB)
        # Before anything else is allocated: memory that was in use is free by then.
        torch.zeros(1, device="cuda")
        driver = ctypes.CDLL("libcuda.so.1")
        report["mapping"] = measure_mapping(driver, size)
        backend = rig.keep_backend()
        with gpu.allocator.use_memory_pool("weights"):
            tensors = [gpu.tensor(128 * MIB, seed) for seed in range(int(options.weights * 8))]
        with gpu.allocator.use_memory_pool("kv_cache"):
            raw = torch.zeros(size, dtype=torch.int8, device="cuda")
        backend.prepare()
        setup = Setup(torch, backend, raw, torch.cuda.synchronize, bare_on(torch))
        measured(setup, int(options.gib * GIB), report)
        wrong = [seed for seed, tensor in enumerate(tensors) if not gpu.intact(tensor, seed)]
        if wrong:
            raise RuntimeError(f"weights {wrong} differ")
    except Exception as error:
        traceback.print_exc()
        report["error"] = f"{type(error).__name__}: {error}"
        code = 1
    text = json.dumps(report, indent=1)
    options.out.write_text(text + "\n")
    print(text, flush=True)
    # How torch takes down its pools at the end of the interpreter is not what is measured.
    os._exit(code)


if __name__ == "__main__":
    main()
