"""The pool beside a direct call, nginx, LiteLLM's proxy and llama-swap, in one run on one machine.

    python benchmarks/pool.py --out RESULT.json [--litellm PROGRAM] [--llama-swap PROGRAM]

Servers and clients are played, so the times are those of what is between them. Cases:

* latency: time to the first byte of a stream, with 1 stream and with 200 at 20 tokens/s.
* streams: 1,000 streams of 20 tokens/s at once: is each of them whole, and what memory is used?
* rotation: 10,000 requests over two models in random order, swaps of 0.5 s; 5 % of clients leave.

nginx is Debian's package, without buffering. What is not installed is left out, and said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
GAP = 0.05
# Of a stream in the case of latency, and in that of 1,000 streams.
TOKENS, LONG = 20, 200
# Requests, seconds of each and how many at a time, and how many come in a second.
REQUESTS, SERVICE, SLOTS, RATE = 10_000, 0.02, 8, 380.0
SWAP, LEAVES = 0.5, 0.05
# What each token of a stream begins with.
TOKEN = b"data: {"
# LiteLLM does not start without one.
KEY = f"sk-{secrets.token_hex(32)}"
NGINX = """\
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream server {{ server 127.0.0.1:{upstream}; keepalive 512; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://server; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def running(
    words: Sequence[str], port: int, log: Path, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that listens on ``port`` once it is up. Raises TimeoutError."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}", **env},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        end = time.monotonic() + 90
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > end or process.poll() is not None:
                raise TimeoutError(f"{words[0]} does not listen: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def upstream(name: str, port: int, **settings: Any) -> list[str]:
    script = str(ROOT / "benchmarks" / "pool_upstream.py")
    return [sys.executable, script, name, str(port), json.dumps(settings)]


@contextmanager
def pool(folder: Path, models: dict[str, int], **settings: Any) -> Iterator[tuple[int, int]]:
    """A pool before served models; its port and its process."""
    port = free_port()
    config = {
        "port": port,
        "run_folder": str(folder / f"run-{port}"),
        "models": {
            name: {"url": f"http://127.0.0.1:{number}", "gpus": [0], "sleep": "level_1"}
            for name, number in models.items()
        },
        "limits": {"queue_requests": 20_000, "hold_seconds": 600},
        "canary": {"random_weights": True},
        **settings,
    }
    path = folder / f"pool-{port}.yaml"
    path.write_text(json.dumps(config))
    words = [sys.executable, "-m", "sm12x.pool", "--config", str(path)]
    cache = {"SM12X_IMAGE_CACHE": str(folder / "cache"), "VLLM_API_KEY": ""}
    with running(words, port, folder / f"pool-{port}.log", **cache) as process:
        asyncio.run(until_ready(port))
        yield port, process.pid


async def until_ready(port: int) -> None:
    while True:
        with suppress(OSError):
            status, _ = await call(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            if status == 200:
                return
        await asyncio.sleep(0.05)


@dataclass(kw_only=True)
class Stream(asyncio.Protocol):
    """A client of one stream after the other on one connection; times in seconds."""

    done: asyncio.Future[None] | None = None
    began: float = 0.0
    first: float = 0.0
    tokens: int = 0
    status: int = 0
    held: bytes = b""
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.status and data[:9] == b"HTTP/1.1 ":
            self.status = int(data[9:12])
        # A token may be in two pieces.
        text = self.held + data
        found = text.count(TOKEN)
        if found and not self.first:
            self.first = time.monotonic() - self.began
        self.tokens += found
        self.held = text[max(text.rfind(TOKEN) + len(TOKEN), len(text) - len(TOKEN) + 1) :]
        if b"[DONE]" in text and self.done and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done and not self.done.done():
            self.done.set_exception(ConnectionError("closed"))

    async def ask(self, port: int, tokens: int, gap: float) -> None:
        """Send one request, and wait for its end. Raises ConnectionError."""
        loop = asyncio.get_running_loop()
        if self.transport is None or self.transport.is_closing():
            await loop.create_connection(lambda: self, "127.0.0.1", port)
        assert self.transport is not None  # noqa: S101
        self.done = loop.create_future()
        self.first, self.tokens, self.status, self.held = 0.0, 0, 0, b""
        body = {"model": "a", "prompt": "x", "stream": True, "max_tokens": tokens, "gap": gap}
        self.began = time.monotonic()
        self.transport.write(post("/v1/completions", body))
        await self.done


def post(path: str, body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


async def call(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body of an answer. Raises OSError."""
    status, _, body = await exchange(port, request)
    return status, body


async def exchange(port: int, request: bytes) -> tuple[int, bytes, bytes]:
    """Status, headers and body of an answer that has a length. Raises OSError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [
            line[15:] for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"
        ]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        return int(head[9:12]), head, body
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("closed") from error
    finally:
        writer.close()


async def one_stream(port: int, count: int) -> list[float]:
    client, times = Stream(), []
    for number in range(count + 20):
        await client.ask(port, 2, 0.0)
        if number >= 20:
            times.append(client.first)
    return times


async def many_streams(port: int, count: int, seconds: float, seed: int) -> list[float]:
    times: list[float] = []
    chance = random.Random(seed)  # noqa: S311 - when a client begins
    end = time.monotonic() + seconds

    async def client() -> None:
        await asyncio.sleep(chance.uniform(0, TOKENS * GAP))
        one = Stream()
        while time.monotonic() < end:
            await one.ask(port, TOKENS, GAP)
            times.append(one.first)

    await asyncio.gather(*(client() for _ in range(count)))
    return times


def figures(times: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(times, n=100)
    return {"p50": 1000 * cuts[49], "p99": 1000 * cuts[98], "count": len(times)}


def latency(targets: dict[str, int], rounds: int) -> dict[str, Any]:
    """Each target in turn, ``rounds`` times, so that what else the machine does meets them all."""
    single: dict[str, list[float]] = {name: [] for name in targets}
    many: dict[str, list[float]] = {name: [] for name in targets}
    for number in range(rounds):
        for name, port in targets.items():
            single[name] += asyncio.run(one_stream(port, 200))
            many[name] += asyncio.run(many_streams(port, 200, 4.0, number))
    result = {}
    for name in targets:
        result[name] = {"1 stream": figures(single[name]), "200 streams": figures(many[name])}
        for case in ("1 stream", "200 streams"):
            mine, direct = result[name][case], result["direct"][case]
            mine |= {f"added {key}": mine[key] - direct[key] for key in ("p50", "p99")}
    return result


async def thousand(port: int, count: int) -> dict[str, Any]:
    clients = [Stream() for _ in range(count)]
    began = time.monotonic()
    done = await asyncio.gather(
        *(client.ask(port, LONG, GAP) for client in clients), return_exceptions=True
    )
    seconds = time.monotonic() - began
    return {
        "streams": count,
        "lost": sum(one is not None for one in done),
        "not whole": sum(client.tokens != LONG for client in clients),
        "tokens_per_second": sum(client.tokens for client in clients) / seconds,
        "seconds": seconds,
    }


def highest_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 1024


@dataclass(kw_only=True)
class Rotation:
    """What became of the requests over two models."""

    answers: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    seconds: float = 0.0


async def rotate(port: int, count: int, limit: float) -> Rotation:
    """Requests that come at RATE, in random order; without an answer by ``limit`` one is lost."""
    chance = random.Random(1)  # noqa: S311 - which model, and who leaves
    result = Rotation()
    began = time.monotonic()

    async def one(at: float, model: str, leaves: bool) -> None:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        sent = time.monotonic()
        work = asyncio.ensure_future(
            exchange(port, post("/v1/completions", {"model": model, "prompt": "x"}))
        )
        try:
            status, head, body = await asyncio.wait_for(work, 0.05 if leaves else limit)
        except TimeoutError:
            result.answers["left" if leaves else "lost"] += 1
            return
        except OSError:
            result.answers["cut"] += 1
            return
        right = status == 200 and json.loads(body)["model"] == model
        result.answers["200" if right else str(status)] += 1
        told = [line for line in head.lower().split(b"\r\n") if line[:15] == b"x-pool-wait-ms:"]
        result.waits.append(int(told[0][15:]) / 1000 if told else time.monotonic() - sent)

    await asyncio.gather(
        *(
            one(number / RATE, chance.choice("ab"), chance.random() < LEAVES)
            for number in range(count)
        )
    )
    result.seconds = time.monotonic() - began
    return result


async def counts(ports: Sequence[int]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for port in ports:
        _, body = await call(port, b"GET /count HTTP/1.1\r\nHost: x\r\n\r\n")
        total.update(json.loads(body))
    return dict(total)


def rotation_of_pool(folder: Path, count: int) -> dict[str, Any]:
    settings = {"slots": SLOTS, "service": SERVICE, "sleep": SWAP / 2, "wake": SWAP / 2}
    ports = {"a": free_port(), "b": free_port()}
    with (
        running(upstream("a", ports["a"], **settings), ports["a"], folder / "a.log"),
        running(upstream("b", ports["b"], asleep=True, **settings), ports["b"], folder / "b.log"),
        pool(folder, ports) as (port, pid),
    ):
        result = asyncio.run(rotate(port, count, 600))
        _, raw = asyncio.run(call(port, b"GET /pool HTTP/1.1\r\nHost: x\r\n\r\n"))
        at_sleep = asyncio.run(counts([*ports.values()]))["at_sleep"]
        shown = json.loads(raw)
        swaps = [one for one in shown["swaps"] if one["result"] == "done"]
        memory = highest_mib(pid)
    # One request after the other, and a swap for each residency that this takes at least.
    service = count * (1 - LEAVES) * SERVICE / SLOTS
    least = max(service, count / RATE)
    residency = 10 * max(one["swap_seconds"] for one in shown["models"])
    ideal = least + SWAP * int(least / (10 * SWAP + SWAP))
    drain = max(one["seconds"]["drain"] for one in swaps)
    took = max(one["total_seconds"] - one["seconds"]["drain"] for one in swaps)
    bound = (residency + took + drain) + drain + took
    return {
        "answers": result.answers,
        "answered by a sleeping server": at_sleep,
        "swaps": len(swaps),
        "seconds": result.seconds,
        "ideal_seconds": ideal,
        "seconds_by_ideal": result.seconds / ideal,
        "longest_wait": max(result.waits),
        "bound_of_a_wait": bound,
        "memory_mib": memory,
    }


def rotation_of_llama_swap(folder: Path, program: str, count: int, limit: float) -> dict[str, Any]:
    """It ends one server and starts the other, which takes as long as a swap of the pool's."""
    port = free_port()
    settings = {"slots": SLOTS, "service": SERVICE, "load": SWAP / 2}
    models = {}
    for name in "ab":
        own = free_port()
        words = upstream(name, own, **settings)
        models[name] = {
            "cmd": " ".join(f"'{word}'" for word in words),
            "proxy": f"http://127.0.0.1:{own}",
            "checkEndpoint": "/health",
            "concurrencyLimit": 20_000,
        }
    path = folder / "llama-swap.yaml"
    path.write_text(json.dumps({"models": models, "healthCheckTimeout": 60, "logLevel": "error"}))
    words = [program, "--config", str(path), "--listen", f"127.0.0.1:{port}"]
    with running(words, port, folder / "llama-swap.log"):
        result = asyncio.run(rotate(port, count, limit))
    return {
        "requests": count,
        "answers": result.answers,
        "seconds": result.seconds,
        "longest_wait": max(result.waits, default=None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--litellm", default="", help="the program of LiteLLM's proxy")
    parser.add_argument("--llama-swap", default="", help="the program")
    parser.add_argument("--rounds", type=int, default=3, help="of the latency")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()}
    with suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())

    def add(case: str, facts: Any) -> None:
        result[case] = facts
        sys.stdout.write(json.dumps({case: facts}) + "\n")
        sys.stdout.flush()
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        direct = free_port()
        with (
            running(upstream("a", direct), direct, folder / "direct.log"),
            pool(folder, {"a": direct}) as (port, pid),
        ):
            targets = {"direct": direct, "pool": port}
            with others(folder, direct, options.litellm, targets):
                add("latency", latency(targets, options.rounds))
            add("direct streams", asyncio.run(thousand(direct, options.streams)))
            streams = asyncio.run(thousand(port, options.streams))
            add("streams", {**streams, "memory_mib": highest_mib(pid)})
        add("rotation", rotation_of_pool(folder, options.requests))
        if options.llama_swap:
            whole = rotation_of_llama_swap(folder, options.llama_swap, options.requests, 120)
            add("llama-swap", whole)
    return 0


@contextmanager
def others(folder: Path, direct: int, litellm: str, targets: dict[str, int]) -> Iterator[None]:
    """nginx and LiteLLM's proxy before the same server, where they are installed."""
    nginx = shutil.which("nginx")
    with contextmanager(nothing)() if not nginx else nginx_before(folder, nginx, direct) as port:
        if port:
            targets["nginx"] = port
        if not litellm:
            yield
            return
        number = free_port()
        path = folder / "litellm.yaml"
        base = f"http://127.0.0.1:{direct}/v1"
        params = {"model": "text-completion-openai/a", "api_base": base, "api_key": "sk-1"}
        path.write_text(json.dumps({"model_list": [{"model_name": "a", "litellm_params": params}]}))
        words = [litellm, "--config", str(path), "--port", str(number), "--host", "127.0.0.1"]
        quiet = {"PYTHONPATH": "", "LITELLM_LOG": "ERROR", "LITELLM_MASTER_KEY": KEY}
        with running(words, number, folder / "litellm.log", **quiet):
            targets["litellm"] = number
            yield


def nothing() -> Iterator[int]:
    yield 0


@contextmanager
def nginx_before(folder: Path, nginx: str, direct: int) -> Iterator[int]:
    port = free_port()
    path = folder / "nginx.conf"
    path.write_text(NGINX.format(folder=folder, upstream=direct, port=port))
    with running([nginx, "-c", str(path), "-p", str(folder)], port, folder / "nginx.log"):
        yield port


if __name__ == "__main__":
    sys.exit(main())
