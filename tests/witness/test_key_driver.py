"""Random requests of an attacker, over sockets, to API servers that share one as vLLM's do.

`SM12X_KEY_SEEDS=100` runs 100 seeds instead of one. A seed has a parser (h11, httptools), a root
path and a middleware of `--middleware`. Nothing that the attacker sends has a key that is good for
what he asks; behind the middleware the router notes what it found.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import importlib
import os
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import Engine
from tests.witness.test_api_key import PROBES, Recorder, built, recorded, walk

executor_rig.use_tree()

SEEDS = int(os.environ.get("SM12X_KEY_SEEDS", "1"))
# Requests of a seed of one attacker, and how many are sent at a time.
REQUESTS = 300
AT_A_TIME = 20
SERVERS = 2
LIMIT = 60 + 40 * SEEDS
# Seconds that an attacker waits for the rest of an answer.
PATIENCE = 0.5
KEY, ADMIN = "inference-key", "admin-key"
SLEEP = ("/sleep", "/wake_up", "/release_kv_cache_memory", "/is_sleeping")
ROOTS = ("", "/", "/s", "/v", "/v1", "/llm", "/llm/", "llm", "/health")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "BREW")
ODD_METHODS = ("get", "post", "options", "OPTIONS ", "PRI", "M-SEARCH", "Options")
VALUES = (
    "",
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    "Bearer null",
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY}x",
    f"Bearer {KEY.upper()}",
    f"Bearer  {KEY}",
    f"Bearer {KEY} {KEY}",
    f"Basic {KEY}",
    f"Token {KEY}",
    f"{KEY}",
    f"Bearer,{KEY}",
    f"Bearer\t{KEY}",
    f'Bearer "{KEY}"',
    f"Bearer \xe9{KEY}",
    "Bearer " + "a" * 5000,
)
# Headers that a server behind a proxy may believe, and others that no server should.
OTHERS = (
    "X-Api-Key: {key}",
    "Api-Key: {key}",
    "Proxy-Authorization: Bearer {key}",
    "X-Authorization: Bearer {key}",
    "Cookie: Authorization=Bearer {key}",
    "X-Original-URL: /health",
    "X-Rewrite-URL: /health",
    "X-Forwarded-Prefix: /health",
    "X-Forwarded-Path: /health",
    "X-Forwarded-For: 127.0.0.1",
    "X-Forwarded-Host: localhost",
    "X-Forwarded-Proto: https",
    "Forwarded: for=127.0.0.1;host=localhost;proto=https",
    "X-HTTP-Method-Override: OPTIONS",
    "X-Real-IP: 127.0.0.1",
    "X-Script-Name: /v1",
    "Script-Name: /v1",
    "Root-Path: /v1",
    "Connection: Authorization",
    "Expect: 100-continue",
    "Upgrade: h2c",
    "Transfer-Encoding: identity",
    "Authorization : Bearer {key}",
    "\tAuthorization: Bearer {key}",
    "Access-Control-Request-Method: POST",
    "Origin: http://evil.example",
    "Origin: null",
)
FOREIGN = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.", "a.b:80")

pytestmark = pytest.mark.usefixtures("vllm_executor")


class Probed(Engine):
    async def check_health(self) -> None: ...


class Noted(Recorder):
    """The router itself: ``passed`` has (method, path of the route it found, status)."""

    def __init__(self, router: Any) -> None:
        super().__init__(router)
        self._router = router

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        status: list[int] = []

        async def noted(message: Any) -> None:
            status.append(message.get("status", 0))
            await send(message)

        try:
            await self._router(scope, receive, noted)
        finally:
            route = scope.get("route")
            found = getattr(route, "path", "") or ("?" if scope.get("endpoint") else "")
            self.passed.append((scope.get("method", "WEBSOCKET"), found, *status[:1]))


class Stripping:
    """As a gateway in the process does it, by `--middleware`: /gw is no part of the path."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path", "").startswith("/gw/"):
            scope = {**scope, "path": scope["path"][3:]}
        await self._app(scope, receive, send)


async def through(request: Any, call_next: Any) -> Any:
    return await call_next(request)


