"""A played vLLM: the routes of a real one that a pool uses, tokens in its own time, and faults.

`python -m tests.integration.pool.played serve NAME --port N ...` takes the words of `vllm serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import BodyPartReader, WSMsgType, web

from sm12x.pool.gpus import GpuMemory

MIB = 1 << 20
WEIGHTS, CACHE = 600 * MIB, 300 * MIB
SPECULATION = """\
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total %d
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total %f
"""


@dataclass(kw_only=True)
class Card:
    """The memory of one GPU that played servers of this process share, in bytes by holder."""

    total: int = 1000 * MIB
    held: dict[str, int] = field(default_factory=dict)
    # What foreign processes hold, by pid.
    foreign: dict[int, int] = field(default_factory=dict)
    most: int = 0

    @property
    def used(self) -> int:
        return sum(self.held.values()) + sum(self.foreign.values())

    def take(self, name: str, size: int) -> bool:
        """Hold ``size`` bytes in all; False where there is no room."""
        if self.used - self.held.get(name, 0) + size > self.total:
            return False
        self.held[name] = size
        self.most = max(self.most, self.used)
        return True


class Cards:
    """NVML of the cards, as `sm12x.pool.gpus.Gpus`."""

    def __init__(self, *cards: Card) -> None:
        self.cards = cards
        self.fault = ""

    def device(self, gpu: int) -> str:
        return str(gpu)

    def memory(self, gpus: list[int]) -> dict[int, GpuMemory] | None:
        return {
            gpu: GpuMemory(
                total=card.total,
                used=card.used,
                free=card.total - card.used,
                processes=card.foreign,
            )
            for gpu in gpus
            for card in [self.cards[gpu]]
        }


@dataclass(kw_only=True)
class Played:
    """One server. Faults are set from outside, and used up by the call that meets them.

    Attributes:
        served: tokens that were sent, and requests that were answered while it slept.
        faults: of `wake` ("refused"), `sleep` ("hangs"), `canary` ("wrong").
    """

    name: str
    cards: tuple[Card, ...] = ()
    key: str = ""
    sleep_seconds: float = 0.02
    wake_seconds: float = 0.02
    token_seconds: float = 0.0
    keeps_kv: bool = False
    ranks: bool = True
    # It writes other text after each wake-up, to users alone.
    drifts: bool = False
    # What it answers with: a text, or else an embedding alone.
    kind: str = "text"
    # Of its drafted tokens, None where it does not speculate.
    acceptance: float | None = None
    drafted: int = 0
    accepted: float = 0.0
    reloads: int = 0
    asleep: str = ""
    changing: str = ""
    running: int = 0
    answered: int = 0
    aborted: int = 0
    refused_asleep: int = 0
    sleeps: int = 0
    wakes: int = 0
    faults: dict[str, str] = field(default_factory=dict)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.resumed.set()
        if not self.asleep:
            for card in self.cards:
                card.take(self.name, WEIGHTS + CACHE)

    def fall(self, asleep: str) -> None:
        """Sleep, with everything unless it sleeps by its KV cache alone already."""
        self.asleep = self.asleep or asleep
        for card in self.cards:
            card.take(self.name, WEIGHTS if self.asleep == "kv_cache" else 0)

    # -- what it is asked --

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._authenticate])
        add = app.router.add_route
        add("GET", "/health", self._health)
        add("GET", "/metrics", self._metrics)
        add("GET", "/v1/models", self._models)
        add("POST", "/sleep", self._sleep)
        add("POST", "/wake_up", self._wake_up)
        add("GET", "/is_sleeping", self._is_sleeping)
        add("POST", "/v1/completions", self._complete)
        add("POST", "/v1/chat/completions", self._complete)
        add("POST", "/v1/messages", self._complete)
        add("POST", "/v1/responses", self._complete)
        add("GET", "/v1/responses/{id}", self._stored)
        add("POST", "/v1/audio/transcriptions", self._transcribe)
        add("GET", "/v1/realtime", self._realtime)
        add("POST", "/v1/embeddings", self._embed)
        add("POST", "/collective_rpc", self._reload)
        add("POST", "/play", self._play)
        return app

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if self.key and request.path != "/health" and given != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self.name, "object": "model", "created": 1, "owned_by": "vllm"}
        return web.json_response({"object": "list", "data": [entry]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            text="# HELP vllm:num_requests_running Running.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{model_name="{self.name}"}} {self.running}\n'
            + ("" if self.acceptance is None else SPECULATION % (self.drafted, self.accepted))
        )

    def _ranks(self) -> dict[str, Any]:
        if not self.ranks:
            return {}
        tags = {"weights": WEIGHTS, "kv_cache": CACHE}
        asleep = {"": {}, "kv_cache": {"kv_cache": CACHE}}.get(self.asleep, tags)
        awake = {tag: size for tag, size in tags.items() if tag not in asleep}
        rank = {"asleep_bytes": asleep, "awake_bytes": awake, "host_copy_bytes": 0}
        return {"ranks": [{**rank, "rank": number} for number in range(max(1, len(self.cards)))]}

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        if self.faults.get("asked") == "hangs":
            await asyncio.sleep(3600)
        return web.json_response({"is_sleeping": bool(self.asleep), **self._ranks()})

    async def _sleep(self, request: web.Request) -> web.Response:
        if self.changing:
            return web.json_response({"detail": f"/{self.changing} is in flight"}, status=409)
        self.changing = "sleep"
        try:
            fault = self.faults.pop("sleep", "")
            if fault == "hangs":
                await asyncio.sleep(3600)
            if fault == "refused":
                return web.json_response({"error": "a rank has failed"}, status=500)
            keep = request.query.get("keep_kv") == "true" and request.query.get("mode") == "keep"
            if keep and not self.keeps_kv:
                return web.json_response({"detail": "no --sleep-keep-kv"}, status=400)
            if not keep:
                self.aborted += self.running
                for task in [*self.tasks]:
                    task.cancel()
            self.resumed.clear()
            await asyncio.sleep(self.sleep_seconds)
            self.sleeps += 1
            level2 = "discarded" if request.query["level"] == "2" else "all"
            self.fall("kv_cache" if request.query.get("tags") == "kv_cache" else level2)
        finally:
            self.changing = ""
        return web.json_response({"status": "sleeping", "level": 1, **self._ranks()})

    async def _wake_up(self, request: web.Request) -> web.Response:
        if self.changing:
            return web.json_response({"detail": f"/{self.changing} is in flight"}, status=409)
        if request.query.get("tags") == "weights":
            return web.json_response({"status": "sleeping", **self._ranks()})
        assert self.asleep != "discarded" or self.reloads
        self.changing = "wake_up"
        try:
            await asyncio.sleep(self.wake_seconds)
            fault = self.faults.pop("wake", "")
            if fault == "hangs":
                await asyncio.sleep(3600)
            taken: list[tuple[Card, int]] = []
            for card in self.cards if self.asleep else ():
                before = card.held.get(self.name, 0)
                if fault == "refused" or not card.take(self.name, WEIGHTS + CACHE):
                    for one, size in taken:
                        one.held[self.name] = size
                    text = "cuMemCreate of 900 MiB: CUDA_ERROR_OUT_OF_MEMORY"
                    return web.json_response({"error": {"message": text}}, status=500)
                taken.append((card, before))
            if fault == "refused":
                return web.json_response({"error": {"message": "a rank has failed"}}, status=500)
            self.wakes += 1
            self.asleep = ""
            self.resumed.set()
        finally:
            self.changing = ""
        return web.json_response({"status": "awake", "tags": None, **self._ranks()})

    def _refuse(self) -> web.Response | None:
        if not (self.asleep or self.changing == "sleep"):
            return None
        self.refused_asleep += 1
        text = "The model is asleep: its weights or its KV cache are not in GPU memory."
        return web.json_response(
            {"error": {"message": text}}, status=503, headers={"Retry-After": "1"}
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refuse():
            return refusal
        body = await request.json()
        if self.kind != "text":
            return web.json_response({"error": {"message": "no text"}}, status=404)
        if body.get("model") != self.name:
            text = f"The model `{body.get('model')}` does not exist."
            return web.json_response({"error": {"message": text, "code": 404}}, status=404)
        tokens = int(body.get("max_tokens", 4))
        task = asyncio.current_task()
        assert task is not None
        self.running += 1
        self.tasks.add(task)
        try:
            if body.get("stream"):
                return await self._stream(request, tokens)
            words = []
            for number in range(tokens):
                await self._token()
                words.append(f" {self.name}{number}")
            if self.drifts and "seed" not in body:
                words.append(f" and {self.wakes}")
            if "seed" in body and self.faults.pop("canary", "") == "wrong":
                words = [" !!!!!!!!"]
            self.answered += 1
            if self.acceptance is not None:
                self.drafted += 10
                self.accepted += 10 * self.acceptance
            choice = {"index": 0, "text": "".join(words), "finish_reason": "length"}
            return web.json_response(
                {"id": "resp_" + self.name, "model": body["model"], "choices": [choice]}
            )
        finally:
            self.running -= 1
            self.tasks.discard(task)

    async def _token(self) -> None:
        if self.token_seconds:
            await asyncio.sleep(self.token_seconds)
        await self.resumed.wait()

    async def _stream(self, request: web.Request, tokens: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(tokens):
            await self._token()
            data = json.dumps({"choices": [{"text": f" {self.name}{number}"}], "at": time.time()})
            await response.write(f"data: {data}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        self.answered += 1
        return response

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"id": request.match_info["id"], "of": self.name})

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        if self.kind != "embedding":
            return web.json_response({"error": {"message": "no embeddings"}}, status=404)
        wrong = self.faults.pop("canary", "") == "wrong"
        vector = [-1.0, 0.5] if wrong else [1.0, 0.5 + 0.001 * self.wakes]
        return web.json_response({"data": [{"embedding": vector}]})

    async def _reload(self, request: web.Request) -> web.StreamResponse:
        assert (await request.json()) == {"method": "reload_weights"}
        assert self.asleep == "discarded"
        self.reloads += 1
        return web.json_response({"results": [None]})

    async def _transcribe(self, request: web.Request) -> web.StreamResponse:
        if refusal := self._refuse():
            return refusal
        size, model = 0, ""
        async for part in await request.multipart():
            assert isinstance(part, BodyPartReader)
            if part.name == "model":
                model = await part.text()
                continue
            while chunk := await part.read_chunk():
                size += len(chunk)
        if model != self.name:
            return web.json_response({"error": {"message": f"no model {model}"}}, status=404)
        self.answered += 1
        return web.json_response({"text": f"{size} bytes"})

    async def _realtime(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_json({"type": "session.created", "model": self.name})
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(f"{self.name}: {message.data}")
            elif message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data[::-1])
        return socket

    async def _play(self, request: web.Request) -> web.StreamResponse:
        """Faults for a server in a process of its own."""
        body = await request.json()
        if body.get("die"):
            os._exit(9)
        self.faults |= body.get("faults", {})
        return web.json_response(
            {"running": self.running, "answered": self.answered, "aborted": self.aborted}
        )


class Site:
    """A played server on a port, which can be ended and started again."""

    def __init__(self, played: Played, port: int = 0) -> None:
        self.played, self.port = played, port
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._runner = web.AppRunner(
            self.played.app(), access_log=None, shutdown_timeout=0.0, handler_cancellation=True
        )
        await self._runner.setup()
        while True:
            # No port that a client's connection may have while this server is away.
            port = self.port or random.randint(20_000, 32_000)  # noqa: S311
            try:
                await web.TCPSite(self._runner, "127.0.0.1", port).start()
                break
            except OSError:
                if self.port:
                    raise
        self.port = port

    async def stop(self) -> None:
        """End as a killed process does: connections are cut, memory is free."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for task in [*self.played.tasks]:
                task.cancel()
            await runner.cleanup()
        for card in self.played.cards:
            card.held.pop(self.played.name, None)

    async def restart(self) -> None:
        """Start again, awake where its GPUs have room, as a server that was loaded anew."""
        await self.stop()
        self.played.changing = ""
        self.played.asleep = ""
        if not all(card.take(self.played.name, WEIGHTS + CACHE) for card in self.played.cards):
            # Its own supervisor has put it to sleep.
            self.played.fall("all")
        self.played.resumed.set()
        await self.start()


def main() -> None:
    """Serve as `vllm serve NAME --port N` until SIGTERM."""
    words = sys.argv[1:]
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("name")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    known, _ = parser.parse_known_args(words)
    name = known.served_model_name or known.name
    settings = json.loads(os.environ.get("PLAYED", "{}"))
    if (log := os.environ.get("PLAYED_LOG")) is not None:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"argv": words, "env": {**os.environ}}) + "\n")
    time.sleep(float(settings.pop("load_seconds", 0.0)))

    async def serve() -> None:
        played = Played(
            name=name,
            key=os.environ.get("VLLM_SLEEP_API_KEY", ""),
            keeps_kv="--sleep-keep-kv" in words,
            **settings,
        )
        site = Site(played, known.port)
        await site.start()
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
