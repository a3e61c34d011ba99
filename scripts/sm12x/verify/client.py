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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, Field, ValidationError

from sm12x.core.errors import ServerError, UsageError
from sm12x.core.text import visible, without
from sm12x.doctor.host import Unseen
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

_ADDRESS = "write it as http://127.0.0.1:8000, without a path of the API"
_LOG = "check address and port, and http or https; if they are right, read the server's log"
_GATEWAY = "give the address of the server behind the gateway, or read its log"
_SLEEP = ("/sleep", "/wake_up", "/is_sleeping")

# The next step after a status that is not 200: the first row that fits. No paths, or no statuses,
# are all of them.
_STEPS: tuple[tuple[tuple[str, ...], Iterable[int], str], ...] = (
    (_SLEEP, (401,), f"{{key}}, or {options.SLEEP_KEY} to the one of its sleep routes"),
    (
        _SLEEP,
        (403,),
        "give the server's IP address in place of its name, or start it with that name in "
        "--allowed-origins, see SECURITY.md",
    ),
    (
        _SLEEP,
        (404,),
        "start the server with --enable-sleep-mode --enable-sleep-routes (a stock vLLM: with "
        "VLLM_SERVER_DEV_MODE=1), see docs/memory.md",
    ),
    (
        ("/collective_rpc",),
        (404,),
        "verify with --level 1, as a sleep of level 2 takes this route, or start the server with "
        "VLLM_SERVER_DEV_MODE=1 where only you reach its port (SECURITY.md)",
    ),
    (
        ("/v1/completions",),
        (404,),
        "name a model that generates text with --model, or another server",
    ),
    (("/v1/completions",), (503,), "see whether it is asleep: curl {url}/is_sleeping"),
    (
        ("/version",),
        (503,),
        "wait until the server has started, or read the log of the gateway before it",
    ),
    (
        (),
        range(300, 400),
        "give the address that it points to, or of a login page the address of the server behind "
        "the proxy",
    ),
    ((), (401, 403), "{key}"),
    ((), (404,), "check the address: it is that of the server, not of a page or a gateway"),
    ((), (409,), "stop the program that also puts this server to sleep or wakes it, and repeat"),
    ((), (429,), "{wait}, and repeat, or give the address of the server behind the gateway"),
    ((), (502, 504), _GATEWAY),
    (
        ("/wake_up",),
        (),
        "free GPU memory (another server on these GPUs has to sleep first: give both addresses), "
        "or read the server's log",
    ),
    (("/sleep",), (), "check that it runs with --enable-sleep-mode, and read its log"),
    ((), (), "read the server's log"),
)

# What happened where no answer came, and the next step, by the type of the error or of one that it
# wraps: the first row that fits.
_NO_ANSWERS: tuple[tuple[type[Exception], str, str], ...] = (
    (
        httpx.ConnectTimeout,
        "cannot be reached: no connection within {connect:g} s",
        "check the address, and the firewall on the way",
    ),
    (
        httpx.TimeoutException,
        "has not answered {call} within {seconds:g} s",
        "read the server's log; --timeout SECONDS waits for longer",
    ),
    (
        ssl.SSLError,
        "cannot be reached: by TLS: {why}",
        "write http:// if the server has no certificate, or give --ca-file FILE",
    ),
    (
        ConnectionRefusedError,
        "cannot be reached: nothing listens there",
        "check the address, and that the server has started; if it was running, its log says why "
        "it ended",
    ),
    (
        socket.gaierror,
        "cannot be reached: the name is not known",
        "check the host's name in the address",
    ),
    (
        httpx.ConnectError,
        "cannot be reached: {why}",
        "check the address, and the network on the way",
    ),
    (httpx.InvalidURL, "cannot be reached: it is not a usable address", _ADDRESS),
    (httpx.DecodingError, "answers {call} unreadably: {why}", _LOG),
    (Exception, "closed the connection during {call}: {why}", _LOG),
)
# After these a server has ended, as far as can be seen.
_GONE = (ConnectionRefusedError, httpx.ConnectError, Exception)


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


class CallError(ServerError):
    """A call that failed.

    ``status`` is that of the answer, None without one. ``gone``: nothing listens at the address, or
    the server closed the connection.
    """

    def __init__(
        self, message: str, *, next_step: str, status: int | None = None, gone: bool = False
    ) -> None:
        super().__init__(message, next_step=next_step)
        self.status = status
        self.gone = gone

    @property
    def unanswered(self) -> bool:
        """Whether the call may still be in progress on the server."""
        return self.status in (None, 502, 504)


class Identity(NamedTuple):
    """Version and model of a server, and whether it sleeps."""

    version: str
    model: str
    asleep: bool


class Completion(NamedTuple):
    """``tokens`` and ``ids`` of the text are None where the server does not give them."""

    text: str
    tokens: int | None
    ids: tuple[int, ...] | None
    seconds: float
    prompt_tokens: int | None = None


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


class _Answer(NamedTuple):
    """The answer to ``call``, such as "POST /sleep"."""

    call: str
    text: str
    seconds: float


