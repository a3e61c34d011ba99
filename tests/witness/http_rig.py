"""The rig of the HTTP witnesses: the release's own routes, on an engine that only pretends.

Routes and error handlers are those of the tree, in one event loop with an engine that sleeps, wakes
and keeps requests as the release's does. Nothing listens: httpx calls the application.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx

# Seconds after which a request that is not answered hangs.
PATIENCE = 2.0
TAGS = {"weights", "kv_cache"}
PROMPT = {"model": "m", "prompt": "a", "max_tokens": 1}
# The module that builds the application of `vllm serve`.
APPLICATION = "vllm.entrypoints.launchers.app"


class Engine:
    """Stands for AsyncLLM: ``asleep`` are the tags that sleep, ``paused`` is a scheduler at rest.

    A call named in ``held`` waits for that event before it does anything, one in ``failing`` fails.
    Weights are ``missing`` after a sleep that discarded them. ``state`` is the name of the state
    that the engine publishes; by default the one of what sleeps.
    """

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.paused = False
        self.missing = False
        self.state = ""
        self.errored = False
        self.options: dict[str, Any] = {}
        self.calls: list[tuple[object, ...]] = []
        self.held: dict[str, asyncio.Event] = {}
        self.failing: set[str] = set()
        self.begun = asyncio.Event()
        self._changed = asyncio.Event()

    async def sleep(
        self, level: int = 1, mode: str = "abort", tags: list[str] | None = None, **options: Any
    ) -> None:
        self.options = options
        await self._call("sleep", level, mode, *([tags] if tags else []))
        self.paused = True
        if tags:
            self.asleep |= set(tags)
        else:
            self.asleep = set(TAGS) if level else set()

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        await self._call("wake_up", tags)
        self.asleep -= set(TAGS if tags is None else tags)
        self.paused = bool(self.asleep)
        self._changed.set()
        return not self.asleep

    async def release_kv_cache_memory(self) -> None:
        await self._call("release_kv_cache_memory")
        self.asleep = {"kv_cache"}

    async def is_sleeping(self) -> bool:
        return self.paused or bool(self.asleep)

    @property
    def sleep_state(self) -> Any:
        """What each server knows without a question, with the stack."""
        states = importlib.import_module("vllm.v1.engine").SleepState
        if self.state:
            return states[self.state]
        if self.missing:
            return states.DISCARDED
        return states.ASLEEP if self.asleep else states.AWAKE

    async def runs(self) -> None:
        """Wait for what a request waits for."""
        while self.paused or self.asleep:
            self._changed.clear()
            await self._changed.wait()

    async def _call(self, name: str, *arguments: object) -> None:
        self.calls.append((name, *arguments))
        self.begun.set()
        if name in self.held:
            await self.held[name].wait()
        if name in self.failing:
            raise RuntimeError(f"{name} was made to fail")


class Server:
    """One API server of ``servers``, as the release builds it, and a client of it.

    ``rejects`` has requests to a sleeping engine refused, where the stack's default differs.
    """

    def __init__(
        self,
        engine: Engine,
        *flags: str,
        development: bool = True,
        servers: int = 1,
        rejects: bool = True,
    ) -> None:
        from fastapi import FastAPI

        completion = importlib.import_module("vllm.entrypoints.openai.completion.api_router")
        app = FastAPI()
        app.state.args = arguments(*flags)
        if getattr(app.state.args, "sleep_mode_requests", "") is None and rejects:
            app.state.args.sleep_mode_requests = "reject"
        # The engine's option, not one of those.
        app.state.args.api_server_count = servers
        app.state.engine_client = engine
        app.state.enable_server_load_tracking = False

        async def create_completion(*_: object) -> Any:
            await engine.runs()
            protocol = importlib.import_module("vllm.entrypoints.openai.completion.protocol")
            usage = importlib.import_module("vllm.entrypoints.serve.engine.protocol").UsageInfo()
            return protocol.CompletionResponse(model="m", choices=[], usage=usage)

        app.state.openai_serving_completion = SimpleNamespace(create_completion=create_completion)
        # Without it the release offers no sleep route, unless a flag asks for them.
        os.environ["VLLM_SERVER_DEV_MODE"] = "1" if development else "0"
        importlib.import_module("vllm.entrypoints.serve.dev.sleep.api_router").attach_router(app)
        app.include_router(completion.router)
        place = "vllm.entrypoints.serve.exception_handling.register"
        importlib.import_module(place).init_exception_handler(app)
        if development:
            rl = importlib.import_module("vllm.entrypoints.rl.online.api_router")
            app.include_router(rl.router)
        self.gate = app.state.sleep_gate if hasattr(app.state, "sleep_gate") else None
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    async def post(self, path: str, **more: Any) -> httpx.Response:
        return await asyncio.wait_for(self.client.post(path, **more), PATIENCE)

    async def ask(self) -> httpx.Response:
        """A request for one token; hanging is a TimeoutError."""
        return await self.post("/v1/completions", json=PROMPT)


def load() -> None:
    """Import what a server takes, here: in the fork of each test it takes seconds."""
    for name in (APPLICATION, "vllm.entrypoints.openai.completion.api_router"):
        importlib.import_module(name)


def arguments(*flags: str) -> Namespace:
    """The frontend's arguments: the engine's would look for a device."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    frontend = importlib.import_module("vllm.entrypoints.common.cli_args").FrontendArgs
    parser = frontend.add_cli_args(FlexibleArgumentParser())
    parsed: Namespace = parser.parse_args(list(flags))
    return parsed


def run(
    test: Callable[[Any, Server], Awaitable[None]],
    *flags: str,
    engine: type[Engine] = Engine,
    development: bool = True,
) -> None:
    """Run ``test`` with an engine and a server of it, in an event loop."""

    async def both() -> None:
        started = engine()
        await test(started, Server(started, *flags, development=development))

    asyncio.run(both())
