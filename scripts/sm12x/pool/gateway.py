"""The pool's HTTP: requests are passed on as they come, or held while their model sleeps."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import os
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import WSMsgType, web
from multidict import CIMultiDict
from yarl import URL

from sm12x import layout
from sm12x.pool import requests
from sm12x.pool.config import PoolConfig
from sm12x.pool.gpus import MIB
from sm12x.pool.members import Member, RefusalError, Ticket
from sm12x.pool.rotation import Rotation
from sm12x.pool.state import Phase

# Of one connection alone, and what the pool sets itself.
_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "authorization", "x-api-key", "content-length"),
        *("expect", "proxy-connection"),
    }
)
# Bytes that a transport takes without a pause.
_CALM = 1 << 15
_REMEMBERED = 10_000
# A server may think for as long as its client waits; it has to take the connection soon.
_NO_LIMIT = aiohttp.ClientTimeout(total=None, sock_connect=10)
_AS_THEY_ARE = frozenset({"User-Agent", "Accept", "Accept-Encoding", "Content-Type"})
_SSE = "text/event-stream"
MODEL_HEADER, WAIT_HEADER = "X-Pool-Model", "X-Pool-Wait-Ms"


class Keys:
    """The keys of users and of administration, by digests; they are read once."""

    def __init__(self, config: PoolConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._users: list[tuple[bytes, int]] = []
        for name in dict.fromkeys([*config.keys.users, *config.keys.priorities]):
            for key in environ.get(name, "").split(","):
                if key.strip():
                    digest = hashlib.sha256(key.strip().encode()).digest()
                    self._users.append((digest, config.keys.priorities.get(name, 0)))
        admin = environ.get(config.keys.admin, "").strip()
        self._admin = hashlib.sha256(admin.encode()).digest() if admin else b""
        self.open = not self._users

    @staticmethod
    def _given(headers: Mapping[str, str]) -> bytes:
        scheme, _, word = headers.get("Authorization", "").partition(" ")
        # Anthropic's clients send theirs in a header of its own.
        key = word if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return hashlib.sha256(key.strip().encode(errors="replace")).digest()

    def user(self, headers: Mapping[str, str]) -> int | None:
        """Return the priority of a user's key, 0 where none is needed; None for a wrong one."""
        given, result = self._given(headers), None
        for digest, priority in self._users:
            if hmac.compare_digest(digest, given):
                result = priority
        if result is None and (self.admin(headers) or (self.open and not _of_a_page(headers))):
            return 0
        return result

    def admin(self, headers: Mapping[str, str]) -> bool:
        """Tell whether the key of administration is there; never where none is set."""
        return bool(self._admin) and hmac.compare_digest(self._admin, self._given(headers))


