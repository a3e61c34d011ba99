"""What figures say: impossible ones, warnings, the verdict, and comparisons of two runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm12x.bench import presets
from sm12x.bench.presets import Preset
from sm12x.bench.report import BenchReport, BenchVerdict, Cell, Finding, HostFacts, Metric, Step
from sm12x.core.errors import UsageError
from sm12x.core.text import duration
from sm12x.verify.report import VerifyReport

# A prefill that is so many times what tokens and time to the first token say: llama-benchy takes
# the answer's beginning, without tokens, for the end of a prefill.
_TIMES = 2.0
# Share of prompt tokens that may be in the prefix cache of a run without it.
_WARM = 0.05
# Bytes of a weight in the narrowest format.
_NARROWEST = 0.5
# A second run's figure is said to have changed from so much on.
_NOISE = 0.03


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A figure of two runs: its name, the earlier value and the later one."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


def active_parameters(config: Path | None) -> float | None:
    """Return a lower bound of the parameters that a token passes through, by a config.json.

    Of each layer it counts the matrices of the MLP, with those experts that are chosen, and of
    attention where heads and their width are named. None where the file names no such sizes.
    """
    if config is None:
        return None
    try:
        raw: Any = json.loads(config.read_text(encoding="utf-8"))
        raw = raw.get("text_config", raw)
        hidden, layers = int(raw["hidden_size"]), int(raw["num_hidden_layers"])
        experts = raw.get("num_experts_per_tok") or raw.get("moe_topk")
        inner = raw.get("moe_intermediate_size") if experts else None
        wide = int(inner or raw["intermediate_size"]) * int(experts if inner else 1)
        each = 3 * hidden * wide
        if {"num_attention_heads", "num_key_value_heads", "head_dim"} <= raw.keys():
            heads = 2 * int(raw["num_attention_heads"]) + 2 * int(raw["num_key_value_heads"])
            each += hidden * int(raw["head_dim"]) * heads
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return float(each * layers)


def findings(
    steps: Sequence[Step],
    host: HostFacts,
    preset: Preset,
    *,
    active: float | None,
) -> tuple[Finding, ...]:
    """Return what is impossible or doubtful in the figures of ``steps``."""
    found = [
        finding
        for step in steps
        for cell in step.cells
        for finding in _of_cell(step, cell, host, active)
    ]
    for step in steps:
        if step.looked_up and step.cached and not preset.prefix_caching and step.kind == "benchy":
            share = step.cached / step.looked_up
            if share > _WARM:
                text = f"{share:.0%} of the prompts were in the prefix cache: prefill is too fast"
                found.append(Finding(level="warning", step=step.name, text=text))
        failed = sum(cell.failed for cell in step.cells)
        if failed:
            asked = sum(cell.requests for cell in step.cells)
            text = f"{failed} of {asked} requests had no answer"
            found.append(Finding(level="warning", step=step.name, text=text))
        for answer in step.answers:
            if answer.garbage:
                text = f"prompt {answer.prompt}: {answer.garbage}"
                found.append(Finding(level="warning", step=step.name, text=text))
    return tuple(found)


def _of_cell(step: Step, cell: Cell, host: HostFacts, active: float | None) -> Iterator[Finding]:
    def impossible(text: str) -> Finding:
        return Finding(level="impossible", step=step.name, text=text)

    prefill, first = _median(cell.prefill), _median(cell.first_token_ms)
    phase = " of the context" if cell.context_phase else ""
    if prefill and first:
        tokens = cell.depth if cell.context_phase else cell.prompt
        # Before a prompt without a phase of its own its context is read as well.
        whole = tokens + (cell.depth if not cell.context_phase else 0)
        seconds = max(first - cell.latency_ms, 0.0) / 1000
        if not seconds:
            text = f"prefill{phase} of {prefill:,.0f} t/s: the first token came within the latency"
            yield impossible(f"{text} of {cell.latency_ms:.1f} ms, so it was not measured")
        elif prefill > _TIMES * (implied := whole * cell.concurrency / seconds):
            yield impossible(
                f"prefill{phase} of {prefill:,.0f} t/s, and the first token after {first:,.0f} ms "
                f"allows {implied:,.0f} t/s at most"
            )
    cards = [presets.load().card(gpu.name) for gpu in host.gpus]
    known = [card for card in cards if card is not None]
    if active is None or not known or len(known) < len(cards):
        return
    most = sum(card.teraops for card in known) * 1e12 / (2 * active)
    if prefill and prefill > most:
        yield impossible(
            f"prefill{phase} of {prefill:,.0f} t/s is above the hardware's peak: a token takes "
            f"{2 * active / 1e9:,.1f}e9 operations or more, so {most:,.0f} t/s ({known[0].source})"
        )
    decode = _median(cell.decode_each)
    # A draft's tokens are read with one pass over the weights.
    drafts = 1.0
    if step.drafted is None:
        drafts = float("inf")
    elif step.drafted and step.accepted is not None:
        produced = cell.output * cell.requests
        drafts = produced / max(produced - step.accepted, 1)
    most = sum(card.gigabytes for card in known) * 1e9 / (_NARROWEST * active) * drafts
    if decode and decode > most:
        yield impossible(
            f"decode of {decode:,.0f} t/s for one request is above what memory allows: {most:,.0f} "
            f"t/s, where each pass reads {active * _NARROWEST / 1e9:,.1f} GB or more "
            f"({known[0].source})"
        )


def _median(metric: Metric | None) -> float | None:
    return metric.median if metric else None


def canary(steps: Sequence[Step]) -> str:
    """Return how the canary's texts after the steps differ from those before; "" where not."""
    before, after = (
        next((step for step in steps if step.name == name), None)
        for name in ("canary-before", "canary-after")
    )
    if before is None or after is None or not before.answers or not after.answers:
        return ""
    texts = {answer.prompt: answer.sha256 for answer in before.answers}
    other = [one.prompt for one in after.answers if texts.get(one.prompt) not in (one.sha256, None)]
    return f"prompts with another greedy text: {', '.join(map(str, other))}" if other else ""


