"""Fetching files from a package index by name and sha256, into a cache, resumable.

The cache is a folder ``files/<sha256>/<name>``, which is locked while a process fetches into it.
``<name>.part`` in it is what has come so far: it outlives that process, and takes the final name
only once its sha256 is right.

What speaks HTTP and reads an index's page is imported where that is done: it takes half of the time
in which a command starts, and most commands find all they need in the cache.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sm12x.core import files, progress
from sm12x.core.errors import DISK_FULL, FetchError, HashMismatchError, NoSpaceError

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
    """Return the file ``name`` of ``project`` on the package index, verified, in ``cache``.

    A cached file is hashed again and returned without touching the network. With ``find_links``
    the file is taken from that folder and the network is never used.

    Raises:
        HashMismatchError: what was fetched or cached is another file; it is deleted (a file of
            the user's, in ``find_links``, is not).
        FetchError: not on the index, not in ``find_links``, or no connection.
        NoSpaceError: the disk is full; what has come so far stays, for the next try.
    """
    final = cache / "files" / sha256 / name
    if _is_cached(final, sha256):
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    part = final.with_name(final.name + ".part")
    try:
        with files.locked(final.parent, wait=True):
            # Another process may have fetched it while this one waited.
            if not _is_cached(final, sha256):
                if find_links is None:
                    _download(project, name, sha256, part, on_progress)
                else:
                    _take(find_links / name, sha256, part)
                part.replace(final)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise NoSpaceError(
            f"the disk of {final.parent} is full while fetching {name}",
            next_step="free space there, or set SM12X_CACHE to a folder on another disk, and run "
            "the command again: it resumes",
        ) from None
    return final


def fetch_shown(
    project: str, name: str, sha256: str, *, cache: Path, find_links: Path | None
) -> Path:
    """As ``fetch``, with a bar for what has to be transferred."""
    with progress.transfer(name) as moved:
        return fetch(project, name, sha256, cache=cache, find_links=find_links, on_progress=moved)


def cached(name: str, sha256: str, *, cache: Path) -> Path | None:
    """The file, verified, if ``fetch`` has brought it before; None otherwise."""
    final = cache / "files" / sha256 / name
    return final if _is_cached(final, sha256) else None


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


def _locate(project: str, name: str, sha256: str) -> tuple[DistributionPackage, str]:
    """Return the file as the first index lists it that has it, and the address of that index."""
    from sm12x.core import download, pipconfig

    absent: list[str] = []
    other: str | None = None
    for address, packages in download.listed(project, name, absent):
        package = next((one for one in packages if one.filename == name), None)
        if package is None:
            shown = pipconfig.without_credentials(address)
            absent.append(f"{shown} has no such file among its {len(packages)} files of {project}")
            continue
        digest = package.digests.get("sha256", sha256)
        if digest == sha256:
            return package, address
        other = digest
    if other is not None:
        raise HashMismatchError(
            f"the package index lists {name} with sha256 {other}, expected {sha256}; "
            "nothing was fetched",
            next_step="check the pin; if it is right, the index serves another file: ask its "
            "operator",
        )
    raise FetchError(f"{name} cannot be fetched: {'; '.join(absent)}", next_step=download.OFFLINE)


def _download(
    project: str, name: str, sha256: str, part: Path, on_progress: OnProgress | None
) -> None:
    """Make ``part`` the whole file."""
    from sm12x.core import download

    resumed = part.is_file()
    # A run may have been killed just before it gave the file its final name.
    if resumed and files.sha256(part) == sha256:
        return
    package, address = _locate(project, name, sha256)
    download.transfer(package, address, part, on_progress)
    if files.sha256(part) != sha256 and resumed:
        # What an earlier run left may be the damaged part: the whole file comes once more.
        os.truncate(part, 0)
        download.transfer(package, address, part, on_progress)
    got = files.sha256(part)
    if got == sha256:
        return
    part.unlink()
    raise HashMismatchError(
        f"{name} was fetched with sha256 {got}, expected {sha256}; it has been deleted",
        next_step="run the command again; if it repeats, a proxy or mirror alters the file",
    )


def _take(source: Path, sha256: str, part: Path) -> None:
    """Copy a file out of a --find-links folder."""
    if not source.is_file():
        raise FetchError(
            f"{source.name} is not in {source.parent}",
            next_step="put it there, or leave out --find-links",
        )
    shutil.copyfile(source, part)
    got = files.sha256(part)
    if got != sha256:
        part.unlink()
        raise HashMismatchError(
            f"{source} has sha256 {got}, expected {sha256}; it was not used",
            next_step=f"replace it with the right {source.name}",
        )
