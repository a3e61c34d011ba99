"""Plans as text, and as a table of many. Nothing here prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from sm12x.core import text as texts
from sm12x.plan import Plan, Row, against
from sm12x.plan.budget import (
    BUDGET,
    COPY,
    DOES_NOT_FIT,
    FITS,
    KV,
    OUTSIDE,
    RESIDUE,
    SYSTEM,
    UNKNOWN,
    WEIGHTS,
    Amount,
    Budget,
    Deployment,
    Inside,
    Term,
    Unknown,
)
from sm12x.plan.host import HostNeed

_WIDTH = 100
OVERVIEW = 190
HEADER = (
    "recipe",
    "GPUs",
    "utilization",
    "GiB per GPU",
    "margin",
    "largest safe",
    "host copies",
    "basis",
    "verdict",
)
SWEPT = (
    "arguments",
    "GPUs",
    "weights",
    "KV cache at start",
    "utilization",
    "largest --max-model-len",
    "--max-num-seqs",
    "requests at once",
    "verdict",
)
_BAR = 40
# Characters of a source without --details.
_SOURCE = 58
_ORDER = (BUDGET, WEIGHTS, KV, OUTSIDE, RESIDUE, COPY, SYSTEM)
# Letters that stand for the names of several servers, which are long.
_LETTERS = "ABCDEF"


def text(plan: Plan, *, width: int = _WIDTH, details: bool = False) -> str:
    """The whole plan: what fits and what to change, then bars, host memory and terms.

    With ``details`` each term has its whole source, and the hardware too.
    """
    page = texts.Page(width)
    say = page.add
    hardware = plan.hardware
    names = [server.name for server in plan.servers]
    letters = dict(zip(names, _LETTERS, strict=False)) if len(names) > 1 else {}
    say(" + ".join(names))
    say(verdict(plan))
    source = f" ({hardware.basis}: {hardware.source})" if details else ""
    say(f"on {hardware.name}, {hardware.memory} GiB per GPU{source}")
    for name, letter in letters.items():
        say(f"{letter} = {name}")
    say(_settings(plan, letters))
    for line in _changes(plan):
        say(line)
    if plan.against:
        say()
        say(against.text(plan.against))
    for row in plan.needed:
        say()
        say(_who(row, letters))
        say(_bars(row.budget, letters))
        for one in row.budget.inside:
            say(f"  {_inside(one)}")
        if row.budget.wake:
            say(
                f"  just after a wake, with its host copy still allocated: {_left(row.budget.wake)}"
            )
    if letters:
        say()
        say(_matrix(plan.rows, letters))
    else:
        say()
    say(_host_line(plan.host, letters, unified=hardware.unified))
    say()
    say("terms, GiB on one GPU:" + ("" if details else " (--details: the whole sources)"))
    say(_sources(plan, letters, details=details))
    return page.text


def _changes(plan: Plan) -> Iterator[str]:
    yield from (f"cut: {line}" for line in plan.cuts)
    for server in plan.too_few:
        yield (
            f"cut: {server.name} needs {server.gpus} GPUs of one machine, there are "
            f"{plan.hardware.gpus}"
        )
    yield from (f"warning: {line}" for line in plan.warnings)


def _settings(plan: Plan, letters: Mapping[str, str]) -> Table:
    """What is planned of each server, and the most with which it starts."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for row in plan.needed:
        for one in row.budget.inside:
            server = next((each for each in plan.servers if each.name == one.server), None)
            if server is not None:
                for name, values in _of_server(server, one, row.budget):
                    label = letters.get(one.server, "")
                    table.add_row(f"  {label}{' ' if label else ''}{name}", values)
    return table


def _of_server(server: Deployment, one: Inside, budget: Budget) -> Iterator[tuple[str, str]]:
    least = f"{_share(one.least)} at least, " if one.least else ""
    yield (
        "--gpu-memory-utilization",
        f"{_share(server.utilization)} planned, {least}{_share(budget.largest)} at most",
    )
    cache = server.cache
    if cache is None or one.context is None:
        yield "--max-model-len", "not known: --checkpoint DIR asks vLLM in the image"
        return
    yield (
        "--max-model-len",
        f"{cache.length:,} planned, {one.context:,} at most before activations",
    )
    most = "no limit" if one.most_sequences is None else f"{one.most_sequences:,} at most"
    yield (
        "--max-num-seqs",
        f"{cache.sequences:,} planned, {most}; {one.requests:,} requests of {cache.length:,} "
        "tokens at once",
    )


