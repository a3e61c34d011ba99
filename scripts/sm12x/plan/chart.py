"""A plan as a picture: one bar for each combination, the GPU's memory as a line."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from sm12x.core import picture
from sm12x.plan import Plan, Row, render
from sm12x.plan.budget import (
    BUDGET,
    COPY,
    DOES_NOT_FIT,
    KV,
    OUTSIDE,
    RESIDUE,
    SYSTEM,
    WEIGHTS,
    Amount,
    Inside,
    Term,
)

# Colours that stay apart for the colour-blind (Okabe and Ito).
_COLOURS = {
    WEIGHTS: "#0072B2",
    KV: "#56B4E9",
    "rest of the budget": "#C9E4F6",
    OUTSIDE: "#E69F00",
    RESIDUE: "#CC79A7",
    COPY: "#F0E442",
    SYSTEM: "#BBBBBB",
}
_DARK = (WEIGHTS,)
_HEIGHT = 0.62
# More bars than this cannot be read.
_MOST_ROWS = 16


def write(plan: Plan, path: Path) -> None:
    """Draw the plan into a PNG. Raises ToolMissingError where matplotlib is not installed."""
    picture.write(_figure(plan), path)


def _figure(plan: Plan) -> Any:
    """The picture as a matplotlib figure. Raises ToolMissingError."""
    rows = [row for row in plan.rows if row.awake][:_MOST_ROWS]
    memory = plan.hardware.memory
    most = max([memory.high, *(row.budget.total.high for row in rows)])
    made = picture.figure("--png", figsize=(10, 1.6 + 0.85 * len(rows)), layout="constrained")
    axes = made.add_subplot()
    seen: set[str] = set()
    for place, row in enumerate(rows):
        _stack(axes, place, row, most, seen)
    axes.axvline(memory.low, color="black", linewidth=1.5)
    if memory.high > memory.low:
        axes.axvspan(memory.low, memory.high, color="black", alpha=0.12, linewidth=0)
    axes.annotate(
        f"{memory} GiB",
        (memory.low, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=9,
    )
    axes.set_xlim(0, most * 1.22)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB on one GPU (hatched: up to the upper end)", fontsize=9)
    names = " + ".join(server.name for server in plan.servers)
    title = f"{names} on {plan.hardware.name}\n{textwrap.fill(render.verdict(plan), 110)}"
    axes.set_title(title, fontsize=9, loc="left", pad=18)
    axes.spines[["top", "right"]].set_visible(False)
    made.legend(loc="outside lower center", ncols=len(seen), fontsize=8, frameon=False)
    return made


def _stack(axes: Any, place: int, row: Row, scale: float, seen: set[str]) -> None:
    left = 0.0
    budgets = {one.server: one for one in row.budget.inside}
    for term in row.budget.terms:
        parts = _parts(term, budgets[term.of]) if term.name == BUDGET else [term]
        for part in parts:
            _bar(axes, place, left, part, label=part.name if part.name not in seen else None)
            if part.amount.low >= scale / 25:
                axes.text(
                    left + part.amount.low / 2,
                    place,
                    f"{part.amount.low:.1f}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color="white" if part.name in _DARK else "black",
                )
            seen.add(part.name)
            left += part.amount.high
    less = " - ?" if row.budget.unknown else ""
    axes.annotate(
        f"{render.signed(row.budget.margin)} GiB{less}\n{row.verdict}",
        (max(left, row.budget.memory.high), place),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color="#B00020" if row.verdict == DOES_NOT_FIT else "black",
    )


def _bar(axes: Any, place: int, left: float, term: Term, *, label: str | None) -> None:
    colour = _COLOURS[term.name]
    low, spread = term.amount.low, term.amount.high - term.amount.low
    axes.barh(place, low, left=left, color=colour, height=_HEIGHT, label=label)
    if spread > 0:
        axes.barh(
            place,
            spread,
            left=left + low,
            color="white",
            edgecolor=colour,
            hatch="////",
            height=_HEIGHT,
            linewidth=0.5,
        )


def _parts(term: Term, one: Inside) -> list[Term]:
    """vLLM's budget as weights, KV cache and the rest.

    A range of weights or KV cache is hatched inside the budget; what does not go in is cut off.
    """
    left = term.amount
    parts = []
    for kind, amount in ((WEIGHTS, one.weights), (KV, one.kv)):
        if amount:
            size = Amount(low=min(amount.low, left.low), high=min(amount.high, left.low))
            parts.append(dataclasses.replace(term, name=kind, amount=size))
            left = Amount(low=left.low - size.high, high=left.high - size.high)
    return [*parts, dataclasses.replace(term, name="rest of the budget", amount=left)]


def _label(row: Row) -> str:
    return "\n".join(
        line for part in render.who(row).split("; ") for line in textwrap.wrap(part, 46)
    )
