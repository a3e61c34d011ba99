"""What a request says: its path, its model, its priority; and what is read of servers' answers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sm12x.pool import canaries, requests
from sm12x.pool.config import CanaryConfig
from sm12x.pool.engines import told
from sm12x.pool.gpus import MIB, GpuMemory, strangers
from sm12x.pool.metrics import Metrics, merged

FORM = "multipart/form-data; boundary=xYz"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"model": "a"}', "a"),
        (b'{"messages": [{"model": "no", "x": {"model": "no"}}], "model": "a/b:c"}', "a/b:c"),
        (b'{"prompt": "\\"model\\": \\"no\\"", "model":"a"}', "a"),
        (b'{"prompt": "model", "model": "a"', "a"),
        (b'{"mod\\u0065l": "caf\\u00e9"}', "caf\u00e9"),
        ('{"model": "caf\u00e9"}'.encode(), "caf\u00e9"),
        # Not all there yet.
        (b'{"model": "a', None),
        (b'{"model"', None),
        (b"", None),
        # No model at the top level.
        (b'{"a": {"model": "no"}}', None),
        (b'[{"model": "no"}]', None),
        (b'{"model": 3}', None),
        (b'{"model": null}', None),
        (b'{"model": {"model": "no"}}', None),
        (b'"model"', None),
        (b'{} {"model": "no"}', None),
        (b"\xff\xfe", None),
    ],
)
def test_the_model_of_a_json_body(body: bytes, name: str | None) -> None:
    named = requests.in_json(body)
    assert (named.name if named else None) == name


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=4), st.text(max_size=12), st.booleans())
def test_the_model_of_any_object_and_its_place(
    rest: dict[str, object], name: str, plain: bool
) -> None:
    rest.pop("model", None)
    whole = {**rest, "model": name}
    body = json.dumps(whole, ensure_ascii=not plain).encode("utf-8", "surrogatepass")
    named = requests.in_json(body)
    assert named is not None
    assert named.name == name
    again = json.loads(requests.renamed(body, named, "another", "application/json"))
    assert again == {**whole, "model": "another"}


@given(st.binary(max_size=200))
def test_no_bytes_are_too_strange(body: bytes) -> None:
    requests.in_json(body)
    requests.in_form(b"--xYz" + body, FORM)
    requests.response_id(body)


def test_the_model_of_a_form() -> None:
    file = (
        b'--xYz\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n'
        b'\0name="model"\r\n\r\nno\r\n'
    )
    model = b'--xYz\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    body = file + model + b"--xYz--\r\n"
    named = requests.in_body(body, FORM)
    assert named is not None
    assert named.name == "whisper"
    assert b"\r\n\r\nother\r\n--xYz--" in requests.renamed(body, named, "other", FORM)
    assert requests.in_form(file, FORM) is None
    assert requests.in_form(body[: -len("--xYz--\r\n") - 2], FORM) is None
    assert requests.in_form(body, "multipart/form-data") is None
    assert requests.in_body(b'{"model": "a"}', "application/octet-stream") is None


@pytest.mark.parametrize(
    ("path", "passed"),
    [
        ("/v1/chat/completions", True),
        ("/v1/messages", True),
        ("/tokenize", True),
        ("/tokenize/", True),
        ("/v2/rerank", True),
        ("/my/route", True),
        ("/sleep", False),
        ("/wake_up", False),
        ("/collective_rpc", False),
        ("/start_profile", False),
        ("/v1", False),
        ("/v1/../sleep", False),
        ("/v1/%2e%2e/sleep", False),
        ("/v1/%2E./sleep", False),
        ("/v1/..%2Fsleep", False),
        ("/v1/%252e%252e/sleep", False),
        ("//v1/models", False),
        ("/v1//sleep", False),
        ("/v1/..", False),
        ("/v1/\\..\\sleep", False),
        ("/v1/load_lora_adapter", False),
        ("/v1/unload_lora_adapter/", False),
        ("/my", False),
        ("/docs", False),
    ],
)
def test_which_paths_are_passed_on(path: str, passed: bool) -> None:
    assert requests.is_passed_on(path, ("/my/",)) == passed


def test_small_readings() -> None:
    assert [requests.priority(text) for text in ("7", "", "10", "-1", "x", "\u0667")] == [
        *(7, 0, 0, 0, 0, 0)
    ]
    assert requests.response_id(b'data: {"response": {"id": "resp_ab-1"}}') == "resp_ab-1"
    assert requests.of_response("/v1/responses/resp_ab/cancel") == "resp_ab"
    assert requests.of_response("/v1/responses") == ""
    openai = json.loads(requests.error_body("/v1/completions", 404, "no", "model_not_found"))
    assert openai["error"] == {
        "message": "no",
        "type": "NotFoundError",
        "param": "model",
        "code": "model_not_found",
    }
    anthropic = json.loads(requests.error_body("/v1/messages", 503, "no", "hold_timeout"))
    assert anthropic == {"type": "error", "error": {"type": "overloaded_error", "message": "no"}}


@pytest.mark.parametrize(
    "body",
    [None, [], {}, {"is_sleeping": 1}, {"status": "ok"}, {"is_sleeping": "true"}, "sleeping"],
)
def test_an_answer_that_tells_no_state_is_none(body: object) -> None:
    assert told(body) is None


def test_ranks_count_only_where_all_of_them_can_be_read() -> None:
    rank = {"asleep_bytes": {"weights": 5}, "awake_bytes": {}, "host_copy_bytes": 5}
    answer = told({"is_sleeping": True, "ranks": [rank, rank]})
    assert answer is not None
    assert [one.freed for one in answer.ranks] == [5, 5]
    for broken in ({}, None, {**rank, "asleep_bytes": {"weights": "5"}}):
        answer = told({"status": "sleeping", "ranks": [rank, broken]})
        assert answer is not None
        assert answer.ranks == ()


def test_strangers_are_named_and_own_processes_are_not() -> None:
    processes = {4_000_001: 600 * MIB, 4_000_002: 30 * MIB, 4_000_003: 900 * MIB}
    memory = GpuMemory(total=0, used=0, free=0, processes=processes)
    text = strangers(memory, frozenset({4_000_003}))
    assert text.index("4000001") < text.index("4000002")
    assert "600 MiB" in text
    assert "4000003" not in text


SERVER = """\
# HELP vllm:x_total A counter.
# TYPE vllm:x_total counter
vllm:x_total{model_name="m"} 3.0
# HELP vllm:x_created A counter.
# TYPE vllm:x_created gauge
vllm:x_created{model_name="m"} 1.0
# HELP vllm:h A histogram.
# TYPE vllm:h histogram
vllm:h_bucket{le="1.0"} 1.0
vllm:h_bucket{le="+Inf"} 1.0
vllm:h_sum 0.5
vllm:h_count 1.0
plain 7
"""


def test_metrics_of_two_servers_are_one_text() -> None:
    text = merged({"a": SERVER, 'b"\n': SERVER})
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert len(families["vllm:x"].samples) == len(families["vllm:x_created"].samples) == 2
    assert {sample.labels["pool_model"] for sample in families["vllm:h"].samples} == {"a", 'b"\n'}
    assert text.count("# TYPE vllm:h histogram") == 1
    assert 'plain{pool_model="a"} 7' in text
    metrics = Metrics()
    metrics.swaps.labels("a", "done").inc()
    whole = metrics.text({"a": SERVER}).decode()
    names = {one.name for one in text_string_to_metric_families(whole)}
    assert {"sm12x_pool_swaps", "vllm:x"} <= names


def test_a_canary_is_restored_for_the_same_server_alone() -> None:
    record = canaries.Record(kind="completion", texts=("a", "b"), acceptance=0.5)
    raw = json.loads(json.dumps(canaries.stored(record, "print")))
    assert canaries.restored(raw, "print") == record
    assert canaries.restored(raw, "another") is None
    assert canaries.restored({"fingerprint": "print"}, "print") is None
    assert canaries.restored(None, "print") is None
    assert CanaryConfig().tokens >= 2
