"""A sleep that releases the KV cache alone: over HTTP, by a setting, and on every rank or none."""

from __future__ import annotations

import asyncio
import contextlib
import io
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import RANKS, SIZES, Gpus, isolated
from tests.witness.http_rig import TAGS, Engine, Server, arguments, run

rig.use_tree()

LIMIT = 40
SETTING = ("--sleep-mode-release", "kv_cache")
ALONE = ["kv_cache"]
AWAKE = [rig.FULL] * RANKS
ASLEEP = [0] * RANKS
RELEASED = [SIZES["weights"]] * RANKS
ORIGINAL = [1000 + rank for rank in range(RANKS)]
# A peer that holds this much leaves no room for a KV cache beside the weights.
SOME = rig.CAPACITY - rig.FULL + 1

pytestmark = pytest.mark.usefixtures("vllm_executor")


# -- HTTP ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@isolated(LIMIT)
def test_a_call_can_release_the_cache_alone(mode: str) -> None:
    async def test(engine: Engine, server: Server) -> None:
        answer = await server.post("/sleep", params={"tags": ALONE, "mode": mode})
        assert answer.status_code == 200
        assert answer.json() == {"status": "sleeping", "level": 1, "tags": ALONE}
        assert engine.calls == [("sleep", 1, mode, ALONE)]
        assert engine.asleep == {"kv_cache"}
        assert (await server.ask()).status_code == 503
        assert (await server.post("/wake_up")).status_code == 200
        assert (await server.ask()).status_code == 200

    run(test)


@pytest.mark.parametrize(
    ("level", "given", "released"),
    [
        (None, (1, "abort", ALONE), {"kv_cache"}),
        (1, (1, "abort", ALONE), {"kv_cache"}),
        (0, (0, "abort"), set()),
        (2, (2, "abort"), TAGS),
    ],
)
@isolated(LIMIT)
def test_the_setting_is_of_level_1(
    level: int | None, given: tuple[object, ...], released: set[str]
) -> None:
    async def test(engine: Engine, server: Server) -> None:
        for _ in range(2):
            params = {} if level is None else {"level": level}
            answer = await server.post("/sleep", params=params)
            assert answer.status_code == 200
            assert answer.json().get("tags") == (ALONE if released == {"kv_cache"} else None)
            assert engine.asleep == released
        assert engine.calls == [("sleep", *given)] * 2

    run(test, *SETTING)


@isolated(LIMIT)
def test_without_the_setting_a_sleep_is_what_it_was() -> None:
    async def test(engine: Engine, server: Server) -> None:
        assert arguments().sleep_mode_release == "all"
        for flags in ((), ("--sleep-mode-release", "all")):
            engine.calls.clear()
            answer = await Server(engine, *flags).post("/sleep")
            assert answer.json() == {"status": "sleeping", "level": 1}
            assert engine.calls == [("sleep", 1, "abort")]

    run(test)


@pytest.mark.parametrize(
    "params",
    [{"tags": tags} for tags in (["weights"], ["kv_cache", "weights"], ["bogus"], [""])]
    + [{"tags": ALONE, "level": level} for level in (0, 2)],
)
@isolated(LIMIT)
def test_what_cannot_be_released_alone_is_refused(params: dict[str, Any]) -> None:
    async def test(engine: Engine, server: Server) -> None:
        answer = await server.post("/sleep", params=params)
        assert answer.status_code in (400, 422)
        assert engine.calls == []
        assert (await server.ask()).status_code == 200
        assert (await server.post("/sleep")).status_code == 200

    run(test)


@isolated(LIMIT)
def test_another_setting_is_refused() -> None:
    for wrong in ("weights", "", "kv"):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
            arguments("--sleep-mode-release", wrong)
        assert "kv_cache" in said.getvalue()


@isolated(LIMIT)
def test_a_release_that_fails_can_be_repeated() -> None:
    async def test(engine: Engine, server: Server) -> None:
        engine.failing = {"sleep"}
        assert (await server.post("/sleep")).status_code == 500
        engine.failing = set()
        assert (await server.post("/sleep")).status_code == 200
        assert engine.asleep == {"kv_cache"}

    run(test, *SETTING)


# -- the engine ---------------------------------------------------------------------------------


