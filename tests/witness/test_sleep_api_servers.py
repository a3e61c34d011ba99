"""Several API servers of one engine: what one of them lets through, the others learn of.

With data parallelism vLLM starts as many API servers as engines, and the kernel chooses one for
each connection: /sleep and /wake_up of one client reach different ones.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import Engine, Server, newer, run

executor_rig.use_tree()

LIMIT = 40

pytestmark = pytest.mark.usefixtures("vllm_executor")


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_a_server_notices_that_another_woke_the_engine(level: int) -> None:
    async def test(engine: Engine, first: Server) -> None:
        second = Server(engine)
        assert (await first.post("/sleep", params={"level": level})).status_code == 200
        assert (await first.ask()).status_code == 503
        assert (await second.post("/wake_up")).status_code == 200
        assert (await first.ask()).status_code == 200
        assert (await second.ask()).status_code == 200

    run(test)


class Differing(Engine):
    """Two data parallel engines, one of which did not wake: the client of 0.33.0 raises."""

    differs = False

    async def is_sleeping(self) -> bool:
        if self.differs:
            raise RuntimeError("Engines returned different is_sleeping results: [False, True]")
        return await super().is_sleeping()


@isolated(LIMIT)
def test_engines_that_differ_refuse_and_the_call_keeps_its_error() -> None:
    async def test(engine: Differing, server: Server) -> None:
        await server.post("/sleep", params={"level": 2})
        engine.failing.add("wake_up")
        engine.differs = True
        answer = await server.post("/wake_up")
        assert answer.status_code == 500
        assert "made to fail" in answer.text
        assert (await server.ask()).status_code == 503
        engine.failing.clear()
        engine.differs = False
        assert (await server.post("/wake_up")).status_code == 200
        assert (await server.ask()).status_code == 200

    run(test, engine=Differing)


class Reporting(Engine):
    """Says what is asleep on its one rank, and counts how often it is asked whether it sleeps."""

    asked = 0

    async def is_sleeping(self) -> bool:
        self.asked += 1
        await asyncio.sleep(0)
        return await super().is_sleeping()

    async def sleep_report(self) -> list[dict[str, Any]]:
        return [{"asleep_bytes": dict.fromkeys(self.asleep, 1)}]


def one_of_two(engine: Engine) -> Server:
    return Server(engine, servers=2)


def ask_each_time() -> None:
    gate = importlib.import_module(f"vllm.entrypoints.serve.{'dev.' if newer() else ''}sleep.gate")
    vars(gate)["NOTICE_SECONDS"] = 0.0


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_a_server_notices_that_another_put_the_engine_to_sleep(level: int) -> None:
    async def test(engine: Engine, _: Server) -> None:
        ask_each_time()
        first, second = one_of_two(engine), one_of_two(engine)
        assert (await second.ask()).status_code == 200
        assert (await first.post("/sleep", params={"level": level})).status_code == 200
        assert (await second.ask()).status_code == 503
        assert (await first.post("/wake_up")).status_code == 200
        assert (await second.ask()).status_code == 200

    run(test, engine=Reporting)


@isolated(LIMIT)
def test_requests_share_one_question_a_second() -> None:
    async def test(engine: Reporting, _: Server) -> None:
        first, second = one_of_two(engine), one_of_two(engine)
        await asyncio.gather(*[second.ask() for _ in range(20)])
        assert engine.asked == 1
        await second.ask()
        assert engine.asked == 1
        await first.post("/sleep", params={"level": 1})
        assert second.gate
        second.gate._asked -= 1.0
        found = await asyncio.gather(*[second.ask() for _ in range(20)])
        assert {answer.status_code for answer in found} == {503}

    run(test, engine=Reporting)


@pytest.mark.guard
@isolated(LIMIT)
def test_requests_wait_where_the_engine_is_only_paused() -> None:
    async def test(engine: Engine, _: Server) -> None:
        first, second = one_of_two(engine), one_of_two(engine)
        await first.post("/sleep", params={"level": 0})
        with pytest.raises(asyncio.TimeoutError):
            await second.ask()

    run(test, engine=Reporting)


@pytest.mark.guard
@isolated(LIMIT)
def test_the_only_server_asks_nothing() -> None:
    async def test(engine: Reporting, server: Server) -> None:
        assert (await server.ask()).status_code == 200
        assert engine.asked == 0

    run(test, engine=Reporting)
