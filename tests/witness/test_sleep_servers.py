"""What an engine core publishes of its sleep, and what each of its API servers makes of it.

Real engine cores, clients and routes: an engine that is silent, busy or dead makes no request wait.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import ENGINES, FULL, RANKS, Gpus, isolated
from tests.witness.http_rig import PROMPT, Server
from tests.witness.served_rig import Served, serve

rig.use_tree()

LIMIT = 60
# Several servers of data parallel engines start the coordinator, too.
LONG = 90
REJECT = ("--sleep-mode-requests", "reject")
AWAKE = [FULL] * RANKS
ASLEEP = [0] * RANKS

pytestmark = pytest.mark.usefixtures("vllm_executor")


async def post(server: Server, path: str, seconds: float = 20, **more: Any) -> httpx.Response:
    return await asyncio.wait_for(server.client.post(path, **more), seconds)


async def ask(server: Server, seconds: float = 20) -> int:
    answer = await post(server, "/v1/completions", seconds, json=PROMPT)
    return int(answer.status_code)


async def begin(served: Served, gpus: Gpus, tokens: int) -> asyncio.Task[int]:
    """A request of so many tokens, each of which takes a tenth of a second."""
    for rank in range(RANKS):
        gpus.late(rank, "execute_model", 0.1)
    served.engines[0].tokens = tokens
    running = asyncio.create_task(ask(served.servers[0], 40))
    await until_called(gpus, "execute_model")
    return running


async def until_called(gpus: Gpus, operation: str) -> None:
    while not gpus.calls(0, operation):
        await asyncio.sleep(0.005)


async def refused(served: Served) -> None:
    """Every server refuses, and asks no engine: one that is held in a call would not answer."""
    for server in served.servers:
        answer = await post(server, "/v1/completions", json=PROMPT)
        assert answer.status_code == 503, answer.text
        assert "Retry-After" in answer.headers


async def everybody_serves(served: Served) -> None:
    for server in served.servers:
        assert await ask(server) == 200


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_every_server_knows_what_one_let_through(gpus: Gpus, level: int) -> None:
    async def test(served: Served) -> None:
        first, second = served.servers
        await everybody_serves(served)
        assert (await post(first, "/sleep", params={"level": level})).status_code == 200
        await served.until("ASLEEP" if level == 1 else "DISCARDED")
        await refused(served)
        assert gpus.used() == ASLEEP
        # The flow after a level 2 sleep: weights, their load, the KV cache.
        for tag in ("weights", "kv_cache"):
            assert (await post(second, "/wake_up", params={"tags": [tag]})).status_code == 200
        await served.until("AWAKE")
        await everybody_serves(served)
        # A pause is no sleep, also after one.
        assert (await post(first, "/sleep", params={"level": 0})).status_code == 200
        asked = asyncio.create_task(ask(second))
        assert not (await asyncio.wait({asked}, timeout=0.3))[0]
        assert (await post(first, "/wake_up")).status_code == 200
        assert await asked == 200

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_a_silent_engine_that_sleeps_makes_no_request_wait(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first = served.servers[0]
        await everybody_serves(served)
        assert (await post(first, "/sleep")).status_code == 200
        await served.until("ASLEEP")
        served.signal(signal.SIGSTOP)
        # As often as an API server would ask again.
        for _ in range(2):
            await refused(served)
            await asyncio.sleep(1.1)
        served.signal(signal.SIGCONT)
        assert (await post(first, "/wake_up")).status_code == 200
        await everybody_serves(served)

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_a_busy_engine_is_asked_nothing(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        second = served.servers[1]
        gpus.late(0, "execute_model", 1.5)
        running = asyncio.create_task(ask(served.servers[0]))
        await until_called(gpus, "execute_model")
        asked = asyncio.create_task(ask(second))
        await asyncio.sleep(0.25)
        assert served.frontends[1].requests == 1, "the request waits in the server"
        gpus.late(0, "execute_model", 0)
        assert [await running, await asked] == [200, 200]

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_servers_know_it_before_memory_is_unmapped_and_until_all_is_back(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first, second = served.servers
        for rank in range(RANKS):
            gpus.hang(rank, "sleep", "wake_up")
        sleeping = asyncio.create_task(post(first, "/sleep"))
        await until_called(gpus, "sleep")
        assert gpus.used() == AWAKE
        await refused(served)
        for rank in range(RANKS):
            gpus.let_go(rank, "sleep")
        assert (await sleeping).status_code == 200
        waking = asyncio.create_task(post(second, "/wake_up"))
        for rank in range(1, RANKS):
            gpus.let_go(rank, "wake_up")
        while gpus.used()[1:] != AWAKE[1:]:
            await asyncio.sleep(0.005)
        await refused(served)
        gpus.let_go(0, "wake_up")
        assert (await waking).status_code == 200
        await served.until("AWAKE")
        await everybody_serves(served)

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_a_call_that_failed_leaves_every_server_with_the_truth(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first, second = served.servers
        with pytest.raises(Exception, match="Invalid pause mode"):
            await served.engines[0].sleep(1, "nonsense")
        await everybody_serves(served)
        gpus.fail(2, "sleep")
        assert (await post(first, "/sleep")).status_code == 500
        await served.until("ASLEEP")
        await refused(served)
        gpus.peer(2, rig.CAPACITY - 20)
        assert (await post(second, "/wake_up")).status_code == 500
        await refused(served)
        gpus.peer(2, 0)
        assert (await post(second, "/wake_up")).status_code == 200
        await served.until("AWAKE")
        await everybody_serves(served)

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_a_request_that_is_on_its_way_when_the_engine_falls_asleep_is_refused(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first, second = served.servers
        for rank in range(RANKS):
            gpus.late(rank, "execute_model", 0.5)
        running = asyncio.create_task(ask(first))
        await until_called(gpus, "execute_model")
        # The engine is in a step, and hears of neither before its end.
        gpus.hang(0, "sleep")
        sleeping = asyncio.create_task(post(first, "/sleep"))
        await asyncio.sleep(0.05)
        asked = asyncio.create_task(ask(second, 10))
        await until_called(gpus, "sleep")
        await served.until("ASLEEP")
        # What waited for a request and has begun to unmap memory is not called off.
        assert (await post(first, "/wake_up")).status_code == 409
        gpus.let_go(0, "sleep")
        assert (await sleeping).status_code == 200
        assert await asked == 503
        await running
        assert gpus.used() == ASLEEP

    serve(gpus, test, *REJECT)


@pytest.mark.parametrize("by", [0, 1])
@isolated(LIMIT)
def test_a_wake_up_calls_off_a_sleep_that_waits(gpus: Gpus, by: int) -> None:
    async def test(served: Served) -> None:
        first = served.servers[0]
        running = await begin(served, gpus, 60)
        sleeping = asyncio.create_task(post(first, "/sleep", params={"mode": "wait"}))
        await served.until("FALLING_ASLEEP")
        await refused(served)
        answer = await post(served.servers[by], "/wake_up")
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "awake"
        called_off = await asyncio.wait_for(sleeping, 20)
        assert called_off.status_code == 409
        assert "called it off" in called_off.text
        assert not running.done()
        await served.until("AWAKE")
        served.engines[0].tokens = 1
        await everybody_serves(served)
        # A sleep that comes later is one of its own.
        again = asyncio.create_task(post(first, "/sleep", 40, params={"mode": "wait"}))
        assert await running == 200
        assert (await again).status_code == 200
        assert gpus.used() == ASLEEP
        assert (await post(first, "/wake_up")).status_code == 200
        await everybody_serves(served)

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_a_pause_that_waits_is_called_off_too(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first = served.servers[0]
        running = await begin(served, gpus, 30)
        pause = asyncio.create_task(post(first, "/sleep", params={"level": 0, "mode": "wait"}))
        await asyncio.sleep(0.3)
        answer = await post(first, "/wake_up", params={"tags": ["scheduling"]})
        assert answer.status_code == 200
        assert (await asyncio.wait_for(pause, 20)).status_code == 409
        assert await running == 200

    serve(gpus, test, *REJECT, servers=1)


@isolated(LIMIT)
def test_a_resume_says_that_memory_is_asleep(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first, second = served.servers
        assert (await post(first, "/sleep")).status_code == 200
        answer = await post(second, "/resume")
        assert answer.status_code == 409
        assert "/wake_up" in answer.text
        # Requests on their way are refused as before.
        with pytest.raises(Exception, match="paused"):
            await asyncio.wait_for(served.frontends[1].generate(1), 20)
        assert (await post(first, "/wake_up")).status_code == 200
        assert (await post(second, "/resume")).json() == {"status": "resumed"}
        await everybody_serves(served)

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_a_deeper_sleep_of_an_engine_that_sleeps_discards_nothing(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        server = served.servers[0]
        for level in (1, 2):
            assert (await post(server, "/sleep", params={"level": level})).status_code == 200
        answer = await post(server, "/v1/completions", json=PROMPT)
        assert answer.status_code == 503
        assert "Call /wake_up, then" in answer.text
        assert (await post(server, "/wake_up")).json()["status"] == "awake"
        assert await ask(server) == 200

    serve(gpus, test, *REJECT, servers=1)


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
@isolated(LIMIT)
def test_a_client_that_leaves_takes_nothing_with_it(gpus: Gpus, call: str) -> None:
    async def test(served: Served) -> None:
        first = served.servers[0]
        if call == "wake_up":
            assert (await post(first, "/sleep")).status_code == 200
        for rank in range(RANKS):
            gpus.hang(rank, call)
        leaving = asyncio.create_task(first.client.post(f"/{call}"))
        await until_called(gpus, call)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await refused(served)
        for rank in range(RANKS):
            gpus.let_go(rank, call)
        await served.until("ASLEEP" if call == "sleep" else "AWAKE")
        if call == "sleep":
            await refused(served)
            assert (await post(first, "/wake_up")).status_code == 200
            await served.until("AWAKE")
        await everybody_serves(served)

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_a_release_of_the_cache_is_published_before_it_is_begun(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first, second = served.servers
        await post(first, "/sleep", params={"level": 0})
        gpus.hang(0, "discard")
        releasing = asyncio.create_task(post(first, "/release_kv_cache_memory"))
        await until_called(gpus, "discard")
        await refused(served)
        gpus.let_go(0, "discard")
        assert (await releasing).status_code == 200
        await refused(served)
        assert (await post(second, "/wake_up")).status_code == 200
        await served.until("AWAKE")
        await everybody_serves(served)

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_after_a_rank_died_every_call_and_request_has_an_error(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first, second = served.servers
        await everybody_serves(served)
        gpus.die(1, "sleep")
        assert (await post(first, "/sleep", 30)).status_code == 500
        for server in served.servers:
            for path in ("/sleep", "/wake_up", "/v1/completions"):
                answer = await post(server, path, 10, json=PROMPT)
                assert answer.status_code == 500, (path, answer.text)
        assert second.gate
        assert not second.gate.in_flight

    serve(gpus, test, *REJECT)


@isolated(LIMIT)
def test_a_call_that_a_dead_engine_has_not_answered_ends_with_an_error(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        running = await begin(served, gpus, 60)
        sleeping = asyncio.create_task(post(served.servers[1], "/sleep", params={"mode": "wait"}))
        await served.until("FALLING_ASLEEP")
        gpus.die(1, "execute_model")
        assert (await asyncio.wait_for(sleeping, 15)).status_code == 500
        assert await running == 500

    serve(gpus, test, *REJECT)


@isolated(LONG)
def test_one_data_parallel_engine_asleep_refuses_at_every_server(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        first, second = served.servers
        running = await begin(served, gpus, 15)
        sleeping = asyncio.create_task(post(first, "/sleep", params={"mode": "wait"}))
        await served.until("FALLING_ASLEEP", "ASLEEP")
        # Engines in lockstep cannot call it off each by itself.
        assert set(served.states()) == {"ASLEEP"}
        assert (await post(first, "/wake_up")).status_code == 409
        assert await running == 200
        assert (await sleeping).status_code == 200
        served.engines[0].tokens = 3
        await refused(served)
        with pytest.raises(Exception, match="paused"):
            await asyncio.wait_for(served.frontends[1].generate(1), 20)
        gpus.peer(3, rig.CAPACITY - 20)
        assert (await post(second, "/wake_up")).status_code == 500
        await refused(served)
        answer = await asyncio.wait_for(first.client.get("/is_sleeping"), 20)
        assert answer.json()["is_sleeping"] is True
        gpus.peer(3, 0)
        assert (await post(first, "/wake_up")).status_code == 200
        await served.until("AWAKE")
        await everybody_serves(served)

    serve(gpus, test, *REJECT, engines=ENGINES)


@pytest.mark.guard
@isolated(LIMIT)
def test_a_program_without_a_server_may_ignore_what_is_published(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        for level in (1, 2):
            engine.call("sleep", level, "abort")
            engine.call("wake_up", None)
            if level == 2:
                engine.call("collective_rpc", "load_new_weights", None, (5,))
                engine.call("wake_up", ["scheduling"])
            assert engine.generates(f"{level}")
