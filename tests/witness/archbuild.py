"""Configures the release's own CUDA build, tells what it compiles for what, and compiles units.

Nothing is fetched: the toolkit is made of the environment's packages, CUTLASS is the one that
FlashInfer carries, and of the other sources of third parties there are empty files by their names.
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

from sm12x.audit import sections
from sm12x.build import cmake, toolchain

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

    def unit(self, module: str, name: str) -> Unit:
        """The one unit of ``module`` whose source ends in ``name``."""
        (found,) = (u for u in self.units if u.module == module and u.name.endswith(name))
        return found


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """``targets`` are the cubins in the object file, as its headers tell ("12.1a"); ``kernels``
    the bytes of code of each kernel, by target ("sm_121a")."""

    targets: tuple[str, ...]
    kernels: dict[str, dict[str, int]]


class Rig:
    """``folder`` is for all that is made; ``tree`` is left as it is."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = tree
        self._folder = folder
        self._builds: dict[tuple[Path, str], Build] = {}
        site = Path(sysconfig.get_path("purelib"))
        self._cuda = toolchain.assemble(site, folder / "cuda", probe=False).path
        self._sources = self._third_party(site)

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

    def compile(self, unit: Unit, *, memory_gib: float, code: str = "") -> Compiled:
        """Compile with the build's own command; with ``code`` for that one target alone.

        Raises:
            MemoryError: less than ``memory_gib`` is free.
            subprocess.CalledProcessError: it does not compile.
        """
        kept = Path(tempfile.mkdtemp(dir=self._folder))
        command = unit.command
        if code:
            compute = code.replace("sm_", "compute_")
            command = f"{_GENCODE.sub('', command)} -gencode arch={compute},code={code}"
        words = shlex.split(command)
        out = kept / "unit.o"
        words[words.index("-o") + 1] = str(out)
        with _alone():
            free = cmake.free_memory_gib()
            if free < memory_gib:
                raise MemoryError(
                    f"compiling {unit.name} takes {memory_gib} GiB of memory, {free:.1f} are free"
                )
            subprocess.run(
                [*words, "--keep", "--keep-dir", str(kept)],
                cwd=unit.directory,
                check=True,
                timeout=_COMPILE_LIMIT,
            )
        kernels: dict[str, dict[str, int]] = {}
        for path in kept.glob("*.cubin"):
            data = path.read_bytes()
            # Of one target alone the name has no architecture.
            named = re.search(r"\.(?:sm|compute)_(\w+)\.cubin$", path.name)
            kernels[f"sm_{named[1]}" if named else code] = {
                section.name.removeprefix(".text."): section.size
                for section in sections.sections(data)
                if section.name.startswith(".text.")
            }
        targets = [
            str(entry.arch)
            for container in sections.audit(unit.name, out.read_bytes()).units
            for entry in container.entries
            if entry.kind == "cubin"
        ]
        shutil.rmtree(kept)
        return Compiled(targets=tuple(targets), kernels=kernels)

    def ptx(self, unit: Unit, *, headers: Sequence[Path | None], code: str) -> list[str]:
        """The PTX of a unit for one target, once for each folder found before torch's headers.

        Raises:
            subprocess.CalledProcessError: it does not compile.
        """
        outs = [Path(tempfile.mkdtemp(dir=self._folder)) / "unit.ptx" for _ in headers]
        words = [word for word in shlex.split(_GENCODE.sub("", unit.command)) if word != "-c"]
        at = words.index("-o") + 1
        runs = []
        for folder, out in zip(headers, outs, strict=True):
            words[at] = str(out)
            more = [f"-arch={code}", "-ptx", *([f"-I{folder}"] if folder else [])]
            run = [words[0], *more, *words[1:]]
            runs.append((run, subprocess.Popen(run, cwd=unit.directory)))
        for run, running in runs:
            if running.wait(timeout=_COMPILE_LIMIT):
                raise subprocess.CalledProcessError(running.returncode, run)
        return [out.read_text() for out in outs]

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
        return found

    def _configure(self, tree: Path, archs: str, folder: Path) -> Build:
        for name in PARTS:
            path = tree / name
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            (folder / "src").mkdir(parents=True, exist_ok=True)
            copy(path, folder / "src" / name)
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
            f"-DVLLM_PYTHON_EXECUTABLE={sys.executable}",
            "-DVLLM_TARGET_DEVICE=cuda",
            f"-DCUDAToolkit_ROOT={self._cuda}",
            f"-DCUDA_TOOLKIT_ROOT_DIR={self._cuda}",
            f"-DCMAKE_CUDA_COMPILER={self._cuda / 'bin' / 'nvcc'}",
            f"-DFETCHCONTENT_BASE_DIR={folder / 'deps'}",
            "-DFETCHCONTENT_FULLY_DISCONNECTED=ON",
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
