"""cuda.h is parsed into the names libcuda exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm12x.core.errors import BadFileError
from sm12x.wheel.toolchain import libcuda_stub

HEADER = """
/* CUresult CUDAAPI cuInAComment(int x); */
#define CUDA_VERSION 13000
#define cuMemAlloc                          cuMemAlloc_v2
#define cuMemcpy                            __CUDA_API_PTDS(cuMemcpy)
#define cuLaunchKernel                      __CUDA_API_PTSZ(cuLaunchKernel)
#define cuStreamWait                        __CUDA_API_PTSZ(cuStreamWait_v2)
#define cuGetProcAddress                    cuGetProcAddress_v2
#define cuNotDeclared                       cuNeitherDeclared
typedef enum cudaError_enum {
    CUDA_SUCCESS                              = 0,
    CUDA_ERROR_INVALID_VALUE                  = 1,
    CUDA_ERROR_NO_DEVICE                      = 100
} CUresult;
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuMemAlloc(CUdeviceptr *dptr, size_t bytesize);
CUresult CUDAAPI
cuSplitOverLines(int x);
CUresult CUDAAPI cuMemcpy(int x);
CUresult CUDAAPI cuLaunchKernel(int x);
CUresult CUDAAPI cuStreamWait(int x);
CUresult CUDAAPI cuGetProcAddress(int x);
#undef cuMemAlloc
CUresult CUDAAPI cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytesize);
"""


def test_every_exported_name_is_found() -> None:
    api = libcuda_stub.parse(HEADER)
    assert api.version == 13000
    assert set(api.symbols) == {
        "cuInit",
        "cuMemAlloc",
        "cuMemAlloc_v2",
        "cuSplitOverLines",
        "cuMemcpy",
        "cuMemcpy_ptds",
        "cuLaunchKernel",
        "cuLaunchKernel_ptsz",
        "cuStreamWait",
        "cuStreamWait_v2",
        "cuStreamWait_v2_ptsz",
        "cuGetProcAddress",
        "cuGetProcAddress_v2",
    }
    assert api.current["cuMemAlloc"] == "cuMemAlloc_v2"
    assert "cuMemcpy" not in api.current
    assert api.errors["CUDA_ERROR_NO_DEVICE"] == 100


def test_the_source_defines_each_name_once() -> None:
    api = libcuda_stub.parse(HEADER)
    text = libcuda_stub.source(api)
    lines = text.splitlines()
    for name in api.symbols:
        written = [
            line
            for line in lines
            if line == f"REFUSE({name})"
            or (line.startswith(f"int {name}(") and not line.endswith(";"))
        ]
        assert len(written) == 1, name
    assert libcuda_stub.source(libcuda_stub.parse(HEADER)) == text


def test_another_header_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cuda.h").write_text("#define OTHER 1\n")
    with pytest.raises(BadFileError):
        libcuda_stub.read(tmp_path)
    with pytest.raises(BadFileError, match=str(tmp_path)):
        libcuda_stub.read(tmp_path / "none")
