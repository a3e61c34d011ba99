"""Fetching files from a package index by name and sha256, into a cache, resumable.

The cache is a folder ``files/<sha256>/<name>``; beside a file that is being fetched lies
``<name>.part``, which is locked while a process writes it, outlives that process, and takes the
final name only once its sha256 is right.

What speaks HTTP and reads an index's page is imported where that is done: it takes half of the time
in which a command starts, and most commands find all they need in the cache.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from sm12x.core import files, progress
from sm12x.core.errors import (
    DISK_FULL,
    BadFileError,
    FetchError,
    HashMismatchError,
    NoSpaceError,
    Sm12xError,
)

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

    from sm12x.core.download import OnProgress


def fetch(
    project: str,
    name: str,
    sha256: str,
    *,
    cache: Path,
    find_links: Path | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """The file ``name`` of ``project`` on the package index, verified, in ``cache``.

    A cached file is hashed again and returned without touching the network. With ``find_links``
    the file is taken from that folder and the network is never used.

    Raises:
        HashMismatchError: what was fetched or cached is another file; it is deleted (a file of
            the user's, in ``find_links``, is not).
        FetchError: not on the index, not in ``find_links``, or no connection.
        NoSpaceError: the disk is full; what has come so far stays, for the next try.
        BadFileError: the cache or ``find_links`` cannot be read or written.
    """
    final = cache / "files" / sha256 / name
    if _is_cached(final, sha256):
        return final
    try:
        with _partial(final) as part:
            # Else another process has fetched it while we waited for its lock: it is there now.
            if part is not None:
                if find_links is None:
                    _download(project, name, sha256, part, on_progress)
                else:
                    _take(find_links, name, sha256, part, on_progress)
                part.replace(final)
                return final
    except OSError as error:
        raise _storage_error(error, final) from None
    return fetch(project, name, sha256, cache=cache, find_links=find_links, on_progress=on_progress)


def fetch_shown(
    project: str, name: str, sha256: str, *, cache: Path, find_links: Path | None
) -> Path:
    """As ``fetch``, with a bar for what has to be transferred."""
    with progress.transfer(name) as moved:
        return fetch(project, name, sha256, cache=cache, find_links=find_links, on_progress=moved)


def _is_cached(final: Path, sha256: str) -> bool:
    if not final.is_file():
        return False
    got = files.sha256(final)
    if got == sha256:
        return True
    final.unlink(missing_ok=True)
    raise HashMismatchError(
        f"{final.name} in the cache has sha256 {got}, expected {sha256}; it has been deleted",
        next_step="run the same command again to fetch it anew",
    )


@contextmanager
def _partial(final: Path) -> Iterator[Path | None]:
    """The locked ``.part`` of ``final``; None if ``final`` appeared while waiting for the lock."""
    part = final.with_name(final.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with part.open("ab") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # The process that held the lock may have given the file its final name, or removed
            # it: then what we have locked is no longer the .part.
            try:
                ours = os.path.samestat(os.fstat(handle.fileno()), part.stat())
            except FileNotFoundError:
                ours = False
            if final.exists():
                if ours:
                    part.unlink()
                yield None
                return
            if ours:
                try:
                    yield part
                finally:
                    if part.exists() and part.stat().st_size == 0:
                        part.unlink()
                return


def _locate(project: str, name: str, sha256: str) -> tuple[DistributionPackage, str]:
    """Ask each index for the project's page, in order; return the file, and the index's address."""
    from sm12x.core import download

    seen: list[str] = []
    other: str | None = None
    for answer in download.answers(project, name, seen):
        package = next((one for one in answer.page.packages if one.filename == name), None)
        if package is None:
            count = len(answer.page.packages)
            seen.append(f"{answer.shown} has no such file among its {count} files of {project}")
            continue
        digest = package.digests.get("sha256", sha256)
        if digest == sha256:
            return package, answer.address
        other = digest
    if other is not None:
        raise HashMismatchError(
            f"the package index lists {name} with sha256 {other}, expected {sha256}; "
            "nothing was fetched",
            next_step="check the pin; if it is right, the index serves another file: ask its "
            "operator",
        )
    raise FetchError(f"{name} cannot be fetched: {'; '.join(seen)}", next_step=download.OFFLINE)


def _download(
    project: str, name: str, sha256: str, part: Path, on_progress: OnProgress | None
) -> None:
    from sm12x.core import download

    package, address = _locate(project, name, sha256)
    auth = _credentials(address, package.url)
    # The part left by an earlier run may be the damaged one: the whole file comes once more then.
    for resumed in (part.stat().st_size > 0, False):
        download.transfer(package.url, part, name, on_progress, size=package.size, auth=auth)
        got = files.sha256(part)
        if got == sha256:
            return
        if not resumed:
            break
        os.truncate(part, 0)
    part.unlink()
    raise HashMismatchError(
        f"{name} was fetched with sha256 {got}, expected {sha256}; it has been deleted",
        next_step="run the command again; if it repeats, a proxy or mirror alters the file",
    )


def _take(folder: Path, name: str, sha256: str, part: Path, on_progress: OnProgress | None) -> None:
    """Copy ``name`` out of a --find-links folder."""
    source = folder / name
    if not source.is_file():
        part.unlink()
        raise FetchError(
            f"{name} is not in {folder}", next_step="put it there, or leave out --find-links"
        )
    shutil.copyfile(source, part)
    if on_progress:
        on_progress(source.stat().st_size, source.stat().st_size)
    got = files.sha256(part)
    if got != sha256:
        part.unlink()
        raise HashMismatchError(
            f"{source} has sha256 {got}, expected {sha256}; it was not used",
            next_step=f"replace it with the right {name}",
        )


def _credentials(index: str, url: str) -> tuple[str, str] | None:
    """Return the index's credentials, for a file on the same host whose address carries none."""
    ours, theirs = urlsplit(index), urlsplit(url)
    same = all(
        getattr(ours, part) == getattr(theirs, part) for part in ("scheme", "hostname", "port")
    )
    if not same or ours.username is None or theirs.username is not None:
        return None
    return unquote(ours.username), unquote(ours.password or "")


def _storage_error(error: OSError, final: Path) -> Sm12xError:
    if error.errno in DISK_FULL:
        return NoSpaceError(
            f"the disk of {final.parent} is full while fetching {final.name}",
            next_step="free space there, or set SM12X_CACHE to a folder on another disk, and run "
            "the command again: it resumes",
        )
    return BadFileError(
        f"{error.filename or final} cannot be used: {error.strerror or error}",
        next_step="check the permissions of that path, or set SM12X_CACHE to a folder that you can "
        "write",
    )
