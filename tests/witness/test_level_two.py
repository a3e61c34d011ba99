"""After a sleep that discarded the weights, a wake_up alone does not serve what is left of them."""

from __future__ import annotations

import asyncio
import importlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import ENGINES, FULL, RANKS, Gpus, isolated
from tests.witness.http_rig import Engine, Server, run
from tests.witness.world import raised

rig.use_tree()

LIMIT = 90
AWAKE = [FULL] * RANKS
# What the pretended workers load; any name, and any way of loading, will do.
LOAD = ("collective_rpc", "load_new_weights", None, (5,))
RELOAD = "reload_weights"

pytestmark = pytest.mark.usefixtures("vllm_executor")


@pytest.fixture
def gpus(gpus: Gpus) -> Gpus:
    gpus.remember()
    return gpus


# ---- the engine core, with four ranks ----


@isolated(LIMIT)
def test_an_engine_stays_paused_until_its_weights_are_loaded(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        assert engine.generates("before")
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        assert gpus.used() == AWAKE
        assert engine.call("is_sleeping")
        engine.call("resume_scheduler")
        assert engine.call("is_sleeping")
        before = len(gpus.calls(0, "execute_model"))
        engine.ask("early")
        time.sleep(0.2)
        assert len(gpus.calls(0, "execute_model")) == before, "garbage was served"
        engine.call(*LOAD)
        assert not engine.call("is_sleeping")
        assert engine.answer("early") == [rig.TOKEN] * 3


@isolated(LIMIT)
def test_an_engine_that_was_paused_meanwhile_stays_so(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        assert engine.call("is_sleeping")
        engine.call("pause_scheduler", "abort")
        engine.call(*LOAD)
        assert engine.call("is_sleeping")
        engine.call("resume_scheduler")
        assert engine.generates("after")


@isolated(LIMIT)
def test_one_rank_without_weights_is_enough(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        gpus.fail(2, "load_new_weights")
        with pytest.raises(Exception, match="load_new_weights was made to fail"):
            engine.call(*LOAD)
        engine.call("wake_up")
        assert engine.call("is_sleeping")
        engine.call(*LOAD)
        engine.call("wake_up")
        assert engine.generates("after")


@isolated(LIMIT)
def test_a_lighter_sleep_brings_no_weights_back(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        engine.call("sleep", 1, "abort")
        engine.call("wake_up")
        assert engine.call("is_sleeping")
        engine.call(*LOAD)
        engine.call("wake_up")
        assert engine.generates("after")


@pytest.mark.guard
@isolated(LIMIT)
def test_the_flow_by_tags_serves(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        for name in "abc":
            engine.call("sleep", 2, "abort")
            engine.call("wake_up", ["weights"])
            engine.call(*LOAD)
            engine.call("wake_up", ["kv_cache"])
            assert not engine.call("is_sleeping")
            assert engine.generates(name)


@pytest.mark.guard
@isolated(LIMIT)
def test_a_light_sleep_asks_no_worker_for_its_weights(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 1, "abort")
        engine.call("wake_up")
        assert engine.generates("after")
        assert not gpus.calls(0, "weights_missing")


@isolated(LIMIT)
def test_data_parallel_engines_wait_for_the_weights_of_all(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:

        def done(answers: list[Any]) -> bool:
            return not any(isinstance(answer, BaseException) for answer in answers)

        assert done(engines.call("sleep", 2, "abort"))
        assert done(engines.call("wake_up", None))
        assert engines.call("is_sleeping") == [True] * ENGINES
        # Engine 1 fails to load: engine 0 has its weights, and waits.
        gpus.fail(3, "load_new_weights")
        assert isinstance(engines.call(*LOAD)[1], BaseException)
        for call in (("wake_up", None), ("resume_scheduler",)):
            assert done(engines.call(*call))
            assert engines.call("is_sleeping") == [True] * ENGINES
        assert done(engines.call(*LOAD))
        assert done(engines.call("wake_up", None))
        assert engines.call("is_sleeping") == [False] * ENGINES
        assert all(engines.generates(f"{n}", engine=n) for n in range(ENGINES))


# ---- LLM ----


class Core:
    """Stands for the engine core's client."""

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.missing = False
        self.paused = False
        self.asked = 0

    def sleep(self, level: int, mode: str) -> None:
        self.asleep = {"weights", "kv_cache"} if level else set()
        self.missing |= level == 2
        self.paused = True

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.asleep -= set(self.asleep if tags is None else tags)
        self.paused = bool(self.asleep) or self.missing
        return not self.paused

    def is_sleeping(self) -> bool:
        self.asked += 1
        return self.paused


def offline(engines: int = 1) -> tuple[Any, Core]:
    """What LLM calls for every request."""
    kind = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
    llm = kind.__new__(kind)
    llm.engine_core = core = Core()
    llm.logger_manager = None
    llm.renderer = SimpleNamespace(clear_mm_cache=lambda: None)
    llm.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=engines))
    return llm, core


def accepts(llm: Any) -> bool:
    """Whether a request gets to where its name is looked at."""
    error = raised(lambda: llm.add_request(1, "a", None))
    if isinstance(error, TypeError):
        return True
    assert RELOAD in str(error), error
    assert "wake_up" in str(error), error
    return False


@isolated(LIMIT)
def test_offline_a_plain_wake_ends_in_an_error_that_names_the_call() -> None:
    llm, engine = offline()
    assert accepts(llm)
    llm.sleep(level=2)
    assert not accepts(llm)
    llm.wake_up()
    assert not accepts(llm)
    # As colocated trainers do: by a call of the model in this process.
    engine.missing = False
    assert accepts(llm)
    assert not engine.paused


@isolated(LIMIT)
def test_offline_an_engine_that_was_not_to_wake_stays_asleep() -> None:
    llm, engine = offline()
    llm.sleep(level=2)
    engine.missing = False
    engine.asleep = set()
    assert not accepts(llm)
    llm.wake_up()
    assert accepts(llm)


@isolated(LIMIT)
def test_offline_data_parallel_engines_resume_in_a_wake_up() -> None:
    """A resume of one would wait for the others."""
    llm, engine = offline(engines=2)
    llm.sleep(level=2)
    llm.wake_up()
    engine.missing = False
    assert not accepts(llm)
    assert engine.paused
    llm.wake_up()
    assert accepts(llm)


@pytest.mark.guard
@isolated(LIMIT)
def test_offline_other_flows_are_as_before() -> None:
    llm, engine = offline()
    for level in (1, 0):
        llm.sleep(level=level)
        assert accepts(llm)
        llm.wake_up()
        assert accepts(llm)
    assert not engine.asked
    llm.sleep(level=2)
    llm.wake_up(["weights"])
    engine.missing = False
    llm.wake_up(["kv_cache"])
    # Requests are queued while it is paused.
    llm.sleep(level=0)
    assert accepts(llm)


# ---- HTTP ----


class Deep(Engine):
    """An engine that stays paused while weights are missing, as AsyncLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.missing = False
        self.asked = 0
        self.silent = False
        # An answer that is given when the event is set.
        self.late: tuple[asyncio.Event, bool] | None = None

    async def sleep(
        self, level: int = 1, mode: str = "abort", tags: list[str] | None = None, **options: Any
    ) -> None:
        await super().sleep(level, mode, tags)
        self.missing |= level == 2

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        await super().wake_up(tags)
        self.paused |= self.missing
        return not self.paused

    async def is_sleeping(self) -> bool:
        self.asked += 1
        if self.late is not None:
            (event, answer), self.late = self.late, None
            await event.wait()
            return answer
        while self.silent:
            await asyncio.sleep(0.01)
        return await super().is_sleeping()

    def load(self) -> None:
        self.missing = False
        self.paused = bool(self.asleep)
        self._changed.set()


async def refused(server: Server, *words: str) -> None:
    answer = await server.ask()
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["Retry-After"]) >= 1
    for word in words:
        assert word in answer.json()["error"]["message"], answer.text


async def served(server: Server) -> None:
    assert (await server.ask()).status_code == 200


@isolated(LIMIT)
def test_over_http_every_answer_names_the_next_call() -> None:
    async def test(engine: Deep, server: Server) -> None:
        await server.post("/sleep", params={"level": 2})
        await refused(server, "tags=weights", RELOAD, "/collective_rpc")
        answer = await server.post("/wake_up")
        assert answer.status_code == 200
        body = answer.json()
        assert body["status"] == "sleeping"
        assert RELOAD in body["next"]
        assert "/collective_rpc" in body["next"]
        await refused(server, RELOAD)
        # What loads the weights passes no gate: the next request finds out.
        engine.load()
        await served(server)

    run(test, engine=Deep)


@isolated(LIMIT)
def test_over_http_the_flow_by_tags_serves() -> None:
    async def test(engine: Deep, server: Server) -> None:
        for _ in range(2):
            await server.post("/sleep", params={"level": 2})
            answer = await server.post("/wake_up", params={"tags": ["weights"]})
            assert RELOAD in answer.json()["next"]
            engine.load()
            await refused(server)
            answer = await server.post("/wake_up", params={"tags": ["kv_cache"]})
            assert answer.status_code == 200
            assert b"next" not in answer.content
            await served(server)

    run(test, engine=Deep)


@isolated(LIMIT)
def test_without_a_route_that_loads_weights_the_answer_says_so() -> None:
    async def test(engine: Deep, server: Server) -> None:
        await server.post("/sleep", params={"level": 2})
        answer = await server.post("/wake_up")
        assert "VLLM_SERVER_DEV_MODE=1" in answer.json()["next"]
        assert "/collective_rpc" not in answer.json()["next"]
        await refused(server, "VLLM_SERVER_DEV_MODE=1")
        # A program that has the engine may load them.
        engine.load()
        await served(server)

    run(test, "--enable-sleep-routes", engine=Deep, development=False)


@isolated(LIMIT)
def test_while_weights_are_loaded_requests_are_refused_and_share_one_question() -> None:
    async def test(engine: Deep, server: Server) -> None:
        await server.post("/sleep", params={"level": 2})
        await server.post("/wake_up")
        # The engine answers nothing while it loads.
        engine.silent = True
        gate: Any = importlib.import_module(type(server.gate).__module__)
        gate.LOOK_SECONDS = 0.1
        before = engine.asked
        await asyncio.gather(*(refused(server, RELOAD) for _ in range(5)))
        assert engine.asked == before + 1
        engine.silent = False
        engine.load()
        await served(server)

    run(test, engine=Deep)


@isolated(LIMIT)
def test_what_was_asked_before_a_sleep_does_not_count_after_it() -> None:
    async def test(engine: Deep, server: Server) -> None:
        await server.post("/sleep", params={"level": 2})
        await server.post("/wake_up")
        event = asyncio.Event()
        engine.late = (event, False)
        asked = asyncio.create_task(server.ask())
        while engine.late is not None:
            await asyncio.sleep(0.001)
        await server.post("/sleep", params={"level": 2})
        event.set()
        assert (await asked).status_code == 503
        await refused(server, RELOAD)

    run(test, engine=Deep)


@isolated(LIMIT)
def test_a_light_sleep_after_a_deep_one_names_the_light_calls() -> None:
    async def test(engine: Deep, server: Server) -> None:
        await server.post("/sleep", params={"level": 2})
        await refused(server, RELOAD)
        await server.post("/wake_up", params={"tags": ["weights"]})
        engine.load()
        await server.post("/wake_up")
        await server.post("/sleep")
        answer = await server.ask()
        assert RELOAD not in answer.text
        answer = await server.post("/wake_up")
        assert b"next" not in answer.content
        await served(server)

    run(test, engine=Deep)
