"""A base: one vLLM release, and all that is specific to it, read from ``base.toml``."""

from __future__ import annotations

import datetime
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm12x import layout
from sm12x.core.errors import BadFileError, UnknownBaseError
from sm12x.stack.model import table
from sm12x.stack.model.table import Table

MACHINES = table.MACHINES
DROPPED_STATES = ("upstream", "conflict", "follows", "unknown")


@dataclass(frozen=True, kw_only=True)
class PinnedFile:
    """A file on the package index. ``sha256`` is in hex."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Sdist(PinnedFile):
    """``tree`` is the git tree id of the unpacked archive, top folder stripped."""

    tree: str


@dataclass(frozen=True, kw_only=True)
class Toolchain:
    """``not_full`` says why `auto` never takes a full build of this release, "" where it may."""

    torch: str
    cuda: str
    cuda_extras: tuple[str, ...]
    build_requires: tuple[str, ...]
    arch_list: str
    not_full: str = ""

    @property
    def cuda_requirement(self) -> str:
        """The toolkit as a requirement: ``cuda-toolkit[nvcc,...]==13.0.2``."""
        return f"cuda-toolkit[{','.join(self.cuda_extras)}]=={self.cuda}"


@dataclass(frozen=True, kw_only=True)
class Module:
    """A native module: its cmake target, its path in the wheel, the sources it is made of.

    ``sources`` names the third-party sources that are compiled into it. ``quick`` says that it is
    cheap enough to be compiled in quick mode when the stack touches it.
    """

    target: str
    path: str
    inputs: tuple[str, ...]
    sources: tuple[str, ...]
    cpu_seconds: float
    peak_gib: float
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What one file costs to compile: seconds of CPU, GiB at its peak; for those that match.

    ``match`` is a glob of the file's path, from its end: "marlin/*bfloat16*.cu".
    """

    match: str
    cpu_seconds: float
    peak_gib: float


@dataclass(frozen=True, kw_only=True)
class SourcePackage(PinnedFile):
    """A wheel that has part of a source: what lies under ``inside`` goes to ``into``."""

    project: str
    inside: str
    into: str


