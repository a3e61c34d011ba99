"""libcudart is found among the mapped files also where a stub with that in its name is mapped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TIME_LIMIT = 50

# What TileLang is to the layer: importing it maps its stub of the CUDA runtime, and its decorators
# and annotations are evaluated.
TILELANG = """
import ctypes
import os

ctypes.CDLL(os.environ["STUB"])


class _Anything:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments, **named):
        return self

    def __getitem__(self, key):
        return self


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()
"""

FOUND = """
import ctypes
import os
import sys

if sys.argv[1] == "before":
    ctypes.CDLL(os.environ["STUB"])
import torch
if sys.argv[1] == "after":
    ctypes.CDLL(os.environ["STUB"])
from vllm.utils.system_utils import find_loaded_library
print(os.path.basename(find_loaded_library(sys.argv[2]) or "none"))
"""

# The order of a model with hyper-connections that drafts: its layers, then what
# vllm.compilation.passes.fusion.allreduce_rms_fusion imports with the same guard.
LAYER_FIRST = """
import sys
from vllm.platforms import current_platform
type(current_platform).is_cuda_alike = lambda self: True
import vllm.model_executor.layers.mhc
try:
    import flashinfer.comm
except ImportError:
    pass
print(sys.modules["flashinfer.comm.cuda_ipc"].cudart.lib._name.rpartition("/")[2])
"""


class Process:
    """Runs Python with the tree, a stub of libcudart and a package that stands for TileLang."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._folder = folder
        self._stub = folder / "libcudart_stub.so"
        source = folder / "stub.c"
        # Too large for a gap between mapped files: what is mapped later has lower addresses, and
        # stands before the others in /proc/self/maps.
        source.write_text("char room[1 << 30]; int cudaGetDevice(int *device) { return 0; }\n")
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(self._stub)], check=True)
        package = folder / "site" / "tilelang"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(TILELANG)
        (package / "language.py").write_text("from tilelang import __getattr__\n")
        self._path = os.pathsep.join([str(tree), str(package.parent)])

    def run(self, program: str, *words: str) -> str:
        """The last line that the program prints; its error where it fails."""
        done = subprocess.run(
            [sys.executable, "-c", program, *words],
            env={**os.environ, "PYTHONPATH": self._path, "STUB": str(self._stub)},
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
        return (done.stdout if done.returncode == 0 else done.stderr).strip().rpartition("\n")[2]


@pytest.fixture
def process(tree: Path, tmp_path: Path) -> Process:
    return Process(tree, tmp_path)


def test_the_runtime_is_found_whichever_is_mapped_first(process: Process) -> None:
    found = {when: process.run(FOUND, when, "libcudart") for when in ("before", "after")}
    assert all(name.startswith("libcudart.so.") for name in found.values()), json.dumps(found)


@pytest.mark.guard
def test_what_is_not_mapped_is_not_found(process: Process) -> None:
    assert process.run(FOUND, "never", "libamdhip64") == "none"


def test_the_layer_leaves_flashinfer_the_runtime(process: Process) -> None:
    assert process.run(LAYER_FIRST).startswith("libcudart.so.")
