"""A base: one vLLM release, and all that is specific to it, read from ``base.toml``."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import Field

from sm12x import layout
from sm12x.core import declared, text
from sm12x.core.declared import MACHINES, Declared, KeyFaultError, Machine
from sm12x.core.errors import BadFileError, UnknownBaseError

__all__ = ["MACHINES"]

# A text with more than blanks.
_Text = Annotated[str, Field(pattern=r"\S")]


@dataclass(frozen=True, kw_only=True)
class PinnedFile(Declared):
    """A file on the package index. ``sha256`` is in hex."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Sdist(PinnedFile):
    """``tree`` is the git tree id of the unpacked archive, top folder stripped."""

    tree: str


@dataclass(frozen=True, kw_only=True)
class Toolchain(Declared):
    """``not_full`` says why `auto` never takes a full build of this release, "" where it may.

    ``auto_needs`` names third-party sources that most modules with GPU code are made of; without
    them `auto` takes no full build either.
    """

    torch: str
    cuda: str
    cuda_extras: tuple[str, ...]
    build_requires: tuple[str, ...]
    arch_list: str
    not_full: str = ""
    auto_needs: tuple[str, ...] = ()

    @property
    def cuda_requirement(self) -> str:
        """The toolkit as a requirement: ``cuda-toolkit[nvcc,...]==13.0.2``."""
        return f"cuda-toolkit[{','.join(self.cuda_extras)}]=={self.cuda}"


@dataclass(frozen=True, kw_only=True)
class Module(Declared):
    """A native module: its cmake target, its path in the wheel, the sources it is made of.

    ``sources`` names the third-party sources that are compiled into it. ``quick`` says that it is
    cheap enough to be compiled in quick mode when the stack touches it. ``other_gpus`` are the
    torch ops (``namespace::name``) that the release registers only where it compiles their kernels,
    which are for other GPUs: compiled for 12.x alone the module lacks those.
    """

    target: str
    path: str
    inputs: tuple[str, ...]
    sources: tuple[str, ...]
    cpu_seconds: float
    peak_gib: float
    quick: bool = False
    other_gpus: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnitCost(Declared):
    """The cost of compiling a matching file: seconds of CPU, GiB at its peak.

    ``match`` is a glob of the file's path, from its end: "marlin/*bfloat16*.cu".
    """

    match: str
    cpu_seconds: float
    peak_gib: float


@dataclass(frozen=True, kw_only=True)
class ThirdPartySource(Declared):
    """A third-party source the release's CMake declares; ``override`` is the variable it reads.

    ``stand_in`` are empty files that CMake's configuration needs where the source is not compiled.

    A source that is compiled comes out of git: ``commit`` of the repository ``git``, with those
    ``submodules``. ``defines`` are the macros of ``version_file`` whose values are the numbers of
    ``pin``.
    """

    name: str
    pin: str
    override: str
    stand_in: tuple[str, ...]
    git: str = ""
    commit: str = ""
    submodules: tuple[str, ...] = ()
    version_file: str = ""
    defines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageBase(Declared):
    base: str
    suite: str


