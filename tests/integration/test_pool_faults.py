"""Faults of servers, GPUs, clients and the pool itself at random points of many swaps.

SM12X_POOL_SEEDS=80 plays 2,000 swaps; each seed repeats the same choices.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.integration.pool.played import MIB, Card, Played
from tests.integration.pool.rig import Pool, pool

from sm12x.pool import rotation
from sm12x.pool.members import Member
from sm12x.pool.state import Phase

SEEDS = int(os.environ.get("SM12X_POOL_SEEDS", "3"))
SWAPS = 25
LIMITS = {
    "hold_seconds": 4,
    "drain_seconds": 0.6,
    "sleep_seconds": 0.3,
    "wake_seconds": 0.3,
    "canary_seconds": 0.5,
    "ask_seconds": 0.3,
    "stall_seconds": 1,
}
POLICY = {"residency_swaps": 1, "least_residency_seconds": 0.05}
# What a request may be answered with, beside 200.
REASONS = {
    503: {"hold_timeout", "wake_failed", "model_unavailable", "server_lost"},
    429: {"queue_full"},
}


def run(work: Coroutine[Any, Any, None], seconds: float = 60) -> None:
    asyncio.run(asyncio.wait_for(work, seconds))


def conflicts(members: Iterable[Member]) -> list[tuple[str, str]]:
    """Return the pairs of models that are awake on a GPU at once; none unless it is a defect."""
    awake = [member for member in members if member.phase is Phase.AWAKE]
    return [
        (one.key, other.key)
        for at, one in enumerate(awake)
        for other in awake[at + 1 :]
        if one.gpus & other.gpus
    ]


class Storm:
    """Clients that ask for random models, and faults at random times."""

    def __init__(self, one: Pool, seed: int) -> None:
        self.one = one
        self.random = random.Random(seed)  # noqa: S311 - a played storm
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.over = False

    async def client(self, number: int) -> None:
        names = [*self.one.sites]
        while not self.over:
            model = self.random.choice(names)
            body = {"model": model, "prompt": "x", "max_tokens": self.random.randint(1, 6)}
            kind = self.random.choice(["plain", "plain", "stream", "leaves"])
            await asyncio.sleep(self.random.uniform(0, 0.1))
            try:
                async with asyncio.timeout(10):
                    await self.ask(kind, body)
            except TimeoutError:
                self.wrong.append(f"{kind} {model}: no answer")

    async def ask(self, kind: str, body: dict[str, Any]) -> None:
        url = self.one.url + "/v1/completions"
        if kind == "leaves":
            work = asyncio.ensure_future(self.one.client.post(url, json=body))
            await asyncio.sleep(self.random.uniform(0, 0.2))
            work.cancel()
            done = (await asyncio.gather(work, return_exceptions=True))[0]
            if isinstance(done, aiohttp.ClientResponse):
                done.close()
            self.answers["left"] += 1
            return
        body["stream"] = kind == "stream"
        try:
            async with self.one.client.post(url, json=body) as answer:
                raw = await answer.read()
                status = answer.status
        except aiohttp.ClientError as error:
            # Only a server that ended in the middle of an answer may cut one off.
            self.answers["cut"] += 1
            if not isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
                self.wrong.append(repr(error))
            return
        self.answers[f"{status}"] += 1
        if status == 200 and kind == "stream":
            if not raw.endswith(b"data: [DONE]\n\n") and b"event: error" not in raw:
                self.wrong.append(f"a stream that ends with {raw[-80:]!r}")
        elif status == 200:
            text = json.loads(raw)["choices"][0]["text"]
            if text != "".join(f" {body['model']}{n}" for n in range(body["max_tokens"])):
                self.wrong.append(f"{body['model']} answered {text!r}")
        else:
            refusal = json.loads(raw)["error"]
            if refusal["code"] not in REASONS.get(status, ()) or not refusal["message"]:
                self.wrong.append(f"{status}: {refusal}")

    async def fault(self) -> None:
        one = self.one
        site = one.sites[self.random.choice([*one.sites])]
        card = one.cards[0]
        match self.random.randint(0, 7):
            case 0:
                site.played.faults["wake"] = "refused"
            case 1:
                site.played.faults["sleep"] = self.random.choice(["hangs", "refused"])
            case 2:
                site.played.faults["wake"] = "hangs"
            case 3:
                await site.stop()
                await asyncio.sleep(self.random.uniform(0, 0.5))
                await site.restart()
            case 4:
                site.played.faults["canary"] = "wrong"
            case 5:
                card.foreign[4_000_000] = 500 * MIB
                await asyncio.sleep(self.random.uniform(0, 0.3))
                card.foreign.clear()
            case 6:
                await self.slow_client(site.played.name)
            case 7:
                site.played.faults["asked"] = "hangs"
                await asyncio.sleep(self.random.uniform(0, 0.3))
                site.played.faults.pop("asked", None)

    async def slow_client(self, model: str) -> None:
        port = int(self.one.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer user-key\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            + f'{{"model": "{model}", '.encode()
        )
        await asyncio.sleep(0.3)
        writer.transport.abort()

    def look(self) -> None:
        """What has to be so at any moment."""
        together = conflicts(self.one.rotation.members.values())
        if together:
            self.wrong.append(f"{together} awake together")
        if self.one.cards[0].used > self.one.cards[0].total + 500 * MIB:
            self.wrong.append("memory was handed out twice")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that looks, waits and tries again twenty times as often."""
    for name in ("_WATCH", "_SETTLE", "_BACKOFF", "_MOST_BACKOFF"):
        monkeypatch.setattr(rotation, name, getattr(rotation, name) / 20)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_request_is_answered_or_refused_with_a_reason(tmp_path: Path, seed: int) -> None:
    async def work() -> None:
        card = Card()
        models = [Played(name="a", cards=(card,)), Played(name="b", cards=(card,), asleep="all")]
        async with pool(tmp_path, models, cards=[card], limits=LIMITS, policy=POLICY) as one:
            for played in models:
                played.token_seconds = 0.01
            storm = Storm(one, seed)
            clients = [asyncio.create_task(storm.client(number)) for number in range(6)]
            faults: set[asyncio.Task[None]] = set()
            while len(one.swaps()) < SWAPS:
                await asyncio.sleep(storm.random.uniform(0.05, 0.3))
                storm.look()
                if len(faults) < 2:
                    task = asyncio.create_task(storm.fault())
                    faults.add(task)
                    task.add_done_callback(faults.discard)
                for member in one.rotation.members.values():
                    # A person has looked at it.
                    if member.phase is Phase.OUT and storm.random.random() < 0.3:
                        await one.command(member.key, "enable")
            storm.over = True
            await asyncio.gather(*clients, *faults)
            for site in one.sites.values():
                site.played.faults.clear()
            assert not storm.wrong, storm.wrong[:5]
            assert storm.answers["200"] > SWAPS
            await recovered(one)

    run(work(), 120)


