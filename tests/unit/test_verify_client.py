"""Addresses, keys and counters of `verify`, and what an answer that is none says."""

from __future__ import annotations

import gzip
import http.client
import io
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPException
from typing import Any

import pytest
import urllib3
from urllib3 import HTTPConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    DecodeError,
    LocationParseError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
    SSLError,
)

from sm12x.core.errors import ServerError, UsageError
from sm12x.doctor.model import Unseen
from sm12x.verify import client
from sm12x.verify.client import Access, CrossedError, RedirectError, Server

KEY = "sk-very-secret"
ANY: Any = None


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        (" https://gpu.example/prefix/v1 ", "https://gpu.example/prefix"),
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost:8000/v1", "http://localhost:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("HTTP://Gpu:8000", "http://gpu:8000"),
    ],
)
def test_an_address_is_taken_as_people_write_it(given: str, made: str) -> None:
    assert client.base_url(given) == made


@pytest.mark.parametrize(
    "given",
    [
        *("", "8000", "localhost", "ftp://x:1", "http://", "http://x:notaport", "http://x:99999"),
        *("http://x:1?a=b", "http://x:1#f", "http://x y:1", "http://[::1:8000", "/run/socket"),
    ],
)
def test_what_is_no_address_is_wrong_usage(given: str) -> None:
    with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:8000"):
        client.base_url(given)


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(UsageError) as refused:
        client.base_url(f"http://me:{KEY}@x:8000")
    assert KEY not in str(refused.value)
    assert "VLLM_API_KEY" in str(refused.value)


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "a b", "a\x00b"])
def test_a_key_that_no_header_can_have_is_not_shown(key: str) -> None:
    with pytest.raises(UsageError) as refused:
        client.checked_key(key, "MY_KEY")
    assert key not in str(refused.value)
    assert "MY_KEY" in str(refused.value)


def test_a_key_from_a_file_may_end_in_a_line_break() -> None:
    assert client.checked_key(f"{KEY}\n", "X") == KEY


def test_counters_are_summed_over_engines() -> None:
    text = (
        "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.\n"
        "# TYPE vllm:spec_decode_num_draft_tokens_total counter\n"
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 10.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="1"} 2.5e+01\n'
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 3\n'
    )
    found = client.metrics(text)
    assert found is not None
    assert found[client.DRAFTED] == 35
    assert found["vllm:num_requests_running"] == 3


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999"])
def test_a_counter_that_is_no_finite_number_is_not_seen(value: str) -> None:
    text = f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 2\n"
    assert client.metrics(text) == {"vllm:num_requests_waiting": 2}


@pytest.mark.parametrize("text", ["<html>no</html>", "a{b= 1", 'x{a="1"} one\n', '{"detail": 1}'])
def test_what_is_no_metrics_is_not_seen(text: str) -> None:
    assert not client.metrics(text)