class Target:
    """The servers of one seed."""

    def __init__(self, chance: random.Random) -> None:
        self.root = chance.choice(ROOTS)
        self.parser = chance.choice(("h11", "httptools"))
        middleware = chance.choice(((), ("Stripping",), ("through",), ("Stripping", "through")))
        flags = ["--enable-sleep-routes"]
        if self.root:
            flags += ["--root-path", self.root]
        for name in middleware:
            flags += ["--middleware", f"{__name__}.{name}"]
        self.engine = Probed()
        os.environ["VLLM_SLEEP_API_KEY"] = ADMIN
        tasks = ("generate", "realtime")
        self.apps = [built(*flags, tasks=tasks, key=KEY) for _ in range(SERVERS)]
        self.paths = sorted({path for _, path in walk(self.apps[0].routes)})
        self.routers = [recorded(app, Noted) for app in self.apps]
        for app in self.apps:
            app.state.engine_client = self.engine
        self.port = 0

    @property
    def passed(self) -> list[Any]:
        return [one for router in self.routers for one in router.passed]

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """The release's servers, which share one socket and count their connections."""
        uvicorn = importlib.import_module("uvicorn")
        launcher = importlib.import_module("vllm.entrypoints.launchers.launcher")
        shared = socket.create_server(("127.0.0.1", 0))
        self.port = shared.getsockname()[1]
        loads = [0] * SERVERS
        servers, tasks = [], []
        for number, app in enumerate(self.apps):
            config = uvicorn.Config(app, http=self.parser, log_level="critical", lifespan="off")
            config.load()
            servers.append(launcher.NoSignalServer(config, peer_loads=(loads, number)))
            tasks.append(asyncio.create_task(servers[-1].serve(sockets=[shared])))
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            for server in servers:
                server.should_exit = server.force_exit = True
            await asyncio.wait(tasks, timeout=5)

    async def send(self, request: bytes) -> list[int]:
        """The statuses of the answers to what is sent; none where the connection just ends."""
        answer = b""
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(request)
                async with asyncio.timeout(PATIENCE):
                    while part := await reader.read(65536):
                        answer += part
            finally:
                writer.close()
        return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]


class Attacker:
    """Makes requests of what a server, a proxy and a router may read in different ways."""

    def __init__(self, chance: random.Random, target: Target) -> None:
        self.chance = chance
        self.target = target

    def path(self, path: str) -> str:
        """One of the ways to write a path of a route, or what is nearly one."""
        chance = self.chance
        for _ in range(chance.choice((0, 0, 1, 1, 2, 3))):
            other = chance.choice((*sorted(PROBES), *self.target.paths))
            at = chance.randrange(len(path) + 1)
            path = chance.choice(
                (
                    path,
                    self.target.root + path,
                    f"/{path}",
                    f"/gw{path}",
                    f"{path}/",
                    f"/health/..{path}",
                    f"/./{path}",
                    f"/health/%2e%2e{path}",
                    f"{path}?x=/health",
                    f"/health?{path}",
                    f"/health#{path}",
                    f"{path}#/health",
                    f"{path};/health",
                    f"/health;{path}",
                    f"{path}%00/health",
                    f"/health%00{path}",
                    f"/health%0a{path}",
                    f"{path}%20",
                    f"{path}%2f",
                    path.replace("/", "%2f"),
                    path.replace("/", "%252f"),
                    path.replace("/", "\\"),
                    path.replace("/", "//"),
                    path.upper(),
                    path[:at] + f"%{ord(path[at]):02x}" + path[at + 1 :]
                    if at < len(path)
                    else path,
                    path[:at] + chance.choice("/.%;?#\\\x00\xa0 ") + path[at:],
                    path[:at] + other,
                    other + path,
                    f"http://localhost{path}",
                    f"http://x/health?{path}",
                    f"http://user@localhost:80{path}",
                    f"//health{path}",
                    "*",
                    "localhost:80",
                )
            )
        return path

    def headers(self, values: tuple[str, ...], host: str) -> list[str]:
        chance = self.chance
        lines = [f"Host: {host}"]
        for _ in range(chance.choice((0, 1, 1, 2))):
            name = chance.choice(("Authorization", "authorization", "AUTHORIZATION"))
            lines.append(f"{name}: {chance.choice(values)}")
        for _ in range(chance.choice((0, 0, 1, 2))):
            # No other header than this one is read for a key.
            lines.append(chance.choice(OTHERS).format(key=chance.choice((KEY, ADMIN))))
        return lines

    def request(self, method: str, path: str, lines: list[str], *, last: bool = True) -> bytes:
        chance = self.chance
        body = b""
        if chance.random() < 0.15:
            lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
            lines += ["Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="]
            method = "GET" if chance.random() < 0.9 else method
        elif last:
            lines += ["Connection: close"]
        if method in ("POST", "PUT", "PATCH"):
            body = b'{"model": "m", "prompt": "a", "max_tokens": 1}'
            lines += ["Content-Type: application/json"]
            inner = self.inner()
            plain = ([f"Content-Length: {len(body)}"], body)
            chunked = ["Transfer-Encoding: chunked"]
            # Where two readers may see one request, or two.
            odd = (
                (chunked, b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)),
                (["Content-Length: 0", *chunked], b"0\r\n\r\n" + inner),
                (["Transfer-Encoding: xchunked", "Content-Length: 4"], b"0\r\n\r\n" + inner),
                (["Transfer-Encoding: chunked, identity"], b"0\r\n\r\n" + inner),
                (["Content-Length: 5", "Content-Length: 0"], b"0\r\n\r\n" + inner),
                (["Content-Length: +0"], inner),
                (chunked, b"0;a=\n\r\n\r\n" + inner),
            )
            more, body = chance.choice((plain,) * 2 * len(odd) + odd)
            lines += more
        version = chance.choice(("HTTP/1.1",) * 40 + ("HTTP/1.0", "HTTP/2.0", "http/1.1"))
        end = chance.choice(("\r\n",) * 40 + ("\n",))
        head = end.join((f"{method} {path} {version}", *lines, "", ""))
        return head.encode("latin-1", errors="replace") + body

    def inner(self) -> bytes:
        path = self.chance.choice(self.target.paths)
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()

    def method(self) -> str:
        return self.chance.choice(METHODS * 10 + ODD_METHODS)

    def without_a_key(self) -> bytes:
        chance = self.chance
        found = b""
        for last in chance.choice(((True,), (True,), (True,), (False, True))):
            path = self.path(chance.choice((*self.target.paths, *SLEEP, *PROBES)))
            host = chance.choice(
                ("localhost", "x/health?", "localhost/health#", "", "[::1]", "a,b")
            )
            found += self.request(self.method(), path, self.headers(VALUES, host), last=last)
        return found

    def with_the_inference_key(self) -> bytes:
        path = self.path(self.chance.choice(SLEEP))
        values = (
            *VALUES,
            f"Bearer {KEY}",
            f"Bearer {KEY}",
            f"bearer {KEY}",
            f"Bearer {ADMIN[:-1]}",
        )
        lines = [f"Authorization: Bearer {KEY}", *self.headers(values, "localhost")]
        method = self.chance.choice(("POST", "POST", "GET", self.method()))
        return self.request(method, path, lines)

    def from_a_page(self) -> bytes:
        """What a browser can be made to send, here with every key that there is."""
        path = self.path(self.chance.choice(SLEEP))
        lines = [f"Authorization: Bearer {ADMIN}", f"Host: {self.chance.choice(FOREIGN)}"]
        if self.chance.random() < 0.5:
            lines[1] = f"Host: 127.0.0.1:{self.target.port}"
            lines.append(
                f"Origin: {self.chance.choice(('null', 'http://evil.example', 'http://a'))}"
            )
        return self.request(self.chance.choice(("GET", "POST", "POST", "HEAD")), path, lines)


