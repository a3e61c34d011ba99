"""Hashes, atomic writes, locks, globs and free space."""

from __future__ import annotations

import fcntl
import fnmatch
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sm12x.core.errors import BadFileError, DirtyTreeError, NoSpaceError, Sm12xError
from sm12x.core.text import GIB

# The date of files that must look old to a tool that compares dates: 2000-01-01, in seconds.
DATE = 946684800


def sha256(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that takes its place if the block succeeds.

    A block that fails, or a process that is killed, leaves ``path`` as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp made it 0600; an output should have the mode any new file gets.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(out: Path, marker: str) -> Iterator[Path]:
    """Yield an empty folder beside ``out`` that takes its place if the block succeeds.

    Args:
        marker: a file that the block puts into the folder, which says that it may be replaced.

    Raises:
        BadFileError: ``out`` holds something, and no ``marker``.
    """
    if out.exists() and not (out / marker).is_file() and any(out.iterdir()):
        raise BadFileError(
            f"{out} exists and was not made by this command",
            next_step="name a new folder, or remove that one",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        staging.chmod(0o755)
        yield staging
        if out.exists():
            shutil.rmtree(out)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def locked(
    folder: Path, refused: Sm12xError | None = None, *, wait: bool = False
) -> Iterator[None]:
    """Lock ``folder`` against other processes; the kernel releases the lock if this one is killed.

    Raises:
        DirtyTreeError: another process holds the lock, and this one does not ``wait``; ``refused``
            instead, where it is given.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise refused or DirtyTreeError(
                f"another process is working in {folder}",
                next_step="wait until it has ended, and run this again",
            ) from None
        except OSError:
            # A file system without locks: go on without one.
            pass
        yield
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary file as ``replacing`` does, for a path that a user names.

    A device, a pipe and the target of a link are written in place: as root, a rename would replace
    /dev/null or /dev/stdout by a file.
    """
    if not path.is_symlink() and (path.is_file() or not path.exists()):
        with replacing(path) as temporary:
            yield temporary
        return
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / path.name
        yield temporary
        with temporary.open("rb") as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)


def write_output(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) to a path that a user names; see ``writing``."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def link(source: str | Path, target: str | Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy with its date where that cannot be."""
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copy2(source, target)


def kernel_text(path: Path) -> str:
    """Return the text of a file in /proc or /sys, "" where it cannot be read."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def home() -> Path:
    """Return the user's home folder; "~" itself, which is none, where the system knows no home."""
    # Path.home() raises there, and with it whoever only looks for files of the user's.
    return Path(os.path.expanduser("~"))  # noqa: PTH111


def _existing(folder: Path) -> Path:
    """Return ``folder``, or the nearest folder above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def has_files(folder: Path) -> bool:
    """Tell whether ``folder`` is a folder that has something in it."""
    return folder.is_dir() and any(folder.iterdir())


def device(folder: Path) -> int:
    """Return the number of the file system of ``folder``, which need not exist yet."""
    return _existing(folder).stat().st_dev


def free_gib(folder: Path) -> float:
    """Return the GiB that this user may fill on the disk of ``folder``, which need not exist."""
    return shutil.disk_usage(_existing(folder)).free / GIB


MOVE_CACHE = "set SM12X_CACHE to a folder on another disk"


def require_space(folder: Path, gib: float, *, what: str, move: str = MOVE_CACHE) -> None:
    """Raise NoSpaceError unless the file system of ``folder`` has ``gib`` GiB free.

    ``move`` says how the step is given another disk.
    """
    free = free_gib(folder)
    if free < gib:
        raise NoSpaceError(
            f"{what} needs {gib:.1f} GiB under {folder}, {free:.1f} GiB are free",
            next_step=f"free {gib - free:.1f} GiB there, or {move}",
        )


def matches(path: str, glob: str) -> bool:
    """Tell whether a path fits a glob: ``*`` stays within a folder, ``**`` goes across folders."""
    return _matches(path.split("/"), glob.split("/"))


def _matches(path: Sequence[str], glob: Sequence[str]) -> bool:
    if not glob:
        return not path
    if glob[0] == "**":
        return _matches(path, glob[1:]) or (bool(path) and _matches(path[1:], glob))
    return bool(path) and fnmatch.fnmatchcase(path[0], glob[0]) and _matches(path[1:], glob[1:])
