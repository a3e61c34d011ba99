"""Does the toolchain that FlashInfer and DeepGEMM compile with at run time work?"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import Sm12xError
from sm12x.runtime.check.report import Line, failed, passed
from sm12x.runtime.places import Places

TOPIC = "compiler"
_ARCHITECTURES = ("sm_120", "sm_121")
REBUILD = "rebuild the image: its compiler, headers or libraries are not whole"

# A kernel with the headers such code includes (half precision, CCCL), and a driver call, so that
# the link needs cudart and the stub of libcuda as theirs does.
SOURCE = """\
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
    """Compile and link ``SOURCE`` for each architecture as the user we are (about 15 s)."""
    nvcc = places.cuda_home / "bin" / "nvcc"
    lines = []
    for tool in ("gcc", "g++", "ninja"):
        path = process.which(tool)
        if path is None:
            lines.append(failed(TOPIC, f"{tool} is not on PATH", REBUILD))
    if lines:
        return lines
    source, built = scratch / "probe.cu", scratch / "probe.so"
    source.write_text(SOURCE, encoding="utf-8")
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
        return [failed(TOPIC, f"nvcc: {_last(error.message)}", REBUILD)]
    who = f"uid {os.getuid()}"
    text = f"nvcc compiles and links for {' and '.join(_ARCHITECTURES)} as {who}"
    return [passed(TOPIC, text)]


def _last(message: str) -> str:
    """The compiler's first error out of a failed process's text, on one line."""
    rows = [row.strip() for row in message.splitlines()]
    errors = [row for row in rows if re.search(r"\b(error|fatal|cannot find|not found)\b", row)]
    return errors[0] if errors else " ".join(rows)