async def attack(target: Target, make: Any) -> collections.Counter[str]:
    outcomes: collections.Counter[str] = collections.Counter()
    for _ in range(REQUESTS // AT_A_TIME):
        sent = [make() for _ in range(AT_A_TIME)]
        for statuses in await asyncio.gather(*map(target.send, sent)):
            outcomes.update(map(str, statuses) if statuses else ["no answer"])
    return outcomes


@pytest.mark.parametrize("seed", range(SEEDS))
@isolated(LIMIT)
def test_an_attacker_reaches_probes_alone(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    target = Target(chance)
    attacker = Attacker(chance, target)

    async def test() -> None:
        async with target.listening():
            outcomes = await attack(target, attacker.without_a_key)
            # "" is none: only the path of a probe, written as none, finds its way there.
            found = {path for _, path, *_ in target.passed}
            print(seed, target.parser, target.root, "no key", dict(outcomes), found)
            assert found <= {*PROBES, ""}, f"no key: {found}"
            assert outcomes["401"] > REQUESTS / 4
            assert not target.engine.calls
            for who in (attacker.with_the_inference_key, attacker.from_a_page):
                outcomes = await attack(target, who)
                print(seed, target.parser, target.root, who.__name__, dict(outcomes))
                assert not target.engine.calls, f"{who.__name__}: {target.engine.calls}"
                assert outcomes["401" if who == attacker.with_the_inference_key else "403"] > 9
            await serves(target)

    asyncio.run(test())


async def serves(target: Target) -> None:
    """Whoever has the key is let in, after all that, on every server."""
    for method, path in (
        ("POST", "/sleep"),
        ("GET", "/is_sleeping"),
        ("POST", "/wake_up"),
    ) * SERVERS:
        lines = (f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close")
        head = "\r\n".join((*lines, f"Authorization: Bearer {ADMIN}", "Content-Length: 0", "", ""))
        assert await target.send(head.encode()) == [200], path
    assert [name for name, *_ in target.engine.calls] == ["sleep", "wake_up"] * SERVERS
