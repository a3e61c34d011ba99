"""The files of a project on a package index or in a folder: names, hashes, upload times."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sm12x.core import files
from sm12x.core.errors import FetchError

SDIST = "sdist"
WHEEL = "wheel"


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """A file of a project. ``sha256`` is in hex, "" where the index gives none.

    ``uploaded`` is None where it does not say, as where its pages are HTML.
    """

    name: str
    version: str
    kind: str
    sha256: str
    uploaded: datetime.datetime | None = None
    yanked: bool = False


def of_index(project: str) -> tuple[ListedFile, ...]:
    """Return all files of ``project`` on the first index that has it.

    Raises:
        FetchError: no index has it, or none answers.
        BadFileError: the CA bundle that the settings name does not exist.
    """
    # As in core.index: imported where it is used.
    from sm12x.core import download

    absent: list[str] = []
    for _, packages in download.listed(project, project, absent):
        return tuple(
            ListedFile(
                name=package.filename,
                version=package.version or "",
                kind=package.package_type or "",
                sha256=package.digests.get("sha256", ""),
                uploaded=package.upload_time,
                yanked=package.is_yanked,
            )
            for package in packages
        )
    raise FetchError(
        f"{project} cannot be looked up: {'; '.join(absent)}",
        next_step="check the index address in the settings of pip or uv",
    )


def of_folder(project: str, folder: Path) -> tuple[ListedFile, ...]:
    """List the files of ``project`` in ``folder``, with their hashes."""
    from pypi_simple import UnparsableFilenameError, parse_filename

    entries: list[ListedFile] = []
    for path in sorted(folder.iterdir()):
        try:
            name, version, kind = parse_filename(path.name, project_hint=project)
        except UnparsableFilenameError:
            continue
        if kind in (SDIST, WHEEL) and canonicalize_name(name) == canonicalize_name(project):
            digest = files.sha256(path)
            entries.append(ListedFile(name=path.name, version=version, kind=kind, sha256=digest))
    return tuple(entries)


def releases(uploads: Iterable[ListedFile]) -> list[str]:
    """Return the final releases whose sdist was not withdrawn, oldest first."""
    versions: dict[Version, str] = {}
    for file in uploads:
        try:
            version = Version(file.version)
        except InvalidVersion:
            continue
        if file.kind == SDIST and not file.yanked and not version.is_prerelease:
            versions[version] = file.version
    return [versions[version] for version in sorted(versions)]
