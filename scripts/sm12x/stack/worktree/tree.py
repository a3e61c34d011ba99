"""Source trees: unpacking an sdist, and telling an untouched tree from any other."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sm12x.core import text as texts
from sm12x.core.errors import DISK_FULL, BadFileError, DirtyTreeError, NoSpaceError
from sm12x.core.git import Repository, TreeFile
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Stack

# How many files an error names before it only counts.
_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """How a tree differs from the untouched one, as sorted paths."""

    edited: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    def __str__(self) -> str:
        kinds = (("edited", self.edited), ("missing", self.missing), ("extra", self.extra))
        return "; ".join(
            f"{kind}: {texts.first_of(paths, _NAMED)}" for kind, paths in kinds if paths
        )


def unpack(archive: Path, directory: Path) -> None:
    """Unpack an sdist into ``directory``, its top folder stripped, whole or not at all.

    ``directory`` must not exist yet, or be empty.

    Raises:
        BadFileError: not a tar archive, cut short, without the one top folder of an sdist, or with
            members that point outside it.
        DirtyTreeError: ``directory`` is a file or holds something.
        NoSpaceError: the disk is full.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise DirtyTreeError(
            f"{directory} exists and is not an empty folder",
            next_step="name a folder that does not exist yet, or empty this one",
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename is atomic there, and a killed run leaves nothing under its name.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as name:
        fresh = Path(name) / "tree"
        fresh.mkdir()
        try:
            with tarfile.open(archive) as tar:
                members = [stripped for member in tar for stripped in _stripped(member, archive)]
                # "data" refuses absolute names, links and devices that lead out of the folder.
                tar.extractall(fresh, members=members, filter="data")
        except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise NoSpaceError(
                    f"{archive} cannot be unpacked in {directory.parent}: {error.strerror}",
                    next_step="free space there, or use another disk (for temporary folders: set "
                    "TMPDIR)",
                ) from None
            raise BadFileError(
                f"{archive} cannot be unpacked: {error}",
                next_step="delete it and fetch it again with `sm12x fetch`",
            ) from None
        if directory.exists():
            directory.rmdir()
        fresh.rename(directory)


@contextmanager
def removed_on_failure(directory: Path) -> Iterator[None]:
    """Remove ``directory``, which ``unpack`` has made, if the block fails or is interrupted.

    Otherwise the same command could not be run again: the folder would be there already.
    """
    try:
        yield
    except BaseException:
        # Out of its place first: a second interrupt must not leave half of it there.
        with (
            suppress(OSError),
            tempfile.TemporaryDirectory(
                dir=directory.parent, prefix=f".{directory.name}.", ignore_cleanup_errors=True
            ) as name,
        ):
            directory.rename(Path(name) / "tree")
        raise


def _entries(archive: Path) -> dict[str, TreeFile]:
    """The files of an sdist by path, with the ids that git gives them."""
    with tempfile.TemporaryDirectory(prefix="sm12x-sdist-") as name:
        unpack(archive, Path(name) / "source")
        with scratch(Path(name) / "source") as repository:
            return repository.index_entries()


def blob_id(data: bytes) -> str:
    """The id git gives to these bytes: sha1 over "blob <size>", NUL and the bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextmanager
def scratch(directory: Path) -> Iterator[Repository]:
    """A throw-away repository, outside ``directory``, whose index holds all its files."""
    require_directory(directory)
    with tempfile.TemporaryDirectory(prefix="sm12x-git-") as name:
        repository = Repository.init(Path(name) / "git", directory)
        repository.add_all()
        yield repository


def tree_id(directory: Path) -> str:
    """The git tree id of a folder's content; the folder is only read."""
    with scratch(directory) as repository:
        return repository.write_tree()


def require_directory(directory: Path) -> None:
    """Raise DirtyTreeError unless ``directory`` is a folder."""
    if directory.is_dir():
        return
    what = "is a file, not a folder" if directory.exists() else "does not exist"
    raise DirtyTreeError(
        f"{directory} {what}",
        next_step="give the folder of an unpacked sdist, or a new one with --unpack",
    )


def _version_of(directory: Path) -> tuple[str, str] | None:
    """Name and version of an unpacked sdist from its PKG-INFO; None where there is none."""
    try:
        text = (directory / "PKG-INFO").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = dict(
        line.split(": ", 1) for line in text.split("\n\n", 1)[0].splitlines() if ": " in line
    )
    if "Name" not in fields or "Version" not in fields:
        return None
    return fields["Name"], fields["Version"]


def _compare(has: Mapping[str, TreeFile], wants: Mapping[str, TreeFile]) -> _Difference:
    """How the files ``has`` differ from the files ``wants``."""
    return _Difference(
        edited=tuple(sorted(p for p in has.keys() & wants.keys() if has[p] != wants[p])),
        missing=tuple(sorted(wants.keys() - has.keys())),
        extra=tuple(sorted(has.keys() - wants.keys())),
    )


def explain(
    base: Base, stack: Stack, directory: Path, has: Mapping[str, TreeFile], archive: Path | None
) -> DirtyTreeError:
    """Say, as far as can be known, why a tree is not the untouched source of the base.

    Args:
        has: the files of ``directory``.
        archive: the sdist, where it is at hand: with it every differing file can be named.
    """
    fresh = f"work on a new copy (`sm12x-dev apply --base {base.version} --unpack NEW_DIR`)"
    name = base.sdist.name.split("-")[0]
    release = _version_of(directory)
    if release is None:
        return DirtyTreeError(
            f"{directory} is not an unpacked sdist: it has no PKG-INFO", next_step=fresh
        )
    if release != (name, base.version):
        return DirtyTreeError(
            f"{directory} is {' '.join(release)}, and the base is {name} {base.version}",
            next_step=f"give a base that fits (`--base {release[1]}`), or unpack {base.sdist.name}",
        )
    patched, half, untouched = _progress(stack, has)
    if patched and not half and not untouched:
        return DirtyTreeError(
            f"{directory} has the whole stack {stack.id} applied already", next_step=fresh
        )
    if patched or half:
        parts = [f"patched: {texts.first_of([*patched, *half], _NAMED)}"]
        if untouched:
            parts.append(f"not patched: {texts.first_of(untouched, _NAMED)}")
        return DirtyTreeError(f"{directory} is half applied ({'; '.join(parts)})", next_step=fresh)
    if archive is not None:
        difference = _compare(has, _entries(archive))
        return DirtyTreeError(
            f"{directory} is not the untouched {name} {base.version} ({difference})",
            next_step=f"undo that, or {fresh}",
        )
    return DirtyTreeError(
        f"{directory} is not the untouched {name} {base.version}; without its sdist the differing "
        "files are not known",
        next_step=f"`sm12x fetch --base {base.version}` to list them, or {fresh}",
    )


def _progress(stack: Stack, has: Mapping[str, TreeFile]) -> tuple[list[str], list[str], list[str]]:
    """The files the stack changes, in three lists: fully patched, partly patched, untouched.

    A file that matches no state of the stack was edited, and is in none of the three lists.
    """
    states: dict[str, list[str]] = {}
    for patch in stack.patches:
        for file in patch.files:
            if not file.old_blob:
                continue
            states.setdefault(file.path, [file.old_blob]).append(file.new_blob)
    patched: list[str] = []
    half: list[str] = []
    untouched: list[str] = []
    for path, blobs in sorted(states.items()):
        now = has[path].blob if path in has else "0" * 40
        # A short id (not --full-index) still says as much as it says.
        fits = [now.startswith(blob) for blob in blobs]
        if fits[0]:
            untouched.append(path)
        elif fits[-1]:
            patched.append(path)
        elif any(fits):
            half.append(path)
    return patched, half, untouched


def _stripped(member: tarfile.TarInfo, archive: Path) -> Iterator[tarfile.TarInfo]:
    top, _, rest = member.name.partition("/")
    if top in ("", ".", "..") or (not rest and not member.isdir()):
        raise BadFileError(
            f"{archive} is not an sdist: {member.name!r} is not inside one top folder",
            next_step="give the .tar.gz of the release as the package index has it",
        )
    if ".git" in PurePosixPath(rest).parts:
        raise BadFileError(
            f"{archive} contains a git repository ({member.name!r})",
            next_step="give the .tar.gz of the release as the package index has it",
        )
    if rest:
        # A hard link names its target from the top of the archive.
        link = member.linkname.partition("/")[2] if member.islnk() else member.linkname
        yield member.replace(name=rest, linkname=link, deep=False)
