"""The report as text for a terminal, as Markdown, and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sm12x.core import picture
from sm12x.core import text as texts
from sm12x.core.text import GIB
from sm12x.verify.report import CheckReport, GpuUse, StressReport, TurnReport, VerifyReport

# Turns that a terminal and a page have room for: the first few and the last.
_FIRST, _LAST = 3, 27
_HEAD = (
    *("cycle", "turn", "sleep s", "wake s", "swap s", "answer s", "awake GiB", "asleep GiB"),
    "texts",
)
_STRESS = ("server", "when", "failed", "garbled", "tokens/s", "median s", "slowest s", "acceptance")
_TRENDS = ("server", "GPU", "asleep GiB", "MiB per cycle", "memory of")
_VERDICTS = {
    "passed": "passed",
    "breached": "BREACHED",
    "unknown": "cannot tell: the answers could not be compared",
    "stopped": "STOPPED before its end",
    "running": "still running, or killed: this is the state at the last write",
}
# The option that draws, for messages.
PICTURE = "--save FILE.png"
# Colours that stay apart for the colour-blind (Okabe and Ito).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_TIMES: tuple[tuple[str, str, Callable[[TurnReport], float | None]], ...] = (
    ("sleep", "o", lambda turn: turn.sleep_seconds),
    ("wake-up", "^", lambda turn: turn.wake_seconds),
    ("swap", "s", lambda turn: turn.swap_seconds),
    ("first answer", "x", lambda turn: turn.answer_seconds),
)


def text(report: VerifyReport) -> str:
    """The whole report for a terminal."""
    parts = ["\n".join(_head(report))]
    turns = list(map(_turn, report.turns))
    if (left_out := len(turns) - _FIRST - _LAST) > 0:
        gap = ("...", f"{left_out} more", *[""] * (len(_HEAD) - 2))
        turns[_FIRST:-_LAST] = [gap]
    parts += [texts.columns(rows, head=head) for _, head, rows in _tables(report, turns)]
    # Before anything was measured each of them is "not seen".
    if report.turns or report.stress:
        parts.append("\n".join(_check(one) for one in report.checks))
    parts.append("\n".join([*_end(report), f"verdict: {_VERDICTS[report.verdict]}"]))
    return "\n\n".join(parts) + "\n"


def markdown(report: VerifyReport) -> str:
    """The whole report as a page."""
    parts = [f"# sm12x verify: {_VERDICTS[report.verdict]}"]
    for lines in (_head(report), _end(report)):
        if bullets := "\n".join(f"- {texts.no_markdown(line)}" for line in lines):
            parts.append(bullets)
    plain = texts.no_markdown
    checks = [(one.verdict, one.server, one.check, plain(one.text)) for one in report.checks]
    tables = _tables(report, list(map(_turn, report.turns)))
    for title, head, rows in [("Checks", ("", "server", "check", "found"), checks), *tables]:
        if rows:
            parts += [f"## {title}", texts.markdown(head, rows).strip()]
    return "\n\n".join(parts) + "\n"


def _tables(
    report: VerifyReport, turns: Sequence[Sequence[str]]
) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
    """Return title, head and rows of each table that has rows."""
    trends = [
        (
            one.server,
            str(one.gpu),
            f"{one.last_bytes / GIB:.2f}",
            "-" if one.mib_per_cycle is None else f"{one.mib_per_cycle:+.2f}",
            "the server" if one.of_server else "all processes",
        )
        for one in report.trends
    ]
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = [
        ("Cycles", _HEAD, turns),
        ("Requests at a time", _STRESS, list(map(_stress, report.stress))),
        ("Residue", _TRENDS, trends),
    ]
    return [table for table in tables if table[2]]


def line(turn: TurnReport) -> str:
    """Return one turn in one line, for the time of the run."""
    named = zip(_HEAD, _turn(turn), strict=True)
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


def _turn(turn: TurnReport) -> tuple[str, ...]:
    answers = "-"
    if turn.answers is not None:
        equal = sum(one.verdict == "equal" for one in turn.answers)
        bad = sum(bool(one.garbage) for one in turn.answers)
        answers = f"{equal} of {len(turn.answers)} equal" + (f", {bad} garbage" if bad else "")
    return (
        str(turn.cycle),
        turn.sleeps if turn.sleeps == turn.wakes else f"{turn.sleeps} > {turn.wakes}",
        _number(turn.sleep_seconds),
        _number(turn.wake_seconds),
        _number(turn.swap_seconds),
        _number(turn.answer_seconds),
        _most(turn.before),
        _most(turn.asleep),
        answers,
    )


def _most(uses: Sequence[GpuUse] | None) -> str:
    """Return the GiB on the fullest GPU: of the server if known, else of all processes."""
    sizes = [use.used if use.held is None else use.held for use in uses or ()]
    most = max((size for size in sizes if size is not None), default=None)
    return _number(None if most is None else most / GIB)


def _stress(one: StressReport) -> tuple[str, ...]:
    return (
        one.server,
        one.when,
        f"{one.failed} of {one.requests}",
        str(one.garbled),
        _number(one.tokens_per_second, ".1f"),
        _number(one.median_seconds),
        _number(one.slowest_seconds),
        _number(one.acceptance, ".0%"),
    )


def _check(one: CheckReport) -> str:
    return f"{one.verdict:8} {one.server} {one.check}: {one.text}"


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def draw(report: VerifyReport, path: Path) -> None:
    """Draw the times of each turn, and below them the residue, into a PNG.

    Raises ToolMissingError where matplotlib is not installed.
    """
    trends = report.trends
    rows = 2 if trends else 1
    drawing = picture.figure(PICTURE, figsize=(10, 1 + 3.2 * rows), layout="constrained")
    times = drawing.add_subplot(rows, 1, 1)
    for (name, marker, value), colour in zip(_TIMES, _COLOURS, strict=False):
        _plot(times, [value(turn) for turn in report.turns], name, marker, colour)
    times.set_ylabel("seconds")
    times.set_ylim(bottom=0)
    names = " and ".join(f"{one.name} {one.model} (vLLM {one.version})" for one in report.servers)
    # matplotlib reads what stands between two dollars as a formula.
    title = f"{names}\n{report.begun}: {report.verdict}".replace("$", r"\$")
    times.set_title(title, fontsize=9, loc="left")
    axes = [times]
    if trends:
        axes.append(drawing.add_subplot(rows, 1, 2, sharex=times))
        axes[-1].set_ylabel("GiB in use while asleep")
        axes[-1].set_xlabel("turn")
    for number, one in enumerate(trends):
        whose = "" if one.of_server else " (all processes)"
        # None in the turns of the other server.
        sizes = [
            _gib(turn, one.gpu, of_server=one.of_server) if turn.sleeps == one.server else None
            for turn in report.turns
        ]
        colour = _COLOURS[number % len(_COLOURS)]
        _plot(axes[-1], sizes, f"{one.server}, GPU {one.gpu}{whose}", ".", colour)
    for one_axes in axes:
        one_axes.set_xlim(0.5, max(len(report.turns), 1) + 0.5)
        one_axes.xaxis.get_major_locator().set_params(integer=True)
        one_axes.spines[["top", "right"]].set_visible(False)
        if one_axes.get_legend_handles_labels()[0]:
            one_axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    picture.write(drawing, path)


def _gib(turn: TurnReport, gpu: int, *, of_server: bool) -> float | None:
    sizes = [use.held if of_server else use.used for use in turn.asleep or () if use.gpu == gpu]
    return next((size / GIB for size in sizes if size is not None), None)


def _plot(axes: Any, values: Sequence[float | None], name: str, marker: str, colour: str) -> None:
    points = [(n, value) for n, value in enumerate(values, 1) if value is not None]
    if points:
        across, up = zip(*points, strict=True)
        axes.plot(across, up, marker=marker, color=colour, label=name, linewidth=1, markersize=4)
