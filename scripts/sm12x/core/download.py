"""HTTP for packages: pages of indexes, and one file, resumed; with the user's CA and proxies."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

import requests
from pypi_simple import (
    ACCEPT_JSON_PREFERRED,
    DistributionPackage,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedRepoVersionError,
)
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from sm12x.core import files, pipconfig
from sm12x.core import text as texts
from sm12x.core.errors import BadFileError, FetchError

# Called with the bytes that are there and the whole size, None where the server does not say.
OnProgress = Callable[[int, int | None], None]

_CHUNK = 1024 * 1024
_TIMEOUT = (15.0, 120.0)  # seconds: to connect, and between two reads
# Waits 0, 1, 2, 4 s: a name server or a proxy that hiccups, not one that is down.
_RETRY = Retry(
    total=4,
    backoff_factor=0.5,
    backoff_max=10,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=("GET",),
    raise_on_status=False,
)
OFFLINE = "put the file into a folder and give that as --find-links"


def listed(
    project: str, name: str, absent: list[str]
) -> Iterator[tuple[str, list[DistributionPackage]]]:
    """Yield the address of each index that has ``project``, in order, and the files it lists.

    Args:
        name: the file to look for.
        absent: gets a line for each index that does not have the project.

    Raises:
        FetchError: an index does not answer, or is no package index.
        BadFileError: the CA bundle that the settings name does not exist.
    """
    config = pipconfig.load()
    # requests reports this as an OSError without the name of the setting.
    if config.ca_bundle is not None and not config.ca_bundle.exists():
        raise BadFileError(
            f"the CA bundle {config.ca_bundle} ({config.ca_from}) does not exist",
            next_step=f"correct {config.ca_from}",
        )
    with session(config) as web:
        for address in config.indexes:
            shown = pipconfig.without_credentials(address)
            index = PyPISimple(address, session=web, accept=ACCEPT_JSON_PREFERRED)
            try:
                page = index.get_project_page(project, timeout=_TIMEOUT)
            except NoSuchProjectError:
                absent.append(f"{shown} has no project {project}")
                continue
            except (ValueError, UnsupportedRepoVersionError) as error:
                # Not an address, or a page that is neither HTML nor JSON of the Simple API.
                raise FetchError(
                    f"{shown} does not answer as a package index: {_one_line(error)}",
                    next_step="check the index address in the settings of pip or uv",
                ) from None
            except requests.RequestException as error:
                raise _network_error(error, shown, name) from None
            yield address, page.packages


def transfer(
    package: DistributionPackage, index: str, part: Path, on_progress: OnProgress | None
) -> None:
    """Bring ``part`` to the length of ``package``, going on where it ends as often as that helps.

    ``index`` is the address of the index that lists it. What ``part`` holds is not all of it yet.
    """
    shown = pipconfig.without_credentials(package.url)
    with session(pipconfig.load()) as web, part.open("ab") as handle:
        web.auth = _credentials(index, package.url)
        furthest, broken = handle.tell(), 0
        while True:
            try:
                reason = _receive(web, package, handle, on_progress)
            except HTTPError as error:
                # Unlike a connection that cannot be made, urllib3 does not try a cut body again.
                reason = _one_line(error)
            except requests.RequestException as error:
                raise _network_error(error, shown, package.filename) from None
            if not reason:
                return
            if handle.tell() > furthest:
                furthest, broken = handle.tell(), 0
            if broken == _RETRY.total:
                raise FetchError(
                    f"{package.filename}: the connection to {shown} broke {broken} times after "
                    f"{furthest} bytes: {reason}",
                    next_step="run the same command again; it resumes where it stopped",
                )
            time.sleep(_RETRY.backoff_factor * 2**broken if broken else 0)
            broken += 1


def _receive(
    web: requests.Session,
    package: DistributionPackage,
    handle: IO[bytes],
    on_progress: OnProgress | None,
) -> str:
    """Append what one request brings; return why it is not all, "" where nothing is missing."""
    have, total = handle.tell(), package.size
    if total is not None:
        if have >= total:
            have = _cut(handle)
        missing = (total - have) / texts.GIB
        what = f"fetching {package.filename}"
        files.require_space(Path(handle.name).parent, missing, what=what)
    # identity: a server that compresses on the way would make ranges and lengths meaningless.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with web.get(package.url, headers=headers, stream=True, timeout=_TIMEOUT) as reply:
        resumed = reply.status_code == HTTPStatus.PARTIAL_CONTENT
        elsewhere = not reply.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        refused = reply.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE
        if refused or (resumed and elsewhere):
            _cut(handle)
            return "the server does not go on where the file ends"
        reply.raise_for_status()
        if not resumed:
            have = _cut(handle)
        length = reply.headers.get("Content-Length", "")
        if total is None and length.isdigit():
            total = have + int(length)
        if on_progress:
            on_progress(have, total)
        # As it comes. Not `iter_content`: that gathers whole chunks and, when the connection
        # breaks, drops the part of one that had come; a bad line would never move on.
        while piece := reply.raw.read1(_CHUNK):
            handle.write(piece)
            # A kill loses nothing.
            handle.flush()
            have += len(piece)
            if on_progress:
                on_progress(have, total)
    return "" if total in (None, have) else f"{have} of {total} bytes came"


def _cut(handle: IO[bytes]) -> int:
    handle.truncate(0)
    return handle.seek(0, os.SEEK_END)


def _credentials(index: str, url: str) -> tuple[str, str] | None:
    """Return the index's credentials, for a file on the same host whose address carries none."""
    ours, theirs = urlsplit(index), urlsplit(url)
    here, there = ((place.scheme, place.hostname, place.port) for place in (ours, theirs))
    if here != there or ours.username is None or theirs.username is not None:
        return None
    return unquote(ours.username), unquote(ours.password or "")


def session(config: pipconfig.PipConfig) -> requests.Session:
    """Return a session with retries and the user's CA; proxies come from the environment."""
    web = requests.Session()
    for scheme in ("https://", "http://"):
        web.mount(scheme, HTTPAdapter(max_retries=_RETRY))
    if config.ca_bundle is not None:
        web.verify = str(config.ca_bundle)
    return web


def _network_error(error: requests.RequestException, shown: str, name: str) -> FetchError:
    reason = _one_line(error)
    if isinstance(error, requests.exceptions.SSLError):
        what = f"the certificate of {shown} is not trusted ({reason})"
        step = "set REQUESTS_CA_BUNDLE to the CA bundle of your network"
    elif isinstance(error, requests.HTTPError) and error.response is not None:
        what = f"{shown} answers {error.response.status_code} {error.response.reason}"
        step = "check the index address and its credentials in the settings of pip or uv"
    else:
        what = f"no connection to {shown} ({reason})"
        step = f"check network and proxy and run it again, or {OFFLINE}"
    return FetchError(f"{name} cannot be fetched: {what}", next_step=step)


def _one_line(error: Exception) -> str:
    """Return the innermost reason, without the objects that requests and urllib3 wrap it in."""
    inner: object = error
    while isinstance(inner, requests.RequestException | HTTPError):
        deeper = getattr(inner, "reason", None) or next(
            (arg for arg in inner.args if isinstance(arg, Exception)), None
        )
        if not isinstance(deeper, Exception):
            break
        inner = deeper
    text = re.sub(r"<[^>]*object at 0x[0-9a-f]+>:? ?|\w+\(host=.*?\): ", "", str(inner))
    return " ".join(text.split()) or type(inner).__name__
