"""One vLLM server over HTTP: version and model, sleep and wake-up, greedy answers, counters.

A server's answers are not trusted: sizes and times are limited, and quoted text is shortened,
printable, and without the API key.
"""

from __future__ import annotations

import functools
import math
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sm12x.core.errors import ServerError, UsageError
from sm12x.core.text import visible, without
from sm12x.doctor.model import Unseen
from sm12x.recipes import options
from sm12x.verify.report import RankUse

# Seconds that a connection may take, and an answer that needs no engine.
_CONNECT, _SOON = 10.0, 30.0
# Bytes of an answer that are read: /metrics of many engines takes a few MB.
_MOST = 16 << 20
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
_ADDRESS = "write it as http://127.0.0.1:8000, without a path of the API"
_SLEEP = ("/sleep", "/wake_up", "/is_sleeping")
# The first call of a run, and what to do where its answer is no HTTP.
_FIRST = "GET /version"
_NO_HTTP = "check address and port, and http or https; if it is a vLLM server, read its log"
_LOG = "read the server's log, start it again, and repeat the command"


def base_url(text: str) -> str:
    """Return ``text`` as http://HOST:PORT[/PREFIX], without /v1.

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
        raise UsageError(f"{_line(text)!r} is no address: {error}", next_step=_ADDRESS) from None
    if parts.username is not None or parts.password is not None:
        # Not shown: it holds a password.
        raise UsageError(
            "an address with a user or a password in it is not taken: it would be printed",
            next_step=f"put an API key into {options.KEY}, and leave the address without it",
        )
    usable = parts.scheme in ("http", "https") and host and not re.search(r"\s", given)
    if not usable or parts.query or parts.fragment:
        raise UsageError(f"{_line(text)!r} is not the address of a server", next_step=_ADDRESS)
    name = f"[{host}]" if ":" in str(host) else host
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{name}{f':{port}' if port is not None else ''}{prefix}"


def checked_key(key: str, variable: str) -> str:
    """Return the key without blanks around it.

    Raises:
        UsageError: it cannot stand in an HTTP header; the key is not shown.
    """
    stripped = key.strip()
    if not (stripped.isascii() and stripped.isprintable()) or " " in stripped:
        raise UsageError(
            f"the API key in {variable} has characters that no HTTP header can have",
            next_step=f"set {variable} to the key alone, without line breaks and quotes",
        )
    return stripped


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
    """The answer to ``call``, such as "POST /sleep"."""

    call: str
    status: int
    text: str
    seconds: float
    headers: httpx.Headers

    @property
    def path(self) -> str:
        return self.call.partition(" ")[2].partition("?")[0]


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
    variable: str = options.KEY
    ca: str = ""
    timeout: float = 300.0


_Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class _Reply(BaseModel):
    """The parts of a JSON answer that are read; a server may say more."""

    model_config = ConfigDict(strict=True)


class _Version(_Reply):
    version: str


class _Model(_Reply):
    id: str


class _Models(_Reply):
    data: Annotated[list[_Model], Field(min_length=1)]


class _Sleeping(_Reply):
    is_sleeping: bool


class _Rank(_Reply):
    dp_rank: _Count
    pp_rank: _Count
    tp_rank: _Count
    asleep_bytes: dict[str, _Count]
    awake_bytes: dict[str, _Count]
    host_copy_bytes: _Count


class _Ranks(_Reply):
    ranks: Annotated[list[_Rank], Field(min_length=1)]


class _Choice(_Reply):
    text: str
    token_ids: list[int] | None = None


class _Usage(_Reply):
    completion_tokens: _Count | None = None


class _Completed(_Reply):
    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Usage | None = None


_R = TypeVar("_R", bound=_Reply)


class Server:
    """A server at ``url``, which messages call ``name``; tests give a ``transport``."""

    def __init__(
        self, name: str, url: str, access: Access, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.name = name
        self.url = url
        self.model = ""
        self._access = access
        self._transport = transport

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
        listed = self._read(_Models, self.call("GET", "/v1/models", timeout=_SOON))
        names = [one.id for one in listed.data]
        if model and model not in names:
            raise UsageError(
                f"{self} has no model {model!r}",
                next_step=f"give --model {' or '.join(map(self.shown, names[:5]))}",
            )
        self.model = model or names[0]
        return Identity(version=version, model=self.model, asleep=self.is_sleeping())

    def is_sleeping(self) -> bool:
        """Raises ServerError, also where there is no such route."""
        return self._read(_Sleeping, self.call("GET", "/is_sleeping", timeout=_SOON)).is_sleeping

    def ranks(self) -> tuple[RankUse, ...] | None:
        """Return the bytes asleep on each rank; None without a report in the known format."""
        try:
            reply = self._read(_Ranks, self.call("GET", "/is_sleeping", timeout=_SOON))
        except ServerError:
            return None
        return tuple(
            RankUse(
                dp=one.dp_rank,
                pp=one.pp_rank,
                tp=one.tp_rank,
                asleep={self.shown(tag): count for tag, count in one.asleep_bytes.items()},
                awake={self.shown(tag): count for tag, count in one.awake_bytes.items()},
                host_copies=one.host_copy_bytes,
            )
            for one in reply.ranks
        )

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
        """Return the greedy continuation of ``prompt``. Raises ServerError."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            # A server that does not know this key ignores it.
            "return_token_ids": True,
        }
        answer = self.call("POST", "/v1/completions", body=body)
        reply = self._read(_Completed, answer)
        choice = reply.choices[0]
        return Completion(
            # Before it is cut: a part of a key is found by nobody.
            text=self._hidden(choice.text),
            tokens=reply.usage.completion_tokens if reply.usage else None,
            ids=None if choice.token_ids is None else tuple(choice.token_ids),
            seconds=answer.seconds,
        )

    def counters(self) -> Mapping[str, float] | None:
        """Return every sample of /metrics by its name, summed over labels; None if not seen."""
        with suppress(ServerError):
            return metrics(self.call("GET", "/metrics", timeout=_SOON).text)
        return None

    def at_work(self) -> int | Unseen:
        """Count requests that run or wait; Unseen where /metrics does not say that none does."""
        try:
            samples = metrics(self.call("GET", "/metrics", timeout=_SOON).text) or {}
        except ServerError as error:
            return Unseen(error.message)
        busy = int(sum(max(0.0, samples.get(name, 0)) for name in _AT_WORK))
        missing = [name for name in _AT_WORK if name not in samples]
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
        """Send a request as ``send`` does, and raise ServerError for any status but 200."""
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
        content = bytearray()
        limits = httpx.Timeout(seconds, connect=min(_CONNECT, seconds))
        try:
            with self._client.stream(
                method, self.url + path, json=body, timeout=limits
            ) as response:
                for part in response.iter_bytes():
                    content += part
                    if len(content) > _MOST:
                        raise ServerError(
                            f"{self} does not finish its answer to {call}", next_step=_LOG
                        )
                    # The time-out of httpx begins anew with every byte: a gateway that sends a
                    # blank now and then to keep a connection open would never come to its end.
                    if time.monotonic() - began > seconds:
                        raise self._late(call, seconds)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            raise self._silent(call, error, seconds) from None
        return Answer(
            call=call,
            status=response.status_code,
            text=content.decode("utf-8", errors="replace"),
            seconds=time.monotonic() - began,
            headers=response.headers,
        )

    @functools.cached_property
    def _client(self) -> httpx.Client:
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        if self._access.key:
            headers["Authorization"] = f"Bearer {self._access.key}"
        return httpx.Client(
            headers=headers,
            verify=_trust(self._access.ca) if self._access.ca else True,
            # No proxy of the environment between here and the server that is timed, and a
            # connection for each request: the server may close a kept one as it is used again.
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            transport=self._transport,
        )

    def shown(self, text: str) -> str:
        """Return a server's text as it is printed: short, on one line, without secrets."""
        return _line(self._hidden(text))

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

    def _silent(self, call: str, error: Exception, seconds: float) -> ServerError:
        """Return the error for a request without an answer, by the types of its causes."""
        if isinstance(error, httpx.TimeoutException) and not isinstance(
            error, httpx.ConnectTimeout
        ):
            return self._late(call, seconds)
        # httpx and httpcore wrap what the system says.
        system = next((one for one in _causes(error) if isinstance(one, OSError)), None)
        kind: type[ServerError] = ServerError
        why = self.shown(getattr(system, "strerror", None) or str(error)).lower()
        step = "check the address, and the network on the way"
        if isinstance(system, ssl.SSLError):
            why = f"by TLS: {why}"
            step = "write http:// if the server has no certificate, or give --ca-file FILE"
        elif isinstance(system, ConnectionRefusedError):
            kind, why = GoneError, "nothing listens there"
            step = (
                "check the address, and that the server has started; if it was running, its log "
                "says why it ended"
            )
        elif isinstance(system, socket.gaierror):
            why, step = "the name is not known", "check the host's name in the address"
        elif isinstance(error, httpx.ConnectTimeout):
            why = f"no connection within {min(_CONNECT, seconds):g} s"
            step = "check the address, and the firewall on the way"
        elif isinstance(error, httpx.ConnectError):
            kind = GoneError
        elif isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol):
            why, step = "it is not a usable address", _ADDRESS
        else:
            step = _NO_HTTP if call == _FIRST else _LOG
            if isinstance(error, httpx.DecodingError):
                return ServerError(f"{self} answers {call} unreadably: {why}", next_step=step)
            return GoneError(f"{self} closed the connection during {call}: {why}", next_step=step)
        return kind(f"{self} cannot be reached: {why}", next_step=step)

    def _late(self, call: str, seconds: float) -> LateError:
        return LateError(
            f"{self} has not answered {call} within {seconds:g} s",
            next_step="read the server's log; --timeout SECONDS waits for longer",
        )

    def _good(self, answer: Answer) -> Answer:
        """Return the answer, if its status is 200. Raises ServerError with the next step."""
        if answer.status == HTTPStatus.OK:
            return answer
        if 300 <= answer.status < 400:
            raise self._redirected(answer)
        words = f": {self.shown(answer.text)}" if answer.text.strip() else ""
        if self._access.key and answer.status in _NO_KEY:
            words += f" (with the key of {self._access.variable})"
        raise _KINDS.get(answer.status, ServerError)(
            f"{self} answers {answer.call} with {answer.status}{words}",
            next_step=self._step(answer),
        )

    def _redirected(self, answer: Answer) -> RedirectError:
        # Without the query, which may have a token.
        to = answer.headers.get("Location", "").partition("?")[0]
        return RedirectError(
            f"{self} answers {answer.call} with {answer.status}, a redirect to "
            f"{self.shown(to) or 'nothing'}",
            next_step="give the address that it points to, or of a login page the address of the "
            "server behind the proxy",
        )

    def _step(self, answer: Answer) -> str:
        """Return the next step for an answer that is not 200: of status and path, of either."""
        variable = self._access.variable
        key = f"{'correct the key in' if self._access.key else 'set'} {variable}"
        key = key if self._access.key else f"{key} to the server's API key"
        after = answer.headers.get("Retry-After", "")
        wait = f"wait {after} s" if after.isdecimal() else "wait"
        behind = "give the address of the server behind the gateway, or read its log"
        of_sleep = {
            401: f"{key}, or {options.SLEEP_KEY} to the one of its sleep routes",
            403: "give the server's IP address in place of its name, or start it with that name in "
            "--allowed-origins, see SECURITY.md",
            404: "start the server with --enable-sleep-mode --enable-sleep-routes (a stock vLLM: "
            "with VLLM_SERVER_DEV_MODE=1), see docs/memory.md",
        }
        of_status = {
            401: key,
            403: key,
            404: "check the address: it is that of the server, not of a page or a gateway",
            409: "stop the program that also puts this server to sleep or wakes it, and repeat",
            429: f"{wait}, and repeat, or give the address of the server behind the gateway",
            502: behind,
            504: behind,
        }
        of_path: dict[str, dict[int, str]] = {
            **dict.fromkeys(_SLEEP, of_sleep),
            "/v1/completions": {
                404: "name a model that generates text with --model, or another server",
                503: f"see whether it is asleep: curl {self.url}/is_sleeping",
            },
            "/version": {
                503: "wait until the server has started, or read the log of the gateway before it"
            },
        }
        at_last = {
            "/wake_up": "free GPU memory (another server on these GPUs has to sleep first: give "
            "both addresses), or read the server's log",
            "/sleep": "check that it runs with --enable-sleep-mode, and read its log",
        }
        return (
            of_path.get(answer.path, {}).get(answer.status)
            or of_status.get(answer.status)
            or at_last.get(answer.path, "read the server's log")
        )

    def _version(self) -> str:
        answer = self.send(*_FIRST.split(), timeout=_SOON)
        if answer.status in _TELLING or 300 <= answer.status < 400:
            self._good(answer)
        with suppress(ValidationError):
            version = _Version.model_validate_json(answer.text).version
            if answer.status == HTTPStatus.OK:
                return self.shown(version)
        raise ServerError(
            f"{self} is no vLLM server: GET /version is answered with {answer.status} and "
            f"{self.shown(answer.text) or 'nothing'!r}",
            next_step="check address and port; of a gateway, give the address of the server "
            "behind it",
        )

    def _read(self, reply: type[_R], answer: Answer) -> _R:
        """Return an answer as the ``reply`` that vLLM gives. Raises ServerError if it is none."""
        try:
            return reply.model_validate_json(answer.text)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, fault["loc"])) or "the JSON"
            raise ServerError(
                f"{self} answers {answer.call} unlike vLLM ({self.shown(where)}: "
                f"{self.shown(fault['msg'])}): {self.shown(answer.text) or 'nothing'}",
                next_step="check that the address is that of a vLLM server, with no gateway "
                "between",
            ) from None


def _trust(ca: str) -> ssl.SSLContext:
    """Trust the certificates in a file or a folder."""
    if Path(ca).is_dir():
        return ssl.create_default_context(capath=ca)
    return ssl.create_default_context(cafile=ca)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def metrics(text: str) -> Mapping[str, float] | None:
    """Return samples in Prometheus' text format by name, summed over labels; None if it is no such.

    What is not a finite number, as NaN of a collector that failed, is left out.
    """
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + float(sample.value)
    except (ValueError, IndexError, KeyError, TypeError):
        return None
    return {name: value for name, value in sums.items() if math.isfinite(value)}


def _line(text: str) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
