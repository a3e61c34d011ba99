"""Compile what the witnesses load: the stand-in driver, and the tree's own cumem_allocator."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.fakecuda import standin

ALLOCATOR = "cumem_allocator.abi3.so"
ROCM_ALLOCATOR = "rocm/cumem_allocator.abi3.so"
WITH_EXCEPTION = "libwithexception.so"


class CompileError(RuntimeError):
    """The tree's allocator does not compile here; the message is the compiler's first error."""


def cuda_include() -> Path:
    """The folder of cuda.h: CUDA_HOME's, else the one of the nvidia-cuda-runtime package.

    Raises:
        FileNotFoundError: there is neither.
    """
    tried: list[Path] = []
    home = os.environ.get("CUDA_HOME")
    if home:
        tried.append(Path(home) / "include")
    spec = importlib.util.find_spec("nvidia")
    if spec is not None and spec.submodule_search_locations is not None:
        for place in spec.submodule_search_locations:
            tried += sorted(Path(place).glob("cu*/include"))
    for folder in tried:
        if (folder / "cuda.h").is_file() and (folder / "cuda_runtime_api.h").is_file():
            return folder
    raise FileNotFoundError(
        "no cuda.h: install nvidia-cuda-runtime and nvidia-cuda-crt, or set CUDA_HOME "
        f"(looked in {', '.join(map(str, tried)) or 'no folder'})"
    )


def build(tree: Path, folder: Path) -> None:
    """Compile the stand-in and the allocator of ``tree`` into ``folder``.

    Raises:
        FileNotFoundError: there are no CUDA headers.
        subprocess.CalledProcessError: gcc failed; its output is on stderr.
        CompileError: the tree's allocator does not compile; all that was said is on stderr.
    """
    include = cuda_include()
    standin.compile_into(folder, include)
    subprocess.run(
        [
            "gcc",
            "-fPIC",
            "-shared",
            "-I",
            sysconfig.get_path("include"),
            str(Path(__file__).with_name("with_exception.c")),
            "-o",
            str(folder / WITH_EXCEPTION),
        ],
        check=True,
    )
    # The release's own settings: C++17 and the stable ABI of Python 3.8.
    compile_allocator(
        tree,
        folder / ALLOCATOR,
        ["-I", str(include)],
        [str(folder / standin.DRIVER), f"-Wl,-rpath,{folder}"],
    )


def build_rocm(tree: Path, folder: Path) -> None:
    """Compile the allocator's ROCm branch into ``folder``, over the stand-in there.

    Raises:
        CompileError: it does not compile; all that was said is on stderr.
    """
    out = folder / ROCM_ALLOCATOR
    out.parent.mkdir(exist_ok=True)
    compile_allocator(tree, out, ["-DUSE_ROCM", "-I", str(standin.SOURCES)], ["-ldl"])


def compile_allocator(tree: Path, out: Path, flags: list[str], libraries: list[str]) -> None:
    """Compile csrc/cumem_allocator.cpp of ``tree`` as the release's CMake does."""
    words = [
        "g++",
        "-std=c++17",
        "-O2",
        "-g",
        "-fPIC",
        "-DPy_LIMITED_API=0x03080000",
        "-I",
        sysconfig.get_path("include"),
        *flags,
        str(tree / "csrc" / "cumem_allocator.cpp"),
    ]
    kept = _kept(words)
    if kept is not None and kept.is_file():
        shutil.copyfile(kept, out)
        return
    done = subprocess.run(
        [*words, "-shared", *libraries, "-o", str(out)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    sys.stderr.write(done.stderr)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise CompileError(lines[0] if lines else f"g++ ended with {done.returncode}")
    if kept is not None:
        fresh = kept.with_suffix(f".{os.getpid()}")
        shutil.copyfile(out, fresh)
        fresh.rename(kept)


def _kept(words: list[str]) -> Path | None:
    """Where `sm12x-dev witness` and `mutate` keep what many of their processes would compile.

    It is found by what the compiler sees: flags, and the text with everything that it includes. The
    driver's place is not part of it, because a witness has loaded the driver before.
    """
    folder = os.environ.get("SM12X_WITNESS_COMPILED")
    if not folder:
        return None
    seen = subprocess.run([*words, "-E", "-P"], stdout=subprocess.PIPE, check=False)
    if seen.returncode != 0:
        return None
    digest = hashlib.sha256("\0".join(words[:-1]).encode() + b"\0" + seen.stdout)
    return Path(folder) / f"{digest.hexdigest()}.so"
