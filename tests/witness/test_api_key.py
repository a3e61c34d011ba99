"""With an API key every route but those of probes asks for it: HTTP, WebSocket and mounted ones.

The applications are those that the release builds. Behind the middleware, in place of the router,
is a recorder: what it is given has passed without a key.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

import httpx
import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import APPLICATION, Engine, arguments

executor_rig.use_tree()

LIMIT = 60
KEY = {"authorization": "Bearer key"}
WRONG = {"authorization": "Bearer other"}
PROBES = {"/health", "/ping"}
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "BREW")
ORIGIN = "http://trusted.example"
# Of a browser that asks whether a page may send its request.
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST"}

pytestmark = pytest.mark.usefixtures("vllm_executor")


class Recorder:
    """Stands for the router: ``passed`` are the requests that came through the middleware."""

    def __init__(self, router: Any) -> None:
        self.routes = router.routes
        self.passed: list[tuple[str, str]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.passed.append((scope.get("method", "WEBSOCKET"), scope["path"]))
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Matching(Recorder):
    """``passed`` has the path of the route that the router finds, "" for none."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        none = importlib.import_module("starlette.routing").Match.NONE
        found = (route for route in self.routes if route.matches(scope)[0] is not none)
        await super().__call__(
            {**scope, "path": getattr(next(found, None), "path", "")}, receive, send
        )


def built(
    *flags: str,
    tasks: tuple[str, ...] = ("generate",),
    development: bool = True,
    key: str = "key",
) -> Any:
    """The application of `vllm serve m --api-key KEY FLAGS`, every optional route with it."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1" if development else "0"
    args = arguments("--api-key", key, "--enable-offline-docs", *flags)
    args.enable_fault_tolerance = True
    # A classifier, for the routes of pooling models.
    model = SimpleNamespace(
        hf_config=SimpleNamespace(num_labels=1), get_pooling_task=lambda tasks: tasks[0]
    )
    app = importlib.import_module(APPLICATION).build_app(args, tasks, model)
    app.state.engine_client = Engine()
    return app


def recorded(app: Any, recorder: type[Recorder] = Recorder) -> Recorder:
    found = app.router = recorder(app.router)
    # The release builds it with the application.
    app.middleware_stack = app.build_middleware_stack()
    return found


def call(app: Any, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    """The status that the application answers; of a refused handshake, that of the refusal."""
    kind = "websocket" if method == "WEBSOCKET" else "http"
    scope: dict[str, Any] = {
        "type": kind,
        "http_version": "1.1",
        "scheme": "ws" if kind == "websocket" else "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(n.encode(), v.encode()) for n, v in {"host": "s", **(headers or {})}.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "subprotocols": [],
        "extensions": {"websocket.http.response": {}},
    }
    if kind == "http":
        scope["method"] = method
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect" if kind == "websocket" else "http.request"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return int(sent[0].get("status", 0))


def walk(routes: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(method, path) of every route, also of those of an application that is mounted."""
    for route in routes:
        path = prefix + getattr(route, "path", "")
        yield from walk(getattr(route, "routes", None) or (), path)
        for parameter in getattr(route, "param_convertors", {}):
            path = path.replace(f"{{{parameter}:path}}", "x/y").replace(f"{{{parameter}}}", "x")
        if "Socket" in type(route).__name__:
            yield "WEBSOCKET", path
        elif path:
            declared = getattr(route, "methods", None) or ()
            yield from ((method, path) for method in {*declared, *METHODS})


def tasks() -> tuple[str, ...]:
    found: tuple[str, ...] = get_args(importlib.import_module("vllm.tasks").SupportedTask)
    return found


@isolated(LIMIT)
def test_every_route_of_every_task_asks_for_the_key() -> None:
    seen: set[tuple[str, str]] = set()
    for task in tasks():
        app = built("--enable-scale-out", "--enable-tokenizer-info-endpoint", tasks=(task,))
        router = recorded(app)
        for method, path in {*walk(router.routes), ("POST", "/v3/of-the-next-release")}:
            seen.add((method, path))
            for headers in ({}, WRONG):
                router.passed.clear()
                status = call(app, method, path, headers)
                if path in PROBES:
                    assert router.passed == [(method, path)], "a probe has no key"
                else:
                    assert not router.passed, f"{task}: {method} {path} asks for no key"
                    assert status == 401, f"{task}: {method} {path} is answered with {status}"
            router.passed.clear()
            call(app, method, path, KEY)
            assert router.passed == [(method, path)], f"{task}: {method} {path} takes no key"
    paths = {path for _, path in seen}
    # What lay outside the guard, and one of each kind of route.
    assert paths >= {
        "/invocations",
        "/tokenize",
        "/generative_scoring",
        "/pooling",
        "/scale_elastic_ep",
        "/metrics",
        "/load",
        "/version",
        "/openapi.json",
        "/static",
        "/sleep",
        "/collective_rpc",
    }
    assert ("WEBSOCKET", "/v1/realtime") in seen


