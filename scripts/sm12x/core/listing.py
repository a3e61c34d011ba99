"""The files of a project on a package index or in a folder: names, hashes, upload times."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sm12x.core import files
from sm12x.core.errors import FetchError

if TYPE_CHECKING:
    from pypi_simple import DistributionPackage

    from sm12x.core.download import Answer

SDIST = "sdist"
WHEEL = "wheel"


@dataclass(frozen=True, kw_only=True)
class ListedFile:
    """A file of a project. ``sha256`` is in hex, "" where the index gives none.

    ``uploaded`` is None where it does not say.
    """

    name: str
    version: str
    kind: str
    sha256: str
    uploaded: datetime.datetime | None
    yanked: bool


def of_index(project: str) -> tuple[ListedFile, ...]:
    """All files of ``project`` on the first index that has it.

    Raises:
        FetchError: no index has it, or none answers.
        BadFileError: the CA bundle that the settings name does not exist.
    """
    # As in core.index: imported where it is used.
    from sm12x.core import download

    seen: list[str] = []
    for answer in download.answers(project, project, seen):
        return _read(answer)
    raise FetchError(
        f"{project} cannot be looked up: {'; '.join(seen)}",
        next_step="check the index address in the settings of pip or uv",
    )


def of_folder(project: str, folder: Path) -> tuple[ListedFile, ...]:
    """List the files of ``project`` in ``folder``, with their hashes."""
    # As in core.index: imported where it is used.
    from pypi_simple import UnparsableFilenameError, parse_filename

    entries: list[ListedFile] = []
    for path in sorted(folder.iterdir()):
        try:
            name, version, kind = parse_filename(path.name, project_hint=project)
        except UnparsableFilenameError:
            continue
        if kind in (SDIST, WHEEL) and canonicalize_name(name) == canonicalize_name(project):
            entries.append(
                ListedFile(
                    name=path.name,
                    version=version,
                    kind=kind,
                    sha256=files.sha256(path),
                    uploaded=None,
                    yanked=False,
                )
            )
    return tuple(entries)


def releases(listed: tuple[ListedFile, ...]) -> list[str]:
    """Return the final releases whose sdist was not withdrawn, oldest first."""
    versions: dict[Version, str] = {}
    for file in listed:
        try:
            version = Version(file.version)
        except InvalidVersion:
            continue
        if file.kind == SDIST and not file.yanked and not version.is_prerelease:
            versions[version] = file.version
    return [versions[version] for version in sorted(versions)]


def _read(answer: Answer) -> tuple[ListedFile, ...]:
    response, page = answer.response, answer.page
    times: dict[str, str] = {}
    if "json" not in response.headers.get("Content-Type", ""):
        from pypi_simple import RepositoryPage

        # Not in the standard of the HTML form, and given by some indexes; uv reads it as well.
        links = RepositoryPage.from_html(response.content, response.url).links
        times = {link.text: str(link.attrs.get("data-upload-time") or "") for link in links}
    return tuple(_listed(package, times.get(package.filename, "")) for package in page.packages)


def _listed(package: DistributionPackage, time: str) -> ListedFile:
    uploaded = package.upload_time
    if uploaded is None and time:
        uploaded = datetime.datetime.fromisoformat(time)
    return ListedFile(
        name=package.filename,
        version=package.version or "",
        kind=package.package_type or "",
        sha256=package.digests.get("sha256", ""),
        uploaded=uploaded,
        yanked=package.is_yanked,
    )