class Gateway:
    """The routes of a pool. ``reload`` reads the configuration again, and returns what changed."""

    def __init__(
        self,
        rotation: Rotation,
        session: aiohttp.ClientSession,
        keys: Keys,
        reload: Callable[[], Awaitable[dict[str, Any]]],
    ) -> None:
        self.rotation = rotation
        self.keys = keys
        self._session = session
        self._reload = reload
        # Which model has answered a stored response.
        self._responses: OrderedDict[str, str] = OrderedDict()
        self._page = (layout.data() / "pool.html").read_bytes()

    def app(self) -> web.Application:
        """Return the application: the pool's own routes first, then what is passed on."""
        app = web.Application(client_max_size=self.rotation.config.limits.body_mib * MIB)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ping", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_get("/pool", self._snapshot)
        app.router.add_get("/pool/", self._status_page)
        app.router.add_post("/pool/reload", self._reload_route)
        app.router.add_post("/pool/models/{name:.+}/{verb}", self._command)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    # -- the pool's own routes --

    async def _health(self, request: web.Request) -> web.Response:
        lost = (Phase.STOPPED, Phase.UNKNOWN, Phase.OUT)
        usable = any(one.phase not in lost for one in self.rotation.members.values())
        if self.rotation.closing or not self.rotation.ready or not usable:
            status = "starting" if usable else "no model can be served"
            return web.json_response({"status": status}, status=503)
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.keys.user(request.headers) is None:
            return self._refused(request, _UNAUTHORIZED)
        members = [*self.rotation.members.values()]
        texts = await asyncio.gather(*(one.engine.metrics() for one in members))
        self.rotation.gauge()
        servers = {one.key: text for one, text in zip(members, texts, strict=True) if text}
        body = self.rotation.metrics.text(servers)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _models(self, request: web.Request) -> web.Response:
        if self.keys.user(request.headers) is None:
            return self._refused(request, _UNAUTHORIZED)
        entries = [entry for one in self.rotation.members.values() for entry in self._entries(one)]
        return web.json_response({"object": "list", "data": entries})

    async def _model(self, request: web.Request) -> web.Response:
        if self.keys.user(request.headers) is None:
            return self._refused(request, _UNAUTHORIZED)
        name = request.match_info["name"]
        member = self.rotation.find(name)
        if member is None:
            return self._refused(request, _unknown(name))
        entries = self._entries(member)
        return web.json_response(next((one for one in entries if one["id"] == name), entries[0]))

    def _entries(self, member: Member) -> list[dict[str, Any]]:
        """Return OpenAI's fields of each name that a server has, and the pool's beside them."""
        shown = self.rotation.shown(member)
        pool = {
            name: shown[name]
            for name in ("state", "why", "rung", "gpus", "pinned", "awake_seconds", "waiting")
        }
        pool |= {"aliases": [*shown["aliases"]], "last_swap": shown["last_swap"]}
        if member.key != member.served:
            pool["aliases"].insert(0, member.key)
        plain = {"id": member.served, "object": "model", "created": 0, "owned_by": "vllm"}
        return [{**one, "pool": pool} for one in member.names or (plain,)]

    async def _snapshot(self, request: web.Request) -> web.Response:
        if self.keys.user(request.headers) is None:
            return self._refused(request, _UNAUTHORIZED)
        return web.json_response(self.rotation.snapshot())

    async def _status_page(self, request: web.Request) -> web.Response:
        # The page has no facts in it: what it shows it asks for with the key that is given there.
        return web.Response(
            body=self._page,
            content_type="text/html",
            charset="utf-8",
            headers={
                "Content-Security-Policy": "default-src 'none'; connect-src 'self'; "
                "script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'; "
                "form-action 'none'; frame-ancestors 'none'",
                "X-Content-Type-Options": "nosniff",
                "Referrer-Policy": "no-referrer",
                "Cache-Control": "no-store",
            },
        )

    async def _reload_route(self, request: web.Request) -> web.Response:
        if not self.keys.admin(request.headers):
            return self._refused(request, _NOT_ADMIN)
        try:
            return web.json_response(await self._reload())
        except RefusalError as refusal:
            return self._refused(request, refusal)

    async def _command(self, request: web.Request) -> web.Response:
        if not self.keys.admin(request.headers):
            return self._refused(request, _NOT_ADMIN)
        names = request.match_info
        try:
            return web.json_response(await self.rotation.command(names["name"], names["verb"]))
        except RefusalError as refusal:
            return self._refused(request, refusal)

    def _refused(
        self, request: web.BaseRequest, refusal: RefusalError, member: Member | None = None
    ) -> web.Response:
        key = member.key if member else ""
        self.rotation.metrics.refusals.labels(key, refusal.code).inc()
        body = requests.error_body(request.path, refusal.status, refusal.text, refusal.code)
        headers = {MODEL_HEADER: key} if member else {}
        if refusal.retry is not None and math.isfinite(refusal.retry):
            headers["Retry-After"] = str(max(1, math.ceil(refusal.retry)))
        if refusal.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        # What is left of a body is not read: the connection cannot be used again.
        if request.can_read_body and not request.content.at_eof():
            headers["Connection"] = "close"
        return web.Response(
            body=body, status=refusal.status, headers=headers, content_type="application/json"
        )

    # -- what is passed on --

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        member: Member | None = None
        try:
            priority = self.keys.user(request.headers)
            if priority is None:
                raise _UNAUTHORIZED
            path = request.rel_url.raw_path
            if not requests.is_passed_on(path, self.rotation.config.paths):
                raise RefusalError(404, "not_found", f"this pool has no route {request.path}")
            if header := self.rotation.config.priority_header:
                priority = max(priority, requests.priority(request.headers.get(header, "")))
            body = Body(request, self.rotation.config)
            member, name = await self._model_of(request, body)
            if request.headers.get("Upgrade", "").lower() == "websocket":
                return await self._websocket(request, member, priority)
            return await self._exchange(request, body, member, name, priority)
        except RefusalError as refusal:
            if member is not None:
                status = str(refusal.status)
                self.rotation.metrics.requests.labels(member.key, status).inc()
            return self._refused(request, refusal, member)
        except asyncio.CancelledError:
            if member is not None:
                self.rotation.metrics.gone.labels(member.key).inc()
            raise

    async def _model_of(self, request: web.Request, body: Body) -> tuple[Member, str]:
        """Return the model of a request, and the name that it gives. Raises RefusalError."""
        rotation = self.rotation
        name = request.query.get("model", "") or request.headers.get(MODEL_HEADER, "")
        if not name and request.can_read_body:
            named = await body.named()
            name = named.name if named else ""
        if not name and (stored := requests.of_response(request.path)):
            name = self._responses.get(stored, "")
        if not name:
            first = rotation.config.default
            if not first and len(rotation.members) > 1:
                raise RefusalError(
                    400,
                    "model_missing",
                    "the request names no model: give `model` in its body or query",
                )
            name = first or next(iter(rotation.members), "")
        member = rotation.find(name)
        if member is None:
            raise _unknown(name)
        return member, name

    async def _exchange(
        self, request: web.Request, body: Body, member: Member, name: str, priority: int
    ) -> web.StreamResponse:
        ticket = await self._place(member, priority, body)
        try:
            body.rename(self.rotation.upstream(member, name), name)
            while True:
                upstream = await self._send(request, body, member)
                try:
                    if not (body.again and await self._fell_asleep(upstream, member)):
                        return await self._answer(request, upstream, ticket)
                finally:
                    upstream.close()
                # Nothing was served yet: the request waits for the wake-up like any other.
                self.rotation.leave(ticket)
                ticket = await self._place(member, priority, body)
        finally:
            self.rotation.leave(ticket)

    async def _fell_asleep(self, upstream: aiohttp.ClientResponse, member: Member) -> bool:
        """Whether the server refused since somebody else has put it to sleep."""
        if upstream.status != 503 or "Retry-After" not in upstream.headers:
            return False
        await self.rotation.look(member)
        return member.phase is not Phase.AWAKE

    async def _place(self, member: Member, priority: int, body: Body | None) -> Ticket:
        """Wait until the model is awake; a body is read meanwhile. Raises RefusalError."""
        ticket = self.rotation.enter(member, priority)
        if ticket.admitted:
            return ticket
        try:
            if body is None:
                await self.rotation.wait(ticket)
                return ticket
            self.rotation.weigh(ticket, body.size)
            # A client that goes away is noticed only while its bytes are read.
            reading = asyncio.ensure_future(
                body.read_all(lambda more: self.rotation.weigh(ticket, more))
            )
            try:
                await asyncio.gather(reading, self.rotation.wait(ticket))
            finally:
                reading.cancel()
        except BaseException:
            self.rotation.leave(ticket)
            raise
        return ticket

    async def _send(
        self, request: web.Request, body: Body, member: Member
    ) -> aiohttp.ClientResponse:
        """Return the server's answer, before its body. Raises RefusalError where there is none."""
        headers = _headers(request.headers, member)
        if body.length is not None:
            headers["Content-Length"] = str(body.length)
        url = member.spec.url + request.rel_url.raw_path_qs
        try:
            return await self._session.request(
                request.method,
                _as_it_is(url),
                headers=headers,
                data=body.send() if request.can_read_body or body.size else None,
                allow_redirects=False,
                timeout=_NO_LIMIT,
                skip_auto_headers=_AS_THEY_ARE,
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error.__cause__, RefusalError):
                raise error.__cause__ from None
            self.rotation.event("lost", model=member.key, why=repr(error))
            asyncio.get_running_loop().call_soon(self._look, member)
            raise RefusalError(
                503, "server_lost", f"the server of {member.key} did not answer", 1.0
            ) from None

    def _look(self, member: Member) -> None:
        if not member.changing:
            self.rotation.keep(self.rotation.look(member))

    async def _answer(
        self, request: web.Request, upstream: aiohttp.ClientResponse, ticket: Ticket
    ) -> web.StreamResponse:
        """Pass an answer on, chunk by chunk as it comes."""
        member, metrics = ticket.member, self.rotation.metrics
        metrics.requests.labels(member.key, str(upstream.status)).inc()
        headers: CIMultiDict[str] = CIMultiDict()
        for name, value in upstream.headers.items():
            if name.lower() not in _HOP:
                headers.add(name, value)
        headers[MODEL_HEADER] = member.key
        headers[WAIT_HEADER] = f"{ticket.waited * 1000:.0f}"
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=headers
        )
        length = upstream.headers.get("Content-Length")
        if length is not None:
            response.content_length = int(length)
        limit = self.rotation.config.limits.stall_seconds
        sent, first = 0, True
        stores = request.method == "POST" and request.path == "/v1/responses"
        try:
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                if first and stores and (stored := requests.response_id(chunk)):
                    self._remember(stored, member.key)
                first = False
                sent += len(chunk)
                await _write(response, chunk, limit, request)
        except (aiohttp.ClientError, OSError) as error:
            if request.transport is None or request.transport.is_closing():
                metrics.gone.labels(member.key).inc()
                raise asyncio.CancelledError from None
            # The server has ended in the middle: a stream says so, and nothing looks whole.
            self.rotation.event("lost", model=member.key, why=repr(error))
            self._look(member)
            if upstream.headers.get("Content-Type", "").startswith(_SSE):
                text = f"the server of {member.key} ended before the end of this answer"
                event = requests.error_body(request.path, 503, text, "server_lost")
                with suppress(OSError):
                    await response.write(b"event: error\ndata: " + event + b"\n\n")
            request.transport.close()
            return response
        finally:
            metrics.bytes.labels(member.key, "out").inc(sent)
        await response.write_eof()
        return response

    def _remember(self, stored: str, key: str) -> None:
        self._responses[stored] = key
        while len(self._responses) > _REMEMBERED:
            self._responses.popitem(last=False)

    async def _websocket(
        self, request: web.Request, member: Member, priority: int
    ) -> web.StreamResponse:
        ticket = await self._place(member, priority, None)
        most = self.rotation.config.limits.body_mib * MIB
        try:
            words = request.headers.get("Sec-WebSocket-Protocol", "")
            protocols = tuple(word.strip() for word in words.split(",") if word.strip())
            url = member.spec.url + request.rel_url.raw_path_qs
            try:
                server = await self._session.ws_connect(
                    _as_it_is(url),
                    headers={
                        name: value
                        for name, value in _headers(request.headers, member).items()
                        if not name.lower().startswith("sec-websocket")
                    },
                    protocols=protocols,
                    max_msg_size=most,
                )
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                status = getattr(error, "status", 503)
                text = f"the server of {member.key} did not take a WebSocket"
                raise RefusalError(
                    status if 400 <= status < 600 else 503, "server_lost", text
                ) from None
            chosen = (server.protocol,) if server.protocol else ()
            client = web.WebSocketResponse(
                protocols=chosen, max_msg_size=most, timeout=5.0, autoping=True
            )
            client.headers[MODEL_HEADER] = member.key
            client.headers[WAIT_HEADER] = f"{ticket.waited * 1000:.0f}"
            await client.prepare(request)
            self.rotation.metrics.requests.labels(member.key, "101").inc()
            pumps = [
                asyncio.create_task(_pump(client, server)),
                asyncio.create_task(_pump(server, client)),
            ]
            try:
                await asyncio.wait(pumps, return_when="FIRST_COMPLETED")
            finally:
                for pump in pumps:
                    pump.cancel()
                await server.close(code=client.close_code or 1000)
                await client.close(code=server.close_code or 1011)
            return client
        finally:
            self.rotation.leave(ticket)


