"""The status page in Chromium: what it shows, and its buttons with the key of administration."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.integration.pool.played import Card, Played
from tests.integration.pool.rig import ADMIN, USER, pool

DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    not (DRIVER and BROWSER), reason="apt-get install chromium chromium-driver"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A page in a browser, by the WebDriver protocol."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    async def do(self, method: str, path: str, body: Any = None) -> Any:
        async with self._session.request(method, self._url + path, json=body) as answer:
            value = (await answer.json())["value"]
            assert answer.status == 200, value
            return value

    async def find(self, selector: str) -> str:
        body = {"using": "css selector", "value": selector}
        element: str = (await self.do("POST", "/element", body))[ELEMENT]
        return element

    async def click(self, selector: str) -> None:
        await self.do("POST", f"/element/{await self.find(selector)}/click", {})

    async def type(self, selector: str, text: str) -> None:
        element = await self.find(selector)
        await self.do("POST", f"/element/{element}/clear", {})
        await self.do("POST", f"/element/{element}/value", {"text": text})

    async def run(self, script: str) -> Any:
        return await self.do("POST", "/execute/sync", {"script": script, "args": []})

    async def until(self, script: str) -> None:
        async with asyncio.timeout(15):
            while not await self.run(f"return {script}"):
                await asyncio.sleep(0.1)


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Browser]:
    assert DRIVER is not None
    port = 9000 + os.getpid() % 1000
    log = (folder / "driver.log").open("wb")
    with subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=log) as driver, log:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
                words = [
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    f"--user-data-dir={folder}/c",
                ]
                options = {"args": words, "binary": BROWSER}
                match = {"alwaysMatch": {"goog:chromeOptions": options}}
                root = Browser(session, f"http://127.0.0.1:{port}")
                async with asyncio.timeout(60):
                    while True:
                        try:
                            made = await root.do("POST", "/session", {"capabilities": match})
                            break
                        except aiohttp.ClientConnectionError:
                            await asyncio.sleep(0.1)
                one = Browser(session, f"http://127.0.0.1:{port}/session/{made['sessionId']}")
                yield one
                await one.do("DELETE", "")
        finally:
            driver.terminate()


def state(model: str) -> str:
    return f"document.querySelector('[data-model={model}] .state')?.textContent"


def button(model: str, verb: str) -> str:
    buttons = f"document.querySelectorAll('[data-model={model}] button')"
    return f"[...{buttons}].find(one => one.textContent === '{verb}')"


def test_the_page_shows_the_pool_and_steers_it(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card()
        models = [Played(name="a", cards=(card,)), Played(name="b", cards=(card,), asleep="all")]
        more = {"a": {"aliases": ["chat"]}}
        async with (
            pool(tmp_path, models, cards=[card], more=more) as one,
            browser(tmp_path) as page,
        ):
            await page.do("POST", "/url", {"url": f"{one.url}/pool/"})
            await page.until("document.getElementById('said').textContent.includes('key')")
            assert await page.run("return document.querySelectorAll('tr[data-model]').length") == 0

            await page.type("#key", USER)
            await page.click("form button")
            await page.until(f"{state('a')} === 'awake' && {state('b')} === 'asleep'")
            text = await page.run("return document.body.innerText")
            assert "chat" in text
            assert "900 MiB of 1000 MiB" in text
            width = await page.run("return document.querySelector('.bar div').style.width")
            assert width == "90%"
            # A user's key shows, and steers nothing.
            await page.run(f"{button('b', 'wake')}.click()")
            await page.until(
                "document.getElementById('said').textContent.includes('administration')"
            )
            assert await one.states() == {"a": "awake", "b": "asleep"}

            await page.type("#key", ADMIN)
            await page.click("form button")
            await page.run(f"{button('b', 'wake')}.click()")
            await page.until(f"{state('b')} === 'awake' && {state('a')} === 'asleep'")
            swaps = await page.run("return document.querySelector('#swaps').innerText")
            assert "done" in swaps
            await page.run(f"{button('b', 'pin')}.click()")
            await page.until(f"{button('b', 'unpin')} !== undefined")
            assert one.rotation.members["b"].pinned
            await page.run(f"{button('b', 'sleep')}.click()")
            await page.until(f"{state('b')} === 'asleep'")
            # What a server says is text, and no markup.
            one.played("a").faults["wake"] = "refused"
            one.rotation.members["b"].reason = "<img src=x onerror=\"document.title='bad'\">"
            await page.until("document.querySelector('[data-model=b] .why') !== null")
            assert await page.run("return document.title") == "Pool"
            assert await page.run("return document.images.length") == 0

    asyncio.run(asyncio.wait_for(work(), 120))
