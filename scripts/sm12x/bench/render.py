"""report.md and its picture: what ran, on what, and the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sm12x.bench import judge
from sm12x.bench.judge import Comparison
from sm12x.bench.report import BenchReport, Cell, Metric
from sm12x.core import picture, text
from sm12x.core.text import GIB
from sm12x.verify import render as verify

REPORT, PICTURE = "report.md", "chart.png"
_OPTION = "the chart of a benchmark"
_SERVE = (
    ("completed", "requests", ".0f"),
    ("output_throughput", "output, t/s", ",.1f"),
    ("median_ttft_ms", "TTFT, ms", ",.1f"),
    ("median_tpot_ms", "TPOT, ms", ",.2f"),
    ("median_itl_ms", "ITL, ms", ",.2f"),
    ("p99_itl_ms", "ITL p99, ms", ",.2f"),
    ("spec_decode_acceptance_length", "accepted length", ".2f"),
)


def cells(report: BenchReport) -> list[Cell]:
    """Return the cells of the grid, in order."""
    return [cell for step in report.steps for cell in step.cells]


def _number(value: float | None, form: str = ",.1f") -> str:
    return "-" if value is None else format(value, form)


def _median(metric: Metric | None, form: str = ",.1f") -> str:
    return _number(metric.median if metric else None, form)


def hardware(report: BenchReport) -> str:
    """Return "2 x NAME" of the GPUs, or why they are not known."""
    names = [gpu.name for gpu in report.host.gpus]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return ", ".join(kinds) or f"not seen ({report.host.unseen})"


def markdown(report: BenchReport, compared: Sequence[Comparison] = (), *, chart: bool) -> str:
    """Return the report as Markdown."""
    plain = text.no_markdown
    parts = [f"# {plain(report.server.model)}: {report.verdict}", plain(_head(report))]
    if report.findings:
        found = [(one.level, one.step, plain(one.text)) for one in report.findings]
        parts += ["## Findings", text.markdown(("", "step", "what"), found).strip()]
    if chart:
        parts.append(f"![Speed by depth and concurrency]({PICTURE})")
    for title, head, rows in _tables(report, compared):
        if rows:
            parts += [f"## {title}", text.markdown(head, rows).strip()]
    if report.swap:
        swap = f"\n{verify.markdown(report.swap)}".replace("\n#", "\n##").strip()
        parts += ["## Sleep and wake-up", swap]
    return "\n\n".join(parts) + "\n"


def _head(report: BenchReport) -> str:
    host, stack = report.host, report.stack
    limits = [gpu.power_limit for gpu in host.gpus if gpu.power_limit]
    power = f", {', '.join(dict.fromkeys(f'{one:.0f} W' for one in limits))}" if limits else ""
    built = f"stack {stack.stack_id} ({stack.mode})" if stack.stack_id else "not of this project"
    ledger = f", ledger {stack.ledger_sha256[:12]}" if stack.ledger_sha256 else ""
    memory = f", {host.memory_total / GIB:.0f} GiB" if host.memory_total else ""
    tools = ", ".join(f"{name} {version}" for name, version in report.tools.items())
    recipe = ""
    if report.recipe:
        changes = [f"{key}={value}" for key, value in report.recipe.overrides.items()]
        recipe = f"- Recipe: {report.recipe.key} {' '.join(changes)}".rstrip() + "\n"
    context = report.server.max_model_len
    return (
        f"- When: {report.begun}, {text.duration(report.seconds)}, preset {report.preset}, seed "
        f"{report.seed}\n"
        f"- Hardware: {hardware(report)}{power}; driver {host.driver or 'not seen'}, Linux "
        f"{host.kernel}, {host.machine}{memory}\n"
        f"- Server: vLLM {report.server.version or 'of unknown version'}, {built}{ledger}"
        f"{f', image {stack.image_digest}' if stack.image_digest else ''}; context "
        f"{context or 'not told'}; KV cache {report.server.kv_cache_dtype or 'not told'}\n"
        f"{recipe}"
        f"- Tools: {tools}; prompts of {report.corpus}; prefix caching "
        f"{'measured' if report.prefix_caching else 'avoided by unique prompts'}"
    )


def _tables(
    report: BenchReport, compared: Sequence[Comparison]
) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    many = [
        (
            one.name,
            _number(one.before),
            _number(one.after),
            f"{one.ratio - 1:+.1%}{'' if judge.changed(one) else ' (noise)'}",
        )
        for one in compared
    ]
    yield "Against the earlier run", ("figure", "before", "now", "change"), many
    grid = [
        (
            f"{cell.depth}{' (context)' if cell.context_phase else ''}",
            str(cell.concurrency),
            _median(cell.prefill, ",.0f"),
            _median(cell.decode),
            _median(cell.decode_each),
            _median(cell.first_token_ms, ",.0f"),
            f"{len(cell.decode.values) if cell.decode else 0}",
            str(cell.failed),
        )
        for cell in cells(report)
    ]
    head = ("depth", "requests at a time", "prefill, t/s", "decode, t/s", "decode of one, t/s")
    yield "Grid (medians)", (*head, "first token, ms", "runs", "failed"), grid
    for step in report.steps:
        if step.kind == "serve":
            shown = [row for row in _SERVE if row[0] in step.figures]
            values = tuple(_number(step.figures[name], form) for name, _, form in shown)
            titles = tuple(title for _, title, _ in shown)
            positions = [f"{value:.0%}" for value in step.acceptance_by_position]
            if positions:
                titles, values = (*titles, "accepted by position"), (*values, ", ".join(positions))
            yield "vllm bench serve", titles, [values] if values else []
    scores = [
        (step.name, f"{step.figures[name]:.1f}", rest)
        for step in report.steps
        for name, rest in (("final_score", "of 100"), ("accuracy", "percent"))
        if name in step.figures
    ]
    yield "Answers", ("step", "score", ""), scores
    other = judge.canary(report.steps)
    rows = [
        (
            step.name,
            step.state,
            text.duration(step.seconds),
            _number(step.acceptance, ".0%"),
            "; ".join(f"{one.watts[2]:.0f}" for one in step.gpus if one.watts) or "-",
            "; ".join(f"{one.celsius[2]:.0f}" for one in step.gpus if one.celsius) or "-",
            "; ".join(f"{one.clock[1]:.0f}" for one in step.gpus if one.clock) or "-",
            text.no_markdown(step.why) or (other if step.name == "canary-after" else ""),
        )
        for step in report.steps
    ]
    heads = (
        "step",
        "state",
        "time",
        "drafts accepted",
        "highest W",
        "highest °C",
        "median MHz",
        "",
    )
    yield "Steps", heads, rows


def draw(report: BenchReport, path: Path) -> None:
    """Draw decode and prefill by depth, or by concurrency where there is one depth, into a PNG.

    Raises ToolMissingError where matplotlib is not installed.
    """
    grid = [cell for cell in cells(report) if not cell.context_phase]
    drawing = picture.figure(_OPTION, figsize=(10, 4), layout="constrained")
    deep = len({cell.depth for cell in grid}) > 1
    for number, (title, name) in enumerate((("decode", "decode"), ("prefill", "prefill")), 1):
        axes = drawing.add_subplot(1, 2, number)
        groups = sorted({cell.concurrency if deep else cell.depth for cell in grid})
        for group in groups:
            mine = [cell for cell in grid if (cell.concurrency if deep else cell.depth) == group]
            points = [
                (cell.depth if deep else cell.concurrency, metric.median)
                for cell in mine
                if (metric := getattr(cell, name)) is not None and metric.median is not None
            ]
            if points:
                across, up = zip(*sorted(points), strict=True)
                label = f"{group} at a time" if deep else f"after {group} tokens"
                axes.plot(across, up, marker="o", markersize=4, linewidth=1.2, label=label)
        _finish(axes, title, "tokens before the prompt" if deep else "requests at a time")
    # matplotlib reads what stands between two dollars as a formula.
    heading = f"{report.server.model}, {hardware(report)}".replace("$", r"\$")
    drawing.suptitle(heading, fontsize=10)
    picture.write(drawing, path)


def _finish(axes: Any, title: str, across: str) -> None:
    axes.set_title(f"{title}, tokens/s", fontsize=9, loc="left")
    axes.set_xlabel(across)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False)


def brief(report: BenchReport) -> str:
    """Return the grid and the findings as lines for a terminal."""
    lines = [f"{report.server.model} on {hardware(report)}: {report.verdict}"]
    rows = [
        (
            f"{cell.depth}{'+' if cell.context_phase else ''}",
            str(cell.concurrency),
            _median(cell.prefill, ",.0f"),
            _median(cell.decode),
            _median(cell.first_token_ms, ",.0f"),
        )
        for cell in cells(report)
    ]
    if rows:
        head = ("depth", "at a time", "prefill t/s", "decode t/s", "first token ms")
        lines.append(text.columns(rows, head=head, indent=2))
    for step in report.steps:
        if step.figures:
            shown = ", ".join(f"{name} {value:,.1f}" for name, value in step.figures.items())
            lines += text.bullets([f"{step.name}: {shown}"], indent=2)
    lines += text.bullets([f"{one.level}: {one.step}: {one.text}" for one in report.findings])
    return "\n".join(lines) + "\n"
