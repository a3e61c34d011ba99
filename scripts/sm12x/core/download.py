"""One file over HTTP: resumable, retried, with the user's CA and proxies."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import HTTPError, MaxRetryError, ProtocolError
from urllib3.util import Retry

from sm12x.core import files, pipconfig
from sm12x.core import text as texts
from sm12x.core.errors import FetchError

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


@dataclass(frozen=True, kw_only=True)
class Remote:
    """Where a file lies. ``size`` is in bytes, None where the index does not say."""

    url: str
    size: int | None
    auth: tuple[str, str] | None


class _CutShortError(Exception):
    """The connection ended before the file did."""


def transfer(remote: Remote, part: Path, name: str, on_progress: OnProgress | None) -> None:
    """Bring ``part`` to its full length, going on where it ends as often as that helps."""
    config = pipconfig.load()
    shown = pipconfig.without_credentials(remote.url)
    retry = RETRY
    furthest = part.stat().st_size
    with session(config) as web, part.open("r+b", buffering=0) as handle:
        while True:
            try:
                _receive(web, remote, handle, name, on_progress)
                return
            except _CutShortError as error:
                size = handle.seek(0, os.SEEK_END)
                if size > furthest:
                    furthest, retry = size, RETRY
                try:
                    retry = retry.increment("GET", shown, error=ProtocolError(str(error)))
                except MaxRetryError:
                    raise FetchError(
                        f"{name}: the connection to {shown} broke {RETRY.total} times after "
                        f"{furthest} bytes: {one_line(error)}",
                        next_step="run the same command again; it resumes where it stopped",
                    ) from None
                retry.sleep()
            except requests.RequestException as error:
                raise network_error(error, shown, name) from None


def _receive(
    web: requests.Session,
    remote: Remote,
    handle: IO[bytes],
    name: str,
    on_progress: OnProgress | None,
) -> None:
    """One request for what is missing, appended to ``handle``."""
    have = handle.seek(0, os.SEEK_END)
    if remote.size is not None:
        if have == remote.size:
            return
        if have > remote.size:
            have = _rewind(handle)
        files.require_space(
            Path(handle.name).parent, (remote.size - have) / texts.GIB, what=f"fetching {name}"
        )
    # identity: a server that compresses on the way would make ranges and lengths meaningless.
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with web.get(
        remote.url, headers=headers, auth=remote.auth, stream=True, timeout=TIMEOUT
    ) as reply:
        if reply.status_code == 416:
            # Nothing after `have`: either all of it is there, or it is not of this file.
            if _total(reply) != have:
                _rewind(handle)
                raise _CutShortError("the server refused to resume")
            return
        reply.raise_for_status()
        if reply.status_code != 206 or _start(reply) != have:
            have = _rewind(handle)
            if reply.status_code == 206:
                raise _CutShortError("the server resumed at another place")
        total = remote.size if remote.size is not None else _total(reply)
        if on_progress:
            on_progress(have, total)
        for chunk in _body(reply):
            # Unbuffered, so that a kill loses nothing; the system may then take less than given.
            view = memoryview(chunk)
            while view:
                view = view[handle.write(view) :]
            have += len(chunk)
            if on_progress:
                on_progress(have, total)
    if total is not None and have != total:
        raise _CutShortError(f"{have} of {total} bytes came")


def _body(reply: requests.Response) -> Iterator[bytes]:
    """The body piece by piece, as it comes.

    Not ``iter_content``: that gathers whole chunks and, when the connection breaks, drops the
    part of one that had come; over a bad line nothing would ever move on.
    """
    try:
        while piece := reply.raw.read1(CHUNK):
            yield piece
    except HTTPError as error:
        # Unlike a connection that cannot be made, urllib3 does not try a cut body again.
        raise _CutShortError(one_line(error)) from None


def session(config: pipconfig.PipConfig) -> requests.Session:
    """A session with retries and the user's CA; proxies come from the environment."""
    web = requests.Session()
    adapter = HTTPAdapter(max_retries=RETRY)
    web.mount("https://", adapter)
    web.mount("http://", adapter)
    if config.ca_bundle is not None:
        web.verify = str(config.ca_bundle)
    return web


def _rewind(handle: IO[bytes]) -> int:
    handle.seek(0)
    handle.truncate()
    return 0


def _start(reply: requests.Response) -> int | None:
    match = re.match(r"bytes (\d+)-", reply.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _total(reply: requests.Response) -> int | None:
    """The whole file's size: after the slash of Content-Range, else Content-Length of a 200."""
    match = re.search(r"/(\d+)$", reply.headers.get("Content-Range", ""))
    if match:
        return int(match[1])
    length = reply.headers.get("Content-Length", "") if reply.status_code == 200 else ""
    return int(length) if length.isdigit() else None


def network_error(error: requests.RequestException, shown: str, name: str) -> FetchError:
    if isinstance(error, requests.exceptions.SSLError):
        return FetchError(
            f"{name} cannot be fetched: the certificate of {shown} is not trusted "
            f"({one_line(error)})",
            next_step="set REQUESTS_CA_BUNDLE to the CA bundle of your network",
        )
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return FetchError(
            f"{name} cannot be fetched: {shown} answers {error.response.status_code} "
            f"{error.response.reason}",
            next_step="check the index address and its credentials in the settings of pip or uv",
        )
    return FetchError(
        f"{name} cannot be fetched: no connection to {shown} ({one_line(error)})",
        next_step=f"check network and proxy and run it again, or {OFFLINE}",
    )


def one_line(error: Exception) -> str:
    """The innermost reason, without the objects that requests and urllib3 wrap it in."""
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
