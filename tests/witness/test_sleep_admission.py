"""Who may call the sleep routes: no web page, nobody without their key, and level 2 nobody."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import PATIENCE, Engine, Server, run

executor_rig.use_tree()

LIMIT = 60
ROUTES = "--enable-sleep-routes"
CALLS = (
    ("POST", "/sleep"),
    ("POST", "/release_kv_cache_memory"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
)

pytestmark = pytest.mark.usefixtures("vllm_executor")


async def statuses(server: Server, headers: dict[str, str]) -> set[int]:
    calls = [server.client.request(method, path, headers=headers) for method, path in CALLS]
    return {(await asyncio.wait_for(call, PATIENCE)).status_code for call in calls}


def answered(*flags: str, development: bool = False, **headers: str) -> int:
    """The one status of all sleep calls with these headers; where it is 200, the engine slept."""
    found: set[int] = set()

    async def test(engine: Engine, server: Server) -> None:
        found.update(await statuses(server, headers))
        assert bool(engine.calls) == (found == {200})

    run(test, ROUTES, *flags, development=development)
    (status,) = found
    return status


FOREIGN: tuple[tuple[str, str | None], ...] = (
    # A page of another server; one that has no origin; one of another port here.
    ("127.0.0.1:8000", "http://evil.example"),
    ("127.0.0.1:8000", "null"),
    ("127.0.0.1:8000", ""),
    ("localhost:8000", "http://localhost:3000"),
    ("[::1]:8000", "http://[::1]"),
    ("127.0.0.1:8000", "http://127.0.0.1:8000.evil.example"),
    ("127.0.0.1:8000", "ftp://127.0.0.1:8000"),
    # A page whose name was made to lead here.
    ("evil.example:8000", "http://evil.example:8000"),
    ("evil.example", None),
    ("localhost.evil.example", None),
    ("127.0.0.1.evil.example:8000", None),
    ("localhost.:8000", None),
    ("evil.example:80:8000", None),
)


@pytest.mark.parametrize("development", [True, False])
@isolated(LIMIT)
def test_a_web_page_calls_no_sleep_route(development: bool) -> None:
    for host, origin in FOREIGN:
        headers = {"host": host} if origin is None else {"host": host, "origin": origin}
        assert answered(development=development, **headers) == 403, headers


@isolated(LIMIT)
def test_addresses_and_names_of_containers_need_no_setting() -> None:
    addresses = ("127.0.0.1:8000", "10.0.0.7", "[::1]:8000", "[::ffff:10.0.0.7]")
    for host in (*addresses, "localhost:8000", "vllm-a", "S"):
        assert answered(development=True, host=host) == 200, host
        # A page of the server itself, of /docs say, also behind a proxy that ends TLS.
        for scheme in ("http", "https"):
            origin = f"{scheme}://{host.lower()}"
            assert answered(development=True, host=host, origin=origin) == 200, origin


ALLOWED = ("--allowed-origins", '["https://Llm.Example.com", "http://page.example:3000"]')


@pytest.mark.parametrize(
    ("flags", "headers", "status"),
    [
        (("--host", "Vllm.lan"), {"host": "vllm.LAN:8000"}, 200),
        (("--host", "vllm.lan"), {"host": "vllm.lan", "origin": "http://vllm.lan"}, 200),
        (("--host", "vllm.lan"), {"host": "evil.lan"}, 403),
        (ALLOWED, {"host": "llm.example.com"}, 200),
        (ALLOWED, {"host": "127.0.0.1", "origin": "http://page.example:3000"}, 200),
        (ALLOWED, {"host": "127.0.0.1", "origin": "http://page.example"}, 403),
        (ALLOWED, {"host": "example.com"}, 403),
        # What opens /v1 to all pages does not open these.
        (("--allowed-origins", '["*"]'), {"origin": "http://evil.example"}, 403),
        (("--allowed-origins", '["*"]'), {"host": "evil.example"}, 403),
    ],
)
@isolated(LIMIT)
def test_an_operator_names_hosts_and_pages(
    flags: tuple[str, ...], headers: dict[str, str], status: int
) -> None:
    assert answered(*flags, development=False, **headers) == status


@isolated(LIMIT)
def test_with_a_key_of_their_own_the_routes_take_no_other() -> None:
    os.environ.update(VLLM_SLEEP_API_KEY="admin", VLLM_API_KEY="inference")
    for development in (False, True):
        for given in ("", "Bearer inference", "Bearer adminn", "Basic admin", "admin", "Bearer"):
            assert answered(development=development, authorization=given) == 401
        for given in ("Bearer admin", "bearer admin"):
            assert answered(development=development, authorization=given) == 200
    assert answered(authorization="Bearer admin", origin="http://evil.example") == 403


@isolated(LIMIT)
def test_their_key_is_good_for_every_route() -> None:
    from tests.witness.test_api_key import built, call, recorded

    os.environ["VLLM_SLEEP_API_KEY"] = "admin"
    app = built()
    router = recorded(app)
    for path in ("/v1/models", "/sleep", "/metrics"):
        assert call(app, "GET", path, {"authorization": "Bearer admin"}) == 200
        assert call(app, "GET", path, {"authorization": "Bearer key"}) == 200
        assert call(app, "GET", path) == 401
    assert len(router.passed) == 6


@isolated(LIMIT)
def test_an_empty_key_is_none() -> None:
    os.environ["VLLM_SLEEP_API_KEY"] = ""
    assert answered() == 200
    from tests.witness.test_api_key import built, call

    assert call(built(), "GET", "/v1/models", {"authorization": "Bearer "}) == 401


@isolated(LIMIT)
def test_weights_that_no_route_loads_are_not_discarded() -> None:
    async def test(engine: Engine, server: Server) -> None:
        for params in ({"level": 2}, {"level": 2, "mode": "wait"}):
            answer = await server.post("/sleep", params=params)
            assert answer.status_code == 403
            assert "VLLM_SERVER_DEV_MODE=1" in answer.json()["error"]["message"]
        assert not engine.calls
        assert (await server.post("/sleep", params={"level": 1})).status_code == 200
        # Also from a sleep of level 1.
        assert (await server.post("/sleep", params={"level": 2})).status_code == 403
        assert (await server.post("/wake_up")).status_code == 200

    run(test, ROUTES, development=False)


@pytest.mark.guard
@isolated(LIMIT)
def test_development_mode_discards_them() -> None:
    async def test(engine: Any, server: Server) -> None:
        assert (await server.post("/sleep", params={"level": 2})).status_code == 200
        assert engine.calls[0][:2] == ("sleep", 2)

    run(test)


@pytest.mark.guard
@isolated(LIMIT)
def test_their_key_is_kept_nowhere() -> None:
    from vllm import envs

    os.environ["VLLM_SLEEP_API_KEY"] = "admin"
    # vLLM writes these next to what it compiles.
    assert "admin" not in str(envs.compile_factors())
