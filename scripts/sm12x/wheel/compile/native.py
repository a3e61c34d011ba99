"""Native modules: compiled by the release's CMake, checked, and written with a record."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from sm12x.core import cudaarch, declared, files, process
from sm12x.core.declared import Declared
from sm12x.core.errors import BadFileError, BuildFailedError
from sm12x.core.progress import Steps
from sm12x.stack.model.base import Base, Module
from sm12x.wheel.compile import cmake, compiling
from sm12x.wheel.ledger import SourceEntry
from sm12x.wheel.selection import Kept, ModuleChoice
from sm12x.wheel.source import third_party
from sm12x.wheel.toolchain import arch, cross, cuda_home

RECORD = "native.json"


@dataclass(frozen=True, kw_only=True)
class NativeModule(Declared):
    """A compiled module. ``sha256`` in hex, ``size`` in bytes, ``glibc`` the oldest it runs on.

    ``units`` is how many files it was compiled of.
    """

    target: str
    path: str
    sha256: str
    size: int
    glibc: str
    units: int = 0


@dataclass(frozen=True, kw_only=True)
class DynamicInfo:
    """The dynamic section of a shared library: what it needs, and where that is looked for.

    ``machine`` is what `platform.machine()` says where it runs, such as "x86_64"; ``glibc`` is the
    newest version of it that a symbol asks for, such as "2.34", or "".
    """

    machine: str
    needed: tuple[str, ...]
    runpath: str
    glibc: str


@dataclass(frozen=True, kw_only=True)
class NativeRecord(Declared):
    """The inputs and results of a native build, independent of time and place.

    ``inputs`` is a hash over all that was read of the source tree. ``arch_list`` is what was asked
    for, ``cmake_archs`` what the release's CMake made of it ("" when nothing was compiled).
    ``kept`` are the modules that stay the official ones although the mode or the stack asks for
    them.
    """

    base_version: str
    inputs: str
    arch_list: str
    cmake_archs: str
    compiler: str
    nvcc: str
    modules: tuple[NativeModule, ...]
    mode: str = "quick"
    kept: tuple[Kept, ...] = ()
    sources: tuple[SourceEntry, ...] = ()
    schema: Literal[2] = 2


def build(
    base: Base,
    source: Path,
    out: Path,
    choice: ModuleChoice,
    settings: cmake.Settings,
    *,
    mode: str = "quick",
    patch_levels: Collection[str] = (),
    on_step: Steps | None = None,
    say: Callable[[str], None] | None = None,
) -> NativeRecord:
    """Compile the modules of ``choice`` into ``out``, and write the record beside them.

    Args:
        source: the patched tree, or its CMakeLists.txt, cmake and csrc.
        mode: what ``choice`` was made for.
        patch_levels: sources that may be of another patch level than pinned.
        on_step: is told how far it is. ``say``: is told what a user should know meanwhile.

    Raises:
        BadArchitectureError: a full build needs more of the architectures.
        BuildFailedError: a module does not compile, or a compiled module cannot go into a wheel.
        NoSpaceError: the largest unit needs more memory than there is.
        BadFileError: ``source`` is not a source tree; a third-party source is not where named, or
            not of the pinned version.
        ToolMissingError: cmake, ninja or a compiler is not there.
    """
    for name in cmake.TREE:
        if not (source / name).exists():
            raise BadFileError(
                f"{source} has no {name}", next_step="make it with `sm12x build source`"
            )
    there = cmake.available(base, settings.third_party)
    sources = tuple(
        SourceEntry(
            name=one.name,
            pin=one.pin,
            version=third_party.require_version(
                one,
                Path(f"{settings.third_party}", one.name),
                patch_level=one.name in patch_levels,
            ),
        )
        for one in base.sources
        if one.name in there and any(one.name in module.sources for module in choice.modules)
    )
    # No symlinks in it: compilers write resolved paths, and the mapping below has to match them.
    settings = dataclasses.replace(
        settings, work=settings.work.resolve(), cuda_home=settings.cuda_home.absolute()
    )
    if mode == "full":
        arch.require_complete(settings.archs)
    settings.work.mkdir(parents=True, exist_ok=True)
    digest = cmake.inputs_hash(source)
    cmake_archs = ""
    stage = settings.work / "stage"
    units: dict[str, int] = {}
    modules = choice.modules
    if modules:
        cmake.sync(source, settings.work / "src")
        cmake_archs = cmake.configure(base, modules, settings, on_step)
        if mode == "full":
            _require_all(base, modules, settings, cmake_archs)
        shutil.rmtree(stage, ignore_errors=True)
        units = compiling.compile_modules(base, modules, settings, on_step=on_step, say=say)
        for module in modules:
            cmake.install_module(module, settings, stage)
    record = NativeRecord(
        base_version=base.version,
        inputs=digest,
        arch_list=arch.to_text(settings.archs),
        cmake_archs=cmake_archs,
        compiler=_compiler_version(settings.target),
        nvcc=cuda_home.nvcc_version(settings.cuda_home),
        modules=tuple(_describe(module, stage, units.get(module.target, 0)) for module in modules),
        mode=mode,
        kept=choice.kept,
        sources=sources,
    )
    _publish(record, stage, out)
    return record


def read(folder: Path) -> NativeRecord:
    """Return the record in ``folder``. Raises BadFileError when there is none, or it is not one."""
    return declared.read_json(
        NativeRecord, folder / RECORD, next_step="make it with `sm12x build native`"
    )


def _require_all(
    base: Base, modules: tuple[Module, ...], settings: cmake.Settings, taken: str
) -> None:
    """Raise, before anything is compiled, if CMake silently left out an architecture.

    ``taken`` is CMake's list of architectures; modules of quick mode have no device code.
    """
    try:
        targets = cudaarch.parse_list(taken)
    except ValueError:
        # An unknown spelling: the audit of the compiled modules checks the result.
        return
    lost = [
        str(one)
        for one in settings.archs
        if not any(other.runs_on(one.major, one.minor) for other in targets)
    ]
    if lost and any(not module.quick for module in modules):
        raise BuildFailedError(
            f"CMake of {base.version} leaves out {' and '.join(lost)}: it would compile for "
            f"{taken or 'nothing'} alone",
            next_step="build in quick mode, or give only supported ones with --arch-list",
        )


def _describe(module: Module, stage: Path, units: int) -> NativeModule:
    path = stage / module.path
    header = dynamic(path)
    if header.runpath:
        raise BuildFailedError(
            f"{module.path} would look for libraries in {header.runpath}, folders of this machine",
            next_step="find the link option that adds them in the release's CMake",
        )
    return NativeModule(
        target=module.target,
        path=module.path,
        sha256=files.sha256(path),
        size=path.stat().st_size,
        glibc=header.glibc,
        units=units,
    )


def dynamic(path: Path) -> DynamicInfo:
    """Read the dynamic section of ``path``. Raises BadFileError when it is not a shared library."""
    entries: dict[str, list[str]] = {"DT_NEEDED": [], "DT_RUNPATH": [], "DT_RPATH": []}
    versions: list[tuple[int, ...]] = []
    try:
        with path.open("rb") as handle:
            elf = ELFFile(handle)
            machine = elf["e_machine"].removeprefix("EM_").lower()
            for section in elf.iter_sections():
                if isinstance(section, DynamicSection):
                    for tag in section.iter_tags():
                        kind = tag.entry.d_tag
                        if kind in entries:
                            # pyelftools names the attribute after the tag: DT_NEEDED, needed.
                            entries[kind].append(getattr(tag, kind.removeprefix("DT_").lower()))
                elif isinstance(section, GNUVerNeedSection):
                    for _, symbols in section.iter_versions():
                        versions += [_glibc(symbol.name) for symbol in symbols]
    except (OSError, ELFError) as error:
        raise BadFileError(
            f"{path} is not a shared library that can be read: {error}",
            next_step="build it again",
        ) from None
    glibc = ".".join(map(str, max(versions, default=())))
    return DynamicInfo(
        machine=machine,
        needed=tuple(entries["DT_NEEDED"]),
        runpath=":".join([*entries["DT_RUNPATH"], *entries["DT_RPATH"]]),
        glibc=glibc,
    )


def _glibc(name: str) -> tuple[int, ...]:
    """Return the version of "GLIBC_2.34"; nothing for another symbol version."""
    head, _, version = name.partition("_")
    parts = version.split(".")
    # GLIBC_PRIVATE and GLIBC_ABI_DT_RELR are no versions.
    if head != "GLIBC" or not all(part.isdigit() for part in parts):
        return ()
    return tuple(int(part) for part in parts)


def _publish(record: NativeRecord, stage: Path, out: Path) -> None:
    """Put the modules in ``out``. The old record is deleted first and the new one written last."""
    (out / RECORD).unlink(missing_ok=True)
    paths = {module.path for module in record.modules}
    if out.is_dir():
        for path in out.rglob("*.so"):
            if path.relative_to(out).as_posix() not in paths:
                path.unlink()
    for name in sorted(paths):
        with files.replacing(out / name) as temporary:
            shutil.copyfile(stage / name, temporary)
        (out / name).chmod(0o755)
    declared.write_json(out / RECORD, record)


def _compiler_version(target: cross.Target | None) -> str:
    compiler = target.compiler() if target else os.environ.get("CXX") or "c++"
    return process.run([compiler, "--version"]).stdout.splitlines()[0]
