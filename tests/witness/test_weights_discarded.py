"""After a sleep that discarded the weights nothing is served until they count as loaded.

They do after reload_weights, at the end of a weight update, or when a caller that has woken the
weights wakes the rest by name; nothing else resumes the scheduler.
"""

from __future__ import annotations

import importlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import ENGINES, FULL, RANKS, Gpus, isolated
from tests.witness.world import raised

rig.use_tree()

LIMIT = 90
RELOAD = ("collective_rpc", "reload_weights")
# A worker extension's own way of loading, which may write one weight of many.
OTHER = ("collective_rpc", "load_new_weights", None, (5,))
ORIGINAL = [1000 + rank for rank in range(RANKS)]

pytestmark = pytest.mark.usefixtures("vllm_executor")


def update(name: str, *arguments: Any) -> tuple[Any, ...]:
    return ("collective_rpc", name, None, arguments)


def sleeps(engine: rig.Engine) -> bool:
    """Whether the engine is paused, and says so to every question."""
    asleep = bool(engine.call("is_sleeping"))
    assert engine.call("resume_scheduler") == (not asleep)
    assert engine.call("is_sleeping") == asleep
    return asleep


def generates(engine: rig.Engine, name: str) -> bool:
    assert not engine.call("is_sleeping")
    return engine.generates(name)


