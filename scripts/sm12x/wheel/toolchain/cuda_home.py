"""Makes a CUDA_HOME out of the toolkit's packages (``nvidia/cu13`` of a site-packages folder).

Used twice: in the builder, and in the runtime image, where FlashInfer and DeepGEMM compile kernels
when a server starts.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import files, process
from sm12x.core.errors import BadFileError, BuildFailedError
from sm12x.wheel.toolchain import cross, libcuda_stub

# Marks a folder that this module made, and may therefore replace.
_MARKER = ".made-by-sm12x"

_RELEASE = re.compile(r"release [\d.]+, V([\d.]+)")
_UNVERSIONED = re.compile(r"(lib.+?\.so)\.[\d.]+")

# Compiled and linked at the end: the compiler, its device passes, the headers of three packages,
# and the three ways a library gets on the link line. cuBLAS is tried where its package is.
_PROBE = """\
#include <cuda.h>
#ifdef WITH_CUBLAS
#include <cublas_v2.h>
#endif
#include <cuda/std/type_traits>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
int main() {
#ifdef WITH_CUBLAS
  cublasHandle_t handle;
  if (cublasCreate(&handle)) return 1;
#endif
  twice<<<1, 1>>>(nullptr);
  return cuInit(0) || cudaDeviceSynchronize();
}
"""


@dataclass(frozen=True, kw_only=True)
class CudaHome:
    """An assembled toolkit; ``nvcc`` is its compiler's version, such as "13.0.88"."""

    path: Path
    nvcc: str


def find_package(site_packages: Path) -> Path:
    """Find the folder of the toolkit's packages. Raises BadFileError for none or several."""
    packages = sorted(path.parents[1] for path in site_packages.glob("nvidia/cu*/bin/nvcc"))
    if len(packages) != 1:
        what = "no" if not packages else f"{len(packages)} toolkits:"
        names = ", ".join(path.name for path in packages)
        raise BadFileError(
            f"{site_packages} has {what} {names or 'nvidia/cu*/bin/nvcc'}",
            next_step="install exactly one `cuda-toolkit[nvcc,...]` (base.toml names it) there",
        )
    return packages[0]


def assemble(
    site_packages: Path, out: Path, *, target: cross.Target | None = None, probe: bool = True
) -> CudaHome:
    """Lay out ``out`` as a CUDA_HOME on the packages in ``site_packages``.

    Args:
        target: another machine to compile for; its packages have the libraries to link with.
        probe: compile and link a small program with the result.

    Raises:
        BadFileError: no toolkit in ``site_packages``, or ``out`` is a folder of something else.
        BuildFailedError: the result cannot compile and link.
        ToolMissingError, ToolFailedError: no C compiler for the stub of libcuda.
    """
    package = find_package(site_packages.resolve())
    shared = cross.libraries(target, package.name) if target else package / "lib"
    out = out.absolute()
    with files.replacing_folder(out, _MARKER) as staging:
        _copy_tools(package / "bin", staging / "bin")
        for name in ("include", "nvvm"):
            (staging / name).symlink_to(package / name)
        _link_libraries(shared, staging / "lib64")
        (staging / "lib").symlink_to("lib64")
        stub = staging / "lib64" / "stubs" / "libcuda.so"
        compiler = str(target.compiler("gcc")) if target else "cc"
        libcuda_stub.build(package / "include", stub, compiler=compiler)
        if target:
            cross.write_marker(target, staging)
        (staging / _MARKER).write_text(f"{package}\n", encoding="utf-8")
        version = nvcc_version(staging)
        if probe:
            _probe(staging, target)
    return CudaHome(path=out, nvcc=version)


def nvcc_version(cuda_home: Path) -> str:
    """Return the version of ``cuda_home``'s nvcc, such as "13.0.88". Raises BadFileError."""
    nvcc = cuda_home / "bin" / "nvcc"
    if not nvcc.is_file():
        raise BadFileError(
            f"{nvcc} is not there", next_step="make a CUDA_HOME with `sm12x build toolchain`"
        )
    match = _RELEASE.search(process.run([nvcc, "--version"]).stdout)
    if match is None:
        raise BadFileError(
            f"the version of {nvcc} could not be read", next_step="install the toolkit anew"
        )
    return match[1]


def _copy_tools(source: Path, target: Path) -> None:
    # nvcc looks for its libraries from where it lies itself: through a link it would look in the
    # package, which has lib but no lib64. A hard link lies here, and costs no second 111 MB.
    shutil.copytree(source, target, copy_function=files.link)


def _link_libraries(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        (target / path.name).symlink_to(path)
    for path in sorted(source.iterdir()):
        # `-lcudart` looks for libcudart.so; the packages carry libcudart.so.13 alone.
        match = _UNVERSIONED.fullmatch(path.name)
        if match and not (target / match[1]).exists():
            (target / match[1]).symlink_to(path.name)


def _probe(cuda_home: Path, target: cross.Target | None) -> None:
    with tempfile.TemporaryDirectory(prefix="sm12x-probe-") as folder:
        program = Path(folder) / "probe.cu"
        program.write_text(_PROBE, encoding="utf-8")
        argv = [cuda_home / "bin" / "nvcc", program, "-o", program.with_suffix("")]
        libraries = ["-lcudart", "-lcuda"]
        if target:
            libraries += ["-ccbin", str(target.compiler())]
        # Of another machine's packages only those that the release links with may exist.
        if (cuda_home / "lib64" / "libcublas.so").exists():
            libraries += ["-DWITH_CUBLAS", "-lcublas"]
        done = process.run([str(word) for word in (*argv, *libraries)], check=False)
        if done.returncode != 0:
            message = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise BuildFailedError(
                f"nvcc of {cuda_home} cannot compile and link a small program: {message}",
                next_step="check that g++ and all of the toolkit's packages are installed",
            )
