"""HTTP for packages: pages of indexes, and one file, resumed; with the user's CA and proxies."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO

import requests
from packaging.utils import canonicalize_name
from pypi_simple import ACCEPT_JSON_PREFERRED, ProjectPage, UnsupportedRepoVersionError
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from sm12x.core import files, pipconfig
from sm12x.core import text as texts
from sm12x.core.errors import BadFileError, FetchError

# Called with the bytes that are there and the whole size, None where the server does not say.
OnProgress = Callable[[int, int | None], None]

CHUNK = 1024 * 1024
TIMEOUT = (15.0, 120.0)  # seconds: to connect, and between two reads
# Waits 0, 1, 2, 4 s: a name server or a proxy that hiccups, not one that is down.
RETRY = Retry(
    total=4,
    backoff_factor=0.5,
    backoff_max=10,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=("GET",),
    raise_on_status=False,
)
OFFLINE = "put the file into a folder and give that as --find-links"
_RANGE = re.compile(r"bytes (?:(?P<start>\d+)-\d+|\*)/(?P<total>\d+)")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the index at ``address`` has of a project; ``shown`` is that without credentials."""

    address: str
    shown: str
    response: requests.Response
    page: ProjectPage


def answers(project: str, name: str, seen: list[str]) -> Iterator[Answer]:
    """Yield the answer of each index that has ``project``, in order.

    Args:
        name: the file to look for.
        seen: gets a line for each index that does not have the project.

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
            url = f"{address.rstrip('/')}/{canonicalize_name(project)}/"
            try:
                response = web.get(url, headers={"Accept": ACCEPT_JSON_PREFERRED}, timeout=TIMEOUT)
                if response.status_code == HTTPStatus.NOT_FOUND:
                    seen.append(f"{shown} has no project {project}")
                    continue
                response.raise_for_status()
                page = ProjectPage.from_response(response, project)
            except (ValueError, UnsupportedRepoVersionError) as error:
                # Not an address, or a page that is neither HTML nor JSON of the Simple API.
                raise FetchError(
                    f"{shown} does not answer as a package index: {_one_line(error)}",
                    next_step="check the index address in the settings of pip or uv",
                ) from None
            except requests.RequestException as error:
                raise _network_error(error, shown, name) from None
            yield Answer(address=address, shown=shown, response=response, page=page)


def transfer(
    url: str,
    part: Path,
    name: str,
    on_progress: OnProgress | None,
    *,
    size: int | None,
    auth: tuple[str, str] | None,
) -> None:
    """Bring ``part`` to its full length, going on where it ends as often as that helps.

    ``size`` is in bytes, None where the index does not say.
    """
    shown = pipconfig.without_credentials(url)
    furthest, broken = part.stat().st_size, 0
    with session(pipconfig.load()) as web, part.open("r+b", buffering=0) as handle:
        while True:
            try:
                reason = _receive(web, url, handle, name, on_progress, size, auth)
            except HTTPError as error:
                # Unlike a connection that cannot be made, urllib3 does not try a cut body again.
                reason = _one_line(error)
            except requests.RequestException as error:
                raise _network_error(error, shown, name) from None
            if not reason:
                return
            if (have := handle.seek(0, os.SEEK_END)) > furthest:
                furthest, broken = have, 0
            if broken == RETRY.total:
                raise FetchError(
                    f"{name}: the connection to {shown} broke {broken} times after {furthest} "
                    f"bytes: {reason}",
                    next_step="run the same command again; it resumes where it stopped",
                )
            time.sleep(RETRY.backoff_factor * 2**broken if broken else 0)
            broken += 1


def _receive(
    web: requests.Session,
    url: str,
    handle: IO[bytes],
    name: str,
    on_progress: OnProgress | None,
    size: int | None,
    auth: tuple[str, str] | None,
) -> str:
    """Append what one request brings; return why it is not all, "" where nothing is missing."""
    have = handle.seek(0, os.SEEK_END)
    if size is not None:
        have = have if have <= size else _cut(handle)
        if have == size:
            return ""
        missing = (size - have) / texts.GIB
        files.require_space(Path(handle.name).parent, missing, what=f"fetching {name}")
    # identity: a server that compresses on the way would make ranges and lengths meaningless.
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={have}-"} if have else {})}
    with web.get(url, headers=headers, auth=auth, stream=True, timeout=TIMEOUT) as reply:
        span = _RANGE.match(reply.headers.get("Content-Range", ""))
        if reply.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            # Nothing after `have`: either all of it is there, or it is not of this file.
            if span and int(span["total"]) == have:
                return ""
            _cut(handle)
            return "the server refused to resume"
        reply.raise_for_status()
        length = reply.headers.get("Content-Length", "")
        total = size
        if reply.status_code == HTTPStatus.PARTIAL_CONTENT:
            if not span or span["start"] != str(have):
                _cut(handle)
                return "the server resumed at another place"
            total = total or int(span["total"])
        else:
            have = _cut(handle)
            total = total or (int(length) if length.isdigit() else None)
        if on_progress:
            on_progress(have, total)
        # As it comes. Not `iter_content`: that gathers whole chunks and, when the connection
        # breaks, drops the part of one that had come; a bad line would never move on.
        while piece := reply.raw.read1(CHUNK):
            # Unbuffered, so that a kill loses nothing; the system may then take less than given.
            view = memoryview(piece)
            while view:
                view = view[handle.write(view) :]
            have += len(piece)
            if on_progress:
                on_progress(have, total)
    return "" if total in (None, have) else f"{have} of {total} bytes came"


def _cut(handle: IO[bytes]) -> int:
    handle.seek(0)
    handle.truncate()
    return 0


def session(config: pipconfig.PipConfig) -> requests.Session:
    """Return a session with retries and the user's CA; proxies come from the environment."""
    web = requests.Session()
    for scheme in ("https://", "http://"):
        web.mount(scheme, HTTPAdapter(max_retries=RETRY))
    if config.ca_bundle is not None:
        web.verify = str(config.ca_bundle)
    return web


def _network_error(error: requests.RequestException, shown: str, name: str) -> FetchError:
    if isinstance(error, requests.exceptions.SSLError):
        return FetchError(
            f"{name} cannot be fetched: the certificate of {shown} is not trusted "
            f"({_one_line(error)})",
            next_step="set REQUESTS_CA_BUNDLE to the CA bundle of your network",
        )
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return FetchError(
            f"{name} cannot be fetched: {shown} answers {error.response.status_code} "
            f"{error.response.reason}",
            next_step="check the index address and its credentials in the settings of pip or uv",
        )
    return FetchError(
        f"{name} cannot be fetched: no connection to {shown} ({_one_line(error)})",
        next_step=f"check network and proxy and run it again, or {OFFLINE}",
    )


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
