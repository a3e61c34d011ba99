"""Configures the release's own CUDA build, tells what it compiles for what, and compiles units.

Nothing is fetched: the toolkit is made of the environment's packages, CUTLASS is the one that
FlashInfer carries, FlashAttention is a small project of the same build rules, and of the other
sources of third parties there are empty files by their names.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sm12x.audit import fatbin, sections
from sm12x.wheel.compile import cmake
from sm12x.wheel.toolchain import cuda_home

# What the release's CMake reads, and writes generated kernels into.
PARTS = ("CMakeLists.txt", "cmake", "csrc")
# The file names of a third party's sources in the CMake file that compiles them.
_NAMED = re.compile(r"\$\{\w+_SOURCE_DIR\}/([\w./-]+\.(?:cu|cpp|cc|py))")
_OVERRIDE = re.compile(r"DEFINED ENV\{(\w+_SRC_DIR)\}")
_GENCODE = re.compile(r"-gencode[= ]\"?arch=\w+,code=(\w+)\"?")
_CUTLASS = """\
set(CUTLASS_DIR ${CMAKE_CURRENT_SOURCE_DIR} CACHE PATH "")
set(CUTLASS_INCLUDE_DIR ${CUTLASS_DIR}/include CACHE PATH "")
set(CUTLASS_TOOLS_UTIL_INCLUDE_DIR ${CUTLASS_DIR}/tools/util/include CACHE PATH "")
"""
# As FlashAttention's: functions of vLLM's names, which know no target of SM12x and replace vLLM's,
# and flags for each source. One source is named by its full path, as a glob gives it.
_FLASH_ATTENTION = """\
cmake_minimum_required(VERSION 3.26)
project(flash_attention LANGUAGES CXX CUDA)
function(cuda_archs_loose_intersection OUT SOURCES TARGETS)
  set(${OUT})
  foreach(target ${TARGETS})
    if(NOT target VERSION_LESS 8.0)
      set(${OUT} "8.0+PTX")
    endif()
  endforeach()
  set(${OUT} ${${OUT}} PARENT_SCOPE)
endfunction()
set(sources ${CMAKE_CURRENT_SOURCE_DIR}/forward.cu split.cu)
cuda_archs_loose_intersection(archs "8.0+PTX" "${CUDA_ARCHS}")
if(archs)
  foreach(code sm_80 compute_80)
    set(flag -gencode arch=compute_80,code=${code})
    set_property(SOURCE ${sources} APPEND PROPERTY
      COMPILE_OPTIONS "$<$<COMPILE_LANGUAGE:CUDA>:${flag}>")
  endforeach()
endif()
add_library(_vllm_fa2_C MODULE interface.cpp ${sources})
"""
_FLASH_ATTENTION_FILES = ("forward.cu", "split.cu", "interface.cpp")
# The release refuses GCC before 13: DeepGEMM's and DeepSelect's host code needs it. None of that
# is compiled here.
_OLD_GCC = """\
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(CMAKE_CXX_COMPILER_VERSION 13)
endif()
"""
# Python as CMake calls it. What it is asked with -c is asked in each build: twice, an import of
# torch for one line, the same each time.
_PYTHON = """\
#!/bin/sh
if [ "$#" -eq 2 ] && [ "$1" = -c ]; then
  answer=$0-$(printf %s "$2" | sha256sum | cut -d ' ' -f 1)
  [ -f "$answer" ] || { PYTHON "$@" > "$answer.part" && mv "$answer.part" "$answer"; } || exit
  exec cat "$answer"
fi
exec PYTHON "$@"
"""
# Seconds one configuring, and one compilation, may take.
_CONFIGURE_LIMIT, _COMPILE_LIMIT = 600, 1500


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A CUDA source of a module. ``codes`` are the `code=` of its targets, "sm_120a" for one."""

    module: str
    name: str
    codes: tuple[str, ...]
    command: str
    directory: Path


