"""What an API server makes of the state that its engine publishes: it looks, and asks nothing."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import PATIENCE, Engine, Server, run

executor_rig.use_tree()

LIMIT = 40
ROUTES = "--enable-sleep-routes"
REQUESTS = "--sleep-mode-requests"
RELOAD = "reload_weights"
CALLED_OFF = "sleep was overtaken: a wake_up or a resume called it off"

pytestmark = pytest.mark.usefixtures("vllm_executor")


async def refused(server: Server, *words: str) -> None:
    answer = await server.ask()
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["Retry-After"]) >= 1
    for word in words:
        assert word in answer.json()["error"]["message"], answer.text


async def served(server: Server) -> None:
    assert (await server.ask()).status_code == 200


async def waits(server: Server) -> asyncio.Task[Any]:
    asked = asyncio.create_task(server.ask())
    done, _ = await asyncio.wait([asked], timeout=0.2)
    assert not done
    return asked


class Silent(Engine):
    """Answers no question."""

    async def is_sleeping(self) -> bool:
        await asyncio.sleep(PATIENCE * 2)
        return await super().is_sleeping()


# ---- the state ----


@isolated(LIMIT)
def test_the_published_state_decides_and_no_engine_is_asked() -> None:
    async def test(engine: Engine, server: Server) -> None:
        second = Server(engine, servers=2)
        for state in ("FALLING_ASLEEP", "ASLEEP", "DISCARDED"):
            engine.state = state
            await refused(server)
            await refused(second)
        engine.state = "AWAKE"
        await served(server)
        await served(second)
        assert engine.calls == []

    run(test, engine=Silent)


@isolated(LIMIT)
def test_one_engine_of_several_is_enough() -> None:
    kind: Any = importlib.import_module("vllm.v1.engine.core_client").DPLBAsyncMPClient
    client = kind.__new__(kind)
    # So that nothing of a client that was never started is taken down.
    client._finalizer = None
    client.sleep_states = {}
    assert client.sleep_state.name == "AWAKE"
    client.sleep_states = {0: 0, 1: 2, 2: 1}
    assert client.sleep_state.name == "ASLEEP"


@pytest.mark.parametrize("call", ["sleep", "release_kv_cache_memory"])
@isolated(LIMIT)
def test_a_server_refuses_from_the_beginning_of_its_own_call_on(call: str) -> None:
    """A busy engine begins it, and says so, later."""

    async def test(engine: Engine, server: Server) -> None:
        engine.state = "AWAKE"
        engine.held[call] = asyncio.Event()
        begun = asyncio.create_task(server.post(f"/{call}"))
        await asyncio.wait_for(engine.begun.wait(), PATIENCE)
        await refused(server, "/wake_up")
        engine.held.pop(call).set()
        assert (await begun).status_code == 200
        # From then on the engine's word counts.
        engine.paused = False
        engine.asleep = set()
        await served(server)

    run(test)


@isolated(LIMIT)
def test_a_dead_engine_answers_with_its_own_error() -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep")
        await refused(server)
        engine.errored = True
        # The request gets to where AsyncLLM raises.
        (await waits(server)).cancel()

    run(test)


@isolated(LIMIT)
def test_after_a_deep_sleep_every_answer_names_the_next_call() -> None:
    async def test(engine: Engine, server: Server) -> None:
        engine.missing = True
        await server.post("/sleep", params={"level": 2})
        await refused(server, "tags=weights", RELOAD, "/collective_rpc")
        body = (await server.post("/wake_up", params={"tags": ["weights"]})).json()
        assert RELOAD in body["next"]
        assert "/collective_rpc" in body["next"]
        await refused(server, RELOAD)
        engine.missing = False
        assert RELOAD not in (await server.ask()).text
        answer = await server.post("/wake_up", params={"tags": ["kv_cache"]})
        assert "next" not in answer.json()
        await served(server)

    run(test)


@isolated(LIMIT)
def test_a_resume_answers_by_the_state() -> None:
    class Resuming(Engine):
        async def resume_generation(self) -> None:
            await self._call("resume_generation")

    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep")
        answer = await server.post("/resume")
        assert answer.status_code == 409
        assert "/wake_up" in answer.json()["error"]
        await server.post("/wake_up")
        answer = await server.post("/resume")
        assert answer.json() == {"status": "resumed"}

    run(test, engine=Resuming)


# ---- the default ----


async def reaches(flags: tuple[str, ...], development: bool) -> str:
    """What becomes of a request to a sleeping engine, and what the engine is told."""
    engine = Engine()
    server = Server(engine, *flags, development=development, rejects=False)
    await server.post("/sleep")
    told = engine.options.get("reject", False)
    if (await asyncio.wait({asyncio.create_task(server.ask())}, timeout=0.2))[1]:
        await server.post("/wake_up")
        return f"waits {told}"
    return f"{(await server.ask()).status_code} {told}"


@pytest.mark.parametrize(
    ("flags", "development", "becomes"),
    [
        # As the release does it.
        pytest.param((), True, "waits False", marks=pytest.mark.guard),
        ((ROUTES,), False, "503 True"),
        ((ROUTES,), True, "503 True"),
        ((REQUESTS, "reject"), True, "503 True"),
        ((ROUTES, REQUESTS, "wait"), False, "waits False"),
    ],
)
@isolated(LIMIT)
def test_only_who_asked_for_the_routes_has_requests_refused(
    flags: tuple[str, ...], development: bool, becomes: str
) -> None:
    assert asyncio.run(reaches(flags, development)) == becomes


@isolated(LIMIT)
def test_a_pause_rejects_nothing() -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep", params={"level": 0})
        assert engine.options == {}
        asked = await waits(server)
        await server.post("/wake_up", params={"tags": ["scheduling"]})
        assert (await asked).status_code == 200

    run(test, ROUTES, development=False)


# ---- calls that cross or are left ----


async def begin(engine: Engine, server: Server, call: str, **more: Any) -> asyncio.Task[Any]:
    engine.begun.clear()
    engine.held[call] = asyncio.Event()
    begun = asyncio.create_task(server.post(f"/{call}", **more))
    await asyncio.wait_for(engine.begun.wait(), PATIENCE)
    return begun


@isolated(LIMIT)
def test_a_wake_up_passes_a_sleep_only_while_that_waits() -> None:
    async def test(engine: Engine, server: Server) -> None:
        sleeping = await begin(engine, server, "sleep", params={"mode": "wait"})
        for state in ("AWAKE", "ASLEEP", "DISCARDED"):
            engine.state = state
            assert (await server.post("/wake_up")).status_code == 409
        engine.state = "FALLING_ASLEEP"
        assert (await server.post("/release_kv_cache_memory")).status_code == 409
        waking = await begin(engine, server, "wake_up")
        for call in ("sleep", "wake_up", "release_kv_cache_memory"):
            assert (await server.post(f"/{call}")).status_code == 409
        await refused(server)
        # The sleep ends first: the wake_up is still in flight.
        engine.held.pop("sleep").set()
        assert (await sleeping).status_code == 200
        assert (await server.post("/sleep")).status_code == 409
        engine.held.pop("wake_up").set()
        engine.state = ""
        assert (await waking).status_code == 200
        await served(server)
        assert (await server.post("/sleep")).status_code == 200

    run(test)


@isolated(LIMIT)
def test_a_wake_up_passes_a_pause_that_waits() -> None:
    async def test(engine: Engine, server: Server) -> None:
        pause = await begin(engine, server, "sleep", params={"level": 0, "mode": "wait"})
        assert (await server.post("/sleep")).status_code == 409
        assert (await server.post("/wake_up")).status_code == 200
        engine.held.pop("sleep").set()
        await pause

    run(test)


@isolated(LIMIT)
def test_a_sleep_that_was_called_off_is_no_failure_of_the_server() -> None:
    class CalledOff(Engine):
        async def sleep(self, *_: Any, **__: Any) -> None:
            raise RuntimeError(f"Call to sleep method failed: {CALLED_OFF}")

    async def test(engine: Engine, server: Server) -> None:
        answer = await server.post("/sleep", params={"mode": "wait"})
        assert answer.status_code == 409
        assert CALLED_OFF in answer.json()["error"]["message"]
        await served(server)

    run(test, engine=CalledOff)


@pytest.mark.parametrize("call", ["sleep", "wake_up", "release_kv_cache_memory"])
@isolated(LIMIT)
def test_a_client_that_leaves_does_not_stay_in_flight(call: str) -> None:
    async def test(engine: Engine, server: Server) -> None:
        if call == "wake_up":
            await server.post("/sleep")
        (await begin(engine, server, call)).cancel()
        await asyncio.sleep(0.01)
        # The engine goes on, and says what came of it.
        engine.held.clear()
        engine.state = "ASLEEP"
        await refused(server)
        engine.state = "AWAKE"
        engine.paused = False
        engine.asleep = set()
        await served(server)
        assert (await server.post("/sleep")).status_code == 200

    run(test)
