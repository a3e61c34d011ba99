"""Addresses, keys and counters of `verify`, and what an answer that is none says."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Iterator

import httpx
import pytest

from sm12x.core.errors import ServerError, UsageError
from sm12x.doctor.host import Unseen
from sm12x.verify import client
from sm12x.verify.client import Access, CallError, Server

KEY = "sk-very-secret"


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
    with pytest.raises(UsageError):
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


Answers = dict[str, tuple[int, object] | Exception]


@pytest.fixture
def answers() -> Answers:
    """What each "METHOD /path" is answered with: status and body, or what is raised."""
    return {
        "GET /version": (200, {"version": "0.33.0"}),
        "GET /v1/models": (200, {"data": [{"id": "tiny"}, {"id": "lora"}]}),
        "GET /is_sleeping": (200, {"is_sleeping": False}),
    }


@pytest.fixture
def server(answers: Answers) -> Server:
    def answer(request: httpx.Request) -> httpx.Response:
        assert (request.url.host, request.url.port) == ("x", 8000)
        assert request.headers["Authorization"] == f"Bearer {KEY}"
        planned = answers[f"{request.method} {request.url.path}"]
        if isinstance(planned, Exception):
            raise planned
        return reply(*planned)

    return Server("A", "http://x:8000", Access(key=KEY), httpx.MockTransport(answer))


def reply(status: int, body: object) -> httpx.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if 300 <= status < 400:
        return httpx.Response(status, headers={b"Location": data})
    return httpx.Response(
        status, content=data, headers={"Retry-After": "7"} if status == 429 else {}
    )


def test_a_server_says_what_it_is(answers: Answers, server: Server) -> None:
    found = server.identify()
    assert (found.version, found.model, found.asleep) == ("0.33.0", "tiny", False)
    assert server.identify("lora").model == "lora"
    with pytest.raises(UsageError, match="--model tiny or lora"):
        server.identify("other")


def unreached(cause: Exception) -> Exception:
    """An error of httpx, with the one of the system that it wraps."""
    error = httpx.ConnectError("x")
    error.__cause__ = cause
    return error


CALLS: dict[str, Callable[[Server], object]] = {
    "GET /version": Server.identify,
    "GET /v1/models": Server.identify,
    "GET /is_sleeping": Server.is_sleeping,
    "GET /collective_rpc": Server.require_reloading,
    "POST /sleep": lambda one: one.sleep(1),
    "POST /wake_up": lambda one: one.wake_up(retry=True),
    "POST /collective_rpc": Server.reload_weights,
    "POST /v1/completions": lambda one: one.complete("x", 4),
}


# Each with what the next step names.
@pytest.mark.parametrize(
    ("call", "answer", "name"),
    [
        ("GET /version", (404, {"detail": "Not Found"}), "address"),
        ("GET /version", (401, {"error": KEY}), "VLLM_API_KEY"),
        ("GET /v1/models", (401, {"error": KEY}), "VLLM_API_KEY"),
        ("GET /version", (503, b"loading"), "gateway"),
        ("GET /v1/models", (429, b"slow"), "7 s"),
        ("GET /v1/models", (502, b"slow"), "gateway"),
        ("GET /is_sleeping", (404, {}), "--enable-sleep-routes"),
        ("GET /is_sleeping", (401, {}), "VLLM_SLEEP_API_KEY"),
        ("GET /is_sleeping", (403, {}), "--allowed-origins"),
        ("GET /is_sleeping", (500, {"error": "\x1b[31mred\x1b[0m"}), "log"),
        ("POST /sleep", (500, {}), "--enable-sleep-mode"),
        ("POST /sleep", (409, {}), "program"),
        ("POST /wake_up", (500, {"error": "block 0x7 of 9 bytes"}), "both addresses"),
        ("POST /v1/completions", (404, {}), "--model"),
        ("POST /v1/completions", (503, {}), "/is_sleeping"),
        ("GET /collective_rpc", (404, {}), "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_each_refusal_has_its_status_and_next_step_and_never_the_key(
    answers: Answers, server: Server, call: str, answer: tuple[int, object], name: str
) -> None:
    answers[call] = answer
    with pytest.raises(CallError) as failed:
        CALLS[call](server)
    assert (failed.value.exit_code, failed.value.status) == (17, answer[0])
    assert failed.value.unanswered == (answer[0] == 502)
    assert name in failed.value.next_step
    assert_quotable(failed.value)


def assert_quotable(error: ServerError) -> None:
    assert KEY not in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 600


@pytest.mark.parametrize(
    ("call", "body", "key"),
    [
        ("GET /version", b"<html>Welcome", "the JSON"),
        ("GET /version", {"version": 3}, "version"),
        ("GET /version", b"[" * 100_000, "the JSON"),
        ("GET /v1/models", {"data": []}, "data"),
        ("GET /v1/models", {"data": "x"}, "data"),
        ("GET /v1/models", b"\xff\xfe", "the JSON"),
        ("GET /is_sleeping", {"is_sleeping": "no"}, "is_sleeping"),
    ],
)
def test_an_answer_that_is_not_that_of_vllm_names_the_key(
    answers: Answers, server: Server, call: str, body: object, key: str
) -> None:
    answers[call] = (200, body)
    with pytest.raises(ServerError) as failed:
        server.identify()
    assert failed.value.exit_code == 17
    assert call in failed.value.message
    assert f"({key}: " in failed.value.message
    assert_quotable(failed.value)


@pytest.mark.parametrize(
    ("error", "gone", "name"),
    [
        (httpx.InvalidURL("a..b"), False, "http://"),
        (unreached(ConnectionRefusedError(111, "x")), True, "log"),
        (unreached(socket.gaierror(-2, "x")), False, "name"),
        (unreached(OSError(113, "No route to host")), True, "network"),
        (unreached(ssl.SSLError("x")), False, "--ca-file"),
        (httpx.ConnectTimeout("x"), False, "firewall"),
        (httpx.ReadTimeout("x"), False, "--timeout"),
        (httpx.DecodingError("Connection refused"), False, "log"),
        # Words of a server are no reason: only types are.
        (httpx.ReadError("timed out, refused"), True, "log"),
        (httpx.RemoteProtocolError("x"), True, "log"),
        (ValueError("read length must be non-negative"), True, "log"),
    ],
)
def test_a_call_without_an_answer_is_told_by_the_type_of_its_cause(
    answers: Answers, server: Server, error: Exception, gone: bool, name: str
) -> None:
    answers["GET /version"] = error
    with pytest.raises(CallError) as failed:
        server.identify()
    assert (failed.value.exit_code, failed.value.status) == (17, None)
    assert (failed.value.gone, failed.value.unanswered) == (gone, True)
    assert name in failed.value.next_step
    assert_quotable(failed.value)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_and_its_token_not_shown(
    answers: Answers, server: Server, call: str, status: int
) -> None:
    answers[call] = (status, f"https://y:8443/login?token={KEY}&state=s3cret".encode())
    with pytest.raises(CallError) as failed:
        CALLS[call](server)
    assert call in failed.value.message
    assert "https://y:8443/login" in failed.value.message
    assert "s3cret" not in str(failed.value)


@pytest.mark.parametrize(
    "to", [f"https://y/\x1b[31m{KEY}", "http://[::1", "http://x:99999/version", ""]
)
def test_a_hostile_redirect_is_printable_and_has_no_key(
    answers: Answers, server: Server, to: str
) -> None:
    answers["GET /version"] = (302, to.encode())
    with pytest.raises(ServerError) as failed:
        server.identify()
    assert str(failed.value).isprintable()
    assert KEY not in str(failed.value)


def test_without_a_key_the_variable_is_named() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert "Authorization" not in request.headers
        return httpx.Response(401, content=b'{"error":"Unauthorized"}')

    with pytest.raises(CallError, match="VLLM_API_KEY"):
        Server("A", "http://x:8000", Access(), httpx.MockTransport(answer)).identify()


@pytest.mark.parametrize(
    "body",
    [
        *(b"nonsense", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{}]}'),
        *(b'{"choices": [null]}', b'{"choices": [{"text": 3}]}', b'{"choices": {"0": 1}}'),
        b'{"choices": [{"text": "a", "token_ids": ["b"]}]}',
        b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": -1}}',
    ],
)
def test_a_completion_that_is_none_is_an_error(
    answers: Answers, server: Server, body: bytes
) -> None:
    answers["POST /v1/completions"] = (200, body)
    with pytest.raises(ServerError, match="POST /v1/completions"):
        server.complete("x", 4)


def test_what_a_completion_leaves_out_is_not_known(answers: Answers, server: Server) -> None:
    answers["POST /v1/completions"] = (200, {"choices": [{"text": "a"}], "usage": None})
    found = server.complete("x", 4)
    assert (found.text, found.tokens, found.ids) == ("a", None, None)


def test_an_answer_without_end_is_cut_off() -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * (1 << 20)

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=endless()))
    with pytest.raises(CallError, match="16 MiB"):
        Server("A", "http://x:8000", Access(), transport).is_sleeping()


RANK = {
    "dp_rank": 1,
    "pp_rank": 0,
    "tp_rank": 3,
    "rank": 3,
    "asleep_bytes": {"weights": 60, "kv_cache": 30},
    "awake_bytes": {},
    "host_copy_bytes": 61,
}


def test_what_a_server_says_of_its_ranks(answers: Answers, server: Server) -> None:
    # GIVEN a server that says nothing, as a stock one
    assert server.ranks() is None
    # WHEN one says it, and something that is new
    said = {"is_sleeping": True, "ranks": [{**RANK, "new": 1}, {**RANK, "tp_rank": 4}]}
    answers["GET /is_sleeping"] = (200, said)
    # THEN it is taken, and whether it sleeps is read as before
    first, second = server.ranks() or ()
    assert (first.dp, first.pp, first.tp, second.tp) == (1, 0, 3, 4)
    assert first.asleep == {"weights": 60, "kv_cache": 30}
    assert (first.awake, first.host_copies) == ({}, 61)
    assert server.is_sleeping()


@pytest.mark.parametrize(
    "ranks",
    [None, [], {}, "two", [None], [{}], [[1]], [{**RANK, "tp_rank": "3"}]]
    + [[{**RANK, key: value}] for key in ("asleep_bytes", "awake_bytes") for value in (3, None)]
    + [[{**RANK, "asleep_bytes": {"weights": size}}] for size in (-1, 1.5, True, None, "1")]
    + [[{**RANK, "host_copy_bytes": None}], [RANK, {**RANK, "dp_rank": -1}]],
)
def test_ranks_in_another_form_are_none(answers: Answers, server: Server, ranks: object) -> None:
    answers["GET /is_sleeping"] = (200, {"is_sleeping": True, "ranks": ranks})
    assert server.ranks() is None
    assert server.is_sleeping()


@pytest.mark.parametrize("answer", [(503, b"no"), (200, b"[]"), (200, b"{"), (404, b"")])
def test_ranks_that_cannot_be_asked_for_end_no_run(
    answers: Answers, server: Server, answer: tuple[int, object]
) -> None:
    answers["GET /is_sleeping"] = answer
    assert server.ranks() is None


def test_counters_are_summed_over_engines(answers: Answers, server: Server) -> None:
    text = (
        "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.\n"
        "# TYPE vllm:spec_decode_num_draft_tokens_total counter\n"
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 10.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="1"} 2.5e+01\n'
        "# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{engine="0"} 3\n'
        "vllm:num_requests_waiting NaN\n"
    )
    answers["GET /metrics"] = (200, text.encode())
    assert server.counters() == {client.DRAFTED: 35, "vllm:num_requests_running": 3}


@pytest.mark.parametrize(
    "answer",
    [(404, b""), (200, b"<html>no</html>"), (200, b"a{b= 1"), (200, b'x{a="1"} one\n')]
    + [(200, f"x {value}\n".encode()) for value in ("+Inf", "-Inf", "1e999")],
)
def test_metrics_that_are_none_are_not_seen(
    answers: Answers, server: Server, answer: tuple[int, object]
) -> None:
    answers["GET /metrics"] = answer
    assert server.counters() == {}


@pytest.mark.parametrize(("running", "busy"), [("NaN", 2), ("+Inf", 2), ("-3", 2), ("1", 3)])
def test_requests_at_work_are_counted_as_far_as_they_are_known(
    answers: Answers, server: Server, running: str, busy: int
) -> None:
    text = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 2\n"
    answers["GET /metrics"] = (200, text.encode())
    assert server.at_work() == busy


@pytest.mark.parametrize(
    "answer",
    [
        *((404, b"nope"), (401, b""), (302, b""), (500, b"no"), (200, b""), (200, b"\xff<html>")),
        # As with --disable-log-stats: Python's own series alone.
        (200, b"# TYPE python_info gauge\npython_info 1\n"),
        (200, b"vllm:num_requests_running 0\n"),
        (200, b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n"),
        httpx.ReadTimeout("late"),
    ],
)
def test_load_that_cannot_be_seen_is_unknown_and_not_zero(
    answers: Answers, server: Server, answer: tuple[int, object] | Exception
) -> None:
    answers["GET /metrics"] = answer
    found = server.at_work()
    assert isinstance(found, Unseen)
    assert "GET /metrics" in found.why
    assert KEY not in found.why
    idle = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    answers["GET /metrics"] = (200, idle)
    assert server.at_work() == 0


def test_level_2_takes_a_route_of_development_mode(answers: Answers, server: Server) -> None:
    answers["GET /collective_rpc"] = (405, b"")
    server.require_reloading()
