"""The report as a picture: times of each turn, and below them the residue of sleeping servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sm12x.core import picture
from sm12x.core.text import GIB
from sm12x.verify.report import TurnReport, VerifyReport

_OPTION = "--save FILE.png"
# Colours that stay apart for the colour-blind (Okabe and Ito).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_TIMES: tuple[tuple[str, str, Callable[[TurnReport], float | None]], ...] = (
    ("sleep", "o", lambda turn: turn.sleep_seconds),
    ("wake-up", "^", lambda turn: turn.wake_seconds),
    ("swap", "s", lambda turn: turn.swap_seconds),
    ("first answer", "x", lambda turn: turn.answer_seconds),
)


def require() -> None:
    """Raise ToolMissingError where no picture can be drawn."""
    picture.figure(_OPTION)


def write(report: VerifyReport, path: Path) -> None:
    """Draw the report into a PNG. Raises ToolMissingError where matplotlib is not installed."""
    picture.write(_figure(report), path)


def _figure(report: VerifyReport) -> Any:
    """Return the chart as a matplotlib figure. Raises ToolMissingError."""
    series = _residue(report)
    rows = 2 if series else 1
    figure = picture.figure(_OPTION, figsize=(10, 1 + 3.2 * rows), layout="constrained")
    times = figure.add_subplot(rows, 1, 1)
    for (name, marker, value), colour in zip(_TIMES, _COLOURS, strict=False):
        _line(times, [value(turn) for turn in report.turns], name, marker, colour)
    times.set_ylabel("seconds")
    times.set_ylim(bottom=0)
    names = " and ".join(f"{one.name} {one.model} (vLLM {one.version})" for one in report.servers)
    times.set_title(
        # matplotlib reads what stands between two dollars as a formula.
        f"{names}\n{report.begun}: {report.verdict}".replace("$", r"\$"),
        fontsize=9,
        loc="left",
    )
    _finish(times, report.turns)
    if series:
        memory = figure.add_subplot(rows, 1, 2, sharex=times)
        for number, (name, sizes) in enumerate(series.items()):
            _line(memory, sizes, name, ".", _COLOURS[number % len(_COLOURS)])
        memory.set_ylabel("GiB in use while asleep")
        memory.set_xlabel("turn")
        _finish(memory, report.turns)
    return figure


def _residue(report: VerifyReport) -> dict[str, list[float | None]]:
    """GiB of each turn, by server and GPU; None in the turns of the other server."""
    return {
        f"{one.server}, GPU {one.gpu}{'' if one.of_server else ' (all processes)'}": [
            _gib(turn, one.gpu, of_server=one.of_server) if turn.sleeps == one.server else None
            for turn in report.turns
        ]
        for one in report.trends
    }


def _gib(turn: TurnReport, gpu: int, *, of_server: bool) -> float | None:
    for use in turn.asleep or ():
        size = use.held if of_server else use.used
        if use.gpu == gpu and size is not None:
            return size / GIB
    return None


def _line(axes: Any, values: Sequence[float | None], name: str, marker: str, colour: str) -> None:
    points = [(n, value) for n, value in enumerate(values, 1) if value is not None]
    if points:
        across, up = zip(*points, strict=True)
        axes.plot(across, up, marker=marker, color=colour, label=name, linewidth=1, markersize=4)


def _finish(axes: Any, turns: Sequence[TurnReport]) -> None:
    axes.set_xlim(0.5, max(len(turns), 1) + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
