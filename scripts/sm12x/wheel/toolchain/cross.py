"""Compiling for another machine: its compiler, its libraries, and CMake's arguments for both.

nvcc runs on this machine and makes host code for the other by that one's g++. What is linked with
(torch, cudart, nvrtc) are the other machine's own packages, unpacked in a folder and never run.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import declared, files, lockfile, pipconfig, process
from sm12x.core.declared import Declared
from sm12x.core.errors import BadArchitectureError, BadFileError, ToolMissingError
from sm12x.stack.model.base import Base

# In a CUDA_HOME for another machine: which one, and where its packages are.
MARKER = "cross.json"

# Packages of the other machine's lock to unpack: those that the release's CMake links with.
PACKAGES = ("torch", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc")
# In a folder of such packages: the lock they are of.
_LOCK = "target.lock"


# Machines that nvcc of an x86_64 toolkit makes code for: what names the compilers, and the folder
# that CUDA's own CMake looks for.
_TRIPLETS = {"aarch64": "aarch64-linux-gnu"}
_CUDA_FOLDERS = {"aarch64": "sbsa-linux"}
_HOST = "x86_64"


@dataclass(frozen=True, kw_only=True)
class Target(Declared):
    """``packages`` is a folder like a site-packages, with the wheels of ``machine`` unpacked."""

    machine: str
    packages: Path

    @property
    def triplet(self) -> str:
        return _TRIPLETS[self.machine]

    def compiler(self, name: str = "g++") -> Path:
        """Find the cross compiler. Raises ToolMissingError, with the package that has it."""
        program = process.which(f"{self.triplet}-{name}")
        if program is None:
            raise ToolMissingError(
                f"compiling for {self.machine} takes {self.triplet}-{name}, which is not installed",
                next_step=f"install it, such as with `apt-get install g++-{self.triplet}`",
            )
        return program


def needed(machine: str, *, here: str | None = None) -> bool:
    """Tell whether a build for ``machine`` crosses machines.

    Args:
        here: this machine as `platform.machine()` names it; None asks.

    Raises:
        BadArchitectureError: it does, and there is no toolkit that could.
    """
    here = here or platform.machine()
    if machine == here:
        return False
    if machine not in _TRIPLETS or here != _HOST:
        raise BadArchitectureError(
            f"code for {machine} cannot be compiled on {here}",
            next_step=f"build on {machine}, or for {' or '.join(_TRIPLETS)} on {_HOST}",
        )
    return True


def libraries(target: Target, toolkit: str) -> Path:
    """Return the folder of the toolkit's libraries for ``target``; ``toolkit`` is such as "cu13".

    Raises:
        BadFileError: a package is not unpacked there, or is for another machine.
    """
    folder = target.packages / "nvidia" / toolkit / "lib"
    torch = target.packages / "torch" / "share" / "cmake" / "Torch"
    for path in (folder, torch):
        if not path.is_dir():
            raise BadFileError(
                f"{target.packages} is not where packages for {target.machine} are unpacked: "
                f"{path.relative_to(target.packages)} is not there",
                next_step="unpack them: "
                f"`sm12x build packages --machine {target.machine} --base VERSION --out DIR`",
            )
    return folder


def lock(base: Base, machine: str) -> str:
    """Return the lock of ``PACKAGES`` for ``machine``, without their runtime requirements."""
    path = base.build_lock_path(machine)
    whole = lockfile.read(path)
    pins = [pin.text for pin in whole.pins if pin.name in PACKAGES]
    if len(pins) != len(PACKAGES):
        raise BadFileError(
            f"{path} does not have all of {', '.join(PACKAGES)}",
            next_step=f"make it with `make lock BASE={base.version}`",
        )
    return f"# What is linked with for {machine}.\n{whole.head}{''.join(pins)}"


def unpack(base: Base, machine: str, out: Path, *, uv: str, find_links: Path | None = None) -> bool:
    """Unpack ``PACKAGES`` for ``machine`` in ``out`` (1 GB), unless they are there already.

    Args:
        uv: the program.
        find_links: a folder with wheels to take besides the index's.

    Returns:
        Whether anything was done.

    Raises:
        BadFileError: ``out`` is a folder of something else, or the lock lacks a package.
        ToolFailedError: uv cannot fetch or unpack them.
    """
    text = lock(base, machine)
    marker = out / _LOCK
    if marker.is_file() and marker.read_text(encoding="utf-8") == text:
        return False
    with files.replacing_folder(out, _LOCK) as staging:
        (staging / _LOCK).write_text(text, encoding="utf-8")
        words: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        words += ["--python-platform", base.locks[machine].platform]
        words += ["--python-version", base.python, "--target", staging]
        words += ["--find-links", find_links] if find_links else []
        process.run(
            [*words, "--requirement", staging / _LOCK],
            env={**pipconfig.load().uv_environment(), "UV_PYTHON_DOWNLOADS": "never"},
            next_step="check network, proxy and index address, and run it again",
        )
    return True


def write_marker(target: Target, cuda_home: Path) -> None:
    """Mark ``cuda_home`` as one for ``target``, for callers that get only its folder."""
    declared.write_json(cuda_home / MARKER, target)
    folder = cuda_home / "targets"
    folder.mkdir(exist_ok=True)
    # CMake's modules look for a cross toolkit in here, NVIDIA's packages for one machine have none.
    (folder / _CUDA_FOLDERS[target.machine]).symlink_to("..")


def find(cuda_home: Path, machine: str) -> Target | None:
    """Read the target of ``cuda_home``, None for this machine.

    Raises:
        BadFileError: it compiles for another machine than ``machine``.
        BadArchitectureError: nothing here compiles for ``machine``.
    """
    path = cuda_home / MARKER
    crossing = needed(machine)
    target = None
    if path.is_file():
        step = "make the CUDA_HOME again with `sm12x build toolchain`"
        target = declared.read_json(Target, path, next_step=step)
    if crossing != (target is not None) or (target and target.machine != machine):
        what = target.machine if target else platform.machine()
        raise BadFileError(
            f"{cuda_home} is a toolkit that compiles for {what}, not for {machine}",
            next_step=f"make one with `sm12x build toolchain --machine {machine}`",
        )
    return target


def definitions(target: Target, work: Path) -> list[str]:
    """Return arguments of CMake: the toolchain file, made in ``work``, and torch's modules.

    Raises ToolMissingError when there is no compiler for the target.
    """
    share = target.packages / "torch" / "share" / "cmake"
    path = work / f"toolchain-{target.machine}.cmake"
    compiler = target.compiler()
    lines = [
        "# Made by sm12x.wheel.toolchain.cross.",
        "set(CMAKE_SYSTEM_NAME Linux)",
        f"set(CMAKE_SYSTEM_PROCESSOR {target.machine})",
        f"set(CMAKE_C_COMPILER {target.compiler('gcc')})",
        f"set(CMAKE_CXX_COMPILER {compiler})",
        f"set(CMAKE_CUDA_HOST_COMPILER {compiler})",
    ]
    _update(path, "".join(f"{line}\n" for line in lines))
    return [
        f"-DCMAKE_TOOLCHAIN_FILE={path}",
        # The release asks this machine's torch where its modules are: those of the target first.
        f"-DTorch_DIR={share / 'Torch'}",
        f"-DCaffe2_DIR={share / 'Caffe2'}",
        # The Python that CMake asks is this machine's, and runs without an emulator; FindPython
        # looks for none at all when crossing machines unless it is given one.
        "-DCMAKE_POLICY_DEFAULT_CMP0190=NEW",
        f"-DCMAKE_CROSSCOMPILING_EMULATOR={process.which('env')}",
    ]


def _update(path: Path, text: str) -> None:
    """Write ``text`` unless it is there: CMake and ninja compare dates."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        files.write_text(path, text)