# The parts of a JSON answer that are read; a server may say more.
class _Version(BaseModel):
    version: str


class ListedModel(BaseModel):
    """A model that a server has; ``root`` is where it is from, ``max_model_len`` in tokens."""

    id: str
    root: str | None = None
    max_model_len: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None


class _Models(BaseModel):
    data: Annotated[list[ListedModel], Field(min_length=1)]


class _Sleeping(BaseModel):
    is_sleeping: bool


class _Ranks(BaseModel):
    ranks: Annotated[tuple[RankUse, ...], Field(min_length=1)]


class _Choice(BaseModel):
    text: str
    token_ids: tuple[int, ...] | None = None


class _Usage(BaseModel):
    completion_tokens: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None
    prompt_tokens: Annotated[int, Field(ge=0, lt=1 << 53)] | None = None


class _Completed(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Usage | None = None


_R = TypeVar("_R", bound=BaseModel)


class Server:
    """A server at ``url``, which messages call ``name``; tests give a ``transport``.

    Each call raises CallError where there is no answer, or one with another status than 200, and
    ServerError where the answer is not that of vLLM.
    """

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

    @property
    def key(self) -> str:
        """The API key, "" without one."""
        return self._access.key

    def identify(self, model: str = "") -> Identity:
        """Ask for version, model and state, and check that the server can be verified.

        Args:
            model: the name to send requests with; "" is the first that the server has.

        Raises:
            UsageError: the server does not have ``model``.
        """
        version = self.version()
        self.choose(model)
        return Identity(version, self.model, self.is_sleeping())

    def version(self) -> str:
        """Ask for the version of vLLM."""
        answer = self.call("GET", "/version", timeout=_SOON)
        return self.shown(self._read(_Version, answer).version)

    def choose(self, model: str = "") -> ListedModel:
        """Take ``model`` for all requests, the first that the server has where it is "".

        Raises:
            UsageError: the server does not have ``model``.
        """
        listed = self._read(_Models, self.call("GET", "/v1/models", timeout=_SOON)).data
        chosen = next((one for one in listed if one.id == model or not model), None)
        if chosen is None:
            names = [self.shown(one.id) for one in listed[:5]]
            raise UsageError(
                f"{self} has no model {model!r}", next_step=f"give --model {' or '.join(names)}"
            )
        self.model = chosen.id
        return chosen

    def is_sleeping(self) -> bool:
        """Ask whether the server sleeps."""
        return self._read(_Sleeping, self.call("GET", "/is_sleeping", timeout=_SOON)).is_sleeping

    def ranks(self) -> tuple[RankUse, ...] | None:
        """Return the bytes asleep on each rank; None without a report in the known format."""
        with suppress(ServerError):
            return self._read(_Ranks, self.call("GET", "/is_sleeping", timeout=_SOON)).ranks
        return None

    def sleep(self, level: int, *, mode: str = "", retry: bool = False) -> float:
        """Put the server to sleep, and return the seconds that took.

        With ``retry`` again and again while another call is in flight. ``mode`` says what becomes
        of running requests, "" for the server's own.
        """
        return self._change(f"/sleep?level={level}{mode and f'&mode={mode}'}", retry=retry)

    def wake_up(self, tag: str = "", *, retry: bool = False) -> float:
        """Wake it up, all tags or one ``tag``, as ``sleep`` does."""
        return self._change(f"/wake_up?tags={tag}" if tag else "/wake_up", retry=retry)

    def reload_weights(self) -> float:
        """Load the weights again, between the two calls of a wake-up from level 2."""
        body = {"method": "reload_weights"}
        return self.call("POST", "/collective_rpc", body=body).seconds

    def require_reloading(self) -> None:
        """Check that ``reload_weights`` can be called."""
        try:
            self.call("GET", "/collective_rpc", timeout=_SOON)
        except CallError as error:
            # The route is there, for POST.
            if error.status != 405:
                raise

    def complete(self, prompt: str, tokens: int) -> Completion:
        """Return the greedy continuation of ``prompt``."""
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
        # Hidden before it is cut: a part of a key is found by nobody.
        text = self._hidden(reply.choices[0].text)
        usage = reply.usage or _Usage()
        ids = reply.choices[0].token_ids
        return Completion(text, usage.completion_tokens, ids, answer.seconds, usage.prompt_tokens)

    def stream(self, prompt: str, tokens: int) -> Iterator[str]:
        """Yield the pieces of the greedy continuation of ``prompt`` as they come."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
        }
        call, size = "POST /v1/completions", 0
        try:
            with self._client.stream(
                "POST", self.url + "/v1/completions", json=body, timeout=self._access.timeout
            ) as response:
                if response.status_code != 200:
                    raise self._refused(call, response, response.read()[:_MOST].decode())
                for line in response.iter_lines():
                    size += len(line)
                    data = line.removeprefix("data:").strip()
                    if size > _MOST or data == "[DONE]":
                        return
                    if data:
                        reply = self._read(_Completed, _Answer(call, data, 0.0))
                        yield self._hidden(reply.choices[0].text)
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise CallError(
                f"{self} closed the stream of {call}: {self.shown(str(error))}", next_step=_LOG
            ) from None

    def counters(self) -> Mapping[str, float]:
        """Return every sample of /metrics by its name, summed over labels; none if not seen."""
        with suppress(ServerError):
            return self._counters()
        return {}

    def at_work(self) -> int | Unseen:
        """Count requests that run or wait; Unseen where /metrics does not say that none does."""
        try:
            samples = self._counters()
        except ServerError as error:
            return Unseen(error.message)
        busy = int(sum(max(0.0, samples.get(name, 0)) for name in _AT_WORK))
        missing = [name for name in _AT_WORK if name not in samples]
        if busy or not missing:
            return busy
        return Unseen(f"GET /metrics has no number of {missing[0]}")

    def _counters(self) -> Mapping[str, float]:
        sums: dict[str, float] = {}
        answer = self.call("GET", "/metrics", timeout=_SOON)
        try:
            for family in text_string_to_metric_families(answer.text):
                for sample in family.samples:
                    sums[sample.name] = sums.get(sample.name, 0.0) + float(sample.value)
        except (ValueError, IndexError, KeyError, TypeError):
            return {}
        # NaN is of a collector that failed.
        return {name: value for name, value in sums.items() if math.isfinite(value)}

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> _Answer:
        """Send a request, and return its answer with status 200."""
        seconds = timeout or self._access.timeout
        connect = min(_CONNECT, seconds)
        call = f"{method} {path}"
        began = time.monotonic()
        content = bytearray()
        try:
            with self._client.stream(
                method,
                self.url + path,
                json=body,
                timeout=httpx.Timeout(seconds, connect=connect),
            ) as response:
                for part in response.iter_bytes():
                    content += part
                    if len(content) > _MOST:
                        raise httpx.DecodingError(f"it has more than {_MOST >> 20} MiB")
                    # The time-out of httpx begins anew with every byte: a gateway that sends a
                    # blank now and then to keep a connection open would never come to its end.
                    if time.monotonic() - began > seconds:
                        raise httpx.ReadTimeout("")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            # httpx and httpcore wrap what the system says.
            causes = [*_causes(error)]
            kind, event, step = next(
                row for row in _NO_ANSWERS if any(isinstance(one, row[0]) for one in causes)
            )
            system = next((one.strerror for one in causes if isinstance(one, OSError)), None)
            why = self.shown(system.lower() if system else str(error))
            event = event.format(call=call, seconds=seconds, connect=connect, why=why)
            raise CallError(f"{self} {event}", next_step=step, gone=kind in _GONE) from None
        text = content.decode("utf-8", errors="replace")
        if response.status_code != 200:
            raise self._refused(call, response, text)
        return _Answer(call, text, time.monotonic() - began)

    @functools.cached_property
    def _client(self) -> httpx.Client:
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        if self._access.key:
            headers["Authorization"] = f"Bearer {self._access.key}"
        trust: ssl.SSLContext | bool = True
        if ca := self._access.ca:
            is_folder = Path(ca).is_dir()
            trust = ssl.create_default_context(
                cafile=None if is_folder else ca, capath=ca if is_folder else None
            )
        return httpx.Client(
            headers=headers,
            verify=trust,
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
            try:
                return self.call("POST", path).seconds
            except CallError as error:
                if error.status != 409 or not retry or time.monotonic() > end:
                    raise
            time.sleep(_AGAIN)

    def _refused(self, call: str, response: httpx.Response, text: str) -> CallError:
        """Return the error for an answer whose status is not 200."""
        status, key, variable = response.status_code, self._access.key, self._access.variable
        words = f": {self.shown(text)}" if text.strip() else ""
        if 300 <= status < 400:
            # Without the query, which may have a token.
            to = response.headers.get("Location", "").partition("?")[0]
            words = f", a redirect to {self.shown(to) or 'nothing'}"
        elif key and status in (401, 403):
            words += f" (with the key of {variable})"
        path = call.partition(" ")[2].partition("?")[0]
        step = next(
            step
            for paths, statuses, step in _STEPS
            if (not paths or path in paths) and (not statuses or status in statuses)
        )
        after = response.headers.get("Retry-After", "")
        step = step.format(
            url=self.url,
            key=f"correct the key in {variable}"
            if key
            else f"set {variable} to the server's API key",
            wait=f"wait {after} s" if after.isdecimal() else "wait",
        )
        return CallError(
            f"{self} answers {call} with {status}{words}", next_step=step, status=status
        )

    def _read(self, reply: type[_R], answer: _Answer) -> _R:
        """Return an answer as the ``reply`` that vLLM gives."""
        try:
            return reply.model_validate_json(answer.text, strict=True)
        except ValidationError as error:
            fault = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, fault["loc"])) or "the JSON"
            raise ServerError(
                f"{self} answers {answer.call} unlike vLLM ({self.shown(where)}: "
                f"{self.shown(fault['msg'])}): {self.shown(answer.text) or 'nothing'}",
                next_step="check that the address is that of a vLLM server, with no gateway "
                "between",
            ) from None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(text: str) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
