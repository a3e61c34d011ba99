"""What other collections take: Spark Arena's three files, and the speed sweep of local-ai-registry.

Spark Arena takes recipe.yaml, benchmark.csv as llama-benchy writes it, and metadata.json, whose
keys are those of sparkrun (spark-arena/sparkrun, benchmarking/base.py). The speed sweep has the
schema registry/schema/speed-sweep.schema.json of 0xSero/local-ai-registry.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from sm12x.bench import presets
from sm12x.bench.render import cells
from sm12x.bench.report import BenchReport, Cell, Metric
from sm12x.core import files

ARENA, SWEEP = "spark-arena", "speed-sweep.json"
_BASES = ("t_s", "t_s_req", "peak_ts", "peak_ts_req", "ttfr", "est_ppt", "e2e_ttft")
_COLUMNS = ("model", "test_name", *(f"{name}_{of}" for name in _BASES for of in ("mean", "std")))


def write(report: BenchReport, folder: Path) -> list[Path]:
    """Write the exports of a report below ``folder``, and return their paths; none without cells.

    recipe.yaml is left out where the run had no recipe.
    """
    if not cells(report):
        return []
    arena = folder / ARENA
    texts = {
        arena / "benchmark.csv": benchmark_csv(report),
        arena / "metadata.json": _json(metadata(report)),
        folder / SWEEP: _json(speed_sweep(report)),
    }
    if report.recipe:
        texts[arena / "recipe.yaml"] = report.recipe.text
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        files.write_text(path, text)
    return [*texts]


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2) + "\n"


def benchmark_csv(report: BenchReport) -> str:
    """Return the table of llama-benchy's `--format csv`, of all cells."""
    most = max(cell.concurrency for cell in cells(report))
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS)
    writer.writeheader()
    for cell in cells(report):
        suffix = f" (c{cell.concurrency})" if most > 1 else ""
        at = f" @ d{cell.depth}" if cell.depth else ""
        names = (
            ("ctx_pp", "ctx_tg") if cell.context_phase else (f"pp{cell.prompt}", f"tg{cell.output}")
        )
        for name, figures in zip(names, _figures(cell), strict=True):
            if figures:
                row = {"model": report.server.model, "test_name": f"{name}{at}{suffix}"}
                writer.writerow({**row, **_columns(figures)})
    return out.getvalue()


def _figures(cell: Cell) -> tuple[Mapping[str, Metric | None], Mapping[str, Metric | None]]:
    each = cell.prefill_each if cell.concurrency > 1 else cell.prefill
    prefill = {
        "t_s": cell.prefill,
        "t_s_req": each,
        "ttfr": cell.first_response_ms,
        "est_ppt": cell.prefill_ms,
        "e2e_ttft": cell.first_token_ms,
    }
    decode = {
        "t_s": cell.decode,
        "t_s_req": cell.decode_each,
        "peak_ts": cell.peak,
        "peak_ts_req": cell.peak_each,
    }
    return prefill if cell.prefill else {}, decode if cell.decode or cell.peak else {}


def _columns(figures: Mapping[str, Metric | None]) -> dict[str, float]:
    columns = {}
    for name, metric in figures.items():
        if metric and metric.values:
            columns[f"{name}_mean"] = statistics.fmean(metric.values)
            columns[f"{name}_std"] = statistics.pstdev(metric.values)
    return columns


