"""The report as text for a terminal, as Markdown, and as a live table during the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from sm12x.core import text as texts
from sm12x.core.text import GIB
from sm12x.verify.report import (
    BREACH,
    BREACHED,
    EQUAL,
    PASSED,
    RUNNING,
    STOPPED,
    UNKNOWN,
    CheckReport,
    GpuUse,
    StressReport,
    TurnReport,
    VerifyReport,
)

# Turns that a terminal and a page have room for: the first few and the last.
_FIRST, _LAST = 3, 27
_LIVE = 8
_HEAD = ("cycle", "turn", "sleep s", "wake s", "swap s", "answer s", "awake GiB", "asleep GiB")
_TEXTS = "texts"
_STRESS = ("server", "when", "failed", "garbled", "tokens/s", "median s", "slowest s", "acceptance")
_TRENDS = ("server", "GPU", "asleep GiB", "MiB per cycle", "memory of")
_VERDICTS = {
    PASSED: "passed",
    BREACHED: "BREACHED",
    UNKNOWN: "cannot tell: the answers could not be compared",
    STOPPED: "STOPPED before its end",
    RUNNING: "still running, or killed: this is the state at the last write",
}


def text(report: VerifyReport) -> str:
    """The whole report for a terminal."""
    parts = ["\n".join(_head(report))]
    if report.turns:
        rows = _few(report.turns, len(_HEAD) + 1)
        parts.append(texts.columns(rows, head=(*_HEAD, _TEXTS)))
    if report.stress:
        parts.append(texts.columns(map(_stress, report.stress), head=_STRESS))
    if report.trends:
        parts.append(texts.columns(_trends(report), head=_TRENDS))
    # Before anything was measured each of them is "not seen".
    if report.turns or report.stress:
        parts.append("\n".join(_check(one) for one in report.checks))
    parts.append("\n".join([*_end(report), f"verdict: {_VERDICTS[report.verdict]}"]))
    return "\n\n".join(parts) + "\n"


def markdown(report: VerifyReport) -> str:
    """The whole report as a page."""
    head = "\n".join(f"- {_escaped(line)}" for line in _head(report))
    parts = [f"# sm12x verify: {_VERDICTS[report.verdict]}", head]
    if end := list(_end(report)):
        parts.append("\n".join(f"- {_escaped(line)}" for line in end))
    if report.checks:
        rows = [(one.verdict, one.server, one.check, _escaped(one.text)) for one in report.checks]
        parts += ["## Checks", texts.markdown(("", "server", "check", "found"), rows).strip()]
    if report.turns:
        turns = list(map(_turn, report.turns))
        parts += ["## Cycles", texts.markdown((*_HEAD, _TEXTS), turns).strip()]
    if report.stress:
        bursts = list(map(_stress, report.stress))
        parts += ["## Requests at a time", texts.markdown(_STRESS, bursts).strip()]
    if report.trends:
        parts += ["## Residue", texts.markdown(_TRENDS, _trends(report)).strip()]
    return "\n\n".join(parts) + "\n"


def live(report: VerifyReport, doing: str) -> RenderableType:
    """The live table: the last turns, breaches so far, and the current step."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in (*_HEAD, _TEXTS):
        table.add_column(name, no_wrap=True)
    for turn in report.turns[-_LIVE:]:
        table.add_row(*_turn(turn))
    bad = [Text(_check(one), style="red") for one in report.checks if one.verdict == BREACH]
    return Group(
        *([table] if report.turns else []), *bad, Spinner("dots", Text(doing, style="cyan"))
    )


def line(turn: TurnReport) -> str:
    """One turn in one line, for output that is not a terminal."""
    named = zip((*_HEAD, _TEXTS), _turn(turn), strict=True)
    return ", ".join(f"{name} {value}" for name, value in named if value not in ("", "-"))


def _head(report: VerifyReport) -> Iterator[str]:
    turns = sum(turn.answer_seconds is not None for turn in report.turns)
    done = turns // max(1, len(report.servers))
    yield (
        f"{report.begun}: {done} of {texts.counted(report.cycles, 'cycle')}, sleep level "
        f"{report.level}, {texts.duration(report.seconds)}"
    )
    for one in report.servers:
        was = "asleep" if one.asleep_at_start else "awake"
        yield f"{one.name}: {one.url}, vLLM {one.version}, model {one.model}, {was} at the start"
    if report.memory_unseen:
        yield f"GPU memory: not seen ({report.memory_unseen})"


def _end(report: VerifyReport) -> Iterator[str]:
    if report.stopped:
        yield f"stopped at: {report.stopped.during}"
        yield f"because: {report.stopped.why}"
        if report.stopped.next_step:
            yield f"next: {report.stopped.next_step}"
    for sentence in report.left:
        yield f"left: {sentence}"


def _few(turns: Sequence[TurnReport], width: int) -> list[tuple[str, ...]]:
    rows = list(map(_turn, turns))
    if len(rows) <= _FIRST + _LAST:
        return rows
    left_out = len(rows) - _FIRST - _LAST
    gap = ("...", f"{left_out} more", *[""] * (width - 2))
    return [*rows[:_FIRST], gap, *rows[-_LAST:]]


def _turn(turn: TurnReport) -> tuple[str, ...]:
    return (
        str(turn.cycle),
        turn.sleeps if turn.sleeps == turn.wakes else f"{turn.sleeps} > {turn.wakes}",
        _seconds(turn.sleep_seconds),
        _seconds(turn.wake_seconds),
        _seconds(turn.swap_seconds),
        _seconds(turn.answer_seconds),
        _most(turn.before),
        _most(turn.asleep),
        _texts(turn),
    )


def _texts(turn: TurnReport) -> str:
    if turn.answers is None:
        return "-"
    equal = sum(one.verdict == EQUAL for one in turn.answers)
    bad = sum(bool(one.garbage) for one in turn.answers)
    summary = f"{equal} of {len(turn.answers)} equal"
    return f"{summary}, {bad} garbage" if bad else summary


def _most(uses: Sequence[GpuUse] | None) -> str:
    """Return the GiB on the fullest GPU: of the server if known, else of all processes."""
    sizes = [
        size
        for use in uses or ()
        if (size := use.used if use.held is None else use.held) is not None
    ]
    return f"{max(sizes) / GIB:.2f}" if sizes else "-"


def _stress(one: StressReport) -> tuple[str, ...]:
    return (
        one.server,
        one.when,
        f"{one.failed} of {one.requests}",
        str(one.garbled),
        "-" if one.tokens_per_second is None else f"{one.tokens_per_second:.1f}",
        _seconds(one.median_seconds),
        _seconds(one.slowest_seconds),
        "-" if one.acceptance is None else f"{one.acceptance:.0%}",
    )


def _trends(report: VerifyReport) -> list[tuple[str, ...]]:
    return [
        (
            one.server,
            str(one.gpu),
            f"{one.last_bytes / GIB:.2f}",
            "-" if one.mib_per_cycle is None else f"{one.mib_per_cycle:+.2f}",
            "the server" if one.of_server else "all processes",
        )
        for one in report.trends
    ]


def _check(one: CheckReport) -> str:
    return f"{one.verdict:8} {one.server} {one.check}: {one.text}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _escaped(line: str) -> str:
    """A line in which nothing of a server's words is Markdown."""
    return "".join(f"\\{c}" if c in "\\`*_<[!#" else c for c in line)
