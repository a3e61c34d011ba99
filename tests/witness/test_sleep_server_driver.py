"""Random calls and requests, through several API servers, of an engine that fails and falls silent.

`SM12X_SERVER_SEEDS=100` runs 100 seeds instead of one. After each round, in which no client's
leaving, no failure and no silence may lose anything, every server knows what the engine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import FULL, RANKS, Gpus, isolated
from tests.witness.http_rig import PROMPT
from tests.witness.served_rig import Served, serve

rig.use_tree()

SEEDS = int(os.environ.get("SM12X_SERVER_SEEDS", "1"))
# Rounds of a seed, and calls and requests of a round.
ROUNDS = 12
CALLS = 6
# Seconds in which everything that needs no model is answered.
PATIENCE = 15.0
AWAKE = [FULL] * RANKS
TAGS: tuple[list[str] | None, ...] = (
    None,
    ["weights"],
    ["kv_cache"],
    ["scheduling"],
    ["weights", "kv_cache"],
)
KINDS = ("request",) * 4 + ("sleep", "wake_up") * 2 + ("release", "resume", "fault", "silence")

pytestmark = pytest.mark.usefixtures("vllm_executor")


class Driver:
    def __init__(self, served: Served, gpus: Gpus, chance: random.Random) -> None:
        self.served = served
        self.gpus = gpus
        self.chance = chance
        self.requests: list[asyncio.Task[Any]] = []
        self.operations = 0

    async def round(self) -> None:
        calls = [self.call() for _ in range(self.chance.randint(1, CALLS))]
        await asyncio.gather(*calls)
        await self.settle()

    async def call(self) -> None:
        await asyncio.sleep(self.chance.random() * 0.1)
        self.operations += 1
        chance = self.chance
        kind = chance.choice(KINDS)
        client = chance.choice(self.served.servers).client
        if kind == "fault":
            rank = chance.randrange(RANKS)
            self.gpus.fail(rank, chance.choice(["sleep", "wake_up", "discard"]))
            return
        if kind == "silence":
            await self.silence()
            return
        if kind == "request":
            chance.choice(self.served.engines).tokens = chance.randint(1, 20)
            task = asyncio.create_task(client.post("/v1/completions", json=PROMPT))
            self.requests.append(task)
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.05)
                task.cancel()
            return
        params: dict[str, Any] = {}
        if kind == "sleep":
            params = {"level": chance.randrange(3), "mode": chance.choice(["abort", "wait"])}
            if params["level"] == 1 and chance.random() < 0.3:
                params["tags"] = ["kv_cache"]
        elif kind == "wake_up":
            params = {"tags": tags} if (tags := chance.choice(TAGS)) else {}
        elif kind == "release":
            kind = "release_kv_cache_memory"
        task = asyncio.create_task(client.post(f"/{kind}", params=params))
        if chance.random() < 0.25:
            await asyncio.sleep(chance.random() * 0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return
        # A sleep may wait for requests that a pause keeps; a wake_up calls it off.
        for _ in range(20):
            done, _pending = await asyncio.wait({task}, timeout=2)
            if done:
                break
            await self.served.servers[0].client.post("/wake_up")
        answer = await asyncio.wait_for(task, PATIENCE)
        assert answer.status_code in (200, 409, 500), answer.text

    async def silence(self) -> None:
        """A server that knows that the engine sleeps asks it nothing."""
        self.served.signal(signal.SIGSTOP)
        try:
            for server, state in zip(self.served.servers, self.served.states(), strict=True):
                if state != "AWAKE":
                    asked = server.client.post("/v1/completions", json=PROMPT)
                    answer = await asyncio.wait_for(asked, PATIENCE)
                    # It may have heard of the end of the sleep in the meantime, not of a beginning.
                    assert answer.status_code == 503, answer.text
            await asyncio.sleep(self.chance.random() * 0.3)
        finally:
            self.served.signal(signal.SIGCONT)

    async def settle(self) -> None:
        """All is quiet: the servers agree with the engine and with each other."""
        # Calls of clients that left are over when each server's has been answered after them.
        for frontend in [*self.served.frontends, self.served.frontends[0]]:
            asked = frontend.client.call_utility_async("is_sleeping")
            paused = await asyncio.wait_for(asked, PATIENCE)
        await asyncio.sleep(0.05)
        for server in self.served.servers:
            assert server.gate
            assert server.gate.in_flight == []
            assert server.gate.unmapping == 0
        states = set(self.served.states())
        assert len(states) == 1, states
        awake = states == {"AWAKE"}
        if self.gpus.used() != AWAKE:
            assert not awake, f"{self.gpus.used()} and awake"
        if not awake:
            assert paused
            for server in self.served.servers:
                answer = await server.client.post("/v1/completions", json=PROMPT)
                assert answer.status_code == 503, answer.text
        elif not paused:
            for server in self.served.servers:
                answer = await asyncio.wait_for(
                    server.client.post("/v1/completions", json=PROMPT), PATIENCE
                )
                assert answer.status_code == 200, answer.text

    async def end(self) -> None:
        """With no more failures the engine wakes, and no request was lost."""
        for rank in range(RANKS):
            for operation in ("sleep", "wake_up", "discard"):
                self.gpus.fail(rank, operation, 0)
        client = self.served.servers[0].client
        for tags in (["weights"], ["kv_cache"], ["scheduling"]):
            answer = await asyncio.wait_for(
                client.post("/wake_up", params={"tags": tags}), PATIENCE
            )
            assert answer.status_code == 200, answer.text
        await self.served.until("AWAKE")
        assert self.gpus.used() == AWAKE
        for request in self.requests:
            with contextlib.suppress(asyncio.CancelledError):
                answer = await asyncio.wait_for(request, PATIENCE)
                assert answer.status_code in (200, 503), answer.text
        await self.settle()


@isolated(60 + 60 * SEEDS)
def test_random_calls_leave_every_server_with_the_truth(gpus: Gpus) -> None:
    async def test(served: Served) -> None:
        operations = 0
        for seed in range(SEEDS):
            print(f"seed {seed}", flush=True)
            driver = Driver(served, gpus, random.Random(seed))  # noqa: S311
            for _ in range(ROUNDS):
                await driver.round()
            await driver.end()
            operations += driver.operations
        print(f"{operations} operations", flush=True)

    serve(gpus, test, "--sleep-mode-requests", "reject", servers=3)
