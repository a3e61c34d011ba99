"""PyTorch's own caching allocator and MemPool over the stand-in driver, with a tree's allocator.

A witness's function runs in a fork, without a GPU: libcudart's part of it is
tests/fakecuda/torchcudart.c, which is preloaded. No kernel can be launched: tensors are allocated
with torch.empty and freed, and their bytes are written and read through the stand-in.

    python -m tests.witness.caching TREE LIBRARIES
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakecuda import standin
from tests.gpu import rig
from tests.witness import forked, native

PRELOADED = "libtorchcudart.so"
# Seconds one function may take.
TIME_LIMIT = 60


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


class Caching:
    """Runs functions of a witness; each takes a ``Rig``, in a fork of a process with torch."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._tree = tree
        self._folder = folder
        # PyTorch reads its settings once.
        self._servers: dict[str, forked.Server] = {}

    def run(self, file: str, function: str, settings: str = "") -> None:
        """``settings`` are PyTorch's PYTORCH_CUDA_ALLOC_CONF."""
        if settings not in self._servers:
            self._servers[settings] = self._start(settings)
        answer = self._servers[settings].ask({"file": file, "function": function})
        if not answer["passed"]:
            pytest.fail(answer["text"], pytrace=False)

    def close(self) -> None:
        for server in self._servers.values():
            server.close(TIME_LIMIT)

    def _start(self, settings: str) -> forked.Server:
        environment = {k: v for k, v in os.environ.items() if not k.endswith("_ALLOC_CONF")}
        environment["PYTORCH_CUDA_ALLOC_CONF"] = settings
        libraries = (self._folder / standin.DRIVER, self._folder / PRELOADED)
        environment["LD_PRELOAD"] = " ".join(map(str, libraries))
        return forked.Server(
            "tests.witness.caching",
            str(self._tree),
            str(self._folder),
            log=self._folder / f"caching-{len(self._servers)}.log",
            env=environment,
        )


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


def call(tree: Path, folder: Path, request: dict[str, Any]) -> None:
    """In a fork: start the stand-in and load the allocator, then call the function."""
    # Kept copies copy with libcudart, which is the real one here.
    os.environ["SLEEP_MODE_HOST_COPY"] = "release"
    fake = standin.Standin(folder)
    fake.initialize()
    gpu = rig.load(tree, folder / native.ALLOCATOR)
    # The real libcudart, which PyTorch has loaded, cannot copy here.
    wrapper: Any = importlib.import_module("vllm.distributed.device_communicators.cuda_wrapper")
    gpu.cumem.libcudart = wrapper.CudaRTLibrary(str(fake.runtime_path))
    gpu.cumem.is_pin_memory_available = lambda: False
    gpu.cumem.PIN_MEMORY = False
    module = forked.witness(request["file"])
    getattr(module, request["function"])(Rig(gpu, fake))
    assert ctypes.c_int(fake.violations()).value == 0, "the driver was used against its rules"


def prepare() -> Callable[[dict[str, Any]], forked.Outcome]:
    tree, folder = map(Path, sys.argv[1:])
    # Most of what a function takes. CUDA is not started by it, and can be in each fork.
    importlib.import_module("torch")
    gc.freeze()

    def answer(request: dict[str, Any]) -> forked.Outcome:
        forked.witness(request["file"])
        return forked.run(lambda: call(tree, folder, request), TIME_LIMIT)

    return answer


if __name__ == "__main__":
    forked.serve(prepare)
