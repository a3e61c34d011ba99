"""The pool's gateway over played servers: streams, holds, queues, refusals, WebSockets, names."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.integration.pool.played import CACHE, MIB, WEIGHTS, Card, Played
from tests.integration.pool.rig import ADMIN, USER, Pool, pool


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def pair(**more: Any) -> tuple[list[Played], Card]:
    card = Card()
    return [Played(name=name, **more) for name in ("a", "b")], card


async def raw(
    one: Pool, head: str, body: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(one.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + b"\r\n\r\n" + body)
    await writer.drain()
    return reader, writer


# Busy models give way, too.
AT_ONCE = {"residency_swaps": 0, "least_residency_seconds": 0.01}
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    f"Authorization: Bearer {USER}"
)


def test_a_sleeping_model_is_woken_up_once_for_all_that_wait(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models) as one:
            answers = await asyncio.gather(*(one.ask("b") for _ in range(20)))
            assert {status for status, _ in answers} == {200}
            assert one.played("b").wakes == 1
            assert await one.states() == {"a": "asleep", "b": "awake"}
            assert one.played("a").refused_asleep == one.played("b").refused_asleep == 0
            (swap,) = one.swaps()
            assert (swap["to"], swap["from"], swap["result"]) == ("b", ["a"], "done")
            assert list(swap["seconds"]) == ["drain", "sleep", "prove", "wake", "canary"]

    run(work())


def test_streams_come_chunk_by_chunk(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair(token_seconds=0.1)
        async with pool(tmp_path, models) as one:
            body = {"model": "a", "stream": True, "max_tokens": 4}
            times = []
            async with one.client.post(one.url + "/v1/completions", json=body) as answer:
                assert answer.headers["Content-Type"] == "text/event-stream"
                assert answer.headers["X-Pool-Model"] == "a"
                assert answer.headers["X-Pool-Wait-Ms"] == "0"
                async for _ in answer.content.iter_any():
                    times.append(asyncio.get_running_loop().time())
            assert times[-1] - times[0] >= 0.25

    run(work())


def test_bodies_are_passed_on_before_they_have_ended(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models) as one:
            text = json.dumps({"model": "a", "prompt": "x" * 200_000}).encode()
            head = f"{HEAD}\r\nContent-Length: {len(text)}"
            reader, writer = await raw(one, head, text[:100_000])
            await asyncio.sleep(0.2)
            # The model was in the first bytes: the request is in flight.
            assert (await one.snapshot())["models"][0]["running"] == 1
            writer.write(text[100_000:])
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    run(work())


def test_forms_name_their_model_after_the_file(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models, more={"b": {"aliases": ["whisper"]}}) as one:
            for model in ("a", "b", "whisper"):
                form = aiohttp.FormData()
                form.add_field("file", b"\0\r\n--x\r\n" * 100_000, filename="speech.wav")
                form.add_field("model", model)
                url = one.url + "/v1/audio/transcriptions"
                async with one.client.post(url, data=form) as answer:
                    assert (answer.status, await answer.json()) == (200, {"text": "800000 bytes"})

    run(work())


def test_a_websocket_is_passed_on_both_ways_after_the_wake_up(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models) as one:
            url = one.url + "/v1/realtime?model=b"
            async with one.client.ws_connect(url) as two:
                assert await two.receive_json() == {"type": "session.created", "model": "b"}
                await two.send_str("hello")
                assert await two.receive_str() == "b: hello"
                await two.send_bytes(b"\0\1\2")
                assert await two.receive_bytes() == b"\2\1\0"
                assert (await one.snapshot())["models"][1]["running"] == 1
            await asyncio.sleep(0.1)
            assert (await one.snapshot())["models"][1]["running"] == 0

    run(work())


def test_a_client_that_leaves_while_it_waits_leaves_the_queue(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models) as one:
            models[0].token_seconds = 0.3
            first = asyncio.create_task(one.ask("a", max_tokens=4))
            await asyncio.sleep(0.1)
            body = json.dumps({"model": "b", "prompt": "x"}).encode()
            _, writer = await raw(one, f"{HEAD}\r\nContent-Length: {len(body)}", body)
            await asyncio.sleep(0.1)
            assert (await one.snapshot())["models"][1]["waiting"] == 1
            writer.transport.abort()
            await asyncio.sleep(0.1)
            shown = (await one.snapshot())["models"][1]
            assert (shown["waiting"], shown["waiting_bytes"]) == (0, 0)
            assert (await first)[0] == 200
            assert one.played("b").wakes == one.played("b").answered == 0

    run(work())


def test_a_client_that_leaves_a_stream_ends_it_at_the_server(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair(token_seconds=0.05)
        async with pool(tmp_path, models) as one:
            body = json.dumps({"model": "a", "stream": True, "max_tokens": 1000}).encode()
            reader, writer = await raw(one, f"{HEAD}\r\nContent-Length: {len(body)}", body)
            await reader.readuntil(b"data: ")
            writer.transport.abort()
            await asyncio.sleep(0.3)
            assert one.played("a").running == 0
            assert (await one.snapshot())["models"][0]["running"] == 0

    run(work())


def test_a_full_queue_is_429_and_a_wait_that_is_too_long_is_503(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        limits = {"queue_requests": 2, "hold_seconds": 0.5, "drain_seconds": 0.2}
        async with pool(tmp_path, models, limits=limits, policy=AT_ONCE) as one:
            models[0].token_seconds = 1.0
            first = asyncio.create_task(one.ask("a", max_tokens=3))
            await asyncio.sleep(0.1)

            async def status() -> tuple[int, str, str]:
                async with one.client.post(
                    one.url + "/v1/completions", json={"model": "b", "prompt": ""}
                ) as answer:
                    error = (await answer.json())["error"]
                    return answer.status, error["code"], answer.headers["Retry-After"]

            answers = await asyncio.gather(*(status() for _ in range(3)))
            assert sorted(answer[:2] for answer in answers) == [
                (429, "queue_full"),
                (503, "hold_timeout"),
                (503, "hold_timeout"),
            ]
            assert all(int(answer[2]) >= 1 for answer in answers)
            assert (await first)[0] == 200, "a drain that takes too long ends no request"
            assert [swap["result"] for swap in one.swaps()][:1] == ["cancelled"]

    run(work())


def test_bodies_that_wait_are_bounded_by_their_bytes(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        limits = {"queue_mib": 1, "body_mib": 4}
        async with pool(tmp_path, models, limits=limits) as one:
            models[0].token_seconds = 1.0
            first = asyncio.create_task(one.ask("a", max_tokens=2))
            await asyncio.sleep(0.1)
            status, body = await one.ask("b", prompt="x" * (2 * MIB))
            assert (status, body["error"]["code"]) == (429, "queue_full")
            status, body = await one.ask("a", prompt="x" * (5 * MIB))
            assert (status, body["error"]["code"]) == (413, "body_too_large")
            await first

    run(work())


def test_names_of_models(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        more = {"b": {"aliases": ["gpt-4", "other"]}}
        async with pool(tmp_path, models, more=more, default="a") as one:
            assert (await one.ask("gpt-4"))[1]["model"] == "b"
            status, body = await one.ask("nothing")
            assert (status, body["error"]["code"], body["error"]["param"]) == (
                404,
                "model_not_found",
                "model",
            )
            status, body = await one.ask("nothing", "/v1/messages")
            assert (status, body["type"], body["error"]["type"]) == (
                404,
                "error",
                "not_found_error",
            )
            async with one.client.get(one.url + "/v1/models") as answer:
                data = (await answer.json())["data"]
            assert [(entry["id"], entry["pool"]["state"]) for entry in data] == [
                ("a", "asleep"),
                ("b", "awake"),
            ]
            assert data[1]["pool"]["aliases"] == ["gpt-4", "other"]
            assert data[1]["pool"]["last_swap"]["result"] == "done"
            # A stored response is asked of the model that has answered it.
            assert (await one.ask("b", "/v1/responses"))[0] == 200
            async with one.client.get(one.url + "/v1/responses/resp_b") as answer:
                assert (await answer.json())["of"] == "b"

    run(work())


def test_keys_and_paths(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models) as one, aiohttp.ClientSession() as nobody:
            for path in ("/v1/models", "/pool", "/metrics", "/v1/completions"):
                async with nobody.get(one.url + path) as answer:
                    assert answer.status == 401
            async with nobody.get(one.url + "/health") as answer:
                assert answer.status == 200
            async with nobody.get(one.url + "/v1/models", headers={"x-api-key": USER}) as answer:
                assert answer.status == 200
            for path in (
                *("/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/play"),
                *(
                    "/v1/../sleep",
                    "/v1/%2e%2e/sleep",
                    "//sleep",
                    "/v1//../sleep",
                    "/v1/load_lora_adapter",
                ),
                *("/sleep?model=a", "/v1/..%2fsleep", "/x/v1/completions"),
            ):
                for method in ("POST", "GET"):
                    reader, writer = await raw(
                        one,
                        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
                        f"Authorization: Bearer {ADMIN}",
                    )
                    assert (await reader.readline()).split()[1] in (b"404", b"400"), path
                    writer.close()
            assert one.played("a").sleeps == 0
            url = one.url + "/pool/models/b/wake"
            async with one.client.post(url) as answer:
                assert answer.status == 403

    run(work())


def test_hostile_requests_are_answered_and_end_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models) as one:
            big = "x" * 100_000
            for head, body in (
                (f"{HEAD}\r\nContent-Length: 5", b"{\xff\xfe}x"),
                (f"{HEAD}\r\nContent-Length: 2", b"[]"),
                (f"{HEAD}\r\nContent-Length: 14", b'{"model": 1e99'),
                (f"{HEAD}\r\nContent-Length: {len(big)}", b"[" * len(big)),
                (f"{HEAD}\r\nContent-Length: -1", b""),
                (f"{HEAD}\r\nContent-Length: 99999999999", b""),
                (f"{HEAD}\r\nTransfer-Encoding: chunked", b"zz\r\n"),
                (f"{HEAD}\r\nTransfer-Encoding: chunked\r\nContent-Length: 3", b"0\r\n\r\n"),
                (f"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: {big}", b""),
                (f"GET /{big} HTTP/1.1\r\nHost: x", b""),
            ):
                reader, writer = await raw(one, head, body)
                line = await asyncio.wait_for(reader.readline(), 5)
                assert line.split()[1].startswith(b"4"), (head[-60:], line)
                writer.close()
            assert (await one.ask("a"))[0] == 200

    run(work())


def test_a_slow_client_is_cut_off_and_holds_up_no_swap(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        limits = {"stall_seconds": 0.5, "drain_seconds": 5}
        async with pool(tmp_path, models, limits=limits) as one:
            body = json.dumps({"model": "a", "stream": True, "max_tokens": 200_000}).encode()
            port = int(one.url.rpartition(":")[2])
            slow = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", port))
            head = f"{HEAD}\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(slow, head.encode() + body)
            await asyncio.sleep(0.2)
            assert (await one.ask("b"))[0] == 200
            slow.close()

    run(work())


def test_requests_are_frozen_over_a_sleep_where_the_server_keeps_them(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair(token_seconds=0.05)
        models[0].keeps_kv = True
        more = {"a": {"running": "freeze", "keep_kv": True}}
        async with pool(tmp_path, models, more=more, policy=AT_ONCE) as one:
            stream = asyncio.create_task(one.lines("a", max_tokens=40))
            await asyncio.sleep(0.3)
            assert (await one.ask("b"))[0] == 200
            lines = await stream
            assert len(lines) == 41
            assert lines[-1] == "data: [DONE]"
            assert one.played("a").aborted == 0
            assert [swap["to"] for swap in one.swaps()] == ["b", "a"]

    run(work())


def test_requests_drain_after_all_where_a_server_does_not_keep_them(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair(token_seconds=0.05)
        more = {"a": {"running": "freeze", "keep_kv": True}}
        async with pool(tmp_path, models, more=more, policy=AT_ONCE) as one:
            stream = asyncio.create_task(one.lines("a", max_tokens=40))
            await asyncio.sleep(0.3)
            status, _ = await one.ask("b")
            assert status == 503
            status, _ = await one.ask("b")
            assert status == 200
            assert len(await stream) == 41
            assert one.played("a").aborted == 0

    run(work())


def test_the_kv_cache_alone(tmp_path: Path) -> None:
    async def work() -> None:
        card = Card(total=2 * WEIGHTS + CACHE + MIB)
        a = Played(name="a", cards=(card,))
        b = Played(name="b", cards=(card,), asleep="kv_cache")
        more: dict[str, dict[str, Any]] = {name: {"sleep": "kv_cache"} for name in ("a", "b")}
        async with pool(tmp_path, [a, b], cards=[card], more=more) as one:
            assert (await one.ask("b"))[0] == 200
            assert a.asleep == "kv_cache"
            (swap,) = one.swaps()
            assert swap["freed_bytes"] == CACHE

    run(work())


def test_metrics_of_pool_and_servers(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models) as one:
            await one.ask("b")
            async with one.client.get(one.url + "/metrics") as answer:
                text = await answer.text()
            assert 'sm12x_pool_swaps_total{pool_model="b",result="done"} 1.0' in text
            assert 'sm12x_pool_state{pool_model="a",state="asleep"} 1.0' in text
            for name in ("a", "b"):
                assert (
                    f'vllm:num_requests_running{{model_name="{name}",pool_model="{name}"}} 0'
                    in text
                )
            assert text.count("# TYPE vllm:num_requests_running gauge") == 1

    run(work())


def test_commands_of_a_person(tmp_path: Path) -> None:
    async def work() -> None:
        models, _ = pair()
        async with pool(tmp_path, models) as one:
            assert (await one.command("b", "wake"))[0] == 200
            await one.until(b="awake", a="asleep")
            assert (await one.command("b", "pin"))[0] == 200
            status, body = await one.ask("a")
            assert (status, body["error"]["code"]) == (503, "model_unavailable")
            assert (await one.command("b", "unpin"))[0] == 200
            assert (await one.ask("a"))[0] == 200
            status, shown = await one.command("a", "sleep")
            assert (status, shown["state"]) == (200, "asleep")
            assert (await one.command("a", "sleep"))[0] == 409
            assert (await one.command("a", "dance"))[0] == 404
            assert (await one.command("c", "wake"))[0] == 404

    run(work())


@pytest.mark.parametrize(
    "headers", [{"X-Priority": "9"}, {"Authorization": "Bearer fast"}], ids=["header", "key"]
)
def test_priority_by_key_or_header(tmp_path: Path, headers: dict[str, str]) -> None:
    async def work() -> None:
        models = [Played(name=name) for name in ("a", "b", "c")]
        settings: dict[str, Any] = {
            "priority_header": "X-Priority",
            "keys": {"priorities": {"FAST": 9}},
        }
        async with pool(tmp_path, models, environ={"FAST": "fast"}, **settings) as one:
            models[0].token_seconds = 0.2
            first = asyncio.create_task(one.ask("a", max_tokens=3))
            await asyncio.sleep(0.1)
            asked = [asyncio.create_task(one.ask("b"))]
            await asyncio.sleep(0.1)
            asked.append(asyncio.create_task(one.ask("c", headers=headers)))
            await asyncio.gather(first, *asked)
            assert [swap["to"] for swap in one.swaps()][:1] == ["c"]

    run(work())
