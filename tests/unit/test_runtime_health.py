"""The health check: which server, and what its answers mean."""

from __future__ import annotations

import http.client
from dataclasses import replace
from pathlib import Path

import pytest

from sm12x.runtime import health
from sm12x.runtime.health import HEALTHY, UNHEALTHY, Listener

SERVER = Listener(host="127.0.0.1", port=8000)
Answer = tuple[int, bytes] | Exception
ASLEEP = (200, b'{"is_sleeping":true}')
AWAKE = (200, b'{"is_sleeping":false}')


def verdict(healthy: Answer, sleeping: Answer) -> tuple[int, str]:
    def get(server: Listener, path: str, seconds: float) -> tuple[int, bytes]:
        answer = {"/health": healthy, "/is_sleeping": sleeping}[path]
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = health.check(SERVER, get)
    return found.code, found.text


@pytest.mark.parametrize(
    ("healthy", "sleeping", "code", "text"),
    [
        ((200, b""), AWAKE, HEALTHY, "is awake"),
        ((200, b""), ASLEEP, HEALTHY, "sleeps"),
        # A release whose /health asks the engine may be red while it sleeps.
        ((503, b""), ASLEEP, HEALTHY, "sleeps"),
        # Without dev mode there is no such path.
        ((200, b""), (404, b"{}"), HEALTHY, "answers"),
        # The engine is deaf in the middle of /sleep and /wake_up.
        ((200, b""), TimeoutError(), HEALTHY, "answers"),
        ((200, b""), (200, b"not json"), HEALTHY, "answers"),
        ((200, b""), (200, b'{"is_sleeping": "false"}'), HEALTHY, "answers"),
        (UnicodeError("label empty or too long"), AWAKE, UNHEALTHY, "does not answer"),
        ((503, b""), (500, b""), UNHEALTHY, "says 503"),
        (ConnectionRefusedError(), AWAKE, UNHEALTHY, "is loading, or cannot start"),
        (TimeoutError(), AWAKE, UNHEALTHY, "does not answer"),
        (http.client.BadStatusLine("x"), AWAKE, UNHEALTHY, "does not answer"),
    ],
)
def test_what_the_answers_mean(healthy: Answer, sleeping: Answer, code: int, text: str) -> None:
    found = verdict(healthy, sleeping)
    assert found[0] == code
    assert text in found[1]


def test_a_container_that_runs_something_else_is_healthy() -> None:
    assert health.check(None, health.get_http).code == HEALTHY


@pytest.mark.parametrize(
    ("command", "server"),
    [
        ("/v/python /v/bin/vllm serve m", SERVER),
        ("vllm serve m --port 1 --port=2", Listener(host="127.0.0.1", port=2)),
        ("vllm serve m --host 0.0.0.0", SERVER),
        ("vllm serve m --port \u00b2", SERVER),
        ("vllm serve m --port 65536", SERVER),
        ("vllm serve m --host 10.0.0.2", Listener(host="10.0.0.2", port=8000)),
        ("vllm serve m --ssl_certfile c", Listener(host="127.0.0.1", port=8000, tls=True)),
        ("vllm serve m --api-key k", Listener(host="127.0.0.1", port=8000, key="k")),
        ("vllm serve m --uds /s", Listener(host="127.0.0.1", port=8000, socket_path="/s")),
        (
            "python -m vllm.entrypoints.openai.api_server --port 3",
            Listener(host="127.0.0.1", port=3),
        ),
        ("vllm serve m --headless", None),
        ("vllm bench serve --port 3", None),
        ("bash -c sleep", None),
        ("serve", None),
    ],
)
def test_the_server_is_the_one_that_runs(command: str, server: Listener | None) -> None:
    assert health.find([["tini", "--"], command.split()]) == server


def test_vllm_port_is_not_the_http_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PORT", "5")
    assert health.find([["vllm", "serve", "m"]]) == SERVER


def test_a_url_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM12X_HEALTH_URL", "https://h:4")
    assert health.server_here() == Listener(host="h", port=4, tls=True)


@pytest.mark.parametrize(
    "url", ["localhost:9", "http://h:99999", "http://[::1", "ftp://h", "http://"]
)
def test_a_url_that_is_none_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM12X_HEALTH_URL", url)
    found = health.here()
    assert found.code == UNHEALTHY
    assert f"SM12X_HEALTH_URL={url} is no address" in found.text


@pytest.mark.parametrize("key", ["sk-1\n", "sk-\u20ac"])
def test_a_key_that_no_header_can_have_is_not_sent(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, str]] = []

    def request(_: object, method: str, path: str, *, headers: dict[str, str]) -> None:
        sent.append(headers)
        raise ConnectionRefusedError

    monkeypatch.setenv("VLLM_API_KEY", key)
    monkeypatch.setattr(http.client.HTTPConnection, "request", request)
    assert health.check(SERVER, health.get_http).code == UNHEALTHY
    assert sent == [{}]


def test_the_key_of_the_sleep_routes_is_sent_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []

    def request(_: object, method: str, path: str, *, headers: dict[str, str]) -> None:
        sent.append(headers.get("Authorization", ""))
        raise ConnectionRefusedError

    monkeypatch.setattr(http.client.HTTPConnection, "request", request)
    monkeypatch.delenv("VLLM_SLEEP_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "inference")
    for server in (SERVER, replace(SERVER, key="argument")):
        health.check(server, health.get_http)
        monkeypatch.setenv("VLLM_SLEEP_API_KEY", "sleep")
        health.check(server, health.get_http)
        monkeypatch.setenv("VLLM_SLEEP_API_KEY", "")
    assert sent == ["Bearer inference", "Bearer sleep", "Bearer argument", "Bearer sleep"]


def test_processes_are_read_oldest_first(tmp_path: Path) -> None:
    for number, words in {"10": b"b\0c\0", "9": b"a\0", "self": b"x\0"}.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_bytes(words)
    (tmp_path / "11").mkdir()
    assert health.running(tmp_path) == [["a"], ["b", "c"]]