def verdict(plan: Plan) -> str:
    """One line: what holds at the worst end, and the largest utilization that would."""
    worst = min(plan.needed, key=lambda row: row.budget.margin.low).budget
    margin = worst.margin
    if plan.verdict == FITS:
        head = f"fits: {margin} GiB to spare"
    elif plan.verdict == UNKNOWN:
        # Another server's row may be tighter; the room is that of the row that lacks the term.
        worst = next(row.budget for row in plan.needed if row.budget.unknown)
        names = ", ".join(str(term) for term in worst.unknown)
        return f"cannot tell: unknown: {names} (room for {worst.margin.low:.1f} GiB)"
    elif margin.low >= 0 and (wake := _worst_wake(plan)) and wake.low < 0:
        head = f"does not fit at a wake: {_left(wake)}"
    elif margin.low >= 0:
        head = "does not fit"
    elif margin.high >= 0:
        head = f"does not fit at the worst end: {_over(margin)} GiB over"
    else:
        head = f"does not fit: {_over(margin)} GiB over"
    return f"{head}; largest safe utilization {_share(worst.largest)}; weakest basis: {worst.basis}"


def _worst_wake(plan: Plan) -> Amount | None:
    wakes = [row.budget.wake for row in plan.needed if row.budget.wake]
    return min(wakes, key=lambda wake: wake.low, default=None)


def _left(margin: Amount) -> str:
    return f"{_over(margin)} GiB over" if margin.low < 0 else f"{margin} GiB to spare"


def who(row: Row) -> str:
    """`awake a; asleep b; stopped c`, without empty groups."""
    return _who(row, {})


def _who(row: Row, letters: Mapping[str, str]) -> str:
    parts = [("awake", row.awake), ("asleep", row.asleep), ("stopped", row.stopped)]
    return "; ".join(f"{state} {_names(names, letters)}" for state, names in parts if names)


def _names(names: Iterable[str], letters: Mapping[str, str]) -> str:
    return ", ".join(letters.get(name, name) for name in names)


def _inside(one: Inside) -> str:
    """What an awake server has to place inside its budget."""
    if one.weights is None:
        return f"inside the {one.budget} GiB: weights not known"
    parts = [f"weights {one.weights}"]
    parts.append(f"KV cache {one.kv}" if one.kv else "KV cache not known")
    if one.spare:
        parts.append(
            f"{one.spare} for activations and more KV cache"
            if one.spare.low >= 0
            else f"{-one.spare.low:.1f} GiB over the budget"
        )
    return f"inside the {one.budget}: {', '.join(parts)}"


def _host_line(need: HostNeed, letters: Mapping[str, str], *, unified: bool) -> str:
    """Host memory for level-1 copies, at the moment when all that can sleep are asleep."""
    if unified:
        return "host memory: it is the same memory; host copies are among the terms"
    kept = f"; sleeps keep at most {need.kept_kv:.0f} GiB of KV cache, as far as there is room"
    kept = kept if need.kept_kv else ""
    if not need.asleep:
        return f"host memory: no level-1 copies{kept}"
    of = f"the level-1 copies of {_names(need.asleep, letters)}"
    if need.copies is None:
        return f"host memory: cannot tell: weights not known ({of})"
    if need.ram is None:
        return f"host memory: {need.copies} GiB for {of}; not checked (give --ram){kept}"
    if need.verdict == DOES_NOT_FIT:
        over = need.copies.high - need.ram
        return (
            f"host memory: does not fit: {need.copies} of {need.ram:.0f} GiB for {of}, "
            f"{over:.1f} GiB over"
        )
    left = need.margin or 0.0
    return (
        f"host memory: fits: {need.copies} of {need.ram:.0f} GiB for {of}; {left:.1f} GiB left for "
        f"processes and page cache{kept}"
    )


def bar(amount: Amount, scale: float, columns: int = _BAR) -> str:
    """Full blocks up to the lower end, shaded ones up to the upper end."""
    low = round(amount.low / scale * columns)
    high = max(round(amount.high / scale * columns), low)
    if high == 0 and amount.high > 0:
        return "▏"
    return "█" * low + "▒" * (high - low)


def _columns() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.columns[1].justify = "right"
    table.add_column(overflow="fold")
    return table


def _bars(budget: Budget, letters: Mapping[str, str]) -> Table:
    table = _columns()
    scale = max(budget.memory.high, budget.total.high)
    for number, term in enumerate(budget.terms):
        start = sum(one.amount.high for one in budget.terms[:number])
        drawn = (" " * round(start / scale * _BAR) + bar(term.amount, scale))[:_BAR]
        table.add_row(_label(term, letters), str(term.amount), drawn, term.basis)
    for unknown in budget.unknown:
        table.add_row(_label(unknown, letters), "?", "", "unknown")
    limit = min(round(budget.memory.low / scale * _BAR), _BAR - 1)
    table.add_row("  total", str(budget.total), " " * limit + "│", f"of {budget.memory}")
    return table


