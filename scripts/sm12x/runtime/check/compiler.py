"""Do the compilers that run at run time work?

The toolchain that FlashInfer and DeepGEMM use; and Triton, on the kernels that the stack adds,
which have to fit the shared memory of SM12x.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from sm12x.core import process
from sm12x.core.errors import Sm12xError
from sm12x.runtime.check.native import Ask
from sm12x.runtime.check.report import Line, Topic
from sm12x.runtime.places import Places

_ARCHITECTURES = ("sm_120", "sm_121")
TOPIC = Topic("compiler", "rebuild the image: its compiler, headers or libraries are incomplete")

# A kernel with the headers such code includes (half precision, CCCL), and a driver call, so that
# the link needs cudart and the stub of libcuda as theirs does.
_SOURCE = """\
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cub/block/block_reduce.cuh>

__global__ void total(const __half* in, float* out) {
  using Reduce = cub::BlockReduce<float, 128>;
  __shared__ typename Reduce::TempStorage storage;
  float sum = Reduce(storage).Sum(__half2float(in[threadIdx.x]));
  if (threadIdx.x == 0) *out = sum;
}

extern "C" int run(const __half* in, float* out) {
  int devices = 0;
  if (cuDeviceGetCount(&devices) != CUDA_SUCCESS) return -1;
  total<<<1, 128>>>(in, out);
  return static_cast<int>(cudaGetLastError());
}
"""


def check(places: Places, scratch: Path) -> list[Line]:
    """Compile and link ``_SOURCE`` for each architecture as the user we are (about 15 s)."""
    nvcc = places.cuda_home / "bin" / "nvcc"
    lines = []
    for tool in ("gcc", "g++", "ninja"):
        path = process.which(tool)
        if path is None:
            lines.append(TOPIC.failed(f"{tool} is not on PATH"))
    if lines:
        return lines
    source, built = scratch / "probe.cu", scratch / "probe.so"
    source.write_text(_SOURCE, encoding="utf-8")
    try:
        # The stub is for the linker alone: without it in RUNPATH the real driver is found.
        process.run(
            [
                *(nvcc, "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "--threads", "0"),
                *(f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in _ARCHITECTURES),
                *("-o", built, source),
                f"-L{places.cuda_home}/lib64",
                f"-L{places.cuda_home}/lib64/stubs",
                "-lcuda",
            ],
            env={"TMPDIR": str(scratch)},
            timeout=300,
        )
    except Sm12xError as error:
        return [TOPIC.failed(f"nvcc: {_last(error.message)}")]
    who = f"uid {os.getuid()}"
    text = f"nvcc compiles and links for {' and '.join(_ARCHITECTURES)} as {who}"
    return [TOPIC.passed(text)]


def _last(message: str) -> str:
    """The compiler's first error out of a failed process's text, on one line."""
    rows = [row.strip() for row in message.splitlines()]
    errors = [row for row in rows if re.search(r"\b(error|fatal|cannot find|not found)\b", row)]
    return errors[0] if errors else " ".join(rows)


_KERNELS = Topic(
    "kernels",
    "rebuild the image with the unchanged stack; if you changed a kernel, choose smaller tiles",
)
# The package whose modules list what they launch; a stack without it has nothing to compile.
PACKAGE = PurePosixPath("vllm/v1/attention/ops/portable_mla")
_CAPABILITIES = (120, 121)
# Shared memory that one block can have on 12.0 and 12.1, bytes (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
_SHARED_MEMORY = 101376


def check_kernels(places: Places, ask: Ask) -> list[Line]:
    """Compile every configuration for 12.0 and 12.1 (about two minutes on two cores)."""
    folder = places.site / PACKAGE
    if not folder.is_dir():
        return []
    question = {"folder": str(folder), "capabilities": _CAPABILITIES}
    answer: list[dict[str, Any]] = ask("kernels", question, {"TRITON_INTERPRET": None})
    lines = []
    for one in answer:
        where = f"{one['name']} for sm_{one['capability']}"
        if one["error"]:
            lines.append(_KERNELS.failed(f"{where} does not compile: {one['error']}"))
        elif one["shared"] > _SHARED_MEMORY:
            text = f"{where} takes {one['shared']} bytes of shared memory, over {_SHARED_MEMORY}"
            lines.append(_KERNELS.failed(text))
    if not answer:
        lines.append(_KERNELS.failed(f"{PACKAGE} lists no configuration"))
    if lines:
        return lines
    most = max(one["shared"] for one in answer)
    targets = " and ".join(f"sm_{capability}" for capability in _CAPABILITIES)
    count = len({one["name"] for one in answer})
    text = f"{count} configurations compile for {targets}; at most {most} of {_SHARED_MEMORY} bytes"
    return [_KERNELS.passed(f"{text} of shared memory")]
