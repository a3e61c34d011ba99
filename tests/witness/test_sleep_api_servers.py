"""Several API servers of one engine: what one of them lets through, the others learn of.

With data parallelism vLLM starts as many API servers as engines, and the kernel chooses one for
each connection: /sleep and /wake_up of one client reach different ones.
"""

from __future__ import annotations

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import Engine, Server, run

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