@isolated(LIMIT)
def test_a_route_of_a_plugin_asks_for_the_key() -> None:
    starlette = importlib.import_module("starlette.routing")
    app = built()
    app.router.routes.insert(0, starlette.Mount("/plugin", app=lambda *_: None))
    router = recorded(app)
    for path in ("/plugin", "/plugin/health", "/plugin/"):
        assert call(app, "GET", path) == 401
    assert not router.passed


@pytest.mark.parametrize("root", ["/", "/s", "/v", "/v1", "/llm", "/llm/", "llm", "/health"])
@isolated(LIMIT)
def test_a_root_path_opens_nothing(root: str) -> None:
    """Each path, as a proxy passes it on: with the root path, without it, and with part of it."""
    app = built("--root-path", root, "--enable-sleep-routes", development=False)
    router = recorded(app, Matching)
    paths = {path for method, path in walk(router.routes) if method == "GET"}
    assert paths >= {"/sleep", "/v1/models", "/health"}
    for path in paths:
        for form in (path, root + path, root.rstrip("/") + path, root + path[1:], "/" + path):
            router.passed.clear()
            status = call(app, "GET", form)
            found = {path for _, path in router.passed}
            assert found <= {*PROBES, ""}, f"{form} reaches {found} without a key"
            assert status == (200 if found else 401)


@pytest.mark.parametrize("root", ["/llm", "/", "/h"])
@isolated(LIMIT)
def test_behind_a_root_path_probes_and_keys_are_as_without(root: str) -> None:
    app = built("--root-path", root)
    router = recorded(app)
    for path in PROBES:
        assert call(app, "GET", path) == 200
        assert call(app, "GET", root + path) == 200
    for path in ("/v1/models", "x/health", "/health/", "/health/x", "/x/health"):
        assert call(app, "GET", root + path) == 401
        assert call(app, "GET", root + path, KEY) == 200
    assert len(router.passed) == 9


@isolated(LIMIT)
def test_metrics_are_open_by_an_option() -> None:
    for flags, status in (((), 401), (("--unauthenticated-metrics",), 200)):
        app = built(*flags)
        assert call(app, "GET", "/metrics") == status
        assert call(app, "GET", "/metrics", KEY) == 200
        assert call(app, "GET", "/metrics/x") == 401
        assert call(app, "GET", "/version") == 401


@isolated(LIMIT)
def test_only_a_preflight_passes_with_the_method_of_one() -> None:
    app = built()
    router = recorded(app)
    for headers in ({}, {"origin": ORIGIN}, {"access-control-request-method": "POST"}):
        assert call(app, "OPTIONS", "/metrics", headers) == 401
    for path in ("/metrics", "/v1/models", "/nothing"):
        # CORSMiddleware answers it itself.
        call(app, "OPTIONS", path, PREFLIGHT)
        assert call(app, "options", path, PREFLIGHT) == 401
    assert not router.passed


@pytest.mark.guard
@isolated(LIMIT)
def test_a_preflight_is_answered_as_before() -> None:
    def answer(*flags: str) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=built(*flags))
            async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
                return await client.options("/v1/completions", headers=PREFLIGHT)

        return asyncio.run(ask())

    refused = answer()
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    allowed = answer("--allowed-origins", f'["{ORIGIN}"]')
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.guard
@isolated(LIMIT)
def test_the_applications_without_the_middleware_have_probes_alone() -> None:
    supervisor = importlib.import_module("vllm.entrypoints.launchers.dp_supervisor")
    preload = importlib.import_module("vllm.entrypoints.cli.preload")
    for app in (supervisor._build_dp_supervisor_app(None), preload._build_health_app(None)):
        assert {route.path for route in app.routes} <= {"/health", "/ready", "/readyz"}