def metadata(report: BenchReport) -> dict[str, object]:
    """Return Spark Arena's metadata, and what it has no key for below ``sm12x``."""
    begun = datetime.datetime.fromisoformat(report.begun)
    end = begun + datetime.timedelta(seconds=report.seconds)
    preset = presets.load().presets[report.preset]
    recipe, stack = report.recipe, report.stack
    return {
        "recipe": {
            "name": recipe.key if recipe else "",
            "qualified_name": recipe.key if recipe else "",
            "type": "sm12x",
            "model": report.server.model,
            "hf_model": report.server.model,
            "container": f"{stack.image}@{stack.image_digest}"
            if stack.image_digest
            else stack.image,
            "container_pinned": bool(stack.image_digest),
            "runtime": "vLLM",
            "runtime_full": f"vllm {report.server.version}",
            "hash": recipe.runs_sha256 if recipe else "",
        },
        "timing": {"start": report.begun, "end": end.isoformat(), "duration": report.seconds},
        "cluster": {"gpus": [gpu.name for gpu in report.host.gpus], "driver": report.host.driver},
        "benchmark": {
            "framework": "llama-benchy",
            "profile": report.preset,
            "args": {
                "pp": [preset.prompt],
                "tg": [preset.output],
                "depth": [*preset.depths],
                "concurrency": [*preset.concurrency],
                "runs": preset.runs,
                "enable_prefix_caching": preset.prefix_caching,
                "exact_tg": True,
            },
        },
        "model": {"revision": report.server.revision, "kv_dtype": report.server.kv_cache_dtype},
        "runtime_info": {"vllm": report.server.version},
        "sm12x": {
            "version": report.sm12x,
            "stack_id": stack.stack_id,
            "ledger_sha256": stack.ledger_sha256,
            "power_limits": [gpu.power_limit for gpu in report.host.gpus],
            "verdict": report.verdict,
        },
    }


def speed_sweep(report: BenchReport) -> dict[str, object]:
    """Return the sweep as a candidate: whoever accepts it fills in ``accepted_at``."""
    grid = [cell for cell in cells(report) if not cell.context_phase]
    memory = [gpu.memory[2] for step in report.steps for gpu in step.gpus if gpu.memory]
    peak = max(memory, default=None)
    name = report.recipe.key if report.recipe else report.server.model.replace("/", "-").lower()
    cache = "context-in-prefix-cache" if report.prefix_caching else "cold-unique-prompts"
    tools = ", ".join(f"{tool} {version}" for tool, version in report.tools.items())
    power = ", ".join(f"{gpu.power_limit or 0:.0f} W" for gpu in report.host.gpus) or "not seen"
    return {
        "schema_version": "local-ai-registry/v1",
        "id": f"{name}-{report.begun[:10]}-sweep",
        "recipe_id": name,
        "measured_at": report.begun[:10],
        "accepted_at": None,
        "source": {
            "kind": "submitter",
            "methodology": f"sm12x bench, preset {report.preset}: {tools}; exact output lengths; "
            f"medians; GPUs at {power}, driver {report.host.driver or 'not seen'}; stack "
            f"{report.stack.stack_id or 'none'}",
        },
        "metrics": {
            "inference_engine_version": f"vLLM {report.server.version}",
            "concurrency": max(cell.concurrency for cell in grid) if grid else None,
            "point_count": len(grid),
            "max_context_tokens": report.server.max_model_len,
            "peak_generation_tps": _most(grid, "decode"),
            "peak_prompt_tps": _most(grid, "prefill"),
        },
        "rows": [_row(cell, cache, peak) for cell in grid or cells(report)],
    }


def _most(grid: Sequence[Cell], name: str) -> float | None:
    medians = [metric.median for cell in grid if (metric := getattr(cell, name))]
    return max((value for value in medians if value is not None), default=None)


def _row(cell: Cell, cache: str, peak: float | None) -> dict[str, object]:
    def median(metric: Metric | None) -> float | None:
        return metric.median if metric else None

    return {
        "concurrency": cell.concurrency,
        "context_tokens": cell.depth + cell.prompt,
        "output_tokens": cell.output,
        "prefill_tok_s": median(cell.prefill),
        "decode_tok_s": median(cell.decode),
        "decode_tok_s_per_stream": median(cell.decode_each),
        "ttft_ms_p50": median(cell.first_token_ms),
        "peak_vram_gb": None if peak is None else peak / 1e9,
        "samples": len(cell.decode.values) if cell.decode else None,
        "status": "measured" if not cell.failed else "partial",
        "cache_state": cache,
    }
