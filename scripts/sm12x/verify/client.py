"""One vLLM server over HTTP: version and model, sleep and wake-up, greedy answers, counters.

A server's answers are not trusted: sizes and times are limited, and quoted text is shortened,
printable, and without the API key.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import certifi
from prometheus_client.parser import text_string_to_metric_families
from urllib3 import BaseHTTPResponse, HTTPConnectionPool, Timeout, connection_from_url
from urllib3.exceptions import (
    ConnectTimeoutError,
    DecodeError,
    HTTPError,
    LocationParseError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)

from sm12x.core.errors import ServerError, UsageError
from sm12x.core.text import without
from sm12x.doctor.model import Unseen
from sm12x.verify.report import RankUse

KEY_VARIABLE = "VLLM_API_KEY"
# The key of a server's sleep routes, where it has one: good for all its routes.
SLEEP_KEY_VARIABLE = "VLLM_SLEEP_API_KEY"
# Seconds that a connection may take, and an answer that needs no engine.
_CONNECT, _SOON = 10.0, 30.0
# Bytes of an answer that are read: /metrics of many engines takes a few MB.
_MOST = 16 << 20
_CHUNK = 1 << 16
# Characters of a server's words in a message.
_SHOWN = 200
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?")
# Seconds between two tries of a call that crosses another.
_AGAIN = 0.5

DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_AT_WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting")

_NO_KEY = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
# Of any server or gateway, vLLM or not: what to do follows from the status.
_TELLING = (*_NO_KEY, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_BEHIND = "give the address of the server behind the gateway, or read its log"
_ADDRESS = "write it as http://127.0.0.1:8000, without a path of the API"
_ROUTES = (
    "start the server with --enable-sleep-mode --enable-sleep-routes (a stock vLLM: with "
    "VLLM_SERVER_DEV_MODE=1), see docs/memory.md"
)
_SLEEP = ("/sleep", "/wake_up", "/is_sleeping")
_NAMED = (
    "give the server's IP address in place of its name, or start it with that name in "
    "--allowed-origins, see SECURITY.md"
)
# The first call of a run, and what to do where its answer is no HTTP.
_FIRST = "GET /version"
_NO_HTTP = "check address and port, and http or https; if it is a vLLM server, read its log"
_LOG = "read the server's log, start it again, and repeat the command"


def base_url(text: str) -> str:
    """``text`` as http://HOST:PORT[/PREFIX], without /v1.

    Raises:
        UsageError: it is no address of a server.
    """
    given = text.strip()
    if _HOST_AND_PORT.fullmatch(given):
        given = f"http://{given}"
    try:
        parts = urlsplit(given)
        port, host = parts.port, parts.hostname
    except ValueError as error:
        raise UsageError(
            f"{_printable(text)!r} is no address: {error}", next_step=_ADDRESS
        ) from None
    if parts.username is not None or parts.password is not None:
        # Not shown: it holds a password.
        raise UsageError(
            "an address with a user or a password in it is not taken: it would be printed",
            next_step=f"put an API key into {KEY_VARIABLE}, and leave the address without it",
        )
    if parts.scheme not in ("http", "https") or not host or re.search(r"\s", given):
        raise UsageError(f"{_printable(text)!r} is not the address of a server", next_step=_ADDRESS)
    if parts.query or parts.fragment:
        raise UsageError(
            f"the address {_printable(text)!r} has a query or a fragment", next_step=_ADDRESS
        )
    name = f"[{host}]" if ":" in host else host
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{name}{f':{port}' if port is not None else ''}{prefix}"


def checked_key(key: str, variable: str) -> str:
    """The key without blanks around it.

    Raises:
        UsageError: it cannot stand in an HTTP header; the key is not shown.
    """
    found = key.strip()
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise UsageError(
            f"the API key in {variable} has characters that no HTTP header can have",
            next_step=f"set {variable} to the key alone, without line breaks and quotes",
        )
    return found


class CrossedError(ServerError):
    """A call was refused because another one is in flight, and did nothing."""


class GoneError(ServerError):
    """Nothing listens at the address, or the server closed the connection."""


class LateError(ServerError):
    """No answer came in time, from the server or its gateway: the call may still be in progress."""


class UnfitError(ServerError):
    """A request was refused for what it asks: a prompt that is too long, say."""


class RedirectError(ServerError):
    """A proxy sends the call to its login page, or the server has another address."""


_KINDS: Mapping[int, type[ServerError]] = {
    HTTPStatus.CONFLICT: CrossedError,
    HTTPStatus.BAD_REQUEST: UnfitError,
    HTTPStatus.BAD_GATEWAY: LateError,
    HTTPStatus.GATEWAY_TIMEOUT: LateError,
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to ``call``, such as "POST /sleep".

    ``moved`` is the header Location, ``after`` the header Retry-After; "" without them.
    """

    call: str
    status: int
    text: str
    seconds: float
    moved: str = ""
    after: str = ""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Version and model of a server, and whether it sleeps."""

    version: str
    model: str
    asleep: bool


@dataclass(frozen=True, kw_only=True)
class Completion:
    """``tokens`` and ``ids`` of the text are None where the server does not give them."""

    text: str
    tokens: int | None
    ids: tuple[int, ...] | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Access:
    """Access to servers: ``key`` is "" without one, ``ca`` a file of certificates or "".

    ``secrets`` are those that no reply may bring into a report, secret -> its name.
    """

    key: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)
    variable: str = KEY_VARIABLE
    ca: str = ""
    timeout: float = 300.0


@contextmanager
def _limited(pool: HTTPConnectionPool, seconds: float) -> Iterator[None]:
    """Shut a pool's connections when so many ``seconds`` have passed, whatever arrives on them.

    The time-out of a socket begins anew with every byte: a gateway that sends a blank now and then
    to keep a connection open would never come to its end.
    """
    kind: Any = pool.ConnectionCls
    sockets: list[socket.socket] = []
    over = threading.Event()

    def shut() -> None:
        over.set()
        for one in sockets:
            with suppress(OSError):
                # Past SSLSocket's own, which is not for a second thread.
                socket.socket.shutdown(one, socket.SHUT_RDWR)

    def connect(connection: Any) -> None:
        kind.connect(connection)
        sockets.append(connection.sock)
        if over.is_set():
            shut()

    pool.ConnectionCls = type("Limited", (kind,), {"connect": connect})
    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        pool.close()


class Server:
    """A server at ``url``, which messages call ``name``."""

    def __init__(self, name: str, url: str, access: Access) -> None:
        self.name = name
        self.url = url
        self.model = ""
        self._access = access

    def __str__(self) -> str:
        return f"{self.name} ({self.url})"

    def identify(self, model: str = "") -> Identity:
        """Ask for version, model and state, and check that the server can be verified.

        Args:
            model: the name to send requests with; "" is the first that the server has.

        Raises:
            ServerError: nothing answers, it is not vLLM, has no sleep routes, or wants a key.
            UsageError: the server does not have ``model``.
        """
        version = self._version()
        self.model = self._model(model)
        return Identity(version=version, model=self.model, asleep=self.is_sleeping())

    def is_sleeping(self) -> bool:
        """Raises ServerError, also where there is no such route."""
        answer = self.call("GET", "/is_sleeping", timeout=_SOON)
        found = self._object(answer).get("is_sleeping")
        if not isinstance(found, bool):
            raise self._nonsense(answer, 'no {"is_sleeping": true or false}')
        return found

    def ranks(self) -> tuple[RankUse, ...] | None:
        """The bytes asleep on each rank; None without a report in the known format."""
        try:
            found = self._object(self.call("GET", "/is_sleeping", timeout=_SOON)).get("ranks")
            return tuple(map(self._rank, found)) if isinstance(found, list) and found else None
        except (ServerError, LookupError, TypeError, ValueError):
            return None

    def sleep(self, level: int, *, retry: bool = False) -> float:
        """Put it to sleep, and return the seconds that took. Raises ServerError.

        With ``retry`` again and again while another call is in flight.
        """
        return self._change(f"/sleep?level={level}", retry=retry)

    def wake_up(self, tag: str = "", *, retry: bool = False) -> float:
        """Wake it up, all tags or one ``tag``, as ``sleep`` does."""
        return self._change(f"/wake_up?tags={tag}" if tag else "/wake_up", retry=retry)

    def reload_weights(self) -> float:
        """Load the weights again, between the two calls of a wake-up from level 2."""
        body = {"method": "reload_weights"}
        return self.call("POST", "/collective_rpc", body=body).seconds

    def require_reloading(self) -> None:
        """Raises ServerError unless ``reload_weights`` can be called."""
        answer = self.send("GET", "/collective_rpc", timeout=_SOON)
        if answer.status == HTTPStatus.NOT_FOUND:
            raise ServerError(
                f"{self} cannot load weights again, which a sleep of level 2 takes: there is no "
                "/collective_rpc",
                next_step="verify with --level 1, or start the server with VLLM_SERVER_DEV_MODE=1 "
                "where only you reach its port (SECURITY.md)",
            )
        if answer.status != HTTPStatus.METHOD_NOT_ALLOWED:
            self._good(answer)

    def complete(self, prompt: str, tokens: int) -> Completion:
        """The greedy continuation of ``prompt``. Raises ServerError."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            # A server that does not know this key ignores it.
            "return_token_ids": True,
        }
        answer = self.call("POST", "/v1/completions", body=body)
        found = self._object(answer)
        try:
            choice = found["choices"][0]
            text = choice["text"]
            ids = choice.get("token_ids")
            count = (found.get("usage") or {}).get("completion_tokens")
        except (LookupError, TypeError, AttributeError):
            raise self._nonsense(answer, "no choices[0].text") from None
        if not isinstance(text, str):
            raise self._nonsense(answer, "no text in choices[0].text")
        known = isinstance(ids, list) and all(type(one) is int for one in ids)
        counted = type(count) is int and 0 <= count <= _MOST
        return Completion(
            # Before it is cut: a part of a key is found by nobody.
            text=self._hidden(text),
            tokens=count if counted else None,
            ids=tuple(ids) if known else None,
            seconds=answer.seconds,
        )

    def counters(self) -> Mapping[str, float] | None:
        """Every sample of /metrics by its name, summed over its labels; None where not seen."""
        with suppress(ServerError):
            return metrics(self.call("GET", "/metrics", timeout=_SOON).text)
        return None

    def at_work(self) -> int | Unseen:
        """Requests that run or wait there; Unseen where /metrics does not say that none does."""
        try:
            found = metrics(self.call("GET", "/metrics", timeout=_SOON).text) or {}
        except ServerError as error:
            return Unseen(error.message)
        busy = int(sum(max(0.0, found.get(name, 0)) for name in _AT_WORK))
        missing = [name for name in _AT_WORK if name not in found]
        if busy or not missing:
            return busy
        return Unseen(f"GET /metrics has no number of {missing[0]}")

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """``send``, and ServerError for any status but 200."""
        return self._good(self.send(method, path, body=body, timeout=timeout))

    def send(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request, and return any answer. Raises ServerError without one."""
        seconds = timeout or self._access.timeout
        call = f"{method} {path}"
        began = time.monotonic()
        end = began + seconds
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        if self._access.key:
            headers["Authorization"] = f"Bearer {self._access.key}"
        try:
            # No proxy of the environment between here and the server that is timed, and a
            # connection for each request: the server may close a kept one as it is used again.
            pool = connection_from_url(self.url, **self._trust())
            with (
                _limited(pool, seconds),
                pool.request(
                    method,
                    urlsplit(self.url).path + path,
                    json=body,
                    headers=headers,
                    timeout=Timeout(connect=min(_CONNECT, seconds), read=seconds),
                    redirect=False,
                    retries=False,
                    preload_content=False,
                ) as response,
            ):
                text = self._read(response, call)
        # ValueError and HTTPException: what http.client makes of a malformed chunk, for one.
        except (OSError, ValueError, HTTPError, HTTPException) as error:
            if time.monotonic() >= end and not isinstance(error, ConnectTimeoutError):
                raise self._late(call, seconds) from None
            raise self._silent(call, error, seconds) from None
        # Where no length was announced, the end of the connection is that of the answer.
        if time.monotonic() >= end:
            raise self._late(call, seconds)
        return Answer(
            call=call,
            status=response.status,
            text=text,
            seconds=time.monotonic() - began,
            moved=response.headers.get("Location", ""),
            after=response.headers.get("Retry-After", ""),
        )

    def _trust(self) -> dict[str, str]:
        """The certificates to trust, a file or a folder, where the server has one."""
        if not self.url.startswith("https:"):
            return {}
        ca = self._access.ca or certifi.where()
        return {
            "cert_reqs": "CERT_REQUIRED",
            "ca_cert_dir" if Path(ca).is_dir() else "ca_certs": ca,
        }

    def shown(self, text: str) -> str:
        """A server's text, made printable: short, on one line, without secrets."""
        return _printable(self._hidden(text))

    def _hidden(self, text: str) -> str:
        key = {self._access.key: "the API key"} if self._access.key else {}
        return without(text, {**key, **self._access.secrets})

    def _change(self, path: str, *, retry: bool) -> float:
        end = time.monotonic() + self._access.timeout
        while True:
            answer = self.send("POST", path)
            crossed = answer.status == HTTPStatus.CONFLICT
            if not (crossed and retry) or time.monotonic() > end:
                return self._good(answer).seconds
            time.sleep(_AGAIN)

    def _read(self, response: BaseHTTPResponse, call: str) -> str:
        parts, size = [], 0
        for part in response.stream(_CHUNK, decode_content=True):
            parts.append(part)
            size += len(part)
            if size > _MOST:
                raise ServerError(f"{self} does not finish its answer to {call}", next_step=_LOG)
        return b"".join(parts).decode("utf-8", errors="replace")

    def _silent(self, call: str, error: Exception, seconds: float) -> ServerError:
        """The error for a request without an answer, by the types of its causes."""
        causes = [*_causes(error)]

        def caused(*kinds: type[BaseException]) -> bool:
            return any(isinstance(one, kinds) for one in causes)

        kind, step = ServerError, "check the address, and the network on the way"
        why = self.shown(getattr(causes[-1], "strerror", None) or str(causes[-1]))
        if caused(SSLError):
            why = f"by TLS: {why}"
            step = "write http:// if the server has no certificate, or give --ca-file FILE"
        elif caused(ConnectionRefusedError):
            kind, why = GoneError, "nothing listens there"
            step = (
                "check the address, and that the server has started; if it was running, its log "
                "says why it ended"
            )
        elif caused(socket.gaierror):
            why, step = "the name is not known", "check the host's name in the address"
        elif caused(NewConnectionError):
            kind, why = GoneError, why.lower()
        elif caused(ConnectTimeoutError):
            why = f"no connection within {min(_CONNECT, seconds):g} s"
            step = "check the address, and the firewall on the way"
        elif caused(ReadTimeoutError, TimeoutError):
            return self._late(call, seconds)
        elif caused(LocationParseError):
            why, step = "it is not a usable address", _ADDRESS
        else:
            step = _NO_HTTP if call == _FIRST else _LOG
            if caused(DecodeError):
                return ServerError(f"{self} answers {call} unreadably: {why}", next_step=step)
            return GoneError(f"{self} closed the connection during {call}: {why}", next_step=step)
        return kind(f"{self} cannot be reached: {why}", next_step=step)

    def _late(self, call: str, seconds: float) -> LateError:
        return LateError(
            f"{self} has not answered {call} within {seconds:g} s",
            next_step="read the server's log; --timeout SECONDS waits for longer",
        )

    def _good(self, answer: Answer) -> Answer:
        """The answer, if its status is 200. Raises ServerError with the next step."""
        if answer.status == HTTPStatus.OK:
            return answer
        if 300 <= answer.status < 400:
            raise self._redirected(answer)
        said = f": {self.shown(answer.text)}" if answer.text.strip() else ""
        with_key = f" (with the key of {self._access.variable})" if self._access.key else ""
        refused = answer.status in _NO_KEY
        raise _KINDS.get(answer.status, ServerError)(
            f"{self} answers {answer.call} with {answer.status}{said}{with_key if refused else ''}",
            next_step=self._step(answer),
        )

    def _redirected(self, answer: Answer) -> RedirectError:
        path = answer.call.partition(" ")[2].partition("?")[0]
        # Without the query, which may have a token.
        to = answer.moved.partition("?")[0]
        with suppress(ValueError):
            to = urljoin(self.url + path, to) if to else ""
        base = to.removesuffix(path)
        step = "give the address of the server behind the proxy, which asks for a login"
        if base not in (to, self.url):
            step = f"give the address that the redirect points to, {self.shown(base)}"
        return RedirectError(
            f"{self} answers {answer.call} with {answer.status}, a redirect to "
            f"{self.shown(to) or 'nothing'}",
            next_step=step,
        )

    def _step(self, answer: Answer) -> str:
        """The next step for an answer that is not 200: of status and path, of either, or any."""
        path = answer.call.partition(" ")[2].partition("?")[0]
        wait = f"wait {self.shown(answer.after)} s" if answer.after.isdecimal() else "wait"
        variable = self._access.variable
        key = f"set {variable} to the server's API key"
        if self._access.key:
            key = f"correct the key in {variable}"
        steps: dict[int | str | tuple[int, str], str] = {
            **{(404, route): _ROUTES for route in _SLEEP},
            **{(403, route): _NAMED for route in _SLEEP},
            **{
                (401, route): f"{key}, or {SLEEP_KEY_VARIABLE} to the one of its sleep routes"
                for route in _SLEEP
            },
            (404, "/v1/completions"): "name a model that generates text with --model, or another "
            "server",
            (503, "/v1/completions"): f"see whether it is asleep: curl {self.url}/is_sleeping",
            (503, "/version"): "wait until the server has started, or read the log of the gateway "
            "before it",
            **dict.fromkeys(_NO_KEY, key),
            404: "check the address: it is that of the server, not of a page or a gateway",
            409: "stop the program that also puts this server to sleep or wakes it, and repeat",
            429: f"{wait}, and repeat, or give the address of the server behind the gateway",
            **dict.fromkeys((502, 504), _BEHIND),
            "/wake_up": "free GPU memory (another server on these GPUs has to sleep first: give "
            "both addresses), or read the server's log",
            "/sleep": "check that it runs with --enable-sleep-mode, and read its log",
        }
        known = ((answer.status, path), answer.status, path)
        return next((steps[one] for one in known if one in steps), "read the server's log")

    def _rank(self, said: Any) -> RankUse:
        """Raises LookupError, TypeError or ValueError for anything but the report of one rank."""
        return RankUse(
            dp=_count(said["dp_rank"]),
            pp=_count(said["pp_rank"]),
            tp=_count(said["tp_rank"]),
            asleep=self._tags(said["asleep_bytes"]),
            awake=self._tags(said["awake_bytes"]),
            host_copies=_count(said["host_copy_bytes"]),
        )

    def _tags(self, said: Any) -> dict[str, int]:
        if not isinstance(said, dict):
            raise TypeError
        return {self.shown(str(tag)): _count(size) for tag, size in said.items()}

    def _version(self) -> str:
        answer = self.send(*_FIRST.split(), timeout=_SOON)
        if answer.status in _TELLING or 300 <= answer.status < 400:
            self._good(answer)
        try:
            version = json.loads(answer.text)["version"]
        except (ValueError, RecursionError, LookupError, TypeError):
            version = None
        if answer.status != HTTPStatus.OK or not isinstance(version, str):
            raise ServerError(
                f"{self} is no vLLM server: GET /version is answered with {answer.status} and "
                f"{self.shown(answer.text) or 'nothing'!r}",
                next_step="check address and port; of a gateway, give the address of the server "
                "behind it",
            )
        return self.shown(version)

    def _model(self, wanted: str) -> str:
        answer = self.call("GET", "/v1/models", timeout=_SOON)
        listed = self._object(answer).get("data")
        names = [
            one["id"]
            for one in (listed if isinstance(listed, list) else ())
            if isinstance(one, dict) and isinstance(one.get("id"), str)
        ]
        if not names:
            raise self._nonsense(answer, "no model in its list")
        if wanted and wanted not in names:
            raise UsageError(
                f"{self} has no model {wanted!r}",
                next_step=f"give --model {' or '.join(map(self.shown, names[:5]))}",
            )
        return wanted or names[0]

    def _object(self, answer: Answer) -> dict[str, Any]:
        try:
            found = json.loads(answer.text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise self._nonsense(answer, "no JSON object")
        return found

    def _nonsense(self, answer: Answer, what: str) -> ServerError:
        return ServerError(
            f"{self} answers {answer.call} with {what}: {self.shown(answer.text) or 'nothing'}",
            next_step="check that the address is that of a vLLM server, with no gateway between",
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes: urllib3 wraps what the system says."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _count(said: Any) -> int:
    if type(said) is not int or said < 0:
        raise ValueError
    return said


def metrics(text: str) -> Mapping[str, float] | None:
    """Samples in Prometheus' text format by name, summed over labels; None if it is no such.

    What is not a finite number, as NaN of a collector that failed, is left out.
    """
    found: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + float(sample.value)
    except (ValueError, IndexError, KeyError, TypeError):
        return None
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _printable(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
