"""Reports of benchmarks in memory, and servers for their runs: no process, no network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sm12x.bench.report import (
    Answer,
    BenchReport,
    Cell,
    GpuFacts,
    HostFacts,
    Metric,
    ServerFacts,
    StackFacts,
    Step,
)

CARD = "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"


def metric(*values: float) -> Metric:
    return Metric(values=values)


def gpu(**changes: Any) -> GpuFacts:
    one = GpuFacts(
        index=0,
        name=CARD,
        hardware="rtx-pro-6000",
        memory_total=95 << 30,
        power_limit=600.0,
        power_limit_default=600.0,
        clock_max=3090.0,
        memory_clock_max=14001.0,
        pcie_generation_max=5,
        pcie_width=16,
        pcie_width_max=16,
    )
    return replace(one, **changes)


def host(*gpus: GpuFacts, unseen: str = "") -> HostFacts:
    return HostFacts(
        machine="x86_64",
        kernel="6.17.0",
        memory_total=256 << 30,
        driver="595.84",
        gpus=gpus,
        unseen=unseen,
    )


def cell(**changes: Any) -> Cell:
    """2048 tokens in 0.4 s, then 100 tokens/s."""
    one = Cell(
        depth=0,
        prompt=2048,
        output=128,
        concurrency=1,
        context_phase=False,
        requests=3,
        failed=0,
        latency_ms=0.0,
        prefill=metric(5000.0, 5120.0, 5200.0),
        prefill_each=metric(5000.0, 5120.0, 5200.0),
        prefill_ms=metric(400.0, 400.0, 410.0),
        decode=metric(99.0, 100.0, 101.0),
        decode_each=metric(99.0, 100.0, 101.0),
        peak=metric(110.0),
        peak_each=metric(110.0),
        first_response_ms=metric(400.0),
        first_token_ms=metric(400.0, 400.0, 410.0),
    )
    return replace(one, **changes)


def step(name: str = "benchy-d0-c1", **changes: Any) -> Step:
    kind = name.partition("-")[0]
    one = Step(name=name, kind=kind, state="done", seconds=1.0)  # type: ignore[arg-type]
    cells = (cell(),) if kind == "benchy" else ()
    texts = (Answer(prompt=1, sha256="a" * 64, garbage=""),) if kind == "canary" else ()
    return replace(one, **{"cells": cells, "answers": texts, **changes})


def report(**changes: Any) -> BenchReport:
    one = BenchReport(
        begun="2026-11-30T09:00:00+00:00",
        seconds=100.0,
        verdict="passed",
        sm12x="0.1.0",
        preset="depth",
        prefix_caching=True,
        random_weights=False,
        seed=7,
        tools={"llama-benchy": "0.4.0", "tool-eval-bench": "3.0.0"},
        corpus="a book",
        corpus_sha256="b" * 64,
        server=ServerFacts(
            version="0.33.0",
            model="org/model",
            root="org/model",
            revision="",
            max_model_len=131072,
            prefix_caching=True,
            kv_cache_dtype="fp8",
        ),
        stack=StackFacts(
            release="0.33.0", stack_id="", mode="", ledger_sha256="", image="", image_digest=""
        ),
        recipe=None,
        host=host(gpu()),
        steps=(step("canary-before"), step(), step("canary-after")),
        swap=None,
        findings=(),
    )
    return replace(one, **changes)


def llama_benchy(*cells: Cell) -> str:
    """The result file of llama-benchy that has these cells."""

    def values(one: Metric | None) -> dict[str, object] | None:
        return {"mean": 0.0, "std": 0.0, "values": [*one.values]} if one else None

    rows = [
        {
            "concurrency": cell.concurrency,
            "context_size": cell.depth,
            "prompt_size": cell.prompt,
            "response_size": cell.output,
            "is_context_prefill_phase": cell.context_phase,
            "pp_throughput": values(cell.prefill),
            "pp_req_throughput": values(cell.prefill_each),
            "est_ppt": values(cell.prefill_ms),
            "tg_throughput": values(cell.decode),
            "tg_req_throughput": values(cell.decode_each),
            "peak_throughput": values(cell.peak),
            "peak_req_throughput": values(cell.peak_each),
            "ttfr": values(cell.first_response_ms),
            "e2e_ttft": values(cell.first_token_ms),
        }
        for cell in cells
    ]
    return json.dumps({"version": "0.4.0", "latency_ms": 0.0, "benchmarks": rows})


def config(path: Path, **sizes: int) -> Path:
    """A config.json of a dense model with a billion parameters in its MLPs."""
    known = {"hidden_size": 4096, "num_hidden_layers": 8, "intermediate_size": 10240}
    path.write_text(json.dumps(known | sizes))
    return path
