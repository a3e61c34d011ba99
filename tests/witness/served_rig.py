"""Several API servers over one real engine: http_rig's servers, executor_rig's engine cores.

Each server has a client of its own, started as `vllm serve --api-server-count` starts it. All of
them are in one event loop, so that a test sees what each knows at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from tests.witness import executor_rig as rig
from tests.witness.http_rig import Server


class Frontend:
    """An API server's AsyncLLM, without tokenizer and statistics, over its real client."""

    def __init__(self, client: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        class Shell(AsyncLLM):  # type: ignore[misc]
            def __init__(self) -> None:
                self.engine_core = client
                self.renderer = SimpleNamespace(clear_mm_cache_async=_nothing)
                self.logger_manager = None
                self.output_handler = None
                self.tokens = 3

            async def runs(self) -> None:
                await frontend.generate(self.tokens)

            def shutdown(self, timeout: float | None = None) -> None: ...

        frontend = self
        self.client = client
        self.engine = Shell()
        self._ends: dict[str, asyncio.Future[Any]] = {}
        self.requests = 0
        self._reading = asyncio.create_task(self._read())

    async def generate(self, tokens: int) -> None:
        """One request, as AsyncLLM sends it and answers it."""
        self.requests += 1
        name = f"{self.client.client_index}-{self.requests}"
        self._ends[name] = asyncio.get_running_loop().create_future()
        await self.client.add_request_async(rig._request(name, tokens))
        try:
            error = await self._ends[name]
        finally:
            del self._ends[name]
        if error is not None:
            raise error.to_exception()

    async def _read(self) -> None:
        try:
            while True:
                for output in (await self.client.get_output_async()).outputs:
                    end = self._ends.get(output.request_id)
                    if output.finish_reason is not None and end is not None and not end.done():
                        end.set_result(output.error)
        except Exception as dead:
            for end in self._ends.values():
                if not end.done():
                    end.set_exception(dead)


async def _nothing() -> None: ...


class Served:
    """``servers`` of one engine, or of several data parallel ones."""

    def __init__(self, launch: Any, clients: list[Any], flags: tuple[str, ...]) -> None:
        self._launch = launch
        self.frontends = [Frontend(client) for client in clients]
        self.engines = [frontend.engine for frontend in self.frontends]
        many = len(clients)
        self.servers = [Server(engine, *flags, servers=many) for engine in self.engines]

    def states(self) -> list[str]:
        """What each server has been told; nothing on a source where no engine says it."""
        return [e.sleep_state.name for e in self.engines if hasattr(e, "sleep_state")]

    async def until(self, *states: str) -> None:
        """Wait until all servers know one of these states."""
        end = time.monotonic() + 5
        while not set(self.states()) <= set(states):
            assert time.monotonic() < end, f"{self.states()}, not {states}"
            await asyncio.sleep(0.002)

    def signal(self, number: signal.Signals) -> None:
        """Stop, continue or kill every engine core."""
        for process in self._launch.engine_manager.processes:
            os.kill(process.pid, number)


def serve(
    gpus: rig.Gpus,
    test: Callable[[Served], Awaitable[None]],
    *flags: str,
    servers: int = 2,
    engines: int = 1,
) -> None:
    """Run ``test`` with ``servers`` API servers over ``engines`` engine cores."""
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    os.environ[rig.DEVICES] = str(gpus.root)
    config = rig._vllm_config(engines)
    listeners = bind_engine_zmq_listeners(config, servers)
    with launch_core_engines(config, MultiprocExecutor, False, listeners.addresses) as launch:
        pass

    async def start_and_test() -> None:
        publishes = launch.coordinator.get_stats_publish_address() if launch.coordinator else None
        clients = [
            EngineCoreClient.make_async_mp_client(
                vllm_config=config,
                executor_class=MultiprocExecutor,
                log_stats=False,
                client_addresses={
                    "input_address": listeners.inputs[n].address,
                    "output_address": listeners.outputs[n].address,
                    "input_listener": listeners.inputs[n].socket,
                    "output_listener": listeners.outputs[n].socket,
                    "stats_update_address": publishes,
                },
                client_count=servers,
                client_index=n,
            )
            for n in range(servers)
        ]
        try:
            await test(Served(launch, clients, flags))
        finally:
            for client in clients:
                client.shutdown()

    try:
        asyncio.run(start_and_test())
    finally:
        gpus.let_everything_go()
        with contextlib.suppress(ProcessLookupError):
            for process in launch.engine_manager.processes:
                os.kill(process.pid, signal.SIGCONT)
        launch.engine_manager.shutdown()
        if launch.coordinator is not None:
            launch.coordinator.shutdown()
