"""Calls the release's own CMake: its copy of the source, configuring, installing.

The release's CMake writes into its source folder (generated Marlin kernels, a vendored Python
file), so the build has its own copy of what it reads, in a work folder that a later run takes up
again. Paths that get into the machine code (assertion messages, for one) are mapped to fixed ones:
two builds give the same bytes, wherever they ran.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm12x.core import files, machine, process
from sm12x.core import text as texts
from sm12x.core.cudaarch import CudaArch
from sm12x.core.errors import (
    BuildFailedError,
    ToolFailedError,
    ToolMissingError,
)
from sm12x.stack.model.base import Base, Module, ThirdPartySource
from sm12x.wheel.compile import launcher
from sm12x.wheel.toolchain import arch, cross

if TYPE_CHECKING:
    # The environment of the witnesses, which use this module, does not have rich.
    from sm12x.core.progress import Steps

# The parts of the source tree that the release's CMake reads.
TREE = ("CMakeLists.txt", "cmake", "csrc")

_SUPPORTED = re.compile(r"^-- CUDA supported target architectures: (.*)$")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Build settings. ``jobs`` 0 is all cores, ``memory_gib`` 0 what is free; ``python`` has torch.

    ``third_party`` has the real third-party sources, each in a folder of its name. ``target`` is
    the other machine that ``cuda_home`` compiles for, None for this one.
    """

    cuda_home: Path
    work: Path
    python: Path
    archs: tuple[CudaArch, ...]
    jobs: int = 0
    memory_gib: float = 0.0
    third_party: Path | None = None
    target: cross.Target | None = None


def inputs_hash(source: Path) -> str:
    """Return a sha256 over names and contents of the files that CMake reads in ``source``."""
    return _hash(source, _tree_files(source))


def _hash(source: Path, paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(source).as_posix()} {files.sha256(path)}\n".encode())
    return digest.hexdigest()


def free_memory_gib() -> float:
    """Return the free memory in GiB: of the machine, or of our control group if that is less."""
    free = machine.available()
    return 1.0 if free is None else free / texts.GIB


def _tree_files(source: Path) -> list[Path]:
    paths: list[Path] = []
    for name in TREE:
        path = source / name
        paths += [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file())
    return sorted(paths)


def sync(source: Path, target: Path) -> None:
    """Make the build's copy equal to ``source``, touching only files that differ.

    ninja compares times, so an untouched file is not compiled again. Files that CMake generated in
    the copy stay: its cache says that they exist.
    """
    manifest = target.with_name(f"{target.name}.files")
    sources = {path.relative_to(source).as_posix(): path for path in _tree_files(source)}
    names = manifest.read_text(encoding="utf-8").splitlines() if manifest.is_file() else []
    for name in names:
        if name not in sources:
            (target / name).unlink(missing_ok=True)
    # Before the copies: a file that a killed run brought here must be known to the next one.
    files.write_text(manifest, "".join(f"{name}\n" for name in sorted({*names, *sources})))
    for name, path in sources.items():
        copy = target / name
        if not copy.is_file() or copy.read_bytes() != path.read_bytes():
            with files.replacing(copy) as temporary:
                shutil.copyfile(path, temporary)
            copy.chmod(path.stat().st_mode & 0o777)


def variables(base: Base, modules: Sequence[Module], settings: Settings) -> dict[str, str]:
    """Return the environment of CMake, and of ninja, which may call CMake again."""
    return {
        **{name: str(path) for name, path in _sources(base, modules, settings).items()},
        "CUDA_HOME": str(settings.cuda_home),
        "TORCH_CUDA_ARCH_LIST": arch.to_text(settings.archs),
        "PATH": _path(settings.python),
        # torch's FindCUDA uses only this variable when it crosses machines.
        **({"CUDA_TOOLKIT_ROOT": str(settings.cuda_home)} if settings.target else {}),
    }