@dataclass(frozen=True, kw_only=True)
class Disk(Declared):
    """The disk space of a bundle, in GiB, measured.

    ``builder_gib`` and ``image_gib`` are the layers that building the wheel and building the image
    leave in the engine's storage, ``builder_layer_gib`` and ``image_layer_gib`` the largest of
    them, ``builder_packages_gib`` and ``image_packages_gib`` what each of the two puts into the
    build's package cache; ``objects_gib`` is what a full build compiles on top, ``flashinfer_gib``
    what FlashInfer's modules take, each of the cache and the image. ``sources_gib`` lie in our own
    cache, ``dist_gib`` in the checkout.
    """

    builder_gib: float
    builder_layer_gib: float
    builder_packages_gib: float
    image_gib: float
    image_layer_gib: float
    image_packages_gib: float
    objects_gib: float
    sources_gib: float
    dist_gib: float
    flashinfer_gib: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LockSpec(Declared):
    """``platform`` as uv names it; ``build_from_sdist`` lists what has no wheel there.

    ``sdist_requires`` are their build requirements besides ``toolchain.build_requires``.
    """

    platform: str
    build_from_sdist: tuple[str, ...]
    sdist_requires: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Override(Declared):
    """A requirement that the lock replaces by another one, and why.

    ``of`` is the package whose metadata asks for ``instead_of``, the release's own unless another
    is named. ``machines`` are those whose lock is made with it, every one where none is named.
    """

    requirement: str
    instead_of: str
    why: str
    of: str = "vllm"
    machines: tuple[Machine, ...] = ()

    def __str__(self) -> str:
        whose = "" if self.of == "vllm" else f" of {self.of}"
        return f"{self.requirement} instead of {self.instead_of}{whose}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Extra(Declared):
    """An extra of the release that lock and image have too: optional packages of its own metadata.

    ``requirement`` is what the extra brings, pinned, as the release's metadata has it; ``license``
    is the package's, as its metadata has it (SPDX). ``modules`` are those of it that the release
    uses, and ``why`` says what it is for.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    requirement: Annotated[str, Field(pattern=r"^[\w.-]+==[^\s*,;]+$")]
    license: _Text
    modules: Annotated[tuple[str, ...], Field(min_length=1)]
    why: _Text

    @property
    def package(self) -> str:
        """The normal name of the package that it brings."""
        return canonicalize_name(Requirement(self.requirement).name)


@dataclass(frozen=True, kw_only=True)
class FlashInferModule(Declared):
    """A CUDA module of the closure's FlashInfer that can be compiled ahead of time.

    ``name`` is FlashInfer's, and that of the file; ``generator`` the function that makes its
    ``JitSpec``, as "package.module:function", with ``arguments`` (a dtype by its name in torch).
    ``cpu_seconds`` is what all its units take, ``peak_gib`` the most that one of them takes.
    ``why`` says what calls it.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")]
    generator: Annotated[str, Field(pattern=r"^[a-z_][\w.]*:[a-z_]\w*$")]
    why: str
    cpu_seconds: Annotated[float, Field(gt=0)]
    peak_gib: Annotated[float, Field(gt=0)]
    arguments: Mapping[str, bool | int | str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Witness(Declared):
    """The witnesses' packages: names from the base's lock, and their download size.

    ``upstream`` names the tests (tests/witness/test_x.py::test_y) of a defect that this release no
    longer has: they must pass on the untouched release. ``needed`` names tests that other untouched
    releases pass and this one fails. ``first`` are the witnesses (tests/witness/test_x.py) that
    take longest: they start first. ``apart`` are packages in a folder that witnesses put on their
    path where they need it: what imports a package wherever it finds it finds none of these.
    """

    packages: tuple[str, ...]
    apart: tuple[str, ...] = ()
    download_mib: int
    first: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()


def _require_version(key: str, text: str) -> None:
    """Raise KeyFaultError unless ``text``, the value of ``key``, is a version."""
    try:
        Version(text)
    except InvalidVersion:
        raise KeyFaultError(key, f"is {text!r}, which is no version") from None


@dataclass(frozen=True, kw_only=True)
class Dropped(Declared):
    """A patch of another base that this stack does not have.

    ``state`` is "upstream" (the release does it itself, in ``since`` at the latest) or "conflict"
    (it is needed, and not yet written for this release).
    """

    patch: str
    state: Literal["upstream", "conflict"]
    why: str
    since: str = ""

    def __post_init__(self) -> None:
        if (self.state == "upstream") != bool(self.since):
            raise KeyFaultError("since", "is for upstream alone" if self.since else "is missing")
        if self.since:
            _require_version("since", self.since)


@dataclass(frozen=True, kw_only=True)
class Base(Declared):
    """``base.toml``, and the folder that it is in."""

    folder: Path
    schema: Literal[1]
    version: str
    released: datetime.date
    python: str
    sdist: Sdist
    wheels: Annotated[Mapping[Machine, PinnedFile], Field(alias="wheel")]
    toolchain: Toolchain
    modules: Annotated[tuple[Module, ...], Field(alias="module")]
    sources: Annotated[tuple[ThirdPartySource, ...], Field(alias="source")]
    image: ImageBase
    disk: Disk
    locks: Annotated[Mapping[Machine, LockSpec], Field(alias="lock")]
    witness: Witness
    units: Annotated[tuple[UnitCost, ...], Field(alias="unit")] = ()
    overrides: Annotated[tuple[Override, ...], Field(alias="override")] = ()
    extras: Annotated[tuple[Extra, ...], Field(alias="extra")] = ()
    dropped: tuple[Dropped, ...] = ()
    flashinfer: tuple[FlashInferModule, ...] = ()

    def __post_init__(self) -> None:
        _require_version("version", self.version)
        for key, names in (
            ("extra", [extra.name for extra in self.extras]),
            ("flashinfer", [module.name for module in self.flashinfer]),
        ):
            for place, name in enumerate(names):
                if name in names[:place]:
                    raise KeyFaultError(f"{key}[{place}].name", f"{name!r} is there twice")

    def overrides_on(self, machine: str) -> tuple[Override, ...]:
        """What the locks of ``machine`` are made with instead."""
        return tuple(
            each for each in self.overrides if not each.machines or machine in each.machines
        )

    def lock_spec(self, machine: str) -> LockSpec:
        """Return the [lock.<machine>] of base.toml. Raises BadFileError if there is none."""
        try:
            return self.locks[machine]
        except KeyError:
            raise BadFileError(
                f"{self.folder / 'base.toml'} has no lock.{machine}", next_step="add that table"
            ) from None

    def lock_path(self, machine: str) -> Path:
        """The locked closure of the release on ``machine`` ("x86_64" or "aarch64")."""
        return self.folder / f"requirements-{machine}.lock"

    def build_lock_path(self, machine: str) -> Path:
        """The locked requirements of the builder on ``machine``."""
        return self.folder / f"build-{machine}.lock"

    @property
    def series_path(self) -> Path:
        return self.folder / "series"


def default() -> str:
    """The default base, from patches/default, which the Makefile reads too.

    Raises:
        BadFileError: there is no such file, or it names no base.
    """
    path = layout.patches() / "default"
    try:
        version = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(
            f"{path} cannot be read: {error}", next_step="write the version of a base into it"
        ) from None
    if version not in versions():
        raise BadFileError(
            f"{path} names {version!r}, which is no base; bases: {', '.join(versions()) or 'none'}",
            next_step="write one of these versions into it",
        )
    return version


def versions() -> list[str]:
    """The versions there is a folder for, oldest first."""
    names = [path.parent.name for path in layout.patches().glob("*/base.toml")]
    return sorted(names, key=lambda text: [int(part) for part in text.split(".") if part.isdigit()])


def load(version: str) -> Base:
    """Read patches/<version>/base.toml.

    Raises:
        UnknownBaseError: there is no such folder.
        BadFileError: the file does not parse, or a key is missing, unknown or of another type.
    """
    folder = layout.patches() / version
    if not (folder / "base.toml").is_file():
        names = versions()
        near = text.near(version, names, cutoff=0.3)
        make = f"make it with `sm12x-dev rebase {version} NEW_DIR --from BASE`"
        raise UnknownBaseError(
            f"there is no base {version}; known bases: {', '.join(names) or 'none'}",
            next_step=f"perhaps you meant {near}" if near else make,
        )
    return parse(folder / "base.toml")


def parse(path: Path) -> Base:
    """Read one base.toml. Raises BadFileError with line and key path of the first fault."""
    base = declared.read_toml(
        Base,
        path,
        given={"folder": path.parent},
        next_step="correct that key; another base.toml shows the layout",
    )
    if base.version != path.parent.name:
        raise BadFileError(
            f"{path}: version is {base.version}, the folder is {path.parent.name}",
            next_step="make the two agree",
        )
    names = [source.name for source in base.sources]
    for name in base.toolchain.auto_needs:
        if name not in names:
            raise BadFileError(
                f"{path}: toolchain.auto_needs names {name!r}, which is no [[source]]",
                next_step=f"use {text.near(name, names) or text.either(names)}",
            )
    return base