def verdict(
    steps: Sequence[Step], found: Sequence[Finding], swap: VerifyReport | None
) -> BenchVerdict:
    """Return ``failed``, ``incomplete`` where a step could not run, or ``passed``."""
    garbage = any(answer.garbage for step in steps for answer in step.answers)
    bad = any(finding.level == "impossible" for finding in found) or garbage
    if bad or any(step.state == "failed" for step in steps) or (swap and swap.verdict != "passed"):
        return "failed"
    measured = any(step.kind == "benchy" and step.state == "done" for step in steps)
    return "passed" if measured and all(_settled(step) for step in steps) else "incomplete"


def _settled(step: Step) -> bool:
    """Whether a step ran, or is one that needs more context than the server has."""
    return step.state == "done" or step.why.startswith("needs ")


def line(step: Step) -> str:
    """Return a step in one line, for the time of the run."""
    words = [f"{step.name}: {step.state}" if step.state != "done" else step.name]
    for cell in step.cells:
        if not cell.context_phase:
            prefill, decode = _median(cell.prefill), _median(cell.decode)
            words += [f"prefill {prefill:,.0f} t/s"] if prefill else []
            words += [f"decode {decode:,.1f} t/s"] if decode else []
    words += [
        f"{name} {step.figures[name]:,.1f}"
        for name in ("median_tpot_ms", "median_itl_ms", "final_score", "accuracy")
        if name in step.figures
    ]
    if step.why:
        words.append(step.why)
    return ", ".join([*words, duration(step.seconds)])


def refusals(now: BenchReport, before: BenchReport) -> list[str]:
    """List why two runs cannot be compared; none where they can."""

    def hardware(report: BenchReport) -> str:
        names = [gpu.name for gpu in report.host.gpus]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))

    def power(report: BenchReport) -> str:
        limits = sorted(gpu.power_limit or 0.0 for gpu in report.host.gpus)
        return " and ".join(dict.fromkeys(f"{limit:.0f} W" for limit in limits))

    def majors(report: BenchReport) -> str:
        return ", ".join(f"{name} {text.partition('.')[0]}" for name, text in report.tools.items())

    rows = [
        ("hardware", hardware),
        ("power limit", power),
        ("model", lambda report: report.server.model),
        ("preset", lambda report: report.preset),
        ("major version of tools", majors),
        ("prefix caching of the prompts", lambda report: str(report.prefix_caching)),
        ("prefix cache of the server", lambda report: str(report.server.prefix_caching)),
    ]
    reasons = [
        f"{name}: {one or 'not seen'} against {other or 'not seen'}"
        for name, value in rows
        if (one := value(now)) != (other := value(before))
    ]
    unseen = [report.host.unseen for report in (before, now) if report.host.unseen]
    return reasons + ([f"hardware: not seen ({unseen[0]})"] if unseen else [])


def compare(now: BenchReport, before: BenchReport) -> list[Comparison]:
    """Return each figure that both runs have.

    Raises:
        UsageError: they are of other hardware, power, tools, or state of the prefix cache.
    """
    if why := refusals(now, before):
        raise UsageError(
            f"the two benchmarks cannot be compared: {'; '.join(why)}",
            next_step="repeat one of them as the other was made",
        )
    old, new = dict(_values(before)), dict(_values(now))
    return [
        Comparison(name=name, before=old[name], after=value)
        for name, value in new.items()
        if old.get(name)
    ]


def _values(report: BenchReport) -> Iterator[tuple[str, float]]:
    for step in report.steps:
        for cell in step.cells:
            where = f"d{cell.depth} c{cell.concurrency}{' context' * cell.context_phase}"
            for name, metric in (("prefill", cell.prefill), ("decode", cell.decode)):
                if value := _median(metric):
                    yield f"{name} {where}, t/s", value
        for name in ("median_ttft_ms", "median_tpot_ms", "median_itl_ms", "output_throughput"):
            if value := step.figures.get(name):
                yield f"{step.name} {name}", value


def changed(one: Comparison) -> bool:
    """Tell whether a figure differs by more than runs of one server do."""
    return abs(one.ratio - 1) > _NOISE