def flags(target: Target, python: Path, work: Path) -> list[str]:
    """Return flags to use this machine's Python headers for ``target``, and hide its folder."""
    code = "import sysconfig; print(sysconfig.get_config_h_filename())"
    header = Path(process.run([python, "-c", code]).stdout.strip())
    options = [f"-ffile-prefix-map={target.packages}=/site-packages"]
    theirs, ours = _machine_headers(header, target)
    if ours is not None:
        folder = work / "python"
        _update(folder / theirs, ours.read_text(encoding="utf-8"))
        options.append(f"-I{folder}")
    return options


def _machine_headers(header: Path, target: Target) -> tuple[str, Path | None]:
    """Return what Debian's pyconfig.h includes for ``target``, and this machine's substitute.

    Debian has one per machine, each in a folder named after it, and only this machine's is
    installed. Modules use the stable ABI, for which they say the same: what differs between two
    64-bit Linux machines concerns building Python itself. Elsewhere there is one pyconfig.h, and
    None here.
    """
    text = header.read_text(encoding="utf-8")
    names = re.findall(r"^#\s*include\s*<(\S+/pyconfig\.h)>", text, re.MULTILINE)
    theirs = next((name for name in names if name.startswith(f"{target.triplet}/")), "")
    # <include>/python3.x/pyconfig.h, and the others in <include>/<machine>/python3.x/.
    installed = (header.parents[1] / name for name in names)
    return theirs, next((path for path in installed if path.is_file()), None) if theirs else None