@dataclass(frozen=True, kw_only=True)
class Build:
    """A configured build; ``units`` is empty where configuring failed."""

    failed: bool
    log: str
    units: tuple[Unit, ...]

    def unit(self, name: str) -> Unit:
        """The one unit whose source ends in ``name``."""
        (found,) = (unit for unit in self.units if unit.name.endswith(name))
        return found


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The device code of a unit.

    ``kernels`` are the bytes of code of each kernel, by the cubin's target ("12.1a").
    """

    kernels: dict[str, dict[str, int]]


class Rig:
    """``folder`` is for all that is made; ``tree`` is left as it is."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = tree
        self._folder = folder
        self._builds: dict[tuple[Path, str], Build] = {}
        site = Path(sysconfig.get_path("purelib"))
        self._cuda = cuda_home.assemble(site, folder / "cuda", probe=False).path
        self._sources = self._third_party(site)
        self._python = folder / "python"
        script = _PYTHON.replace("PYTHON", shlex.quote(sys.executable))
        self._python.write_text(script, encoding="utf-8")
        self._python.chmod(0o755)

    def build(self, archs: str, tree: Path | None = None) -> Build:
        """The build of ``tree`` for the TORCH_CUDA_ARCH_LIST ``archs``; each is made once."""
        key = (tree or self.tree, archs)
        if key not in self._builds:
            self._builds[key] = self._configure(*key, self._folder / f"build{len(self._builds)}")
        return self._builds[key]

    def untouched(self) -> Path:
        """The tree without the stack, out of the repository that applying leaves."""
        folder = self._folder / "untouched"
        if not folder.exists():
            folder.mkdir()
            whole = folder / "parts.tar"
            words = ["git", "-C", f"{self.tree}", "archive", "-o", f"{whole}", "base", "--", *PARTS]
            subprocess.run(words, check=True)
            shutil.unpack_archive(whole, folder)
        return folder

    def compile(
        self,
        unit: Unit,
        *,
        memory_gib: float,
        code: str = "",
        source: str = "",
    ) -> Compiled:
        """Compile the device code with the build's own command; the host's takes as long again.

        Args:
            memory_gib: what compiling it takes.
            code: compile for this target alone: "sm_121a", or "compute_120a" for PTX.
            source: CUDA to compile in the unit's place, as if it was in the folder of the unit.

        Raises:
            MemoryError: less than ``memory_gib`` is free.
            subprocess.CalledProcessError: it does not compile.
        """
        command = unit.command
        if code:
            arch = code.replace("sm_", "compute_")
            command = f"{_GENCODE.sub('', command)} -gencode arch={arch},code={code}"
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        out = folder / "unit.fatbin"
        nvcc, *words = shlex.split(command)
        words[words.index("-o") + 1] = str(out)
        at = words.index("-c")
        words[at] = "-fatbin"
        if source:
            place = folder / "unit.cu"
            place.write_text(source, encoding="utf-8")
            words += ["-I", str(Path(words[at + 1]).parent)]
            words[at + 1] = str(place)
        with _alone():
            free = cmake.free_memory_gib()
            if free < memory_gib:
                raise MemoryError(
                    f"compiling {unit.name} takes {memory_gib} GiB of memory, {free:.1f} are free"
                )
            subprocess.run(
                [nvcc, "--no-compress", *words],
                cwd=unit.directory,
                check=True,
                timeout=_COMPILE_LIMIT,
            )
        data = out.read_bytes()
        out.unlink()
        return _compiled(data)

    def _third_party(self, site: Path) -> dict[str, str]:
        """What each override of the release's CMake is set to."""
        found: dict[str, str] = {}
        for path in [self.tree / "CMakeLists.txt", *(self.tree / "cmake").rglob("*.cmake")]:
            text = path.read_text(encoding="utf-8")
            for variable in _OVERRIDE.findall(text):
                folder = self._folder / "third_party" / variable
                for name in ("README", *_NAMED.findall(text)):
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).touch()
                found[variable] = str(folder)
        cutlass = Path(found["VLLM_CUTLASS_SRC_DIR"])
        for path in (site / "flashinfer" / "data" / "cutlass").iterdir():
            (cutlass / path.name).symlink_to(path)
        (cutlass / "CMakeLists.txt").write_text(_CUTLASS, encoding="utf-8")
        attention = Path(found["VLLM_FLASH_ATTN_SRC_DIR"])
        (attention / "CMakeLists.txt").write_text(_FLASH_ATTENTION, encoding="utf-8")
        for name in _FLASH_ATTENTION_FILES:
            (attention / name).touch()
        return found

    def _configure(self, tree: Path, archs: str, folder: Path) -> Build:
        for name in PARTS:
            path = tree / name
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            (folder / "src").mkdir(parents=True, exist_ok=True)
            copy(path, folder / "src" / name)
        compiler = folder / "compiler.cmake"
        compiler.write_text(_OLD_GCC, encoding="utf-8")
        programs = Path(sysconfig.get_path("scripts"))
        environment = {
            **os.environ,
            **self._sources,
            "CUDA_HOME": str(self._cuda),
            "TORCH_CUDA_ARCH_LIST": archs,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        }
        words = [
            f"{programs / 'cmake'}",
            *("-S", f"{folder / 'src'}", "-B", f"{folder / 'build'}", "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DVLLM_PYTHON_EXECUTABLE={self._python}",
            "-DVLLM_TARGET_DEVICE=cuda",
            f"-DCUDAToolkit_ROOT={self._cuda}",
            f"-DCUDA_TOOLKIT_ROOT_DIR={self._cuda}",
            f"-DCMAKE_CUDA_COMPILER={self._cuda / 'bin' / 'nvcc'}",
            f"-DFETCHCONTENT_BASE_DIR={folder / 'deps'}",
            "-DFETCHCONTENT_FULLY_DISCONNECTED=ON",
            f"-DCMAKE_PROJECT_INCLUDE={compiler}",
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        ]
        done = subprocess.run(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_CONFIGURE_LIMIT,
            check=False,
        )
        units = () if done.returncode else tuple(_units(folder))
        return Build(failed=done.returncode != 0, log=done.stdout, units=units)


def _compiled(data: bytes) -> Compiled:
    kernels: dict[str, dict[str, int]] = {}
    found = fatbin.parse(data, 0, len(data))
    assert not found.faults, found.faults
    for entry in (entry for container in found.containers for entry in container.entries):
        code = data[entry.offset : entry.offset + entry.size]
        if entry.kind != "ptx":
            kernels[str(entry.arch)] = {
                section.name.removeprefix(".text."): section.size
                for section in sections.sections(code)
                if section.name.startswith(".text.")
            }
    return Compiled(kernels=kernels)


def _units(folder: Path) -> Iterator[Unit]:
    entries = json.loads((folder / "build" / "compile_commands.json").read_text())
    for entry in entries:
        if entry["file"].endswith(".cu"):
            module = re.search(r"CMakeFiles/(\w+)\.dir/", entry["output"])
            assert module, entry["output"]
            yield Unit(
                module=module[1],
                name=os.path.relpath(entry["file"], folder / "src"),
                codes=tuple(_GENCODE.findall(entry["command"])),
                command=entry["command"],
                directory=Path(entry["directory"]),
            )


@contextmanager
def _alone() -> Iterator[None]:
    """One large compilation at a time, whichever process it is in."""
    with (Path(tempfile.gettempdir()) / f"sm12x-witness-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lines(units: Sequence[Unit]) -> list[str]:
    """One line a unit: what is compared, and what a failure shows."""
    return sorted(f"{unit.module} {unit.name}: {' '.join(unit.codes)}" for unit in units)
