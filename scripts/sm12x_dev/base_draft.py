"""Drafting base.toml for another release: the old one, updated from the index and the source.

Nothing is guessed: a value in neither is kept from the old base and listed as still to be checked.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomlkit
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from sm12x.core import files
from sm12x.core.declared import MACHINES
from sm12x.core.errors import FetchError
from sm12x.core.lockfile import Lockfile
from sm12x.stack.model.base import Base, Dropped, Override
from sm12x_dev import listing
from sm12x_dev.listing import SDIST, WHEEL, ListedFile

# Files with a release's build requirements for CUDA; the first that exists counts.
_BUILD_REQUIREMENTS = ("requirements/build/cuda.txt", "requirements/build.txt")
_CMAKE = ("CMakeLists.txt", "cmake/external_projects/*.cmake")
_DOCKER_CUDA = re.compile(r"^ARG CUDA_VERSION=(\S+)$", re.MULTILINE)
_TARGET = re.compile(r"define_extension_target\s*\(\s*([\w.]+)\s+(.*?)\)", re.DOTALL)
_OTHER_ACCELERATOR = re.compile(r"\bLANGUAGE\s+(HIP|SYCL)\b")
_OVERRIDE = re.compile(r"ENV\{(\w+_SRC_DIR)\}")
_TAG = re.compile(r"\bGIT_TAG\s+\"?([^\s\")]+)\"?")
_SET = re.compile(r"\bset\s*\(\s*(\w+)\s+\"([^\"]*)\"")
_COMMENT = re.compile(r"(?m)^\s*#.*$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# How much of a commit id a pin shows.
_SHORT = 7
# Keys of a [[source]] that hold for any revision of it.
_LASTING = (
    *("name", "pin", "override", "stand_in", "git", "submodules"),
    *("version_file", "defines", "commit"),
)


@dataclass(frozen=True, kw_only=True)
class Release:
    """The files of one release, as the index lists them; ``released`` is None where unknown."""

    version: str
    sdist: ListedFile
    wheels: Mapping[str, ListedFile]
    released: datetime.date | None


def release(
    listed: Iterable[ListedFile],
    version: str,
    *,
    project: str,
    released: datetime.date | None = None,
) -> Release:
    """Return the sdist and the official wheels of ``version``, the latest build of each.

    Args:
        released: the release date; by default the day of the last of these uploads (UTC).

    Raises:
        FetchError: there is no such release, or it has no sdist with a sha256.
    """
    listed = tuple(listed)
    uploads = [file for file in listed if file.version == version and not file.yanked]
    sdist = next((file for file in uploads if file.kind == SDIST and file.sha256), None)
    if sdist is None:
        newest = ", ".join(listing.releases(listed)[-1:]) or "none"
        raise FetchError(
            f"the package index has no sdist with a sha256 of {project} {version}",
            next_step=f"give a release as the package index writes it; the newest is {newest}",
        )
    wheels: dict[str, ListedFile] = {}
    for machine in MACHINES:
        fitting = [
            file
            for file in uploads
            if file.kind == WHEEL and file.name.endswith(f"_{machine}.whl") and "linux" in file.name
        ]
        if fitting:
            wheels[machine] = max(fitting, key=lambda file: parse_wheel_filename(file.name)[2])
    times = [file.uploaded for file in (sdist, *wheels.values())]
    days = [time.astimezone(datetime.UTC).date() for time in times if time is not None]
    if released is None and len(days) == len(times):
        released = max(days)
    return Release(version=version, sdist=sdist, wheels=wheels, released=released)


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """Facts from a release's source; None, or nothing, for one that it does not have.

    ``requires`` are the build requirements by package, ``targets`` the extension targets for CUDA,
    ``pins`` the revisions of third-party sources by the variable that overrides each.
    """

    requires: Mapping[str, str]
    torch: str | None
    cuda: str | None
    targets: tuple[str, ...]
    pins: Mapping[str, tuple[str, ...]]
    files: frozenset[str]

    @classmethod
    def read(cls, tree: Path) -> SourceFacts:
        """Read the untouched source in ``tree``."""
        lines = next(filter(None, (_text(tree / name) for name in _BUILD_REQUIREMENTS)), "")
        words = (line.split("#")[0].strip() for line in lines.splitlines())
        requires = {_name(word): word for word in words if word and not word.startswith("-")}
        torch = re.fullmatch(r"torch\s*==\s*([\w.+!]+)", requires.get("torch", ""))
        cuda = _DOCKER_CUDA.search(_text(tree / "docker/Dockerfile"))
        cmake = [
            _COMMENT.sub("", _text(path)) for glob in _CMAKE for path in sorted(tree.glob(glob))
        ]
        return cls(
            requires=requires,
            torch=torch[1] if torch else None,
            cuda=cuda[1] if cuda else None,
            targets=tuple(
                name
                for text in cmake
                for name, rest in _TARGET.findall(text)
                if not _OTHER_ACCELERATOR.search(rest)
            ),
            pins={key: pins for text in cmake for key, pins in _pins(text).items()},
            files=frozenset(
                path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()
            ),
        )


def _pins(text: str) -> dict[str, tuple[str, ...]]:
    """The third-party sources of one CMake file: variable -> every revision it may have."""
    overrides = list(dict.fromkeys(_OVERRIDE.findall(text)))
    pins: list[str] = []
    for tag in _TAG.findall(text):
        variable = re.fullmatch(r"\$\{(\w+)\}", tag)
        pins += [v for k, v in _SET.findall(text) if k == variable[1]] if variable else [tag]
    # A tag of a file with several sources belongs to an unknown one of them.
    return {key: tuple(dict.fromkeys(pins)) if len(overrides) == 1 else () for key in overrides}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """base.toml of the new release, and the values that a person must check before a commit."""

    text: str
    to_check: tuple[str, ...]


def draft(
    base: Base,
    release: Release,
    source: SourceFacts,
    before: SourceFacts,
    *,
    tree: str,
    overrides: Sequence[Override] = (),
) -> Draft:
    """Draft base.toml of ``release`` from that of ``base``, whose comments stay.

    Args:
        source: of the untouched source of the release; ``before`` of that of ``base``.
        tree: its git tree id.
        overrides: of the new base's lock. Those of ``base`` are for its own release.
    """
    old = (base.folder / "base.toml").read_text(encoding="utf-8")
    head, newline, rest = old.partition("\n")
    values = tomlkit.parse(head.replace(base.version, release.version) + newline + rest)
    check: list[str] = []
    values["version"] = release.version
    if release.released:
        values["released"] = release.released
    else:
        check.append(f"released: no upload times; {base.released} is kept: give --released DATE")
    tables: Any = values
    tables["sdist"].update(name=release.sdist.name, sha256=release.sdist.sha256, tree=tree)
    for machine in base.wheels:
        wheel = release.wheels.get(machine)
        if wheel:
            tables["wheel"][machine].update(name=wheel.name, sha256=wheel.sha256)
        elif release.wheels:
            check.append(f"wheel.{machine}: the release has no such wheel; left out with its lock")
            del tables["wheel"][machine], tables["lock"][machine]
        else:
            check.append(f"wheel.{machine}: no wheel of the release is listed; {base.version}'s")
    _toolchain(tables["toolchain"], base, source, before, check)
    _modules(tables["module"], source, before, check)
    _sources(tables["source"], tables["toolchain"], source, check)
    for key in ("dropped", "override"):
        values.pop(key, None)
    if overrides:
        values["override"] = _tables(
            {key: value for key, value in asdict(each).items() if value not in ("", ())}
            for each in overrides
        )
    for key in ("upstream", "needed"):
        tables["witness"].pop(key, None)
    for key in ("module.cpu_seconds, peak_gib and other_gpus", "disk", "image", "flashinfer"):
        check.append(f"{key}: of {base.version}")
    return Draft(text=tomlkit.dumps(values), to_check=tuple(check))


def amended(
    text: str,
    *,
    cuda: str | None = None,
    dropped: Sequence[Dropped] = (),
    upstream: Sequence[str] = (),
    needed: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> str:
    """Return the text of a drafted base.toml with more filled in.

    Args:
        cuda: the toolkit that the release's torch asks for.
        dropped: the patches that the stack leaves out.
        upstream: pytest ids of the kept patches' tests that the untouched release passes.
        needed: those of guards that it fails.
        packages: what the witnesses install.
    """
    values = tomlkit.parse(text)
    if cuda:
        values["toolchain"]["cuda"] = cuda
    for key, words in (("packages", packages), ("upstream", upstream), ("needed", needed)):
        if words:
            values["witness"][key] = _list(words)
    if dropped:
        values["dropped"] = _tables(
            {key: value for key, value in asdict(entry).items() if value} for entry in dropped
        )
    return tomlkit.dumps(values)


def witness_packages(
    packages: Sequence[str], old: Lockfile, new: Lockfile, torch: Iterable[str]
) -> list[str]:
    """The witnesses' packages in the new lock.

    These are the packages of the old list that the new lock still has, the CUDA libraries that
    ``torch`` asks for, and the dependencies of both that only the new lock has.
    """
    chosen = {name for name in packages if name in new.versions}
    chosen |= {name for name in torch if name.startswith("nvidia-") and name in new.versions}
    fresh = {pin.name: pin.via for pin in new.pins if pin.name not in old.versions}
    while more := {name for name, via in fresh.items() if chosen & {*via}} - chosen:
        chosen |= more
    return sorted(chosen)


def _toolchain(
    tools: Any, base: Base, source: SourceFacts, before: SourceFacts, check: list[str]
) -> None:
    for key, value in (("torch", source.torch), ("cuda", source.cuda)):
        if value:
            tools[key] = value
        else:
            check.append(f"toolchain.{key}: not in the source; {tools[key]} is kept")
    old = base.toolchain.build_requires
    tools["build_requires"] = _list([source.requires.get(_name(text), text) for text in old])
    gone = [text for text in old if _name(text) not in source.requires]
    new = [text for name, text in source.requires.items() if name not in before.requires]
    for what, names in (("the release does not ask for", gone), ("not taken over:", new)):
        if names:
            check.append(f"toolchain.build_requires: {what} {', '.join(names)}")


def _modules(modules: Any, source: SourceFacts, before: SourceFacts, check: list[str]) -> None:
    for module in list(modules):
        name = str(module["target"])
        # A target that a third-party source brings is in neither.
        if name in before.targets and name not in source.targets:
            check.append(f"module {name}: no longer a target of the release; left out")
            modules.remove(module)
            continue
        check += [
            f"module {name}: inputs {glob} matches no file of the release"
            for glob in module["inputs"]
            if _matches(glob, before) and not _matches(glob, source)
        ]
    new = [target for target in source.targets if target not in before.targets]
    if new:
        check.append(f"module: new targets, not listed, so official: {', '.join(new)}")


def _matches(glob: str, facts: SourceFacts) -> bool:
    return any(files.matches(path, glob) for path in facts.files)


def _sources(sources: Any, tools: Any, source: SourceFacts, check: list[str]) -> None:
    left = dict(source.pins)
    for entry in list(sources):
        name, old = str(entry["name"]), str(entry["pin"])
        if entry["override"] not in left:
            check.append(f"source {name}: the release no longer declares it; left out")
            sources.remove(entry)
            if name in tools.get("auto_needs", ()):
                tools["auto_needs"].remove(name)
            continue
        pins = left.pop(entry["override"])
        if len(pins) != 1:
            check.append(f"source {name}: its pin is one of {', '.join(pins) or 'unknown ones'}")
        if not pins or any(pin.startswith(old) for pin in pins):
            continue
        entry["pin"] = pins[-1][:_SHORT] if _COMMIT.fullmatch(pins[-1]) else pins[-1]
        if "commit" in entry:
            entry["commit"] = pins[-1]
        gone = [key for key in entry if key not in _LASTING]
        for key in gone:
            del entry[key]
        if gone:
            check.append(f"source {name}: {', '.join(gone)} was for {old}; left out")
    if left:
        check.append(f"source: new, without an entry: {', '.join(left)}")


def _list(words: Sequence[str]) -> Any:
    """A list, one entry a line where it is long."""
    entries = tomlkit.array()
    entries.extend(words)
    return entries.multiline(sum(map(len, words)) > 60)


def _tables(entries: Iterable[Mapping[str, Any]]) -> Any:
    tables = tomlkit.aot()
    for entry in entries:
        table = tomlkit.table()
        for key, value in entry.items():
            table[key] = list(value) if isinstance(value, tuple) else value
        tables.append(table)
    return tables


def _text(path: Path) -> str:
    """The text of a file, "" where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _name(requirement: str) -> str:
    try:
        return canonicalize_name(Requirement(requirement).name)
    except InvalidRequirement:
        return requirement