def configure(
    base: Base, modules: Sequence[Module], settings: Settings, on_step: Steps | None
) -> str:
    """Run CMake unless it already ran with the same arguments; return the architectures it took."""
    work = settings.work
    folder = work / "build"
    environment = variables(base, modules, settings)
    argv = [
        tool("cmake", settings.python),
        *("-S", work / "src", "-B", folder, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja', settings.python)}",
        *_definitions(base, modules, settings),
    ]
    words = [str(word) for word in argv]
    # The launcher adds arguments to the compiler's that ninja does not see.
    digest = files.sha256(Path(launcher.__file__))
    key = json.dumps({"argv": words, "variables": environment, "launcher": digest}, sort_keys=True)
    inputs = _description_hash(work / "src")
    stamp = work / "configured.json"
    log = work / "logs" / "configure.log"
    state = json.loads(stamp.read_text(encoding="utf-8")) if stamp.is_file() else {}
    if state.get("key") != key:
        # CMake keeps compilers and paths of an earlier run in its cache, whatever its arguments.
        stamp.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        state = {}
    if state.get("inputs") != inputs:
        if state:
            # Not configured until CMake has run; objects compiled with these arguments stay valid.
            files.write_text(stamp, json.dumps({"key": key, "inputs": "", "archs": ""}))
        log.unlink(missing_ok=True)
        arch_lists: list[str] = []

        def line(text: str) -> None:
            match = _SUPPORTED.match(text)
            arch_lists.extend([match[1]] if match else [])
            if on_step:
                on_step("configure", 0, 0)

        run(words, environment, log, "CMake could not configure the release", line)
        state = {"key": key, "inputs": inputs, "archs": arch_lists[-1] if arch_lists else ""}
        files.write_text(stamp, json.dumps(state))
    archs: str = state["archs"]
    return archs


def _description_hash(source: Path) -> str:
    """Return a hash over what configuring reads: CMake's files, and scripts that make sources.

    ninja does not know of the scripts; CMake runs them only when it runs itself.
    """
    compiled = source / "csrc"
    return _hash(
        source,
        (
            path
            for path in _tree_files(source)
            if path.suffix == ".py" or not path.is_relative_to(compiled)
        ),
    )


def _sources(base: Base, modules: Sequence[Module], settings: Settings) -> dict[str, Path]:
    """Map the CMake variable of each third-party source to its folder."""
    stand_ins = settings.work / "third_party"
    return {
        source.override: third_party(source, modules, settings.third_party, stand_ins)
        for source in base.sources
    }


def _definitions(base: Base, modules: Sequence[Module], settings: Settings) -> list[str]:
    cuda = settings.cuda_home
    target = settings.target
    other = cross.flags(target, settings.python, settings.work) if target else []
    flags = " ".join([*_prefix_maps(base, modules, settings), *other])
    # -I and -S: it starts once per unit, and needs nothing but the standard library.
    before = [settings.python, "-I", "-S", Path(launcher.__file__)]
    # No CCACHE_BASEDIR: ccache would make paths relative, which the prefix maps then do not match.
    before += filter(None, [process.which("ccache")])
    return [
        *(cross.definitions(target, settings.work) if target else ()),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DVLLM_PYTHON_EXECUTABLE={settings.python}",
        "-DVLLM_TARGET_DEVICE=cuda",
        f"-DCUDAToolkit_ROOT={cuda}",
        f"-DCUDA_TOOLKIT_ROOT_DIR={cuda}",
        f"-DCMAKE_CUDA_COMPILER={cuda / 'bin' / 'nvcc'}",
        f"-DFETCHCONTENT_BASE_DIR={settings.work / 'deps'}",
        # No network at build time: a source that no override covers must fail, not be fetched.
        "-DFETCHCONTENT_FULLY_DISCONNECTED=ON",
        # Nothing of the build machine's folders, the stub of libcuda above all, in the module.
        "-DCMAKE_SKIP_RPATH=ON",
        f"-DCMAKE_CXX_FLAGS={flags}",
        f"-DCMAKE_CUDA_FLAGS={' '.join(f'-Xcompiler={flag}' for flag in flags.split())}",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        *(
            f"-DCMAKE_{language}_COMPILER_LAUNCHER={';'.join(map(str, before))}"
            for language in ("C", "CXX", "CUDA")
        ),
    ]


def _prefix_maps(base: Base, modules: Sequence[Module], settings: Settings) -> list[str]:
    names = {source.override: source.name for source in base.sources}
    maps = {
        settings.work / "src": "/vllm",
        settings.work / "build": "/build",
        settings.cuda_home: "/cuda",
        purelib(settings.python): "/site-packages",
        **{
            path: f"/third_party/{names[override]}"
            for override, path in _sources(base, modules, settings).items()
        },
    }
    return [f"-ffile-prefix-map={path}={name}" for path, name in maps.items()]


def purelib(python: Path) -> Path:
    """Return the site-packages of another Python."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(process.run([python, "-c", code]).stdout.strip())


def available(base: Base, folder: Path | None) -> frozenset[str]:
    """Return the third-party sources of ``base`` that are in ``folder``."""
    if folder is None:
        return frozenset()
    names = (source.name for source in base.sources if files.has_files(folder / source.name))
    return frozenset(names)


def third_party(
    source: ThirdPartySource, modules: Iterable[Module], real: Path | None, stand_ins: Path
) -> Path:
    """Return the folder to pass to CMake for ``source``: the one in ``real`` where it is compiled.

    A source that is not compiled, or is not there, gets a stand-in folder in ``stand_ins``.
    """
    if real and any(source.name in module.sources for module in modules):
        checkout = real / source.name
        if files.has_files(checkout):
            return checkout.resolve()
    folder = stand_ins / source.name
    for name in ("README", *source.stand_in):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            text = "Stands in for the real source, of which nothing is compiled in this build.\n"
            path.write_text(text if name == "README" else "", encoding="utf-8")
    return folder


def install_module(module: Module, settings: Settings, stage: Path) -> None:
    argv = [tool("cmake", settings.python), "--install", settings.work / "build"]
    words = [*map(str, argv), "--component", module.target, "--strip", "--prefix", str(stage)]
    log = settings.work / "logs" / f"{module.target}.log"
    what = f"native module {module.target} could not be installed"
    run(words, {"PATH": _path(settings.python)}, log, what, lambda _: None)
    if not (stage / module.path).is_file():
        raise BuildFailedError(
            f"CMake's target {module.target} did not make {module.path}",
            next_step=f"check `path` of that module in base.toml; the log is {log}",
        )


def run(
    words: list[str],
    variables: Mapping[str, str],
    log: Path,
    what: str,
    on_line: Callable[[str], None],
) -> None:
    """Run one step of the build, with its output in ``log``.

    Raises BuildFailedError, which begins with ``what``.
    """
    try:
        process.stream(words, env=variables, log=log, on_line=on_line)
    except ToolFailedError as error:
        shown = {name: value for name, value in variables.items() if name != "PATH"}
        again = shlex.join(["env", *(f"{name}={value}" for name, value in shown.items()), *words])
        raise BuildFailedError(
            f"{what}: {error.message}", next_step=f"read {log}; repeat it with `{again}`"
        ) from None


def _path(python: Path) -> str:
    return f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"


def tool(name: str, python: Path) -> Path:
    """Return the program beside ``python`` (a build requirement), else the one on PATH."""
    path = shutil.which(name, path=_path(python))
    if path is None:
        raise ToolMissingError(
            f"`{name}` is neither beside {python} nor on PATH",
            next_step=f"install the build requirements of base.toml, {name} among them",
        )
    return Path(path)