async def recovered(one: Pool) -> None:
    """Without faults each model serves again, and the pool's states are those of the servers."""
    for name in one.sites:
        async with asyncio.timeout(40):
            while (await one.ask(name))[0] != 200:
                if one.rotation.members[name].phase is Phase.OUT:
                    await one.command(name, "enable")
                await asyncio.sleep(0.1)
    for shown in (await one.snapshot())["models"]:
        asleep = bool(one.played(shown["model"]).asleep)
        assert shown["state"] == ("asleep" if asleep else "awake")
        assert (shown["running"], shown["waiting"], shown["waiting_bytes"]) == (0, 0, 0)


def two(card: Card) -> list[Played]:
    return [Played(name="a", cards=(card,)), Played(name="b", cards=(card,), asleep="all")]


def test_a_refused_wake_up_puts_the_other_back_and_says_why(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        async with pool(tmp_path, two(card), cards=[card]) as one:
            one.played("b").faults["wake"] = "refused"
            status, body = await one.ask("b")
            assert (status, body["error"]["code"]) == (503, "wake_failed")
            assert "CUDA_ERROR_OUT_OF_MEMORY" in body["error"]["message"]
            assert await one.states() == {"a": "awake", "b": "asleep"}
            assert (one.played("a").asleep, one.played("b").asleep) == ("", "all")
            assert (await one.ask("a"))[0] == 200
            (swap,) = one.swaps()
            assert swap["result"] == "failed"
            assert [*swap["seconds"]][-3:] == ["wake", "retreat", "restore"]

    run(work())


def test_foreign_memory_is_named_before_a_wake_up_is_tried(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        async with pool(tmp_path, two(card), cards=[card]) as one:
            card.total = 1500 * MIB
            card.foreign[4_123_456] = 600 * MIB
            card.total = 1000 * MIB + 499 * MIB
            one.played("a").sleep_seconds = 0.0
            status, body = await one.ask("b")
            assert status == 503
            assert "process 4123456" in body["error"]["message"]
            assert "600 MiB" in body["error"]["message"]
            assert one.played("b").wakes == 0

    run(work())


def test_a_sleep_that_frees_nothing_is_no_sleep(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        models = two(card)
        async with pool(tmp_path, models, cards=[card]) as one:
            card.total = 5000 * MIB
            models[0].fall = lambda asleep: setattr(models[0], "asleep", asleep)  # type: ignore[method-assign]
            status, body = await one.ask("b")
            assert status == 503
            assert "NVML of 0" in body["error"]["message"]
            assert await one.states() == {"a": "awake", "b": "asleep"}

    run(work())


def test_without_ranks_and_nvml_nothing_is_believed_unless_that_is_said(tmp_path: Path) -> None:
    async def work() -> None:
        models = [Played(name="a", ranks=False), Played(name="b", ranks=False)]
        async with pool(tmp_path / "one", models) as one:
            status, body = await one.ask("b")
            assert status == 503
            assert "nothing proves" in body["error"]["message"]
        models = [Played(name="a", ranks=False), Played(name="b", ranks=False)]
        async with pool(tmp_path / "two", models, proof="if_seen") as one:
            assert (await one.ask("b"))[0] == 200

    run(work())


def test_a_wrong_canary_takes_a_model_out_until_a_person_has_looked(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        async with pool(tmp_path, two(card), cards=[card]) as one:
            assert (await one.ask("b"))[0] == 200
            one.played("a").faults["canary"] = "wrong"
            status, body = await one.ask("a")
            assert status == 503
            assert "!!!!!!!!" in body["error"]["message"]
            assert await one.states() == {"a": "out", "b": "awake"}
            status, body = await one.ask("a")
            assert (status, body["error"]["code"]) == (503, "model_unavailable")
            assert (await one.ask("b"))[0] == 200
            status, shown = await one.command("a", "enable")
            assert (status, shown["state"]) == (200, "asleep")
            assert (await one.ask("a"))[0] == 200

    run(work())


def test_a_model_that_is_taken_out_leaves_its_gpu(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        models = two(card)
        # Awake when the pool comes, and wrong from the first answer on.
        models[0].faults["canary"] = "wrong"
        async with pool(tmp_path, models, cards=[card]) as one:
            assert await one.states() == {"a": "out", "b": "asleep"}
            assert models[0].asleep
            assert (await one.ask("b"))[0] == 200
            # Wrong when it is put back: off the GPU again, and the other can be served.
            assert (await one.command("a", "enable"))[0] == 200
            models[0].faults["wake"] = "refused"
            models[1].faults["canary"] = "wrong"
            assert (await one.ask("a"))[0] == 503
            assert await one.states() == {"a": "asleep", "b": "out"}
            await asyncio.sleep(1.1)
            assert (await one.ask("a"))[0] == 200

    run(work())


@pytest.mark.usefixtures("hasty")
def test_a_model_that_is_taken_out_and_cannot_sleep_is_put_to_sleep_later(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        models = two(card)
        async with pool(tmp_path, models, cards=[card]) as one:
            assert (await one.ask("b"))[0] == 200
            models[0].faults |= {"canary": "wrong", "sleep": "refused"}
            assert (await one.ask("a"))[0] == 503
            async with asyncio.timeout(5):
                while (await one.ask("b"))[0] != 200:
                    await asyncio.sleep(0.05)
            assert await one.states() == {"a": "out", "b": "awake"}

    run(work())


def test_a_model_that_drafts_worse_is_taken_out(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        models = two(card)
        models[0].acceptance = 0.8
        async with pool(tmp_path, models, cards=[card]) as one:
            assert (await one.ask("b"))[0] == 200
            assert (await one.ask("a"))[0] == 200
            models[0].acceptance = 0.5
            assert (await one.ask("b"))[0] == 200
            status, body = await one.ask("a")
            assert status == 503
            assert "drafted tokens" in body["error"]["message"]
            assert await one.states() == {"a": "out", "b": "awake"}

    run(work())


def test_a_model_without_text_is_known_by_its_embedding(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        models = two(card)
        models[0].kind = "embedding"
        async with pool(tmp_path, models, cards=[card]) as one:
            assert (await one.ask("b"))[0] == 200
            await one.command("a", "wake")
            await one.until(a="awake")
            models[0].faults["canary"] = "wrong"
            assert (await one.ask("b"))[0] == 200
            await one.command("a", "wake")
            await one.until(a="out", b="awake")

    run(work())


def test_discarded_weights_are_loaded_again_by_a_server_that_can(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        models = two(card)
        more = {"a": {"sleep": "level_2"}}
        async with pool(tmp_path, models, cards=[card], more=more) as one:
            assert (await one.ask("b"))[0] == 200
            assert models[0].asleep == "discarded"
            assert (await one.ask("a"))[0] == 200
            assert models[0].reloads == 1

    run(work())


def test_a_sleep_that_hangs_has_a_limit(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        async with pool(tmp_path, two(card), cards=[card], limits={"sleep_seconds": 0.3}) as one:
            one.played("a").faults["sleep"] = "hangs"
            status, body = await one.ask("b")
            assert status == 503
            assert "no answer to /sleep" in body["error"]["message"]
            assert await one.states() == {"a": "awake", "b": "asleep"}
            assert (await one.ask("b"))[0] == 200

    run(work())


def test_a_stream_says_so_when_its_server_ends(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        async with pool(tmp_path, two(card), cards=[card]) as one:
            one.played("a").token_seconds = 0.05
            body = {"model": "a", "stream": True, "max_tokens": 100}
            async with one.client.post(one.url + "/v1/completions", json=body) as answer:
                await answer.content.readuntil(b"\n\n")
                await one.sites["a"].stop()
                rest = b""
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    async for chunk in answer.content.iter_any():
                        rest += chunk
            assert b"event: error" in rest
            assert b"[DONE]" not in rest
            await one.until(a="stopped")
            status, refused = await one.ask("a")
            assert (status, refused["error"]["code"]) == (503, "model_unavailable")
            assert (await one.ask("b"))[0] == 200

    run(work())


def test_what_others_do_to_a_server_is_seen(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        async with pool(tmp_path, two(card), cards=[card]) as one:
            async with one.client.post(one.sites["a"].url + "/sleep?level=1") as answer:
                assert answer.status == 200
            # The server refuses, the pool asks it, and wakes it up.
            assert (await one.ask("a"))[0] == 200
            assert one.played("a").refused_asleep == 1
            assert one.played("a").wakes == 1

    run(work())


def test_a_model_that_never_sleeps_stays_and_displaces_nobody(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card(total=2000 * MIB)
        models = [*two(card), Played(name="c", cards=(card,), asleep="all")]
        async with pool(tmp_path, models, cards=[card], more={"c": {"sleep": "never"}}) as one:
            assert await one.states() == {"a": "awake", "b": "asleep", "c": "asleep"}
            assert (await one.ask("c"))[0] == 200
            assert await one.states() == {"a": "awake", "b": "asleep", "c": "awake"}
            assert (await one.ask("b"))[0] == 200
            assert await one.states() == {"a": "asleep", "b": "awake", "c": "awake"}
            assert (await one.command("c", "sleep"))[0] == 409

    run(work())


def test_a_pinned_model_stays_awake_from_the_start(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        async with pool(tmp_path, two(card), cards=[card], more={"a": {"pin": True}}) as one:
            status, body = await one.ask("b")
            assert (status, body["error"]["code"]) == (503, "model_unavailable")
            assert "pinned" in body["error"]["message"]
            assert (await one.command("a", "unpin"))[0] == 200
            assert (await one.ask("b"))[0] == 200

    run(work())


def test_idle_models_go_to_sleep(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        more = {"a": {"idle_seconds": 0.3}}
        async with pool(tmp_path, two(card), cards=[card], more=more) as one:
            await one.until(a="asleep")
            assert one.played("b").wakes == 0
            assert (await one.ask("a"))[0] == 200

    run(work())


def test_independent_gpus_swap_at_the_same_time_and_shared_ones_do_not(tmp_path: Path) -> None:
    async def work() -> None:
        cards = [Card(), Card()]
        sets = {"a": [0], "b": [0], "c": [1], "d": [1], "both": [0, 1]}
        models = [
            Played(
                name=name,
                cards=tuple(cards[gpu] for gpu in gpus),
                asleep="" if name in ("a", "c") else "all",
                sleep_seconds=0.1,
                wake_seconds=0.1,
            )
            for name, gpus in sets.items()
        ]
        async with pool(tmp_path, models, cards=cards, gpus=sets) as one:
            assert await one.command("c", "wake")
            await one.until(c="awake")
            begin = asyncio.get_running_loop().time()
            answers = await asyncio.gather(one.ask("b"), one.ask("d"))
            assert asyncio.get_running_loop().time() - begin < 1.5
            assert [status for status, _ in answers] == [200, 200]
            assert (await one.ask("both"))[0] == 200
            states = await one.states()
            assert [name for name, state in states.items() if state == "awake"] == ["both"]
            # One rank of a model on two GPUs that has no room: neither of them is taken.
            assert (await one.ask("a"))[0] == 200
            cards[1].foreign[4_000_001] = 500 * MIB
            status, body = await one.ask("both")
            assert status == 503
            assert "GPU 1" in body["error"]["message"]
            assert (await one.ask("a"))[0] == 200

    run(work())