class Body:
    """A request's body: read as far as its model is named, and passed on from there.

    ``size`` are the bytes that are held, ``length`` those of the whole; None where it comes in
    chunks. ``again`` tells whether it can be sent a second time.
    """

    def __init__(self, request: web.Request, config: PoolConfig) -> None:
        self._request = request
        self._most = config.limits.body_mib * MIB
        self._stall = config.limits.stall_seconds
        self._type = request.headers.get("Content-Type", "")
        self._held = bytearray()
        self._named: requests.Named | None = None
        self._whole = not request.can_read_body
        self._streamed = False
        self._received = 0
        self.length = request.content_length if request.can_read_body else None
        if self.length is not None and self.length > self._most:
            raise self._too_large()

    @property
    def size(self) -> int:
        return len(self._held)

    @property
    def again(self) -> bool:
        return not self._streamed

    def _too_large(self) -> RefusalError:
        text = f"the body has more than {self._most // MIB} MiB"
        return RefusalError(413, "body_too_large", text)

    async def _more(self) -> bytes:
        """Return the next bytes, none at the end. Raises RefusalError for a client that stalls."""
        try:
            async with asyncio.timeout(self._stall):
                chunk = await self._request.content.readany()
        except TimeoutError:
            text = f"no byte of the body came for {self._stall:g} s"
            raise RefusalError(408, "client_stalled", text) from None
        except aiohttp.ClientPayloadError as error:
            raise RefusalError(400, "body_broken", f"the body cannot be read: {error}") from None
        self._received += len(chunk)
        # Without the last look at a body whose length was told.
        if not chunk or self._received == self._request.content_length:
            self._whole = True
        return chunk

    def _hold(self, chunk: bytes) -> None:
        self._held += chunk
        if len(self._held) > self._most:
            raise self._too_large()

    async def named(self) -> requests.Named | None:
        """Return the model that the body names, having read as much of it as that takes."""
        looked = 0
        while not self._whole:
            self._hold(await self._more())
            # A long body is looked through again only after it has doubled.
            if self._whole or len(self._held) >= 2 * looked:
                looked = len(self._held)
                self._named = requests.in_body(bytes(self._held), self._type)
                if self._named:
                    break
        return self._named

    async def read_all(self, weigh: Callable[[int], None]) -> None:
        """Read the rest; ``weigh`` is given the bytes of each piece."""
        while not self._whole:
            chunk = await self._more()
            weigh(len(chunk))
            self._hold(chunk)

    def rename(self, name: str, given: str) -> None:
        """Put the server's own name of the model in the place of an alias."""
        if self._named is None or name == given or self._named.name != given:
            return
        held = requests.renamed(bytes(self._held), self._named, name, self._type)
        if self.length is not None:
            self.length += len(held) - len(self._held)
        self._held = bytearray(held)
        self._named = None

    def send(self) -> bytes | AsyncIterator[bytes]:
        """Return the body: its bytes where all are there, else what yields them as they come."""
        if self._whole:
            return bytes(self._held)
        self._streamed = True
        return self._stream()

    async def _stream(self) -> AsyncIterator[bytes]:
        total = len(self._held)
        if self._held:
            yield bytes(self._held)
            self._held.clear()
        while not self._whole and (chunk := await self._more()):
            total += len(chunk)
            if total > self._most:
                raise self._too_large()
            yield chunk


