"""The API key is asked for by the path that the router matches, whatever Host and root path are."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import PATIENCE
from tests.witness.test_sleep_routes import built

executor_rig.use_tree()

LIMIT = 60
CALLS = (("POST", "/sleep"), ("GET", "/is_sleeping"), ("POST", "/v1/completions"))

pytestmark = pytest.mark.usefixtures("vllm_executor")


@pytest.mark.parametrize("host", ["x/health?", "x/health#", "x\\health?", "/health?", "x"])
@pytest.mark.parametrize("root", ["", "/", "/s", "/v", "/v1", "/llm"])
@isolated(LIMIT)
def test_no_host_and_no_root_path_opens_a_route(root: str, host: str) -> None:
    app = built("--enable-sleep-routes", "--api-key", "key", "--root-path", root)

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            calls = [
                client.request(method, prefix + path, headers={"Host": host})
                for method, path in CALLS
                for prefix in ("", root.rstrip("/"))
            ]
            return [(await asyncio.wait_for(call, PATIENCE)).status_code for call in calls]

    # 404: no route, where a prefix makes it another path.
    assert set(asyncio.run(ask())) <= {401, 404}
    assert not app.state.engine_client.calls