@dataclass(frozen=True, kw_only=True)
class Source:
    """A third-party source the release's CMake declares; ``override`` is the variable it reads.

    ``stand_in`` are the files, empty ones, that configuring asks for where nothing of the source
    is compiled. ``ops`` are the torch ops that are made of it (``namespace::name``): a module
    compiled without the source may lack those, and no others.

    A source that is compiled comes out of ``packages``, with the generated ``texts`` (path to
    content) beside them, or out of git: ``commit`` of the repository ``git``, with those
    ``submodules``. ``defines`` are the macros of ``version_file`` whose values are the numbers of
    ``pin``.
    """

    name: str
    pin: str
    override: str
    stand_in: tuple[str, ...]
    ops: tuple[str, ...] = ()
    packages: tuple[SourcePackage, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    git: str = ""
    commit: str = ""
    submodules: tuple[str, ...] = ()
    version_file: str = ""
    defines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImageBase:
    base: str
    suite: str


@dataclass(frozen=True, kw_only=True)
class Disk:
    """What a bundle takes on disk, in GiB, measured.

    ``builder_gib`` and ``image_gib`` are the layers that building the wheel and building the image
    leave in the engine's storage, ``builder_layer_gib`` and ``image_layer_gib`` the largest of
    them, ``builder_packages_gib`` and ``image_packages_gib`` what each of the two puts into the
    build's package cache; ``objects_gib`` is what a full build compiles on top. ``sources_gib`` lie
    in our own cache, ``dist_gib`` in the checkout.
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


@dataclass(frozen=True, kw_only=True)
class LockSpec:
    """``platform`` as uv names it; ``build_from_sdist`` lists what has no wheel there.

    ``sdist_requires`` is what building those needs besides ``toolchain.build_requires``.
    """

    platform: str
    build_from_sdist: tuple[str, ...]
    sdist_requires: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Override:
    """A requirement of the release that its lock replaces by another one, and why."""

    requirement: str
    instead_of: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Witness:
    """What the witnesses need: names out of the base's lock, and what they weigh to download.

    ``upstream`` names the tests (tests/witness/test_x.py::test_y) that show a defect which this
    release does not have any more: they pass on it untouched, and have to. ``needed`` names those
    that other releases pass untouched, and this one does not. ``first`` are the witnesses
    (tests/witness/test_x.py) that take longest, so that the others run beside them.
    """

    packages: tuple[str, ...]
    download_mib: int
    first: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A patch of another base that this stack does not have.

    ``state`` is "upstream" (the release does it itself, first in the release ``since``), "conflict"
    (it is needed, and nobody has written it for this release yet), "follows" (it merges once the
    patches in conflict before it are in) or "unknown" (it does not merge, and whether it is needed
    could not be found out).
    """

    patch: str
    state: str
    since: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Base:
    version: str
    folder: Path
    released: datetime.date
    python: str
    sdist: Sdist
    wheels: Mapping[str, PinnedFile]
    toolchain: Toolchain
    modules: tuple[Module, ...]
    sources: tuple[Source, ...]
    units: tuple[Unit, ...]
    image: ImageBase
    disk: Disk
    locks: Mapping[str, LockSpec]
    witness: Witness
    overrides: tuple[Override, ...] = ()
    dropped: tuple[Dropped, ...] = ()

    def lock_path(self, machine: str) -> Path:
        """The locked closure of the release on ``machine`` ("x86_64" or "aarch64")."""
        return self.folder / f"requirements-{machine}.lock"

    def build_lock_path(self, machine: str) -> Path:
        """The locked requirements of the builder on ``machine``."""
        return self.folder / f"build-{machine}.lock"

    @property
    def series_path(self) -> Path:
        return self.folder / "series"

    @property
    def include(self) -> Path:
        """The folder of headers that CUDA units find before torch's; there may be none."""
        return self.folder / "include"

    def headers(self) -> tuple[Path, ...]:
        """The files of ``include``."""
        return tuple(sorted(path for path in self.include.rglob("*") if path.is_file()))


def default() -> str:
    """The base that is built where none is named; patches/default says it, to the Makefile too.

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
            f"{path} names {version!r}, which is no base here: {', '.join(versions()) or 'none'}",
            next_step="write one of those into it",
        )
    return version


def versions() -> list[str]:
    """The versions there is a folder for, oldest first."""
    found = [path.parent.name for path in layout.patches().glob("*/base.toml")]
    return sorted(found, key=lambda text: [int(part) for part in text.split(".") if part.isdigit()])


def load(version: str) -> Base:
    """Read patches/<version>/base.toml.

    Raises:
        UnknownBaseError: there is no such folder.
        BadFileError: the file does not parse, or a key is missing, unknown or of another type.
    """
    folder = layout.patches() / version
    if not (folder / "base.toml").is_file():
        known = versions()
        near = difflib.get_close_matches(version, known, n=1, cutoff=0.3)
        hint = f"perhaps you meant {near[0]}" if near else "add patches/<version>/base.toml"
        raise UnknownBaseError(
            f"there is no base {version}; known bases: {', '.join(known) or 'none'}",
            next_step=hint,
        )
    return parse(folder / "base.toml")


def parse(path: Path) -> Base:
    """Read one base.toml. Raises BadFileError with the key path of the first fault."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadFileError(f"{path} cannot be read: {error}", next_step="mend that line") from None
    top = Table(raw, path, "")
    schema = top.integer("schema")
    if schema != 1:
        raise BadFileError(
            f"{path}: schema {schema} is not known (this version reads schema 1)",
            next_step="update sm12x or write the file for schema 1",
        )
    sdist = top.table("sdist")
    tools = top.table("toolchain")
    image = top.table("image")
    disk = top.table("disk")
    witness = top.table("witness")
    base = Base(
        version=top.text("version"),
        folder=path.parent,
        released=top.date("released"),
        python=top.text("python"),
        sdist=Sdist(name=sdist.text("name"), sha256=sdist.text("sha256"), tree=sdist.text("tree")),
        wheels={
            machine: PinnedFile(name=table.text("name"), sha256=table.text("sha256"))
            for machine, table in top.tables("wheel").items()
        },
        toolchain=Toolchain(
            torch=tools.text("torch"),
            cuda=tools.text("cuda"),
            cuda_extras=tools.texts("cuda_extras"),
            build_requires=tools.texts("build_requires"),
            arch_list=tools.text("arch_list"),
            not_full=tools.optional_text("not_full"),
        ),
        modules=tuple(
            Module(
                target=entry.text("target"),
                path=entry.text("path"),
                inputs=entry.texts("inputs"),
                sources=entry.texts("sources"),
                cpu_seconds=entry.number("cpu_seconds"),
                peak_gib=entry.number("peak_gib"),
                quick=entry.flag("quick", default=False),
            )
            for entry in top.entries("module")
        ),
        sources=tuple(_source(entry) for entry in top.entries("source")),
        units=tuple(
            Unit(
                match=entry.text("match"),
                cpu_seconds=entry.number("cpu_seconds"),
                peak_gib=entry.number("peak_gib"),
            )
            for entry in top.optional_entries("unit")
        ),
        image=ImageBase(base=image.text("base"), suite=image.text("suite")),
        disk=Disk(
            builder_gib=disk.number("builder_gib"),
            builder_layer_gib=disk.number("builder_layer_gib"),
            builder_packages_gib=disk.number("builder_packages_gib"),
            image_gib=disk.number("image_gib"),
            image_layer_gib=disk.number("image_layer_gib"),
            image_packages_gib=disk.number("image_packages_gib"),
            objects_gib=disk.number("objects_gib"),
            sources_gib=disk.number("sources_gib"),
            dist_gib=disk.number("dist_gib"),
        ),
        locks={
            machine: LockSpec(
                platform=table.text("platform"),
                build_from_sdist=table.texts("build_from_sdist"),
                sdist_requires=table.texts("sdist_requires"),
            )
            for machine, table in top.tables("lock").items()
        },
        witness=Witness(
            packages=witness.texts("packages"),
            download_mib=witness.integer("download_mib"),
            first=witness.texts("first", default=()),
            upstream=witness.texts("upstream", default=()),
            needed=witness.texts("needed", default=()),
        ),
        overrides=tuple(
            Override(
                requirement=entry.text("requirement"),
                instead_of=entry.text("instead_of"),
                why=entry.text("why"),
            )
            for entry in top.optional_entries("override")
        ),
        dropped=tuple(_dropped(entry) for entry in top.optional_entries("dropped")),
    )
    top.finish()
    if base.version != path.parent.name:
        raise BadFileError(
            f"{path}: version is {base.version}, the folder is {path.parent.name}",
            next_step="make the two agree",
        )
    return base


def _dropped(entry: Table) -> Dropped:
    state = entry.choice("state", DROPPED_STATES)
    return Dropped(
        patch=entry.text("patch"),
        state=state,
        # Only what is upstream has a first release.
        since=entry.text("since") if state == "upstream" else "",
        why=entry.text("why"),
    )


def _source(entry: Table) -> Source:
    return Source(
        name=entry.text("name"),
        pin=entry.text("pin"),
        override=entry.text("override"),
        stand_in=entry.texts("stand_in"),
        ops=entry.optional_texts("ops"),
        packages=tuple(
            SourcePackage(
                project=package.text("project"),
                name=package.text("name"),
                sha256=package.text("sha256"),
                inside=package.text("inside"),
                into=package.text("into"),
            )
            for package in entry.optional_entries("package")
        ),
        texts={text.text("path"): text.text("text") for text in entry.optional_entries("text")},
        git=entry.optional_text("git"),
        commit=entry.optional_text("commit"),
        submodules=entry.optional_texts("submodules"),
        version_file=entry.optional_text("version_file"),
        defines=entry.optional_texts("defines"),
    )