@isolated(LIMIT)
def test_the_engine_keeps_its_weights_where_they_are(gpus: Gpus) -> None:
    with rig.engine(gpus) as engine:
        assert engine.generates("before")
        for _ in range(2):
            # The second call changes nothing, and asks no rank.
            engine.call("sleep", 1, "abort", ALONE)
            assert engine.call("is_sleeping")
            assert gpus.used() == RELEASED
            assert engine.weights() == ORIGINAL
        assert gpus.calls(0, "discard", "sleep") == ["discard kv_cache"]
        engine.call("wake_up", ["kv_cache"])
        assert not engine.call("is_sleeping")
        assert gpus.used() == AWAKE
        assert engine.generates("after")
        assert engine.weights() == ORIGINAL


@pytest.mark.parametrize("mode", ["wait", "keep"])
@isolated(LIMIT)
def test_a_request_that_runs_is_not_lost(gpus: Gpus, mode: str) -> None:
    with rig.engine(gpus) as engine:
        for rank in range(RANKS):
            gpus.late(rank, "execute_model", 0.1)
        engine.ask("running", tokens=5)
        gpus.until_called(0, "execute_model")
        sleep = engine.begin("sleep", 1, mode, ALONE)
        if mode == "wait":
            assert engine.answer("running") == [rig.TOKEN] * 5
        sleep.result(LIMIT / 2)
        assert gpus.used() == RELEASED
        engine.ask("while released")
        engine.call("wake_up", None)
        assert engine.answer("while released") == [rig.TOKEN] * 3
        assert engine.answer("running") == [rig.TOKEN] * 5


@pytest.mark.parametrize("first", [ALONE, None])
@isolated(LIMIT)
def test_a_full_sleep_before_or_after_it_stays_one(gpus: Gpus, first: list[str] | None) -> None:
    with rig.engine(gpus) as engine:
        second = None if first else ALONE
        engine.call("sleep", 1, "abort", *([first] if first else []))
        engine.call("sleep", 1, "abort", *([second] if second else []))
        assert gpus.used() == ASLEEP
        engine.call("wake_up", ["kv_cache"])
        assert engine.call("is_sleeping")
        engine.call("wake_up", ["weights"])
        assert gpus.used() == AWAKE
        assert engine.weights() == ORIGINAL
        assert engine.generates("after")


@pytest.mark.parametrize(
    ("level", "tags"), [(0, ALONE), (2, ALONE), (1, ["weights"]), (1, ["kv_cache", "weights"])]
)
@isolated(LIMIT)
def test_the_engine_refuses_what_it_cannot_release_alone(
    gpus: Gpus, level: int, tags: list[str]
) -> None:
    with rig.engine(gpus) as engine:
        with pytest.raises(Exception, match="cannot release"):
            engine.call("sleep", level, "abort", tags)
        assert not engine.call("is_sleeping")
        assert engine.generates("after")


@isolated(90)
def test_data_parallel_engines_release_together(gpus: Gpus) -> None:
    with rig.data_parallel(gpus) as engines:
        for _ in range(2):
            engines.ask_client("sleep_async", 1, "abort", ALONE)
            assert gpus.used() == RELEASED
            assert engines.call("is_sleeping") == [True] * rig.ENGINES
        engines.ask_client("wake_up_async", None)
        assert gpus.used() == AWAKE
        assert all(engines.generates(f"{n}", engine=n) for n in range(rig.ENGINES))


@isolated(LIMIT)
def test_the_state_in_the_metrics_is_that_of_awake_weights(gpus: Gpus) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    asked: list[tuple[object, ...]] = []

    async def noted(*call: object, **options: object) -> None:
        asked.append((*call, *options.values()))

    engine: Any = SimpleNamespace(
        engine_core=SimpleNamespace(sleep_async=noted),
        renderer=SimpleNamespace(clear_mm_cache_async=noted),
        logger_manager=SimpleNamespace(record_sleep_state=lambda *state: asked.append(state)),
    )
    asyncio.run(AsyncLLM.sleep(engine, 1, "keep", tags=ALONE))
    assert [call for call in asked if call] == [(1, "keep", ALONE), (1, 0)]
    asked.clear()
    asyncio.run(AsyncLLM.sleep(engine, 1, "keep"))
    assert [call for call in asked if call] == [(1, "keep"), (1, 1)]


