"""What host memory of the sleep-mode backend `keep` costs elsewhere, as JSON, for each package.

    python3 -m tests.gpu.fork_and_context PACKAGE [PACKAGE ...] [--gib 8] [--rehearse]

PACKAGE is a folder such as scripts/sleep-keep; each is measured in processes of its own:

- `context`: the memory that GPU 0 loses when the preparation for GPU 1 ends half way, as the host
  has no room for the rest (two GPUs, no other process on them).
- `fork`: seconds that a fork() takes beside so many GiB of host memory that the package has
  registered, the host memory that is gone while the child waits, and what ends a child that reads
  it; `fork_pinned` is the same beside pinned memory of PyTorch.

Nothing of vLLM is needed, and no block has memory of a GPU. With `--rehearse` the stand-in driver
of tests/fakecuda takes the place of GPUs, and contexts are counted in place of memory.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.gpu import rig

MIB = 1 << 20
GIB = 1 << 30
CASES = ("context", "fork", "fork_pinned")
# Blocks of a case; each fills a region of the package.
BLOCKS = 8
# Seconds that one case may take.
LIMIT = 240


class Driver:
    """The GPUs of this host."""

    def __init__(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.cuda.init()
        self.block = GIB

    def use(self, device: int) -> None:
        """Have a context on this device, and no other, as a worker of vLLM has."""
        self.torch.cuda.set_device(device)
        self.torch.zeros(1, device=f"cuda:{device}")

    def runtime_path(self) -> str:
        path = rig.find_loaded_library("libcudart")
        assert path is not None, "PyTorch has loaded no libcudart"
        return path

    def lost(self) -> float:
        """MiB in use on GPU 0, by whatever process."""
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        text = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout
        return float(text.splitlines()[0])


class Rehearsal(Driver):
    """The stand-in driver, with blocks of a MiB."""

    def __init__(self) -> None:
        from tests.fakecuda import standin

        self._folder = tempfile.TemporaryDirectory()
        standin.compile_into(Path(self._folder.name))
        self._fake = standin.Standin(Path(self._folder.name))
        self._fake.initialize()
        self.torch = importlib.import_module("torch")
        self.block = MIB
        self._contexts: set[int] = set()

    def use(self, device: int) -> None:
        assert self._fake.runtime.cudaSetDevice(device) == 0

    def runtime_path(self) -> str:
        return str(self._fake.runtime_path)

    def lost(self) -> float:
        self._contexts |= self._fake.contexts()
        return float(0 in self._contexts)


def host_copies(package: Path, driver: Driver) -> tuple[Any, Any]:
    """The package's module, and an object of its class without any block."""
    triton = SimpleNamespace(jit=lambda kernel: kernel)
    rig._stub("vllm", package=True)
    rig._stub(
        "vllm.triton_utils",
        HAS_TRITON=False,
        triton=triton,
        tl=SimpleNamespace(constexpr=None),
    )
    sys.path.insert(0, str(package))
    module: Any = importlib.import_module("vllm_sleep_keep.host_copies")
    assert str(package) in module.__file__
    options: dict[str, Any] = {"runtime_path": driver.runtime_path(), "pin_memory": True}
    options |= {"create_and_map": print, "unmap_and_release": print, "knows_mapped": True}
    # pin_memory is an argument of packages before issue 40, knows_mapped of later ones.
    taken = inspect.signature(module.HostCopies.__init__).parameters
    return module, module.HostCopies(
        **{name: value for name, value in options.items() if name in taken}
    )


def allocator(device: int, size: int) -> Any:
    """Records of blocks that nothing reads or writes."""
    blocks = [
        SimpleNamespace(
            handle=(device, size, (n + 1) << 40, 0),
            tag="weights",
            cpu_backup_tensor=None,
            is_asleep=False,
        )
        for n in range(BLOCKS)
    ]
    return SimpleNamespace(pointer_to_data={block.handle[2]: block for block in blocks})


