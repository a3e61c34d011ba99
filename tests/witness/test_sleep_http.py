"""Calls of sleep and wake_up over HTTP that cannot be done are answered with an error."""

from __future__ import annotations

import asyncio

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import PATIENCE, TAGS, Engine, Server, run

executor_rig.use_tree()

LIMIT = 40

pytestmark = pytest.mark.usefixtures("vllm_executor")


@pytest.mark.parametrize("tags", [["bogus"], ["weights", "kvcache"], [""], ["Weights"]])
@isolated(LIMIT)
def test_a_tag_that_is_not_there_is_an_error(tags: list[str]) -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep")
        answer = await server.post("/wake_up", params={"tags": tags})
        assert answer.status_code in (400, 422)
        assert "kv_cache" in answer.json()["error"]["message"]
        assert engine.calls == [("sleep", 1, "abort")]
        assert engine.asleep == TAGS

    run(test)


@pytest.mark.guard
@pytest.mark.parametrize(
    ("tags", "given"),
    [
        ([], None),
        (["weights"], ["weights"]),
        (["weights", "kv_cache"], ["weights", "kv_cache"]),
        (["scheduling"], ["scheduling"]),
    ],
)
@isolated(LIMIT)
def test_tags_reach_the_engine(tags: list[str], given: list[str] | None) -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep", params={"level": 2, "mode": "wait"})
        answer = await server.post("/wake_up", params={"tags": tags})
        assert answer.status_code == 200
        assert engine.calls == [("sleep", 2, "wait"), ("wake_up", given)]

    run(test)


@pytest.mark.parametrize("second", ["sleep", "wake_up"])
@pytest.mark.parametrize("first", ["sleep", "wake_up"])
@isolated(LIMIT)
def test_a_call_during_another_is_refused(first: str, second: str) -> None:
    async def test(engine: Engine, server: Server) -> None:
        if first == "wake_up":
            await server.post("/sleep")
        engine.calls.clear()
        engine.begun.clear()
        engine.held[first] = asyncio.Event()
        begun = asyncio.create_task(server.post(f"/{first}"))
        await asyncio.wait_for(engine.begun.wait(), PATIENCE)
        answer = await server.post(f"/{second}")
        assert answer.status_code == 409
        message = answer.json()["error"]["message"]
        assert f"/{first}" in message
        assert [call[0] for call in engine.calls] == [first]
        engine.held.pop(first).set()
        assert (await begun).status_code == 200
        assert (await server.post(f"/{second}")).status_code == 200

    run(test)


@pytest.mark.guard
@pytest.mark.parametrize("call", ["sleep", "wake_up"])
@isolated(LIMIT)
def test_a_call_that_failed_can_be_repeated(call: str) -> None:
    async def test(engine: Engine, server: Server) -> None:
        engine.failing = {call}
        if call == "wake_up":
            await server.post("/sleep")
        assert (await server.post(f"/{call}")).status_code == 500
        engine.failing = set()
        assert (await server.post(f"/{call}")).status_code == 200
        assert engine.asleep == (TAGS if call == "sleep" else set())

    run(test)
