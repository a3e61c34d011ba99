"""The health check: is the server of this container alive, awake or asleep?

/health decides. In vLLM it answers from the API server without asking the engine: 200 as long as
the engine has not died, also while it sleeps and in the middle of a slow /sleep (pinning host
memory for the weights can take 20 s and more). /is_sleeping asks the engine, which does not answer
during such a change: no answer means that a change is in progress, not that the engine has died. It
is asked second, to tell the state of the server, and to overrule a failing /health of a server that
is only asleep.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sm12x.core import files
from sm12x.recipes import options

HEALTHY = 0
UNHEALTHY = 1
# Seconds. The sum stays under the image's HEALTHCHECK timeout.
HEALTH_SECONDS = 5.0
SLEEP_SECONDS = 2.0
# vLLM's default.
_PORT = 8000
_URL = "SM12X_HEALTH_URL"
# What a client on the same machine reaches by the loopback address.
_EVERYWHERE = ("", "0.0.0.0", "::", "localhost")  # noqa: S104 - compared, not bound


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Where a server listens: ``socket_path`` is "" unless it is a Unix socket.

    ``key`` is the API key that its command names, "" without one.
    """

    host: str
    port: int
    tls: bool = False
    socket_path: str = ""
    key: str = ""

    def __str__(self) -> str:
        return self.socket_path or f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    code: int
    text: str


# (server, path, seconds) -> (status, body). Raises OSError or http.client.HTTPException.
_Get = Callable[[Listener, str, float], tuple[int, bytes]]


def find(commands: Iterable[Sequence[str]]) -> Listener | None:
    """The server among running command lines: the last --host, --port, ... of `vllm serve`.

    VLLM_PORT is not looked at: it is the port vLLM's processes use among themselves.
    """
    for words in commands:
        at = options.server(words)
        if at is None:
            continue
        given = options.parse(words[at:])
        if "headless" in given:
            continue
        host = given.get("host", "")
        if host in _EVERYWHERE:
            host = "127.0.0.1"
        port = given.get("port", "")
        return Listener(
            host=host,
            port=int(port) if options.is_port(port) else _PORT,
            tls="ssl-certfile" in given,
            socket_path=given.get("uds", ""),
            key=given.get("api-key", ""),
        )
    return None


def here() -> Verdict:
    """``check`` of the server of this container."""
    try:
        server = server_here()
    except ValueError as error:
        return Verdict(
            code=UNHEALTHY,
            text=f"{_URL}={os.environ[_URL]} is no address of a server ({error}): write it as "
            "http://127.0.0.1:8000, or leave it out for the `vllm serve` that runs here",
        )
    return check(server, get_http)


def check(server: Listener | None, get: _Get) -> Verdict:
    """The health of a server. None, no server, is healthy: the container runs something else."""
    if server is None:
        return Verdict(code=HEALTHY, text="no vLLM server runs here: nothing to check")
    try:
        status, _ = get(server, "/health", HEALTH_SECONDS)
    except ConnectionRefusedError:
        return Verdict(
            code=UNHEALTHY, text=f"{server} is not open: the server is loading, or cannot start"
        )
    # ValueError: a host whose name cannot be one.
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Verdict(code=UNHEALTHY, text=f"{server}/health does not answer: {error!r}")
    asleep = is_sleeping(server, get, SLEEP_SECONDS)
    if asleep:
        return Verdict(code=HEALTHY, text=f"{server} sleeps")
    if status == http.client.OK:
        state = "is awake" if asleep is False else "answers"
        return Verdict(code=HEALTHY, text=f"{server} {state}")
    return Verdict(code=UNHEALTHY, text=f"{server}/health says {status}: the engine has died")


def is_sleeping(server: Listener, get: _Get, seconds: float) -> bool | None:
    """None where it is not known: no sleep routes, or the engine is changing its state."""
    try:
        status, body = get(server, "/is_sleeping", seconds)
        if status != http.client.OK:
            return None
        answer = json.loads(body)["is_sleeping"]
        return answer if isinstance(answer, bool) else None
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None


def running(proc: Path = Path("/proc")) -> list[list[str]]:
    """List the command lines of the processes here, oldest first: vLLM's workers come after it."""
    commands = []
    for folder in sorted(
        (entry for entry in proc.iterdir() if entry.name.isdigit()), key=lambda e: int(e.name)
    ):
        try:
            raw = (folder / "cmdline").read_bytes()
        except OSError:
            # It ended, or belongs to another user.
            continue
        commands.append([word.decode(errors="replace") for word in raw.split(b"\0") if word])
    return commands


# Where a pool of this container listens, for the health check beside it.
_POOL = f"sm12x-pool-{os.getuid()}.json"


def write_pool(host: str, port: int) -> None:
    """Record where the pool of this container listens: its servers are not what is asked for."""
    address = "127.0.0.1" if host in _EVERYWHERE else host
    record = {"host": address, "port": port, "pid": os.getpid()}
    files.write_text(Path(tempfile.gettempdir()) / _POOL, json.dumps(record))


def forget_pool() -> None:
    """Delete the record of ``write_pool``, unless another pool has written its own."""
    path = Path(tempfile.gettempdir()) / _POOL
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            path.unlink()


def _pool() -> Listener | None:
    """Where the pool listens whose process runs; None without one."""
    path = Path(tempfile.gettempdir()) / _POOL
    try:
        if path.lstat().st_uid != os.getuid():
            return None
        record = json.loads(path.read_text(encoding="utf-8"))
        words = Path(f"/proc/{record['pid']}/cmdline").read_bytes().split(b"\0")
        if b"sm12x.pool" not in words:
            return None
        return Listener(host=str(record["host"]), port=int(record["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def server_here() -> Listener | None:
    """The server to ask: SM12X_HEALTH_URL, else the pool or the `vllm serve` that runs here.

    Raises:
        ValueError: the variable has no address of a server.
    """
    url = os.environ.get(_URL, "")
    if url:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("no http:// or no host")
        return Listener(
            host=parts.hostname,
            port=parts.port or _PORT,
            tls=parts.scheme == "https",
        )
    return _pool() or find(running())


def get_http(server: Listener, path: str, seconds: float) -> tuple[int, bytes]:
    """GET a path of a server of this very container, past any proxy."""
    return request(server, "GET", path, seconds)


def request(server: Listener, method: str, path: str, seconds: float) -> tuple[int, bytes]:
    """Ask a server of this very container, past any proxy, and return status and body.

    With the key of the sleep routes, which is good for all, or the server's.
    """
    named = os.environ.get(options.SLEEP_KEY, "") or server.key
    key = named or os.environ.get(options.KEY, "")
    if not (key.isascii() and key.isprintable()):
        # No header can have it, so no server can be asked with it.
        key = ""
    connection: http.client.HTTPConnection
    if server.socket_path:
        connection = _UnixConnection(server.socket_path, seconds)
    elif server.tls:
        # Its certificate is for its public name, not for the loopback address.
        unchecked = ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(
            server.host, server.port, timeout=seconds, context=unchecked
        )
    else:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=seconds)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {})
        response = connection.getresponse()
        return response.status, response.read(65536)
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