def _sources(plan: Plan, letters: Mapping[str, str], *, details: bool) -> Table:
    """Each term once, with where it comes from: on one line, but for ``details``."""
    table = _columns()
    seen: dict[tuple[str, str], Term | Unknown] = {}
    for row in plan.rows:
        for term in row.budget.terms:
            seen[term.of, term.name] = term
        for unknown in row.budget.unknown:
            seen[unknown.of, unknown.name] = unknown
    for server in plan.servers:
        for name, inner in ((WEIGHTS, server.weights), (KV, server.kv)):
            if inner:
                seen[server.name, name] = dataclasses.replace(inner, name=name, of=server.name)
    names = [*(server.name for server in plan.servers), ""]
    kept = [term for term in seen.values() if term.of in names]
    kept.sort(key=lambda term: (names.index(term.of), _ORDER.index(term.name)))
    for found in kept:
        if isinstance(found, Term):
            source = " ".join(found.source.split())
            short = source if details or len(source) <= _SOURCE else f"{source[: _SOURCE - 1]}…"
            cells = (str(found.amount), found.basis, short)
        else:
            cells = ("?", "unknown", "not measured and not computed")
        table.add_row(_label(found, letters), *cells)
    return table


def _label(term: Term | Unknown, letters: Mapping[str, str]) -> str:
    letter = letters.get(term.of)
    return f"  {letter} {term.name}" if letter else f"  {term.name}"


def _matrix(rows: Iterable[Row], letters: Mapping[str, str]) -> Table:
    title = "servers that can be awake together"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for name in ("awake", "asleep", "stopped", "GiB per GPU", "margin", "host copies", "verdict"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            _names(row.awake, letters) or "none (a swap)",
            _names(row.asleep, letters) or "-",
            _names(row.stopped, letters) or "-",
            str(row.budget.total),
            signed(row.budget.margin),
            str(row.host.copies) if row.host.copies else "?",
            row.verdict,
        )
    return table


def summary(plan: Plan, name: str) -> tuple[str, ...]:
    """One row under HEADER; where the plan cannot tell, the verdict names what is not known."""
    worst = min(plan.needed, key=lambda row: row.budget.margin.low).budget
    unknown = [term for row in plan.needed for term in row.budget.unknown]
    said = plan.verdict
    if said == UNKNOWN:
        worst = next(row.budget for row in plan.needed if row.budget.unknown)
        said += f": {', '.join(dict.fromkeys(term.name for term in unknown))}?"
    machines = max(server.machines for server in plan.servers)
    count = machines * max(server.gpus for server in plan.servers)
    copies = "-"
    if plan.host.asleep:
        copies = str(plan.host.copies) if plan.host.copies else "?"
    return (
        name,
        f"{count} x {plan.hardware.key}",
        " / ".join(_share(server.utilization) for server in plan.servers),
        f"{worst.total}{' + ?' if worst.unknown else ''} of {worst.memory}",
        f"{signed(worst.margin)}{' - ?' if worst.unknown else ''}",
        "?" if unknown else _share(worst.largest),
        copies,
        "unknown" if unknown else worst.basis,
        said,
    )


def swept(plan: Plan, name: str) -> tuple[str, ...]:
    """One row under SWEPT."""
    server, row = plan.servers[0], plan.needed[-1]
    one, cache = row.budget.inside[0], plan.servers[0].cache
    sequences = "no limit" if one.most_sequences is None else f"{one.most_sequences:,}"
    return (
        name,
        str(server.gpus),
        str(one.weights),
        f"{cache.start:.2f}" if cache else "-",
        f"{_share(one.least) if one.least else '?'} to {_share(row.budget.largest)}",
        f"{one.context:,}" if one.context is not None else "-",
        sequences if cache else "-",
        f"{one.requests:,}" if one.requests is not None else "-",
        plan.verdict,
    )


def _share(value: float) -> str:
    """A utilization with two digits, or as many as it was given with."""
    return max(f"{value:.2f}", f"{value:g}", key=len)


def table(
    rows: Iterable[Sequence[str]], *, head: Sequence[str] = HEADER, width: int = OVERVIEW
) -> str:
    """Many plans, a row each."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(head):
        made.add_column(name, no_wrap=number < 4)
    for row in rows:
        made.add_row(*row)
    return texts.draw(made, width) + "\n"


def signed(amount: Amount) -> str:
    """`1.7 to 4.1`, `-12.5 to -10.1`: a range whose ends carry their signs."""
    low, high = f"{amount.low:.1f}", f"{amount.high:.1f}"
    return low if low == high else f"{low} to {high}"


def _over(margin: Amount) -> str:
    return str(Amount(low=max(0.0, -margin.high), high=-margin.low))
