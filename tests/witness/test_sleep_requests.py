"""A request that arrives while the engine's memory is asleep is refused, or waits where set."""

from __future__ import annotations

import asyncio
import contextlib
import io

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import PATIENCE, Engine, Server, arguments, run

executor_rig.use_tree()

LIMIT = 40
SETTING = "--sleep-mode-requests"

pytestmark = pytest.mark.usefixtures("vllm_executor")


async def refused(server: Server) -> None:
    answer = await server.ask()
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    error = answer.json()["error"]
    assert error["code"] == 503
    assert "/wake_up" in error["message"]


async def served(server: Server) -> None:
    assert (await server.ask()).status_code == 200


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_a_request_to_a_sleeping_engine_is_refused(level: int) -> None:
    async def test(engine: Engine, server: Server) -> None:
        await served(server)
        await server.post("/sleep", params={"level": level})
        await refused(server)
        await server.post("/wake_up")
        await served(server)

    run(test)


@isolated(LIMIT)
def test_a_request_to_an_engine_that_is_half_awake_is_refused() -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep")
        await server.post("/wake_up", params={"tags": ["weights"]})
        await refused(server)
        await server.post("/wake_up", params={"tags": ["kv_cache"]})
        await served(server)

    run(test)


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
@isolated(LIMIT)
def test_a_request_during_a_call_is_refused(call: str) -> None:
    async def test(engine: Engine, server: Server) -> None:
        if call == "wake_up":
            await server.post("/sleep")
        engine.begun.clear()
        engine.held[call] = asyncio.Event()
        begun = asyncio.create_task(server.post(f"/{call}"))
        await asyncio.wait_for(engine.begun.wait(), PATIENCE)
        if call == "sleep":
            # As mode=abort leaves it while memory is copied.
            engine.paused = True
        await refused(server)
        engine.held.pop(call).set()
        await begun
        if call == "sleep":
            await refused(server)
        else:
            await served(server)

    run(test)


@isolated(LIMIT)
def test_after_a_call_that_failed_the_engine_decides() -> None:
    async def test(engine: Engine, server: Server) -> None:
        engine.failing = {"sleep", "wake_up"}
        # Nothing was unmapped, or all of it was mapped again.
        assert (await server.post("/sleep")).status_code == 500
        await served(server)
        engine.failing = {"wake_up"}
        await server.post("/sleep")
        assert (await server.post("/wake_up")).status_code == 500
        await refused(server)

    run(test)


@pytest.mark.guard
@isolated(LIMIT)
def test_a_pause_keeps_requests_as_before() -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep")
        await server.post("/wake_up")
        await server.post("/sleep", params={"level": 0})
        asked = asyncio.create_task(server.ask())
        done, _ = await asyncio.wait([asked], timeout=0.2)
        assert not done
        await server.post("/wake_up", params={"tags": ["scheduling"]})
        assert (await asked).status_code == 200

    run(test)


@isolated(LIMIT)
def test_requests_wait_where_that_is_set() -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep")
        asked = asyncio.create_task(server.ask())
        done, _ = await asyncio.wait([asked], timeout=0.2)
        assert not done
        await server.post("/wake_up")
        assert (await asked).status_code == 200

    run(test, SETTING, "wait")


@pytest.mark.parametrize("value", ["yes", "Wait", "503"])
@isolated(LIMIT)
def test_a_bad_setting_ends_the_start(value: str) -> None:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit):
        arguments(SETTING, value)
    said = errors.getvalue()
    assert f"argument {SETTING}: invalid choice" in said
    assert all(known in said for known in ("reject", "wait"))


@pytest.mark.guard
@isolated(LIMIT)
def test_what_needs_no_memory_passes() -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep")
        answer = await server.client.get("/is_sleeping")
        assert answer.json() == {"is_sleeping": True}

    run(test)
