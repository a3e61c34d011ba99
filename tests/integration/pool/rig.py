"""A pool in this process, with played servers or others behind it, and a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from tests.integration.pool.played import Card, Cards, Played, Site

from sm12x.core import declared
from sm12x.pool import config as configs
from sm12x.pool.engines import RunFolder
from sm12x.pool.gateway import Gateway, Keys
from sm12x.pool.members import RefusalError
from sm12x.pool.metrics import Metrics
from sm12x.pool.rotation import Rotation

USER, ADMIN = "user-key", "admin-key"


@dataclass(kw_only=True)
class Pool:
    """A pool that runs, and what it has told."""

    rotation: Rotation
    sites: dict[str, Site]
    cards: tuple[Card, ...]
    client: aiohttp.ClientSession
    url: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def played(self, name: str) -> Played:
        return self.sites[name].played

    async def ask(
        self, model: str, path: str = "/v1/completions", **body: Any
    ) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of a request without a stream."""
        headers = body.pop("headers", {})
        async with self.client.post(
            self.url + path, json={"model": model, "prompt": "x", **body}, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def lines(self, model: str, **body: Any) -> list[str]:
        """Return the events of a stream. Raises aiohttp.ClientError where it is cut."""
        request = {"model": model, "prompt": "x", "stream": True, **body}
        async with self.client.post(self.url + "/v1/completions", json=request) as answer:
            text = (await answer.read()).decode()
        return [line for line in text.split("\n\n") if line]

    async def snapshot(self) -> dict[str, Any]:
        async with self.client.get(self.url + "/pool") as answer:
            result: dict[str, Any] = await answer.json()
            return result

    async def states(self) -> dict[str, str]:
        return {one["model"]: one["state"] for one in (await self.snapshot())["models"]}

    async def until(self, seconds: float = 10.0, **states: str) -> None:
        """Wait until models are in these states. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not states.items() <= (await self.states()).items():
                await asyncio.sleep(0.02)

    async def command(self, model: str, verb: str) -> tuple[int, dict[str, Any]]:
        async with self.client.post(
            f"{self.url}/pool/models/{model}/{verb}", headers={"Authorization": f"Bearer {ADMIN}"}
        ) as answer:
            return answer.status, await answer.json()

    def swaps(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "swap"]


@asynccontextmanager
async def pool(
    folder: Path,
    models: Sequence[Played],
    *,
    cards: Sequence[Card] = (),
    gpus: dict[str, list[int]] | None = None,
    more: dict[str, dict[str, Any]] | None = None,
    environ: dict[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[Pool]:
    """Run a pool over played servers. ``more`` are settings of models, ``settings`` of the pool."""
    sites = {one.name: Site(one) for one in models}
    for number, site in enumerate(sites.values()):
        if number:
            site.played.fall("all")
        await site.start()
    raw = {
        "models": {
            name: {
                "url": site.url,
                "gpus": (gpus or {}).get(name, [0]),
                "sleep": "level_1",
                **(more or {}).get(name, {}),
            }
            for name, site in sites.items()
        },
        **settings,
    }
    raw["limits"] = {
        "hold_seconds": 10,
        "sleep_seconds": 2,
        "wake_seconds": 2,
        "canary_seconds": 2,
    } | (settings.get("limits", {}))
    config, faults = declared.check(configs.PoolConfig, raw)
    assert config is not None, faults
    events: list[dict[str, Any]] = []
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as asking,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        ) as passing,
        aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {USER}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=timeout,
        ) as client,
    ):
        rotation = Rotation(
            config,
            session=asking,
            folder=RunFolder(folder / "run"),
            gpus=Cards(*cards) if cards else _Unseen(),  # type: ignore[arg-type]
            metrics=Metrics(),
            tell=lambda line: events.append(json.loads(line)),
        )
        for spec in configs.specs(config, lambda word: None).values():
            rung = spec.config.sleep
            rotation.add(spec, "level_1" if rung == "auto" else rung)

        async def reload() -> dict[str, Any]:
            raise RefusalError(422, "configuration", "not here")

        variables = {"VLLM_API_KEY": USER, "SM12X_POOL_ADMIN_KEY": ADMIN, **(environ or {})}
        keys = Keys(config, variables)
        gateway = Gateway(rotation, passing, keys, reload)
        runner = web.AppRunner(
            gateway.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        one = Pool(
            rotation=rotation,
            sites=sites,
            cards=tuple(cards),
            client=client,
            url=f"http://127.0.0.1:{port}",
            events=events,
        )
        try:
            await rotation.start()
            yield one
        finally:
            await runner.cleanup()
            await rotation.stop()
            for site in sites.values():
                await site.stop()


class _Unseen:
    fault = "there is no GPU"

    def device(self, gpu: int) -> str:
        return str(gpu)

    def memory(self, gpus: Sequence[int]) -> None:
        return None
