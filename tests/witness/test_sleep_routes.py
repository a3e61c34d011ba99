"""The sleep routes alone, without development mode, and behind the API key."""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

import httpx
import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import APPLICATION, PATIENCE, Engine, arguments

executor_rig.use_tree()

LIMIT = 60
KEY = {"Authorization": "Bearer key"}
SLEEP = {"/sleep", "/wake_up", "/is_sleeping"}
# Of development mode, what a server in rotation must not have.
DANGEROUS = {"/collective_rpc", "/reset_prefix_cache", "/server_info"}
CALLS = (("GET", "/is_sleeping"), ("POST", "/sleep"), ("POST", "/wake_up"))

pytestmark = pytest.mark.usefixtures("vllm_executor")


def built(*flags: str, development: bool = False) -> Any:
    """The application that the release builds for `vllm serve m FLAGS`; needs an engine."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1" if development else "0"
    app = importlib.import_module(APPLICATION).build_app(arguments(*flags), ("generate",))
    app.state.engine_client = Engine()
    return app


def answers(app: Any, headers: dict[str, str]) -> list[int]:
    """The status of each of CALLS."""

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            calls = [client.request(method, path, headers=headers) for method, path in CALLS]
            return [(await asyncio.wait_for(call, PATIENCE)).status_code for call in calls]

    return asyncio.run(ask())


@isolated(LIMIT)
def test_the_option_registers_the_sleep_routes_and_no_other() -> None:
    app = built("--enable-sleep-routes")
    paths = {getattr(route, "path", "") for route in app.routes}
    assert paths >= SLEEP
    assert not paths & DANGEROUS
    assert answers(app, {}) == [200, 200, 200]


@isolated(LIMIT)
def test_with_a_key_they_ask_for_it() -> None:
    app = built("--enable-sleep-routes", "--api-key", "key")
    assert answers(app, {}) == [401, 401, 401]
    assert answers(app, {"Authorization": "Bearer other"}) == [401, 401, 401]
    assert answers(app, KEY) == [200, 200, 200]


@pytest.mark.guard
@isolated(LIMIT)
def test_without_the_option_nothing_has_changed() -> None:
    assert answers(built("--api-key", "key"), KEY) == [404, 404, 404]
    app = built("--api-key", "key", development=True)
    assert answers(app, KEY) == [200, 200, 200]
    assert {getattr(route, "path", "") for route in app.routes} >= DANGEROUS


@isolated(LIMIT)
def test_in_development_mode_the_option_adds_the_key() -> None:
    app = built("--enable-sleep-routes", "--api-key", "key", development=True)
    assert answers(app, {}) == [401, 401, 401]
    assert answers(app, KEY) == [200, 200, 200]