async def _write(
    response: web.StreamResponse, chunk: bytes, limit: float, request: web.Request
) -> None:
    """Write a chunk; a client that takes none of it for ``limit`` seconds is cut off."""
    transport = request.transport
    if transport is None or transport.get_write_buffer_size() + len(chunk) < _CALM:
        # The usual case, in which nothing waits: without the cost of a timer for each token.
        await response.write(chunk)
        return
    try:
        async with asyncio.timeout(limit):
            await response.write(chunk)
    except TimeoutError:
        transport.abort()
        raise asyncio.CancelledError from None


async def _pump(
    source: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
    sink: web.WebSocketResponse | aiohttp.ClientWebSocketResponse,
) -> None:
    with suppress(ConnectionError, RuntimeError):
        async for message in source:
            if message.type is WSMsgType.TEXT:
                await sink.send_str(message.data)
            elif message.type is WSMsgType.BINARY:
                await sink.send_bytes(message.data)


def _headers(headers: Mapping[str, str], member: Member) -> CIMultiDict[str]:
    """Return the headers for the server: the client's without those of its connection and key."""
    named = {word.strip().lower() for word in headers.get("Connection", "").split(",")}
    passed: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in _HOP and name.lower() not in named:
            passed.add(name, value)
    passed.update(member.engine.headers)
    return passed


def _of_a_page(headers: Mapping[str, str]) -> bool:
    """Whether a web page of another server asks, or has let its own name lead here.

    Browsers say in Host and Origin which name was looked up, and which page asks.
    """
    host, origin = headers.get("Host", ""), headers.get("Origin", "")
    name = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    own = name.startswith("[") or not re.search("[.].*[a-z]", name, re.IGNORECASE)
    return not own or (bool(origin) and origin not in (f"http://{host}", f"https://{host}"))


def _as_it_is(url: str) -> URL:
    return URL(url, encoded=True)


def _unknown(name: str) -> RefusalError:
    return RefusalError(404, "model_not_found", f"The model `{name[:200]}` does not exist.")


_UNAUTHORIZED = RefusalError(401, "invalid_api_key", "this pool asks for a key of its users")
_NOT_ADMIN = RefusalError(403, "not_allowed", "this route takes the key of administration")