@isolated(LIMIT)
def test_an_engine_stays_paused_until_its_weights_are_reloaded(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        assert engine.generates("before")
        engine.call("sleep", 2, "abort")
        engine.ask("early")
        assert engine.call("wake_up") is False
        assert gpus.used() == [FULL] * RANKS
        before = len(gpus.calls(0, "execute_model"))
        assert sleeps(engine)
        time.sleep(0.2)
        assert len(gpus.calls(0, "execute_model")) == before, "garbage was served"
        engine.call(*RELOAD)
        assert not sleeps(engine)
        assert engine.answer("early") == [rig.TOKEN] * 3


@pytest.mark.parametrize(
    "call",
    [
        OTHER,
        ("collective_rpc", "echo", None, ("x",)),
        ("wake_up",),
        ("wake_up", ["weights"]),
        ("wake_up", ["weights", "kv_cache"]),
        ("wake_up", ["nonsense"]),
        ("resume_scheduler",),
    ],
)
@isolated(LIMIT)
def test_no_other_call_resumes_it(gpus: Gpus, call: tuple[Any, ...]) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        engine.call(*call)
        assert sleeps(engine)
        engine.call(*RELOAD)
        assert generates(engine, "after")


@pytest.mark.parametrize("tag", ["kv_cache", "scheduling"])
@isolated(LIMIT)
def test_who_wakes_the_rest_by_name_has_loaded_the_weights(gpus: Gpus, tag: str) -> None:
    """As RL frameworks do, which load in ways that vLLM does not see."""
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        # Not while the weights sleep themselves.
        engine.call("wake_up", [tag])
        engine.call("wake_up", ["weights"])
        engine.call(*OTHER)
        if tag == "scheduling":
            engine.call("wake_up")
        assert sleeps(engine)
        engine.call("wake_up", [tag])
        assert generates(engine, "after")


@pytest.mark.guard
@isolated(LIMIT)
def test_the_flow_by_tags_serves(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        for name in "abc":
            engine.call("sleep", 2, "abort")
            engine.call("wake_up", ["weights"])
            engine.call(*OTHER)
            assert engine.call("wake_up", ["kv_cache"])
            assert generates(engine, name)


@isolated(LIMIT)
def test_one_rank_that_failed_to_load_is_enough(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        gpus.fail(2, "reload_weights")
        with pytest.raises(Exception, match="reload_weights was made to fail"):
            engine.call(*RELOAD)
        assert sleeps(engine)
        engine.call(*RELOAD)
        assert generates(engine, "after")


@isolated(LIMIT)
def test_an_engine_that_was_paused_meanwhile_stays_so(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        engine.call("pause_scheduler", "abort")
        engine.call(*RELOAD)
        assert engine.call("is_sleeping")
        assert engine.call("resume_scheduler")
        assert generates(engine, "after")


@isolated(LIMIT)
def test_a_lighter_sleep_brings_no_weights_back(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        engine.call("sleep", 1, "abort")
        engine.call("wake_up")
        assert sleeps(engine)
        engine.call(*RELOAD)
        assert generates(engine, "after")


@pytest.mark.guard
@isolated(LIMIT)
def test_weights_that_sleep_already_are_not_discarded(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 1, "abort")
        engine.call("wake_up", ["kv_cache"])
        engine.call("sleep", 2, "abort")
        # Nor by the sleep that takes a failed wake_up back.
        gpus.fail(3, "wake_up")
        with pytest.raises(Exception, match="wake_up was made to fail"):
            engine.call("wake_up")
        assert engine.call("wake_up")
        assert engine.weights() == ORIGINAL
        assert generates(engine, "after")


@pytest.mark.parametrize("kept", [pytest.param(RANKS, marks=pytest.mark.guard), RANKS - 1])
@isolated(LIMIT)
def test_weights_that_every_rank_keeps_are_not_missed(gpus: Gpus, kept: int) -> None:
    """With --sleep-preserve-parameter-names."""
    for rank in range(kept):
        gpus.keep(rank)
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        assert engine.call("wake_up") == (kept == RANKS)
        assert engine.call("is_sleeping") == (kept < RANKS)


@isolated(LIMIT)
def test_dummy_weights_are_missed_only_once_others_were_loaded(gpus: Gpus) -> None:
    rig.use_dummy_weights()
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        assert engine.call("wake_up")
        engine.call(*RELOAD)
        engine.call("sleep", 2, "abort")
        assert not engine.call("wake_up")
        assert sleeps(engine)


# ---- weight updates ----


@pytest.mark.parametrize("level", [1, 2])
@isolated(LIMIT)
def test_no_sleep_in_the_middle_of_an_update(gpus: Gpus, level: int) -> None:
    with rig.engine(gpus) as engine:
        engine.call(*update("start_weight_update"))
        for _ in range(2):
            engine.call(*update("update_weights", 7))
            with pytest.raises(Exception, match="finish_weight_update"):
                engine.call("sleep", level, "abort")
        assert gpus.used() == [FULL] * RANKS
        engine.call(*update("finish_weight_update"))
        engine.call("sleep", level, "abort")
        assert engine.call("wake_up") == (level == 1)


@pytest.mark.parametrize("failing", ["update_weights", "finish_weight_update"])
@isolated(LIMIT)
def test_an_update_that_failed_keeps_nobody_from_sleeping(gpus: Gpus, failing: str) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        engine.call(*update("start_weight_update"))
        gpus.fail(1, failing)
        with pytest.raises(Exception, match="was made to fail"):
            engine.call(*update(failing, *(() if failing.startswith("finish") else (7,))))
        # Its end, if a rank has one, loads nothing.
        engine.call(*update("finish_weight_update"))
        assert sleeps(engine)
        engine.call("sleep", 2, "abort")
        assert gpus.used() == [0] * RANKS


@isolated(LIMIT)
def test_the_end_of_an_update_counts_and_nothing_before(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up", ["weights"])
        engine.call(*update("start_weight_update"))
        engine.call(*update("update_weights", 7))
        # Who wakes the rest by name has not loaded everything yet.
        engine.call("wake_up", ["kv_cache"])
        assert sleeps(engine)
        engine.call(*update("update_weights", 7))
        assert sleeps(engine)
        engine.call(*update("finish_weight_update"))
        assert generates(engine, "after")


@isolated(LIMIT)
def test_the_update_of_a_draft_loads_no_weights(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        engine.call("sleep", 2, "abort")
        engine.call("wake_up")
        engine.call(*update("start_draft_weight_update"))
        engine.call(*update("finish_weight_update"))
        assert sleeps(engine)


# ---- data parallel engines ----


@isolated(LIMIT)
def test_data_parallel_engines_wait_for_the_weights_of_all(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:

        def done(answers: list[Any]) -> bool:
            return not any(isinstance(answer, BaseException) for answer in answers)

        assert done(engines.call("sleep", 2, "abort"))
        assert engines.call("wake_up", None) == [False] * ENGINES
        # Engine 1 fails to load: engine 0 has its weights, and waits.
        gpus.fail(3, "reload_weights")
        assert isinstance(engines.call(*RELOAD)[1], BaseException)
        for call in (("wake_up", None), ("resume_scheduler",)):
            assert engines.call(*call) == [False] * ENGINES
            assert engines.call("is_sleeping") == [True] * ENGINES
        assert done(engines.call(*RELOAD))
        assert engines.call("wake_up", None) == [True] * ENGINES
        assert engines.call("is_sleeping") == [False] * ENGINES
        assert all(engines.generates(f"{n}", engine=n) for n in range(ENGINES))


# ---- LLM ----


class Core:
    """Stands for the engine core's client."""

    def __init__(self) -> None:
        self.paused = False
        self.asked = 0

    def sleep(self, level: int, mode: str) -> None:
        self.paused = True

    def is_sleeping(self) -> bool:
        self.asked += 1
        return self.paused


def offline() -> tuple[Any, Core]:
    """What LLM calls for every request."""
    kind = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
    llm = kind.__new__(kind)
    llm.engine_core = core = Core()
    llm.logger_manager = None
    llm.renderer = SimpleNamespace(clear_mm_cache=lambda: None)
    return llm, core


def accepts(llm: Any) -> bool:
    """Whether a request gets to where its name is looked at."""
    error = raised(lambda: llm.add_request(1, "a", None))
    if isinstance(error, TypeError):
        return True
    assert "reload_weights" in str(error), error
    assert "wake_up" in str(error), error
    return False


@isolated(LIMIT)
def test_offline_a_request_without_weights_is_an_error_that_names_the_call() -> None:
    llm, engine = offline()
    assert accepts(llm)
    llm.sleep(level=2)
    assert not accepts(llm)
    assert not accepts(llm)
    # A sleep of level 0 on top changes nothing.
    llm.sleep(level=0)
    assert not accepts(llm)
    engine.paused = False
    assert accepts(llm)


@pytest.mark.guard
@isolated(LIMIT)
def test_offline_other_flows_are_as_before() -> None:
    llm, engine = offline()
    for level in (1, 0):
        llm.sleep(level=level)
        assert accepts(llm)
    assert not engine.asked
    llm.sleep(level=2)
    engine.paused = False
    # Requests are queued while it is paused.
    llm.sleep(level=0)
    assert accepts(llm)
