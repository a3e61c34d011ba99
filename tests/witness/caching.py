"""PyTorch's own caching allocator and MemPool over the stand-in driver, with a tree's allocator.

A witness's function runs in a process of its own, without a GPU: libcudart's part of it is
tests/fakecuda/torchcudart.c, which is preloaded. No kernel can be launched: tensors are allocated
with torch.empty and freed, and their bytes are written and read through the stand-in.

    python -m tests.witness.caching TREE LIBRARIES FILE FUNCTION
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakecuda import standin
from tests.gpu import rig
from tests.witness import native

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = "libtorchcudart.so"
# Seconds one function may take; it needs about five, most of them for importing torch.
TIME_LIMIT = 60
TAIL = 4000


def build(tree: Path, folder: Path) -> None:
    """Compile the stand-ins and the allocator of ``tree`` into ``folder``.

    Raises:
        FileNotFoundError: there are no CUDA headers.
        subprocess.CalledProcessError: gcc failed; its output is on stderr.
    """
    native.build(tree, folder)
    command = ["gcc", "-std=c11", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    command += ["-DFAKECUDA_WITH_CUDA_H", "-isystem", str(native.cuda_include())]
    command += [str(standin.SOURCES / "torchcudart.c"), str(folder / standin.DRIVER)]
    command += [f"-Wl,-rpath,{folder}", "-o", str(folder / PRELOADED)]
    subprocess.run(command, check=True)


@dataclass(frozen=True, kw_only=True)
class Caching:
    """Runs functions of a witness; each takes a ``Rig``."""

    tree: Path
    folder: Path

    def run(self, file: str, function: str, settings: str = "") -> None:
        """``settings`` are PyTorch's PYTORCH_CUDA_ALLOC_CONF."""
        environment = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}
        environment["PYTORCH_CUDA_ALLOC_CONF"] = settings
        libraries = (self.folder / standin.DRIVER, self.folder / PRELOADED)
        environment["LD_PRELOAD"] = " ".join(map(str, libraries))
        command = [sys.executable, "-m", "tests.witness.caching", str(self.tree), str(self.folder)]
        try:
            done = subprocess.run(
                [*command, file, function],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIME_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            said = (expired.stdout or b"").decode(errors="replace")
            pytest.fail(f"hangs: no end after {TIME_LIMIT} s\n{said[-TAIL:]}", pytrace=False)
        if done.returncode != 0:
            pytest.fail(f"ended with {done.returncode}\n{done.stdout[-TAIL:]}", pytrace=False)


class Rig(rig.Gpu):
    """One allocator with PyTorch's pools, on the stand-in."""

    def __init__(self, gpu: rig.Gpu, fake: standin.Standin) -> None:
        self.torch = gpu.torch
        self.cumem = gpu.cumem
        self.allocator = gpu.allocator
        self.fake = fake
        self.peak = 0

    def empty(self, size: int) -> Any:
        """A tensor; ``peak`` has the most that was mapped after one was made."""
        tensor = self.torch.empty(size, dtype=self.torch.uint8, device="cuda")
        self.peak = max(self.peak, self.mapped())
        return tensor

    def mapped(self) -> int:
        return self.fake.alive().physical

    def write(self, tensor: Any, value: int) -> None:
        """To both ends of the tensor."""
        for address in self._ends(tensor):
            assert self.fake.write(address, bytes([value] * 512)) == 0, "a tensor without memory"

    def holds(self, tensor: Any, value: int) -> bool:
        return all(
            self.fake.read(address, 512) == bytes([value] * 512) for address in self._ends(tensor)
        )

    @staticmethod
    def _ends(tensor: Any) -> tuple[int, int]:
        address = tensor.data_ptr()
        return address, address + tensor.numel() - 512


def main() -> None:
    tree, folder, file, function = sys.argv[1:]
    code = 1
    # Kept copies copy with libcudart, which is the real one here.
    os.environ["SLEEP_MODE_HOST_COPY"] = "release"
    try:
        fake = standin.Standin(Path(folder))
        fake.initialize()
        gpu = rig.load(Path(tree), Path(folder) / native.ALLOCATOR)
        # The real libcudart, which PyTorch has loaded, cannot copy here.
        wrapper: Any = importlib.import_module("vllm.distributed.device_communicators.cuda_wrapper")
        gpu.cumem.libcudart = wrapper.CudaRTLibrary(str(fake.runtime_path))
        gpu.cumem.is_pin_memory_available = lambda: False
        gpu.cumem.PIN_MEMORY = False
        spec = importlib.util.spec_from_file_location("witness_under_test", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        getattr(module, function)(Rig(gpu, fake))
        assert ctypes.c_int(fake.violations()).value == 0, "the driver was used against its rules"
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # How torch takes down its pools at the end of the interpreter is not what is tested.
        os._exit(code)


if __name__ == "__main__":
    main()
