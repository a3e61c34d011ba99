"""Source trees: unpacking an sdist, and telling an untouched tree from any other."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from sm12x.core import text as texts
from sm12x.core.errors import DISK_FULL, BadFileError, DirtyTreeError, NoSpaceError
from sm12x.core.git import Repository, TreeFile
from sm12x.stack.model.base import Base
from sm12x.stack.model.series import Stack

# How many files an error names before it only counts.
_NAMED = 8


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


def explain(
    base: Base, stack: Stack, directory: Path, has: Mapping[str, TreeFile]
) -> DirtyTreeError:
    """Return the error for a tree that is not the untouched source of the base.

    A file that matches no state of the stack was edited, and tells nothing of a patched tree.

    Args:
        has: the files of ``directory``.
    """
    states: dict[str, list[str]] = {}
    for file in (file for patch in stack.patches for file in patch.files if file.old_blob):
        states.setdefault(file.path, [file.old_blob]).append(file.new_blob)
    whole: list[str] = []
    half: list[str] = []
    untouched: list[str] = []
    for path, blobs in sorted(states.items()):
        now = has[path].blob if path in has else "0" * 40
        # A short id (not --full-index) still says as much as it says.
        fits = [now.startswith(blob) for blob in blobs]
        if any(fits):
            (untouched if fits[0] else whole if fits[-1] else half).append(path)
    if half or (whole and untouched):
        parts = [f"patched: {texts.first_of([*whole, *half], _NAMED)}"]
        parts += [f"not patched: {texts.first_of(untouched, _NAMED)}"] if untouched else []
        what = f"is half applied ({'; '.join(parts)})"
    elif whole:
        what = f"has the whole stack {stack.id} applied already"
    else:
        what = f"is not the untouched source of {base.sdist.name}"
    return DirtyTreeError(
        f"{directory} {what}",
        next_step=f"work on a new copy (`sm12x-dev apply --base {base.version} --unpack NEW_DIR`)",
    )


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
