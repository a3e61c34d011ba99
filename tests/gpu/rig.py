"""The tree's real allocator on a real GPU, without vLLM installed.

vllm.device_allocator and cuda_wrapper.py are the tree's own; what they import of the rest of vLLM
is answered by a few stub modules, so that torch is all a host needs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

LIBRARY = "cumem_allocator.abi3.so"
# SM12X_KEEP: the package of another commit, to compare with.
ROOT = Path(__file__).resolve().parents[2]
KEEP = Path(os.environ.get("SM12X_KEEP", ROOT / "scripts" / "sleep-keep"))
MIB = 1 << 20
GIB = 1 << 30


def cuda_home() -> Path:
    """CUDA_HOME, else the folder of the nvcc on PATH, else /usr/local/cuda."""
    given = os.environ.get("CUDA_HOME")
    if given:
        return Path(given)
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if (Path(folder) / "nvcc").is_file():
            return Path(folder).resolve().parent
    return Path("/usr/local/cuda")


def compile_allocator(tree: Path, folder: Path) -> Path:
    """Compile the tree's allocator into ``folder`` as the release's CMake does.

    Raises:
        subprocess.CalledProcessError: g++ failed; its output is on stderr.
    """
    out = folder / LIBRARY
    home = cuda_home()
    includes = [home / "include", home / "targets" / "x86_64-linux" / "include"]
    includes.append(Path(sysconfig.get_path("include")))
    # Not linked to libcuda: the one that torch has loaded has its symbols.
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-DPy_LIMITED_API=0x03080000"]
    command += [f"-I{folder}" for folder in includes]
    command += ["csrc/cumem_allocator.cpp", "-o", str(out)]
    subprocess.run(command, check=True, cwd=tree)
    return out


def load(tree: Path, library: Path) -> Gpu:
    """Load torch, the driver, and the tree's allocator."""
    torch: Any = importlib.import_module("torch")
    torch.cuda.init()
    _global_driver()
    _stub("vllm", package=True)
    _stub("vllm.logger", init_logger=logging.getLogger)
    _stub("vllm.envs", VLLM_CUDART_SO_PATH=None)
    _stub("vllm.platforms", current_platform=types.SimpleNamespace(is_rocm=lambda: False))
    _stub("vllm.utils", package=True)
    _stub("vllm.utils.system_utils", find_loaded_library=find_loaded_library)
    _stub("vllm.utils.torch_utils", PIN_MEMORY=True)
    _stub_triton()
    _stub("vllm.distributed", package=True)
    _stub("vllm.distributed.device_communicators", package=True)
    _from_tree(tree, "vllm.device_allocator")
    loader = importlib.machinery.ExtensionFileLoader("vllm.cumem_allocator", str(library))
    spec = importlib.util.spec_from_file_location(loader.name, str(library), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[loader.name] = module
    _from_tree(tree, "vllm.distributed.device_communicators.cuda_wrapper")
    cumem = _from_tree(tree, "vllm.device_allocator.cumem")
    assert cumem.cumem_available
    return Gpu(torch, cumem)


def keep_backend() -> Any:
    """The sleep-mode backend of scripts/sleep-keep, for the allocator that is loaded."""
    sys.path.insert(0, str(KEEP))
    return importlib.import_module("vllm_sleep_keep.backend").KeepBackend()


def _stub_triton() -> None:
    found = importlib.util.find_spec("triton") is not None
    # As vLLM's own without it: kernels are defined, and not launched.
    triton: Any = types.SimpleNamespace(jit=lambda kernel: kernel)
    language: Any = types.SimpleNamespace(constexpr=None)
    if found:
        triton = importlib.import_module("triton")
        language = importlib.import_module("triton.language")
    _stub("vllm.triton_utils", HAS_TRITON=found, triton=triton, tl=language)


def _global_driver() -> None:
    """Let the allocator find the driver's symbols: a host may have no libcuda.so to link to."""
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)


def _stub(name: str, *, package: bool = False, **content: Any) -> None:
    module = types.ModuleType(name)
    if package:
        module.__path__ = []
    for key, value in content.items():
        setattr(module, key, value)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _from_tree(tree: Path, name: str) -> Any:
    place = tree.joinpath(*name.split("."))
    if place.is_dir():
        spec = importlib.util.spec_from_file_location(
            name, place / "__init__.py", submodule_search_locations=[str(place)]
        )
    else:
        spec = importlib.util.spec_from_file_location(name, place.with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def find_loaded_library(name: str) -> str | None:
    """The path of a loaded library whose file name begins with ``name``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path and Path(path).name.startswith(name):
            return f"/{path}"
    return None


class Gpu:
    """One allocator on the first GPU, in a process of its own."""

    def __init__(self, torch: Any, cumem: Any) -> None:
        self.torch = torch
        self.cumem = cumem
        self.allocator: Any = cumem.CuMemAllocator.get_instance()
        # Those of the package that are kept.
        self.host_copies: Any = None
        if os.environ.get("SM12X_BACKEND") == "keep":
            self._sleep_by_package()

    def _sleep_by_package(self) -> None:
        """Let the allocator sleep and wake as the backend of scripts/sleep-keep does."""
        self.host_copies = copies = keep_backend().copies
        self.allocator.prepare_sleep = functools.partial(copies.prepare, self.allocator)
        self.allocator.sleep = functools.partial(copies.sleep, self.allocator)
        self.allocator.discard = functools.partial(copies.discard, self.allocator)
        self.allocator.wake_up = lambda tags=None: copies.wake_up(self.allocator, tags)

    def prepare_sleep(self) -> None:
        """Prepare the first sleep as a server does after its load, and wait until it is.

        Where no host copies are kept, nothing is prepared.
        """
        if self.host_copies is not None:
            self.allocator.prepare_sleep()
            self.host_copies._wait_for_preparation()

    def free(self) -> int:
        """Bytes of free memory on the device."""
        self.torch.cuda.synchronize()
        return int(self.torch.cuda.mem_get_info()[0])

    def tensor(self, size: int, seed: int) -> Any:
        """``size`` bytes that depend on ``seed``."""
        count = size // 4
        return self.torch.arange(seed, seed + count, dtype=self.torch.int32, device="cuda")

    def intact(self, tensor: Any, seed: int) -> bool:
        wanted = self.torch.arange(
            seed, seed + tensor.numel(), dtype=self.torch.int32, device="cuda"
        )
        return bool(self.torch.equal(tensor, wanted))

    def recorded(self) -> int:
        """Bytes of all blocks the allocator has a record of."""
        return sum(data.handle[1] for data in self.allocator.pointer_to_data.values())

    def write_late(self, tensor: Any, seconds: float = 0.5) -> None:
        """Launch a write to ``tensor`` that begins ``seconds`` from now."""
        # The first launch of a kernel loads it, which can wait for what is running.
        tensor.fill_(0)
        self.torch.cuda._sleep(1)
        self.torch.cuda.synchronize()
        self.torch.cuda._sleep(int(seconds * 1.5e9))
        tensor.fill_(1)
