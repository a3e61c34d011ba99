"""Benchmarks: what is impossible, what is hidden, what cannot be compared, what others read."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.unit.benching import CARD, cell, config, gpu, host, metric, report, step

from sm12x import layout
from sm12x.bench import exports, judge, presets, redact, render, run, tools
from sm12x.bench.report import Answer, BenchReport, Finding
from sm12x.core import declared
from sm12x.core.errors import BadFileError, ToolFailedError, UsageError

PRESETS = presets.load().presets
SCHEMA = json.loads((layout.schemas() / "bench-1.json").read_text())


def found(one: Any, *, active: float | None = None, preset: str = "depth") -> list[Finding]:
    return [
        *judge.findings((one,), host(gpu()), PRESETS[preset], active=active),
    ]


def test_a_sound_figure_has_no_finding() -> None:
    assert not found(step(), active=1e9)


def test_a_prefill_that_its_own_first_token_denies_is_impossible() -> None:
    """As one that a board has carried: 770,513 t/s, and 6,155 ms to the first token."""
    one = cell(depth=16384, prefill=metric(770513.0), first_token_ms=metric(6155.0))
    (finding,) = found(step(cells=(one,)))
    assert finding.level == "impossible"
    assert "770,513" in finding.text
    within = cell(first_token_ms=metric(3.0), latency_ms=6.0)
    assert [one.level for one in found(step(cells=(within,)))] == ["impossible"]


def test_a_prefill_above_the_peak_of_the_card_is_impossible() -> None:
    """10^9 parameters take 2 * 10^9 operations, of which the card does 2 * 10^15 per second."""
    fast = cell(prefill=metric(1.1e6), first_token_ms=metric(1.9))
    assert not found(step(cells=(replace(fast, prefill=metric(0.9e6)),)), active=1e9)
    (finding,) = found(step(cells=(fast,)), active=1e9)
    assert finding.level == "impossible"
    # Two cards do twice as much, and of a card that is not known nothing is said.
    two = judge.findings(
        (step(cells=(fast,)),), host(gpu(), gpu(index=1)), PRESETS["depth"], active=1e9
    )
    other = judge.findings(
        (step(cells=(fast,)),), host(gpu(name="RTX 3090")), PRESETS["depth"], active=1e9
    )
    assert not two
    assert not other


def test_a_decode_that_reads_weights_faster_than_memory_is_impossible() -> None:
    fast = cell(decode_each=metric(4000.0))
    # 0.5 GB per token from 1,792 GB/s are 3,584 tokens/s.
    (finding,) = found(step(cells=(fast,), drafted=0, accepted=0), active=1e9)
    assert finding.level == "impossible"
    # Three of four tokens are a draft's.
    assert not found(step(cells=(fast,), drafted=384, accepted=288), active=1e9)
    assert not found(step(cells=(fast,)), active=1e9)


def test_active_parameters_are_a_lower_bound(tmp_path: Path) -> None:
    dense = config(tmp_path / "dense.json")
    assert judge.active_parameters(dense) == 8 * 3 * 4096 * 10240
    sizes = {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    sparse = config(tmp_path / "sparse.json", **sizes, **heads)
    each = 3 * 4096 * 768 * 8 + 4096 * 128 * (2 * 32 + 2 * 4)
    assert judge.active_parameters(sparse) == 8 * each
    (tmp_path / "odd.json").write_text('{"hidden_size": "many"}')
    assert judge.active_parameters(tmp_path / "odd.json") is None
    assert judge.active_parameters(None) is None


def test_a_warm_cache_is_a_warning_where_it_is_avoided() -> None:
    warm = step(cached=400, looked_up=1000)
    assert [one.level for one in found(warm, preset="rtx")] == ["warning"]
    assert not found(warm, preset="depth")


@pytest.mark.parametrize(
    ("steps", "findings", "verdict"),
    [
        ((step(),), (), "passed"),
        ((step(), step("serve", state="skipped", why="needs 9 tokens of context")), (), "passed"),
        ((step(), step("serve", state="skipped", why="--skip serve")), (), "incomplete"),
        ((step("canary-before"),), (), "incomplete"),
        ((step(), step("gsm8k", state="failed", why="no network")), (), "failed"),
        ((step(),), (Finding(level="impossible", step="x", text="y"),), "failed"),
        ((step(),), (Finding(level="warning", step="x", text="y"),), "passed"),
        (
            (step(), step("canary-after", answers=(Answer(prompt=1, sha256="", garbage="!!!!!"),))),
            (),
            "failed",
        ),
    ],
)
def test_the_verdict(steps: Any, findings: Any, verdict: str) -> None:
    assert judge.verdict(steps, findings, None) == verdict


def test_a_canary_with_another_text_is_told() -> None:
    other = step("canary-after", answers=(Answer(prompt=1, sha256="c" * 64, garbage=""),))
    assert judge.canary((step("canary-before"), step("canary-after"))) == ""
    assert "1" in judge.canary((step("canary-before"), other))


def _server(**changes: Any) -> Callable[[BenchReport], BenchReport]:
    return lambda one: replace(one, server=replace(one.server, **changes))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda one: replace(one, host=host(gpu(), gpu(index=1))), "hardware"),
        (lambda one: replace(one, host=host(gpu(power_limit=300.0))), "power limit"),
        (lambda one: replace(one, host=host(unseen="no GPU is here")), "hardware"),
        (lambda one: replace(one, tools={**one.tools, "tool-eval-bench": "2.9.1"}), "major"),
        (lambda one: replace(one, prefix_caching=False), "prefix caching"),
        (_server(prefix_caching=False), "prefix cache of the server"),
        (_server(model="org/other"), "model"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    change: Callable[[BenchReport], BenchReport], what: str
) -> None:
    assert any(reason.startswith(what) for reason in judge.refusals(report(), change(report())))
    with pytest.raises(UsageError, match="cannot be compared"):
        judge.compare(report(), change(report()))


def test_what_can_be_compared_is_figure_by_figure() -> None:
    slower = step(cells=(cell(decode=metric(80.0)),))
    now = report(steps=(slower,), tools={"llama-benchy": "0.5.1", "tool-eval-bench": "3.1.0"})
    rows = {one.name: one for one in judge.compare(now, report())}
    assert rows["decode d0 c1, t/s"].ratio == pytest.approx(0.8)
    assert judge.changed(rows["decode d0 c1, t/s"])
    assert not judge.changed(rows["prefill d0 c1, t/s"])
    assert "-20.0%" in render.markdown(now, [*rows.values()], chart=False)


SECRETS = {"sk-abc-1234567890": "VLLM_API_KEY"}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("key sk-abc-1234567890.", "key <VLLM_API_KEY>."),
        ("at http://rig7.lan:8000/v1", "at http://<host>:8000/v1"),
        ('"hostname": "RIG7"', '"hostname": "<host>"'),
        ("/data/models on rig77", "/data/models on rig77"),
        ("/home/joe/models/x", "<home>/models/x"),
        ("/Users/joe/x and /root/.cache/y", "<home>/x and <home>/.cache/y"),
        ("joe ran it, not joey", "<user> ran it, not joey"),
        ("http://192.168.7.20:8000, http://127.0.0.1:8000", "http://<address>:8000, http://127.0.0.1:8000"),
        ("fe80::1ff:fe23:4567:890a at 09:20:29", "<address> at 09:20:29"),
        ("driver 595.84.1, vllm 0.33.0", "driver 595.84.1, vllm 0.33.0"),
        ("hf_abcdefghijklmnopqrstuv", "<secret>"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer <secret>"),
    ],
)  # fmt: skip
def test_what_must_not_be_shared_is_replaced(text: str, clean: str) -> None:
    names = {"rig7": "host", "rig7.lan": "host", "joe": "user", "localhost": "host"}
    hides = redact.Redaction(SECRETS, names, "/srv/joe")
    assert hides.text(text) == clean
    assert hides.text(clean) == clean


def test_a_report_of_a_host_with_a_common_name_can_still_be_read(tmp_path: Path) -> None:
    hides = redact.Redaction({}, {"depth": "host", "benchy": "host", "passed": "user"}, "/")
    clean = hides.value(report())
    declared.write_json(tmp_path / "bench.json", clean)
    assert run.read(tmp_path) == report()


def test_a_report_is_as_its_schema_says_and_is_read_again(tmp_path: Path) -> None:
    text = declared.to_json(report(), BenchReport)
    jsonschema.validate(json.loads(text), SCHEMA)
    (tmp_path / "bench.json").write_text(text)
    assert run.read(tmp_path) == report()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 2}', "{" * 100_000, '{"schema": 1, "steps": [{"name": 3}]}']
)
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(BadFileError):
        run.read(tmp_path)


def test_the_steps_of_a_preset() -> None:
    names = [one.name for one in run.plan(PRESETS["depth"], 3)]
    assert names[0] == "canary-before"
    assert names[-2:] == ["swap", "canary-after"]
    assert len([name for name in names if name.startswith("benchy")]) == 28
    assert "tools" not in [one.name for one in run.plan(PRESETS["smoke"], 0)]


BENCHY = {
    "version": "0.4.0",
    "latency_ms": 0.0,
    "benchmarks": [
        {
            "concurrency": 2,
            "context_size": 4096,
            "prompt_size": 2048,
            "response_size": 128,
            "is_context_prefill_phase": False,
            "pp_throughput": {"mean": 1, "std": 0, "values": [5000.0, 5100.0]},
            "tg_throughput": {"mean": 1, "std": 0, "values": [90.0, 92.0]},
            "e2e_ttft": {"mean": 1, "std": 0, "values": [400.0, 410.0, 420.0]},
            "ttfr": None,
        }
    ],
}


def test_the_result_of_llama_benchy_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(BENCHY))
    (one,) = tools.cells(path, PRESETS["depth"])
    assert one.prefill == metric(5000.0, 5100.0)
    assert (one.depth, one.concurrency, one.requests, one.failed) == (4096, 2, 6, 3)


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        '{"benchmarks": [{}]}',
        '{"benchmarks": [{"concurrency": "two"}]}',
        '{"benchmarks": 3}',
        json.dumps({"benchmarks": [BENCHY["benchmarks"][0] | {"tg_throughput": None}]}),  # type: ignore[index]
    ],
)
def test_a_result_without_figures_is_a_failure_of_its_tool(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ToolFailedError):
        tools.cells(path, PRESETS["depth"])


def test_figures_of_the_other_tools(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    rates = "spec_decode_per_position_acceptance_rates"
    path.write_text(
        json.dumps({"completed": 16, "median_itl_ms": 9.5, rates: [0.81, float("nan")]})
    )
    got = tools.serve_figures(path)
    assert got == {
        "figures": {"completed": 16.0, "median_itl_ms": 9.5},
        "acceptance_by_position": (0.81,),
    }
    path.write_text(json.dumps({"completed": 0}))
    with pytest.raises(ToolFailedError):
        tools.serve_figures(path)
    path.write_text(json.dumps({"final_score": 87, "rating": "good"}))
    assert tools.tool_figures(path) == {"final_score": 87.0}
    path.write_text(json.dumps({"error": "no model"}))
    with pytest.raises(ToolFailedError, match="no model"):
        tools.tool_figures(path)


def test_the_key_is_in_no_command_line(tmp_path: Path) -> None:
    installed = tools.Tools(python=tmp_path / "python", home=tmp_path, versions={})
    target = tools.Target(
        address="http://127.0.0.1:1",
        model="m",
        shown="org/m",
        tokenizer="org/m",
        key="sk-secret",
        timeout=3.0,
    )
    one = PRESETS["depth"]
    jobs = [
        tools.benchy(installed, target, one, "s", tmp_path, depth=0, concurrency=1, seed=1),
        tools.tool_calls(installed, target, tmp_path, seed=1),
        tools.tool_calls(installed, target, tmp_path, seed=1, gsm8k=5),
    ]
    for job in jobs:
        assert not any("sk-secret" in word for word in job.argv)
        assert "sk-secret" in job.env.values()


def test_spark_arenas_table_has_a_row_for_each_kind_of_figure() -> None:
    context = cell(depth=4096, context_phase=True, concurrency=2)
    one = report(steps=(step(cells=(cell(), context, cell(depth=4096, concurrency=2))),))
    rows = [*csv.DictReader(io.StringIO(exports.benchmark_csv(one)))]
    assert [row["test_name"] for row in rows] == [
        "pp2048 (c1)",
        "tg128 (c1)",
        "ctx_pp @ d4096 (c2)",
        "ctx_tg @ d4096 (c2)",
        "pp2048 @ d4096 (c2)",
        "tg128 @ d4096 (c2)",
    ]
    assert float(rows[1]["t_s_mean"]) == 100.0
    assert rows[1]["ttfr_mean"] == ""
    meta = exports.metadata(one)
    assert {"recipe", "timing", "cluster", "benchmark", "model", "runtime_info"} <= meta.keys()
    assert json.loads(json.dumps(meta)) == meta


# What the schema of 0xSero/local-ai-registry asks of a speed sweep and of its rows.
SWEEP = {
    "type": "object",
    "required": [
        *("schema_version", "id", "recipe_id", "measured_at", "accepted_at", "source", "rows"),
    ],
    "properties": {
        "schema_version": {"const": "local-ai-registry/v1"},
        "accepted_at": {"type": ["string", "null"]},
        "source": {"type": ["object", "null"]},
        "metrics": {"type": "object"},
        "rows": {
            "minItems": 1,
            "items": {
                "required": [
                    *("concurrency", "context_tokens", "output_tokens", "prefill_tok_s"),
                    *("decode_tok_s", "ttft_ms_p50", "peak_vram_gb", "samples", "status"),
                ],
                "properties": {
                    "concurrency": {"type": ["integer", "null"], "minimum": 1},
                    "samples": {"type": ["integer", "null"], "minimum": 1},
                    "decode_tok_s": {"type": ["number", "null"], "minimum": 0},
                },
            },
        },
        "id": {"type": "string"},
        "recipe_id": {"type": "string"},
        "measured_at": {"type": ["string", "null"]},
    },
    "additionalProperties": False,
}


def test_the_speed_sweep_is_what_the_registry_takes() -> None:
    sweep = exports.speed_sweep(report())
    jsonschema.validate(json.loads(json.dumps(sweep)), SWEEP)
    assert sweep["accepted_at"] is None


def test_the_report_has_what_a_reader_looks_for() -> None:
    one = report(findings=(Finding(level="warning", step="serve", text="a | b"),))
    page = render.markdown(one, chart=True)
    for words in (CARD, "600 W", "595.84", "llama-benchy 0.4.0", "5,120", "100.0", "a \\| b"):
        assert words in page
    assert render.PICTURE not in render.markdown(one, chart=False)
    assert "5,120" in render.brief(one)


def test_presets_name_cards_and_tools_that_there_are() -> None:
    lock = (presets.folder() / "requirements.lock").read_text()
    for name in presets.load().tools:
        assert f"\n{name}==" in lock
    assert presets.load().card(CARD) is not None
    hashes = [line for line in lock.splitlines() if "==" in line and not line.startswith("#")]
    assert all(line.rstrip().endswith("\\") for line in hashes)


def test_every_field_of_a_report_is_declared() -> None:
    names = {field.name for field in dataclasses.fields(BenchReport)}
    assert names == SCHEMA["properties"].keys()
