"""The sleep routes say of each rank what is asleep, and never at the cost of the call itself."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import RANKS, SIZES, Gpus, isolated
from tests.witness.http_rig import PATIENCE, TAGS, Engine, Server, run

rig.use_tree()

LIMIT = 40
ASLEEP: dict[str, int] = SIZES
AWAKE: dict[str, int] = {}
# A peer that holds this much leaves no room for the weights.
MOST = rig.CAPACITY - 20
# The release's route, and the engine's method of that name.
RELEASE = "release_kv_cache_memory"

pytestmark = pytest.mark.usefixtures("vllm_executor")


# -- HTTP ---------------------------------------------------------------------------------------


class Reporting(Engine):
    """An engine of two ranks; ``report`` replaces what it says."""

    report: Any = "what is asleep"

    async def sleep_report(self) -> Any:
        await self._call("sleep_report")
        if self.report != "what is asleep":
            return self.report
        return [{"rank": rank, "asleep_bytes": sorted(self.asleep)} for rank in range(2)]


def ranks(*asleep: str) -> list[dict[str, Any]]:
    return [{"rank": rank, "asleep_bytes": sorted(asleep)} for rank in range(2)]


async def state(server: Server) -> dict[str, Any]:
    answer = await asyncio.wait_for(server.client.get("/is_sleeping"), PATIENCE)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


@isolated(LIMIT)
def test_every_answer_says_what_is_asleep_on_each_rank() -> None:
    async def test(engine: Reporting, server: Server) -> None:
        assert await state(server) == {"is_sleeping": False, "ranks": ranks()}
        answer = await server.post("/sleep", params={"level": 1})
        assert answer.status_code == 200
        assert answer.json() == {"status": "sleeping", "level": 1, "ranks": ranks(*TAGS)}
        assert await state(server) == {"is_sleeping": True, "ranks": ranks(*TAGS)}
        answer = await server.post("/wake_up", params={"tags": ["weights"]})
        assert answer.status_code == 200
        assert answer.json() == {
            "status": "sleeping",
            "tags": ["weights"],
            "ranks": ranks("kv_cache"),
        }
        answer = await server.post("/wake_up")
        assert answer.json() == {"status": "awake", "tags": None, "ranks": ranks()}
        assert await state(server) == {"is_sleeping": False, "ranks": ranks()}
        await server.post("/sleep", params={"level": 0})
        answer = await server.post(f"/{RELEASE}")
        assert answer.json() == {"status": "kv_cache_released", "ranks": ranks("kv_cache")}

    run(test, engine=Reporting)


@isolated(LIMIT)
def test_a_pause_is_no_sleep_of_memory() -> None:
    async def test(engine: Reporting, server: Server) -> None:
        answer = await server.post("/sleep", params={"level": 0})
        assert answer.json() == {"status": "sleeping", "level": 0, "ranks": ranks()}
        answer = await server.post("/wake_up", params={"tags": ["scheduling"]})
        assert answer.json() == {"status": "awake", "tags": ["scheduling"], "ranks": ranks()}

    run(test, engine=Reporting)


@isolated(LIMIT)
def test_an_answer_says_where_weights_are_missing_beside_it() -> None:
    class Missing(Reporting):
        def __init__(self) -> None:
            super().__init__()
            self.missing = True

        async def is_sleeping(self) -> bool:
            return True

    async def test(engine: Reporting, server: Server) -> None:
        await server.post("/sleep", params={"level": 2})
        answer = await server.post("/wake_up")
        assert answer.json()["ranks"] == ranks()
        assert "next" in answer.json()

    run(test, engine=Missing)


@pytest.mark.parametrize("report", [None, [], "asleep", {"rank": 0}])
@isolated(LIMIT)
def test_what_is_not_known_is_left_out(report: Any) -> None:
    async def test(engine: Reporting, server: Server) -> None:
        engine.report = report
        answer = await server.post("/sleep", params={"level": 1})
        assert answer.status_code == 200
        assert answer.json() == {"status": "sleeping", "level": 1}
        assert await state(server) == {"is_sleeping": True}
        answer = await server.post("/wake_up")
        assert answer.json() == {"status": "awake", "tags": None}
        assert [call[0] for call in engine.calls].count("sleep_report") == 3

    run(test, engine=Reporting)


@pytest.mark.parametrize(
    "trouble", ["fails", "hangs", pytest.param("is not there", marks=pytest.mark.guard)]
)
@isolated(LIMIT)
def test_a_report_that_cannot_be_had_fails_no_call(trouble: str) -> None:
    async def test(engine: Reporting, server: Server) -> None:
        if trouble == "fails":
            engine.failing = {"sleep_report"}
        elif trouble == "hangs":
            engine.held["sleep_report"] = asyncio.Event()
            module: Any = importlib.import_module("vllm.entrypoints.serve.dev.sleep.ranks")
            module.PATIENCE = 0.2
        answer = await server.post("/sleep", params={"level": 1})
        assert answer.status_code == 200
        assert answer.json() == {"status": "sleeping", "level": 1}
        assert (await state(server))["is_sleeping"] is True
        assert (await server.post("/wake_up")).json()["status"] == "awake"
        assert trouble == "is not there" or ("sleep_report",) in engine.calls
        # A call after it is let through.
        assert (await server.post("/sleep")).status_code == 200

    run(test, engine=Engine if trouble == "is not there" else Reporting)


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
@isolated(LIMIT)
def test_a_call_that_failed_is_an_error_as_before(call: str) -> None:
    async def test(engine: Reporting, server: Server) -> None:
        if call == "wake_up":
            await server.post("/sleep")
        engine.failing = {call}
        answer = await server.post(f"/{call}")
        assert answer.status_code == 500
        assert "ranks" not in answer.json()
        # What became of it can be asked for.
        assert (await state(server))["ranks"] == ranks(*engine.asleep)

    run(test, engine=Reporting)


@isolated(LIMIT)
def test_no_other_call_comes_between_a_call_and_its_report() -> None:
    async def test(engine: Reporting, server: Server) -> None:
        engine.held["sleep_report"] = asyncio.Event()
        sleeping = asyncio.create_task(server.post("/sleep"))
        while ("sleep_report",) not in engine.calls:
            await asyncio.sleep(0.01)
        answer = await server.post("/wake_up")
        assert answer.status_code == 409
        engine.held.pop("sleep_report").set()
        assert (await sleeping).json()["ranks"] == ranks(*TAGS)

    run(test, engine=Reporting)


# -- executor and engine ------------------------------------------------------------------------


def asleep(reports: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [report["asleep_bytes"] for report in reports]


@isolated(LIMIT)
def test_each_rank_reports(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        assert asleep(executor.sleep_report()) == [AWAKE] * RANKS
        executor.sleep(1)
        assert [one["rank"] for one in executor.sleep_report()] == list(range(RANKS))
        assert asleep(executor.sleep_report()) == [ASLEEP] * RANKS
        executor.wake_up(["weights"])
        assert asleep(executor.sleep_report()) == [{"kv_cache": SIZES["kv_cache"]}] * RANKS
        executor.wake_up()
        assert asleep(executor.sleep_report()) == [AWAKE] * RANKS


@isolated(LIMIT)
def test_ranks_are_asked_once_for_each_call(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        executor.wake_up()
        assert gpus.calls(0, "sleep_report") == []
        for _ in range(5):
            executor.sleep_report()
        assert len(gpus.calls(0, "sleep_report")) == 1
        executor.sleep(1)
        for _ in range(5):
            executor.sleep_report()
        assert len(gpus.calls(0, "sleep_report")) == 2


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
@isolated(LIMIT)
def test_a_call_that_failed_half_way_is_reported_as_it_is(gpus: Gpus, call: str) -> None:
    with rig.executor(gpus) as executor:
        if call == "sleep":
            executor.sleep_report()
            gpus.fail(2, "sleep")
            with pytest.raises(RuntimeError, match="sleep was made to fail"):
                executor.sleep(1)
            woken = {"kv_cache": SIZES["kv_cache"]}
            assert asleep(executor.sleep_report()) == [ASLEEP, ASLEEP, woken, ASLEEP]
            return
        executor.sleep(1)
        executor.sleep_report()
        gpus.peer(2, MOST)
        # What the others have woken is not put back.
        gpus.fail(0, "sleep")
        with pytest.raises(RuntimeError, match="rank 2: CUDA Error: out of memory"):
            executor.wake_up()
        assert asleep(executor.sleep_report())[2] == ASLEEP
        assert asleep(executor.sleep_report())[0] == {"kv_cache": SIZES["kv_cache"]}
        gpus.peer(2, 0)
        executor.wake_up()
        assert asleep(executor.sleep_report()) == [AWAKE] * RANKS


@pytest.mark.parametrize("trouble", ["silent", "failing", "hanging"])
@isolated(LIMIT)
def test_nothing_is_reported_where_one_rank_does_not_say(gpus: Gpus, trouble: str) -> None:
    rig.hurry()
    from vllm.v1.executor import abstract

    with rig.executor(gpus) as executor:
        abstract.REPORT_TIMEOUT_SECONDS = 0.5
        executor.sleep(1)
        if trouble == "silent":
            gpus.silence(1)
        elif trouble == "failing":
            gpus.fail(1, "sleep_report")
        else:
            gpus.hang(1, "sleep_report")
        assert executor.sleep_report() == []
        asked = len(gpus.calls(0, "sleep_report"))
        # Who polls it does not wait again.
        assert executor.sleep_report() == []
        assert len(gpus.calls(0, "sleep_report")) == asked
        if trouble == "hanging":
            gpus.let_go(1, "sleep_report")
        executor.wake_up()
        assert not executor.is_sleeping
        if trouble != "silent":
            assert asleep(executor.sleep_report()) == [AWAKE] * RANKS


@isolated(LIMIT)
def test_a_rank_that_hangs_in_wake_up_is_not_asked(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        executor.sleep(1)
        gpus.hang(0, "wake_up", "sleep")
        with pytest.raises((RuntimeError, TimeoutError)):
            executor.wake_up()
        assert executor.sleep_report() == []
        assert gpus.calls(1, "sleep_report") == []
        gpus.let_go(0, "wake_up", "sleep")


@isolated(LIMIT)
def test_the_engine_reports_while_it_serves(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        assert asleep(engine.call("sleep_report")) == [AWAKE] * RANKS
        assert engine.generates("a")
        engine.call("sleep", 1, "abort")
        found = engine.call("sleep_report")
        assert asleep(found) == [ASLEEP] * RANKS
        json.dumps(found)
        engine.call("wake_up", None)
        assert asleep(engine.call("sleep_report")) == [AWAKE] * RANKS
        assert engine.generates("b")


@isolated(90)
def test_ranks_of_all_data_parallel_engines_report(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        engines.call("sleep", 1, "abort")
        found = engines.report()
        assert [(one["dp_rank"], one["rank"]) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert asleep(found) == [ASLEEP] * RANKS
        engines.call("wake_up", None)
        gpus.silence(3)
        assert engines.report() == []
