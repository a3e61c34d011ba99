"""Kept KV over HTTP: asked for by a call, refused with a reason, and counted."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated
from tests.witness.http_rig import Engine, Server, run

executor_rig.use_tree()

LIMIT = 40
METRICS = "vllm.entrypoints.serve.dev.sleep.metrics"

pytestmark = pytest.mark.usefixtures("vllm_executor")


class Keeping(Engine):
    """An engine of two ranks whose sleeps keep KV; ``lost`` is what its wake-ups lose."""

    refuses = False
    lost = False

    async def sleep(self, *arguments: Any, **options: Any) -> None:
        if self.refuses:
            text = importlib.import_module("vllm.v1.engine").KV_NOT_KEPT
            raise RuntimeError(f"Call to sleep method failed: {text}no room.")
        await super().sleep(*arguments, **options)
        self.kv = {"kept_bytes": 96, "kept_tokens": 6, "dropped_bytes": 32, "dropped_tokens": 2}

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        part = "lost" if self.lost else "restored"
        if self.asleep:
            self.kv |= {f"{part}_bytes": 96, f"{part}_tokens": 6}
        return await super().wake_up(tags)

    async def sleep_report(self) -> list[dict[str, Any]]:
        return [{"dp_rank": 0, "rank": rank, "kv": self.kv} for rank in range(2)]


@pytest.mark.parametrize(
    ("value", "given"), [("true", True), ("false", False), ("1", True), ("0", False)]
)
@isolated(LIMIT)
def test_a_call_says_whether_kv_is_kept(value: str, given: bool) -> None:
    async def test(engine: Engine, server: Server) -> None:
        answer = await server.post("/sleep", params={"keep_kv": value})
        assert answer.status_code == 200
        assert engine.options["keep_kv"] is given
        assert engine.calls == [("sleep", 1, "abort")]

    run(test)


@pytest.mark.guard
@isolated(LIMIT)
def test_without_it_the_server_decides() -> None:
    async def test(engine: Engine, server: Server) -> None:
        await server.post("/sleep")
        assert "keep_kv" not in engine.options
        answer = await server.post("/sleep", params={"level": 2, "keep_kv": "false"})
        assert answer.status_code == 200

    run(test)


@pytest.mark.parametrize(
    "params",
    [{"keep_kv": "perhaps"}, {"keep_kv": "true", "level": 2}, {"keep_kv": "true", "level": 0}],
)
@isolated(LIMIT)
def test_what_cannot_be_is_refused(params: dict[str, Any]) -> None:
    async def test(engine: Engine, server: Server) -> None:
        answer = await server.post("/sleep", params=params)
        assert answer.status_code in (400, 422)
        assert "keep_kv" in answer.json()["error"]["message"]
        assert engine.calls == []

    run(test)


@isolated(LIMIT)
def test_a_refusal_names_its_reason() -> None:
    async def test(engine: Any, server: Server) -> None:
        engine.refuses = True
        answer = await server.post("/sleep", params={"keep_kv": "true"})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "no room." in message
        assert "keep_kv" in message
        engine.refuses = False
        # The call is not in flight any more.
        assert (await server.post("/sleep")).status_code == 200

    run(test, engine=Keeping)


def counted() -> dict[tuple[str, str], float]:
    """Bytes and tokens in /metrics by outcome, where there are any."""
    registry = importlib.import_module("prometheus_client").REGISTRY
    return {
        (sample.name.split("_")[-2], sample.labels["outcome"]): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:sleep_mode_kv_cache") and sample.name.endswith("_total")
        if sample.value
    }


@pytest.mark.parametrize("lost", [False, True])
@isolated(LIMIT)
def test_what_became_of_it_is_told_and_counted(lost: bool) -> None:
    async def test(engine: Any, server: Server) -> None:
        engine.lost = lost
        part = "lost" if lost else "restored"
        for turn in (1, 2):
            answer = await server.post("/sleep")
            assert [rank["kv"]["kept_bytes"] for rank in answer.json()["ranks"]] == [96, 96]
            asleep = (await server.client.get("/is_sleeping")).json()
            assert [rank["kv"]["dropped_tokens"] for rank in asleep["ranks"]] == [2, 2]
            answer = await server.post("/wake_up")
            assert answer.json()["ranks"][0]["kv"][f"{part}_tokens"] == 6
            # A wake_up of what is awake counts nothing.
            await server.post("/wake_up")
            assert counted() == {
                ("bytes", "kept"): 192 * turn,
                ("bytes", "dropped"): 64 * turn,
                ("bytes", part): 192 * turn,
                # Both ranks have the same tokens.
                ("tokens", "kept"): 6 * turn,
                ("tokens", "dropped"): 2 * turn,
                ("tokens", part): 6 * turn,
            }

    run(test, engine=Keeping)


@isolated(LIMIT)
def test_an_engine_that_keeps_nothing_counts_nothing() -> None:
    async def test(engine: Engine, server: Server) -> None:
        assert (await server.post("/sleep")).json() == {"status": "sleeping", "level": 1}
        await server.post("/wake_up")
        assert counted() == {}
        assert hasattr(importlib.import_module(METRICS).sleep_mode_operation_metrics(), "kv_bytes")

    run(test)
