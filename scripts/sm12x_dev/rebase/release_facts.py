"""Facts from a release's source: torch, CUDA, native modules, third-party sources.

Unknown is not empty: a fact that cannot be read is None, and the caller must report it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sm12x.core import files, lockfile

# Files with a release's build requirements for CUDA; the first that exists counts.
_BUILD_REQUIREMENTS = ("requirements/build/cuda.txt", "requirements/build.txt")
_DOCKERFILE = Path("docker/Dockerfile")
_CMAKE = ("CMakeLists.txt", "cmake/external_projects/*.cmake")

_DOCKER_CUDA = re.compile(r"^ARG CUDA_VERSION=(\S+)$", re.MULTILINE)
_TARGET = re.compile(r"define_extension_target\s*\(\s*([\w.]+)\s+(.*?)\)", re.DOTALL)
_CUDA_ONLY = re.compile(r"\bLANGUAGE\s+(\S+)")
_OVERRIDE = re.compile(r"ENV\{(\w+_SRC_DIR)\}")
_TAG = re.compile(r"\bGIT_TAG\s+\"?([^\s\")]+)\"?")
_REPOSITORY = re.compile(r"\bGIT_REPOSITORY\s+\"?([^\s\")]+)\"?")
_SET = re.compile(r"\bset\s*\(\s*(\w+)\s+\"([^\"]*)\"")
_VARIABLE = re.compile(r"^\$\{(\w+)\}$")
_COMMENT = re.compile(r"(?m)^\s*#.*$")


@dataclass(frozen=True, kw_only=True)
class DeclaredSource:
    """A third-party source that the release's CMake declares.

    ``pins`` holds every revision it may take, several where CMake chooses; ``git`` is "" where the
    file names none.
    """

    override: str
    pins: tuple[str, ...]
    git: str
    file: str


@dataclass(frozen=True, kw_only=True)
class ReleaseFacts:
    """``targets`` are the extension targets, without those that CMake marks as for other
    accelerators.

    ``extras`` are what each extra of the release brings, None where it has no metadata.
    """

    build_requires: tuple[str, ...] | None
    torch: str | None
    cuda: str | None
    targets: tuple[str, ...]
    sources: tuple[DeclaredSource, ...]
    files: frozenset[str]
    extras: Mapping[str, tuple[str, ...]] | None = None


def read(tree: Path) -> ReleaseFacts:
    """Read the facts that the untouched source in ``tree`` has."""
    requires = _build_requires(tree)
    docker = _text(tree / _DOCKERFILE)
    cuda = _DOCKER_CUDA.search(docker) if docker else None
    cmake = {
        str(path.relative_to(tree)): _COMMENT.sub("", _text(path) or "")
        for pattern in _CMAKE
        for path in sorted(tree.glob(pattern))
    }
    return ReleaseFacts(
        build_requires=requires,
        torch=pinned("torch", requires or ()),
        cuda=cuda[1] if cuda else None,
        targets=_targets(cmake.values()),
        sources=tuple(found for name, text in cmake.items() for found in _sources(name, text)),
        files=frozenset(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()),
        extras=_extras(tree),
    )


def pinned(name: str, requirements: Iterable[str]) -> str | None:
    """The version that one of ``requirements`` pins ``name`` to; None if none does."""
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name == name:
            for part in requirement.specifier:
                if part.operator == "==" and not part.version.endswith("*"):
                    return part.version
    return None


def unmatched(patterns: Iterable[str], paths: frozenset[str]) -> list[str]:
    """The globs that no path matches."""
    return [g for g in patterns if not any(files.matches(path, g) for path in paths)]


def _build_requires(tree: Path) -> tuple[str, ...] | None:
    for name in _BUILD_REQUIREMENTS:
        text = _text(tree / name)
        if text is not None:
            lines = (line.split("#")[0].strip() for line in text.splitlines())
            return tuple(line for line in lines if line and not line.startswith("-"))
    text = _text(tree / "pyproject.toml")
    try:
        return tuple(tomllib.loads(text)["build-system"]["requires"]) if text else None
    except (tomllib.TOMLDecodeError, KeyError):
        return None


def _extras(tree: Path) -> dict[str, tuple[str, ...]] | None:
    text = _text(tree / "PKG-INFO")
    if text is None:
        return None
    metadata = message_from_string(text)
    found: dict[str, list[str]] = {name: [] for name in metadata.get_all("Provides-Extra", [])}
    for line in metadata.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        for name, brought in found.items():
            if lockfile.brought_by(requirement, name):
                brought.append(str(requirement).partition(";")[0].strip())
    return {canonicalize_name(name): tuple(brought) for name, brought in found.items()}


def _targets(texts: Iterable[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for text in texts:
        for name, rest in _TARGET.findall(text):
            language = _CUDA_ONLY.search(rest)
            if language is None or language[1] not in ("HIP", "SYCL"):
                found[name] = None
    return tuple(found)


def _sources(name: str, text: str) -> list[DeclaredSource]:
    overrides = list(dict.fromkeys(_OVERRIDE.findall(text)))
    # Releases have one source per file; CMakeLists.txt itself has only CUTLASS.
    if len(overrides) != 1:
        return [DeclaredSource(override=o, pins=(), git="", file=name) for o in overrides]
    values: dict[str, list[str]] = {}
    for variable, value in _SET.findall(text):
        values.setdefault(variable, []).append(value)
    pins: dict[str, None] = {}
    for tag in _TAG.findall(text):
        variable = _VARIABLE.match(tag)
        for pin in values.get(variable[1], []) if variable else [tag]:
            pins[pin] = None
    repository = _REPOSITORY.search(text)
    git = repository[1] if repository and not _VARIABLE.match(repository[1]) else ""
    return [DeclaredSource(override=overrides[0], pins=tuple(pins), git=git, file=name)]


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