def context(package: Path, driver: Driver, size: int) -> dict[str, Any]:
    driver.use(1)
    module, copies = host_copies(package, driver)
    # Each block has a region, and the host has room for half of them.
    module.REGION = size
    rooms = iter([1 << 50] * (BLOCKS // 2))
    module.available_host_memory = lambda *arguments, **named: next(rooms, 0)
    before = driver.lost()
    copies.prepare(allocator(1, size))
    copies._wait_for_preparation()
    return {
        "gpu0_before": before,
        "gpu0_lost": driver.lost() - before,
        "gib_kept": sum(len(tensor) for tensor in copies.held()) / GIB,
    }


def fork(package: Path, driver: Driver, size: int) -> dict[str, Any]:
    driver.use(0)
    module, copies = host_copies(package, driver)
    module.available_host_memory = lambda *arguments, **named: 1 << 50
    copies.prepare(allocator(0, size))
    copies._wait_for_preparation()
    held = copies.held()
    assert len(held) == BLOCKS, "the package has taken no host memory"
    return forked(held)


def fork_pinned(package: Path, driver: Driver, size: int) -> dict[str, Any]:
    driver.use(0)
    pinned = not isinstance(driver, Rehearsal)
    held = [
        driver.torch.empty(size, dtype=driver.torch.uint8, pin_memory=pinned) for _ in range(BLOCKS)
    ]
    for tensor in held:
        tensor.fill_(1)
    return forked(held)


def forked(held: list[Any]) -> dict[str, Any]:
    """Fork beside this memory, twice: one child waits, the other reads a byte."""
    gib = sum(len(tensor) for tensor in held) / GIB
    reader, writer = os.pipe()
    before = available()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    seconds = time.monotonic() - began
    gone = before - available()
    os.close(writer)
    os.waitpid(child, 0)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os._exit(int(held[0][0]) & 0)
    status = os.waitpid(child, 0)[1]
    ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "reads it"
    return {
        "gib": gib,
        "fork_seconds": round(seconds, 4),
        "gib_gone": round(gone / GIB, 2),
        "child": ended,
        "mapping": mapping(held[0].data_ptr()),
    }


def available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no MemAvailable in /proc/meminfo")


def mapping(address: int) -> str:
    """The mapping of an address, by its permissions, name and flags."""
    title = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            title = f"{rest[0]} {' '.join(rest[4:])}" if start <= address < end else ""
        elif title and first == "VmFlags:":
            return f"{title}: {' '.join(rest)}"
    return "none"


def measured(package: Path, case: str, options: argparse.Namespace) -> Any:
    """The figures of one case, measured in a process of its own; or how it ended."""
    command = [sys.executable, "-m", "tests.gpu.fork_and_context", str(package), "--case", case]
    command += ["--gib", str(options.gib), *(["--rehearse"] if options.rehearse else [])]
    try:
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT} s"
    if ended.returncode:
        return f"exit code {ended.returncode}: {ended.stderr[-2000:]}"
    return json.loads(ended.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--gib", type=int, default=8, help="GiB of host memory beside a fork")
    parser.add_argument("--rehearse", action="store_true", help="on the stand-in driver")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("SLEEP_MODE_HOST_COPY", "auto")
    packages = [package.resolve() for package in options.packages]
    if options.case:
        driver = Rehearsal() if options.rehearse else Driver()
        size = driver.block if options.rehearse else options.gib * GIB // BLOCKS
        figures = globals()[options.case](packages[0], driver, size)
        print(json.dumps(figures), flush=True)
        # How torch takes down its contexts at the end of the interpreter is not measured.
        os._exit(0)
    report = {
        str(package): {case: measured(package, case, options) for case in CASES}
        for package in packages
    }
    print(json.dumps(report, indent=2))
    return 0 if all(isinstance(c, dict) for cases in report.values() for c in cases.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
