"""A server for benchmarks/pool.py: the real routes, as little work for each token as can be.

    python benchmarks/pool_upstream.py MODEL PORT [SETTINGS]

SETTINGS is JSON: `sleep` and `wake` in seconds, `asleep`, `slots` (requests at a time), `service`
(seconds of one), `load` in seconds before it answers. A stream has `max_tokens` tokens, one every
`gap` seconds of its body, and all streams' tokens of a moment are written in one tick.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from contextlib import suppress
from typing import Any, cast

TOKEN = b'data: {"choices": [{"text": " token"}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN)
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
TICK = 0.01


class Server:
    """One model. ``at_sleep`` counts requests that came while it slept."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.settings = {"sleep": 0.25, "wake": 0.25, "slots": 0, "service": 0.0, **settings}
        self.asleep = bool(settings.get("asleep"))
        self.changing = False
        self.at_sleep = self.served = 0
        self.streams: dict[Connection, tuple[int, float, float]] = {}
        self.waiting: deque[Connection] = deque()
        self.busy = 0

    def tick(self) -> None:
        now = time.monotonic()
        for connection, (left, gap, at) in [*self.streams.items()]:
            if at > now:
                continue
            if left:
                connection.transport.write(CHUNK)
                self.streams[connection] = (left - 1, gap, at + gap)
            else:
                connection.transport.write(LAST)
                del self.streams[connection]
                self.served += 1
        asyncio.get_running_loop().call_later(TICK, self.tick)

    def next(self) -> None:
        """Begin requests while there are slots."""
        slots = int(self.settings["slots"])
        while self.waiting and (not slots or self.busy < slots):
            connection = self.waiting.popleft()
            self.busy += 1
            loop = asyncio.get_running_loop()
            loop.call_later(float(self.settings["service"]), self.end, connection)

    def end(self, connection: Connection) -> None:
        self.busy -= 1
        self.served += 1
        connection.answer(200, {"choices": [{"text": f" {self.name}"}], "model": self.name})
        self.next()

    def state(self) -> dict[str, Any]:
        rank = {"asleep_bytes": {}, "awake_bytes": {}, "host_copy_bytes": 0}
        rank["asleep_bytes" if self.asleep else "awake_bytes"] = {"weights": 1 << 30}
        return {"ranks": [rank]}

    async def change(self, connection: Connection, asleep: bool) -> None:
        if self.changing:
            connection.answer(409, {"detail": "in flight"})
            return
        self.changing = True
        await asyncio.sleep(float(self.settings["sleep" if asleep else "wake"]))
        self.changing, self.asleep = False, asleep
        connection.answer(200, {"status": "sleeping" if asleep else "awake", **self.state()})


class Connection(asyncio.Protocol):
    """HTTP/1.1 with a length, which is all that comes here."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self.server = server
        self.held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.server.streams.pop(self, None)
        with suppress(ValueError):
            self.server.waiting.remove(self)

    def data_received(self, data: bytes) -> None:
        self.held += data
        while (at := self.held.find(b"\r\n\r\n")) >= 0:
            head = self.held[:at].lower()
            length = 0
            for line in head.split(b"\r\n")[1:]:
                if line.startswith(b"content-length:"):
                    length = int(line[15:])
            if len(self.held) < at + 4 + length:
                return
            path = self.held.split(b" ", 2)[1].decode()
            body = self.held[at + 4 : at + 4 + length]
            self.held = self.held[at + 4 + length :]
            self.request(path, body)

    def request(self, path: str, body: bytes) -> None:
        server = self.server
        route = path.partition("?")[0]
        if route in ("/sleep", "/wake_up"):
            server.task = asyncio.ensure_future(server.change(self, route == "/sleep"))  # type: ignore[attr-defined]
        elif route == "/is_sleeping":
            self.answer(200, {"is_sleeping": server.asleep, **server.state()})
        elif route == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": server.name}]})
        elif route == "/count":
            self.answer(200, {"served": server.served, "at_sleep": server.at_sleep})
        elif not body:
            self.answer(200, {})
        else:
            self.complete(json.loads(body))

    def complete(self, body: dict[str, Any]) -> None:
        server = self.server
        if server.asleep or (server.changing and not server.asleep):
            server.at_sleep += 1
            self.answer(503, {"error": {"message": "asleep"}}, b"Retry-After: 1\r\n")
        elif body.get("stream"):
            self.transport.write(HEAD + CHUNK)
            gap = float(body.get("gap", 0.0))
            left = int(body.get("max_tokens", 1)) - 1
            server.streams[self] = (left, gap, time.monotonic() + gap)
        elif "seed" in body or not server.settings["service"]:
            server.served += 1
            self.answer(200, {"choices": [{"text": f" {server.name}"}], "model": server.name})
        else:
            server.waiting.append(self)
            server.next()

    def answer(self, status: int, body: Any, more: bytes = b"") -> None:
        text = json.dumps(body).encode()
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
        self.transport.write(head % (status, more, len(text)) + text)


async def main(name: str, port: int, settings: dict[str, Any]) -> None:
    await asyncio.sleep(float(settings.get("load", 0.0)))
    server = Server(name, settings)
    listener = await asyncio.get_running_loop().create_server(
        lambda: Connection(server), "127.0.0.1", port, backlog=4096
    )
    server.tick()
    await listener.serve_forever()


if __name__ == "__main__":
    with suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    words = sys.argv[1:]
    asyncio.run(main(words[0], int(words[1]), json.loads(words[2] if words[2:] else "{}")))