class Page:
    """An answer of urllib3."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body
        self.headers: dict[str, str] = {}
        if 300 <= status < 400:
            self.headers, self.body = {"Location": body.decode()}, b""
        if status == 429:
            self.headers = {"Retry-After": "7"}

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stream(self, size: int, *, decode_content: bool) -> Iterator[bytes]:
        yield self.body


Answers = dict[str, tuple[int, object] | Exception]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """What each "METHOD /path" is answered with: status and body, or what is raised."""
    answers: Answers = {
        "GET /version": (200, {"version": "0.21.0"}),
        "GET /v1/models": (200, {"data": [{"id": "tiny"}, {"id": "lora"}]}),
        "GET /is_sleeping": (200, {"is_sleeping": False}),
    }

    def request(
        self: HTTPConnectionPool, method: str, url: str, *, headers: dict[str, str], **more: Any
    ) -> Page:
        assert (self.host, self.port) == ("x", 8000)
        assert (more["redirect"], more["retries"]) == (False, False)
        assert headers["Authorization"] == f"Bearer {KEY}"
        found = answers[f"{method} {url.partition('?')[0]}"]
        if isinstance(found, Exception):
            raise found
        status, body = found
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Page(status, data)

    monkeypatch.setattr(HTTPConnectionPool, "request", request)
    return answers


def server() -> Server:
    return Server("A", "http://x:8000", Access(key=KEY))


def test_a_server_says_what_it_is(answering: Answers) -> None:
    found = server().identify()
    assert (found.version, found.model, found.asleep) == ("0.21.0", "tiny", False)
    assert server().identify("lora").model == "lora"
    with pytest.raises(UsageError, match="--model tiny or lora"):
        server().identify("other")


def failing(*causes: Exception) -> ProtocolError:
    """An error of urllib3, with the causes that it wraps."""
    error = ProtocolError("x")
    error.__cause__ = causes[-1]
    for inner, outer in itertools.pairwise(causes):
        outer.__cause__ = inner
    return error


@pytest.mark.parametrize(
    ("call", "answer", "said"),
    [
        ("GET /version", (200, b"<html>Welcome"), "is no vLLM server"),
        ("GET /version", (404, {"detail": "Not Found"}), "is no vLLM server"),
        ("GET /version", (200, {"version": 3}), "is no vLLM server"),
        ("GET /version", (200, b"[" * 100_000), "is no vLLM server"),
        ("GET /version", (401, {"error": KEY}), "correct the key in VLLM_API_KEY"),
        ("GET /v1/models", (401, {"error": KEY}), "correct the key in VLLM_API_KEY"),
        ("GET /v1/models", (200, {"data": []}), "no model in its list"),
        ("GET /v1/models", (200, {"data": "x"}), "no model in its list"),
        ("GET /v1/models", (200, b"\xff\xfe"), "no JSON object"),
        ("GET /version", (503, b"loading"), "wait until the server has started"),
        ("GET /v1/models", (429, b"slow"), "wait 7 s, and repeat"),
        ("GET /version", LocationParseError("a..b"), "is not a usable address"),
        ("GET /is_sleeping", (404, {}), "--enable-sleep-mode --enable-sleep-routes"),
        ("GET /is_sleeping", (401, {}), "VLLM_SLEEP_API_KEY"),
        ("GET /is_sleeping", (403, {}), "--allowed-origins"),
        ("GET /is_sleeping", (200, {"is_sleeping": "no"}), "is_sleeping"),
        ("GET /is_sleeping", (500, {"error": "\x1b[31mred\x1b[0m"}), "read the server's log"),
        ("GET /version", failing(ConnectionRefusedError(111, "x")), "nothing listens there"),
        ("GET /version", failing(socket.gaierror(-2, "x")), "the name is not known"),
        (
            "GET /version",
            failing(OSError(113, "No route to host"), NewConnectionError(ANY, "refused")),
            "cannot be reached: no route to host. Next",
        ),
        ("GET /version", ConnectTimeoutError("x"), "no connection within 10 s"),
        ("GET /version", failing(TimeoutError("x")), "has not answered GET /version within 30 s"),
        ("GET /version", failing(DecodeError("Connection refused")), "unreadably"),
        # Words of a server are no reason: only types are.
        ("GET /version", ProtocolError("timed out, refused"), "closed the connection"),
        (
            "GET /version",
            ReadTimeoutError(ANY, "/", "x"),
            "has not answered GET /version within 30 s",
        ),
        ("GET /version", SSLError("x"), "write http://"),
        ("GET /version", ProtocolError("Remote end closed"), "closed the connection"),
        ("GET /version", ValueError("read length must be non-negative"), "closed the connection"),
        ("GET /version", HTTPException("got more than 100 headers"), "closed the connection"),
    ],
)
def test_each_failure_says_what_to_do_and_never_the_key(
    answering: Answers, call: str, answer: tuple[int, object] | Exception, said: str
) -> None:
    answering[call] = answer
    with pytest.raises(ServerError) as failed:
        server().identify()
    assert failed.value.exit_code == 17
    assert said in str(failed.value)
    assert KEY not in str(failed.value)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 600


CALLS: dict[str, Callable[[Server], object]] = {
    "GET /version": Server.identify,
    "GET /v1/models": Server.identify,
    "GET /is_sleeping": Server.is_sleeping,
    "GET /collective_rpc": Server.require_reloading,
    "POST /sleep": lambda one: one.sleep(1),
    "POST /wake_up": lambda one: one.wake_up("weights", retry=True),
    "POST /collective_rpc": Server.reload_weights,
    "POST /v1/completions": lambda one: one.complete("x", 4),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "to", ["https://sso.example/login?next=%2Fversion&state=s3cret", "/login", "//sso.example/", ""]
)
def test_a_redirect_to_a_login_page_asks_for_the_server_behind_the_proxy(
    answering: Answers, call: str, to: str
) -> None:
    answering[call] = (302, to.encode())
    with pytest.raises(RedirectError) as failed:
        CALLS[call](server())
    assert call in failed.value.message
    assert "behind the proxy" in failed.value.next_step
    assert to.partition("?")[0] in failed.value.message
    assert "s3cret" not in str(failed.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_of_the_route_itself_names_the_other_address(
    answering: Answers, call: str, status: int
) -> None:
    path = call.partition(" ")[2]
    answering[call] = (status, f"https://y:8443{path}?token={KEY}".encode())
    with pytest.raises(RedirectError) as failed:
        CALLS[call](server())
    assert failed.value.next_step.endswith(" https://y:8443")
    # The same address with a slash more is no other address.
    answering[call] = (status, f"{path}/".encode())
    with pytest.raises(RedirectError) as failed:
        CALLS[call](server())
    assert "behind the proxy" in failed.value.next_step


@pytest.mark.parametrize(
    "to", [f"https://y/\x1b[31m{KEY}", "http://[::1", "http://x:99999/version"]
)
def test_a_hostile_redirect_is_printable_and_has_no_key(answering: Answers, to: str) -> None:
    answering["GET /version"] = (302, to.encode())
    with pytest.raises(RedirectError) as failed:
        server().identify()
    assert str(failed.value).isprintable()
    assert KEY not in str(failed.value)


def test_without_a_key_the_variable_is_named(
    answering: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(self: HTTPConnectionPool, method: str, url: str, **settings: Any) -> Page:
        assert "Authorization" not in settings["headers"]
        return Page(401, b'{"error":"Unauthorized"}')

    monkeypatch.setattr(HTTPConnectionPool, "request", request)
    with pytest.raises(ServerError, match=r"Next: set VLLM_API_KEY to the server's API key"):
        Server("A", "http://x:8000", Access()).identify()


def test_a_crossing_call_is_an_error_of_its_own(answering: Answers) -> None:
    answering["POST /sleep"] = (409, {"error": {"message": "/wake_up is in flight"}})
    with pytest.raises(CrossedError, match="/wake_up is in flight"):
        server().sleep(1)


def test_a_refused_wake_up_names_the_other_server(answering: Answers) -> None:
    answering["POST /wake_up"] = (500, {"error": {"message": "block 0x7 of 9 bytes"}})
    with pytest.raises(ServerError, match=r"block 0x7 of 9 bytes.*give both addresses"):
        server().wake_up()


@pytest.mark.parametrize(
    "body",
    [
        *(b"nonsense", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{}]}'),
        *(b'{"choices": [null]}', b'{"choices": [{"text": 3}]}', b'{"choices": {"0": 1}}'),
    ],
)
def test_a_completion_that_is_none_is_an_error(answering: Answers, body: bytes) -> None:
    answering["POST /v1/completions"] = (200, body)
    with pytest.raises(ServerError, match="POST /v1/completions with no"):
        server().complete("x", 4)


def test_what_a_completion_leaves_out_is_not_known(answering: Answers) -> None:
    answering["POST /v1/completions"] = (200, {"choices": [{"text": "a"}], "usage": None})
    found = server().complete("x", 4)
    assert (found.text, found.tokens, found.ids) == ("a", None, None)
    odd = {"choices": [{"text": "a", "token_ids": ["b"]}], "usage": {"completion_tokens": -1}}
    answering["POST /v1/completions"] = (200, odd)
    found = server().complete("x", 4)
    assert (found.tokens, found.ids) == (None, None)


def test_an_answer_without_end_is_cut_off(
    answering: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless(self: Page, size: int, *, decode_content: bool) -> Iterator[bytes]:
        while True:
            yield b"x" * (1 << 20)

    monkeypatch.setattr(Page, "stream", endless)
    with pytest.raises(ServerError, match="does not finish its answer"):
        server().is_sleeping()


@pytest.mark.parametrize("chunks", [False, True])
def test_a_compressed_answer_is_read_whole_or_in_chunks(
    monkeypatch: pytest.MonkeyPatch, chunks: bool
) -> None:
    body = gzip.compress(b'{"is_sleeping": true}')
    sent = {"Content-Encoding": "gzip", "Content-Length": str(len(body))}
    if chunks:
        sent = {"Content-Encoding": "gzip", "Transfer-Encoding": "chunked"}
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"

    class Sent:
        """A socket from which only this answer comes."""

        def makefile(self, mode: str) -> io.BytesIO:
            head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
            return io.BytesIO(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body)

    def request(self: HTTPConnectionPool, *_: object, **__: object) -> urllib3.HTTPResponse:
        answer: Any = http.client.HTTPResponse(Sent(), method="GET")  # type: ignore[arg-type]
        answer.begin()
        return urllib3.HTTPResponse(
            body=answer, headers=sent, status=200, preload_content=False, original_response=answer
        )

    monkeypatch.setattr(HTTPConnectionPool, "request", request)
    assert server().is_sleeping()


RANK = {
    "dp_rank": 1,
    "pp_rank": 0,
    "tp_rank": 3,
    "rank": 3,
    "asleep_bytes": {"weights": 60, "kv_cache": 30},
    "awake_bytes": {},
    "host_copy_bytes": 61,
}


def test_what_a_server_says_of_its_ranks(answering: Answers) -> None:
    # GIVEN a server that says nothing, as a stock one
    assert server().ranks() is None
    # WHEN one says it, and something that is new
    said = {"is_sleeping": True, "ranks": [{**RANK, "new": 1}, {**RANK, "tp_rank": 4}]}
    answering["GET /is_sleeping"] = (200, said)
    # THEN it is taken, and whether it sleeps is read as before
    first, second = server().ranks() or ()
    assert (first.dp, first.pp, first.tp, second.tp) == (1, 0, 3, 4)
    assert first.asleep == {"weights": 60, "kv_cache": 30}
    assert (first.awake, first.host_copies) == ({}, 61)
    assert server().is_sleeping()


@pytest.mark.parametrize(
    "ranks",
    [None, [], {}, "two", [None], [{}], [[1]], [{**RANK, "tp_rank": "3"}]]
    + [[{**RANK, key: value}] for key in ("asleep_bytes", "awake_bytes") for value in (3, None)]
    + [[{**RANK, "asleep_bytes": {"weights": size}}] for size in (-1, 1.5, True, None, "1")]
    + [[{**RANK, "host_copy_bytes": None}], [RANK, {**RANK, "dp_rank": -1}]],
)
def test_ranks_in_another_form_are_none(answering: Answers, ranks: object) -> None:
    answering["GET /is_sleeping"] = (200, {"is_sleeping": True, "ranks": ranks})
    assert server().ranks() is None
    assert server().is_sleeping()


@pytest.mark.parametrize("answer", [(503, b"no"), (200, b"[]"), (200, b"{"), (404, b"")])
def test_ranks_that_cannot_be_asked_for_end_no_run(
    answering: Answers, answer: tuple[int, object]
) -> None:
    answering["GET /is_sleeping"] = answer
    assert server().ranks() is None


def test_metrics_that_are_not_there_are_not_seen(answering: Answers) -> None:
    answering["GET /metrics"] = (404, b"")
    assert server().counters() is None
    answering["GET /metrics"] = (200, b"vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n")
    assert server().at_work() == 3


@pytest.mark.parametrize(("running", "busy"), [("NaN", 2), ("+Inf", 2), ("-3", 2), ("1", 3)])
def test_requests_at_work_are_counted_as_far_as_they_are_known(
    answering: Answers, running: str, busy: int
) -> None:
    text = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 2\n"
    answering["GET /metrics"] = (200, text.encode())
    assert server().at_work() == busy


@pytest.mark.parametrize(
    "answer",
    [
        *((404, b"nope"), (401, b""), (302, b""), (500, b"no"), (200, b""), (200, b"\xff<html>")),
        # As with --disable-log-stats: Python's own series alone.
        (200, b"# TYPE python_info gauge\npython_info 1\n"),
        (200, b"vllm:num_requests_running 0\n"),
        (200, b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n"),
        ReadTimeoutError(ANY, "/", "late"),
    ],
)
def test_load_that_cannot_be_seen_is_unknown_and_not_zero(
    answering: Answers, answer: tuple[int, object] | Exception
) -> None:
    answering["GET /metrics"] = answer
    found = server().at_work()
    assert isinstance(found, Unseen)
    assert "GET /metrics" in found.why
    assert KEY not in found.why
    idle = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    answering["GET /metrics"] = (200, idle)
    assert server().at_work() == 0


def test_level_2_takes_development_mode(answering: Answers) -> None:
    answering["GET /collective_rpc"] = (405, b"")
    server().require_reloading()
    answering["GET /collective_rpc"] = (404, b"")
    with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
        server().require_reloading()