# -- ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "then",
    [
        "discard",
        # What the release does too, unless it takes the late reply of a rank for another one's.
        pytest.param("sleep", marks=pytest.mark.patched_only),
        pytest.param("wake_up", marks=pytest.mark.patched_only),
    ],
)
@isolated(LIMIT)
def test_a_release_that_failed_on_one_rank(gpus: Gpus, then: str) -> None:
    with rig.executor(gpus) as executor:
        gpus.fail(2, "discard")
        with pytest.raises(RuntimeError, match="discard was made to fail"):
            executor.discard(("kv_cache",))
        assert executor.is_sleeping
        assert gpus.used() == [60, 60, rig.FULL, 60]
        if then == "discard":
            executor.discard(("kv_cache",))
            assert gpus.used() == RELEASED
        elif then == "sleep":
            executor.sleep(1)
            assert gpus.used() == ASLEEP
        executor.wake_up()
        assert not executor.is_sleeping
        assert gpus.used() == AWAKE
        assert executor.collective_rpc("weights") == ORIGINAL


@isolated(LIMIT)
def test_a_rank_that_hangs_in_a_release_does_not_block_the_engine(gpus: Gpus) -> None:
    rig.hurry(sleep=0.5)
    with rig.executor(gpus) as executor:
        gpus.hang(0, "discard")
        with pytest.raises((RuntimeError, TimeoutError)):
            executor.discard(("kv_cache",))
        assert executor.is_sleeping
        # It is not asked again before it replies.
        with pytest.raises((RuntimeError, TimeoutError), match="discard was not sent"):
            executor.discard(("kv_cache",))
        assert gpus.calls(1, "discard") == ["discard kv_cache"]
        gpus.let_go(0, "discard")
        for _ in range(100):
            with contextlib.suppress(RuntimeError, TimeoutError):
                executor.wake_up()
            if not executor.is_sleeping:
                break
        assert gpus.used() == AWAKE


@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
@pytest.mark.parametrize("before", ["a release", "a sleep of level 2"])
@isolated(LIMIT)
def test_a_refused_wake_up_of_the_cache_leaves_no_rank_with_one(
    gpus: Gpus, before: str, tags: list[str] | None
) -> None:
    weights = ORIGINAL
    with rig.executor(gpus) as executor:
        if before == "a release":
            executor.discard(("kv_cache",))
        else:
            executor.sleep(2)
            executor.wake_up(["weights"])
            executor.collective_rpc("load_new_weights", args=(2000,))
            weights = [2000 + rank for rank in range(RANKS)]
        gpus.peer(2, SOME)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="CUDA Error: out of memory"):
                executor.wake_up(tags)
            # The memory is free for the peers, and the weights are where they were.
            assert gpus.used() == RELEASED
            assert executor.sleeping_tags == {"kv_cache"}
        gpus.peer(2, 0)
        executor.wake_up(tags)
        assert not executor.sleeping_tags
        assert gpus.used() == AWAKE
        assert executor.collective_rpc("weights") == weights


@isolated(LIMIT)
def test_a_refused_wake_up_that_cannot_be_undone_can_be_finished(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        executor.discard(("kv_cache",))
        gpus.peer(2, SOME)
        gpus.fail(0, "discard")
        with pytest.raises(RuntimeError, match="CUDA Error: out of memory"):
            executor.wake_up()
        assert gpus.used() == [rig.FULL, 60, 60, 60]
        executor.discard(("kv_cache",))
        assert gpus.used() == RELEASED
        gpus.peer(2, 0)
        executor.wake_up()
        assert gpus.used() == AWAKE


@isolated(LIMIT)
def test_a_rank_that_hangs_in_a_refused_wake_up_is_waited_for_shortly(gpus: Gpus) -> None:
    rig.hurry()
    with rig.executor(gpus) as executor:
        executor.discard(("kv_cache",))
        gpus.peer(2, SOME)
        gpus.hang(0, "discard")
        with pytest.raises(RuntimeError, match="CUDA Error: out of memory"):
            executor.wake_up()
        assert executor.sleeping_tags == {"kv_cache"}
        assert gpus.used()[1:] == RELEASED[1:]
        gpus.let_go(0, "discard")


@isolated(LIMIT)
def test_a_release_is_reported_anew(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        assert [one["asleep_bytes"] for one in executor.sleep_report()] == [{}] * RANKS
        executor.discard(("kv_cache",))
        released = {"kv_cache": SIZES["kv_cache"]}
        assert [one["asleep_bytes"] for one in executor.sleep_report()] == [released] * RANKS
