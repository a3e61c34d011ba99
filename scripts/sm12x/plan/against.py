"""A server's log beside the plan: what vLLM says of its memory at start, term by term.

vLLM rounds to 0.01 GiB. A KV cache of so many GiB holds a number of tokens that is exact only for
its bytes, so the plan gives the range of what is rounded to that figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import text as texts
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.core.text import GIB
from sm12x.plan.budget import Deployment, Hardware
from sm12x.plan.figures import AGREES, DIFFERS, LOG_ONLY, Against, Agreement, Answer, Compared
from sm12x.recipes.planned import CONVERSION

# What of a log is read: a server starts within the first megabytes.
_LONGEST = 256 << 20
_ROUNDING = 0.005
# Weights agree within this share: buffers that kernels make while they load come on top.
_NEAR = 0.01
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Printed once by each start of a server; an engine's process prints what follows.
_START = "non-default args:"
_NUMBER = r"(-?[0-9][0-9,]*(?:\.[0-9]+)?)"
_LINES = {
    "weights": rf"Model loading took {_NUMBER} GiB",
    "available": rf"(?:Available KV cache memory:|Current kv cache memory in use is) {_NUMBER} GiB",
    "reserved": rf"reserved {_NUMBER} GiB memory for KV Cache as specified",
    "tokens": rf"KV cache size: {_NUMBER} tokens",
    "length": rf"Maximum concurrency for {_NUMBER} tokens per request",
    "requests": rf"Maximum concurrency for [0-9,]+ tokens per request: {_NUMBER}x",
    "needed": rf"\({_NUMBER} GiB KV cache is needed",
    "share": rf"Desired GPU memory utilization is \({_NUMBER},",
    "memory": rf"Free memory on device \([0-9.]+/{_NUMBER} GiB\) on startup",
    "consumed": rf"Actual usage is {_NUMBER} GiB for consumed memory",
    "activations": rf"{_NUMBER} GiB for peak activation",
    "graphs": rf"Graph capturing finished in [0-9]+ secs, took {_NUMBER} GiB",
}
_RELEASE = re.compile(r"LLM engine \(v([^)\s]+)\)")


@dataclass(frozen=True, kw_only=True)
class Logged:
    """The figures of a server's last start: of each worker in the order of the lines, () for none.

    Sizes are GiB. ``available`` is the KV cache memory, ``reserved`` that of
    --kv-cache-memory-bytes, ``needed`` what vLLM refuses to start without, and ``memory`` all of a
    GPU, of which the server takes ``share``.
    """

    release: str
    weights: tuple[float, ...]
    available: tuple[float, ...]
    reserved: tuple[float, ...]
    tokens: tuple[float, ...]
    length: tuple[float, ...]
    requests: tuple[float, ...]
    needed: tuple[float, ...]
    share: tuple[float, ...]
    memory: tuple[float, ...]
    consumed: tuple[float, ...]
    activations: tuple[float, ...]
    graphs: tuple[float, ...]

    @property
    def budgets(self) -> tuple[int, ...]:
        """The least and the most bytes of KV cache that are rounded to what the log has."""
        if not self.available:
            return ()
        # vLLM plans with the least of all workers.
        size = min(self.available)
        return tuple(int((size + end) * GIB) for end in (-_ROUNDING, _ROUNDING) if size > _ROUNDING)


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a plan says of a server, None where it says nothing; sizes are GiB on one GPU.

    ``cache`` is the KV cache memory: exact where both ends are the same, else at most the upper.
    ``tokens`` and ``requests`` are those of the log's KV cache memory.
    """

    weights: tuple[float, float] | None
    cache: tuple[float, float] | None
    at_start: float | None = None
    length: int | None = None
    tokens: tuple[float, float] | None = None
    requests: tuple[float, float] | None = None


def read(path: Path) -> Logged:
    """Read what a server's log says of its last start.

    Raises:
        BadFileError: it cannot be read, or has no line of a vLLM server about memory.
    """
    try:
        with path.open("rb") as handle:
            whole = handle.read(_LONGEST).decode("utf-8", "replace")
    except OSError as error:
        raise BadFileError(
            f"{path} cannot be read: {error.strerror}", next_step="give the log of a vLLM server"
        ) from None
    text = _COLOUR.sub("", whole)
    text = text[max(0, text.rfind(_START)) :]
    values = {
        name: tuple(float(number.replace(",", "")) for number in re.findall(pattern, text))
        for name, pattern in _LINES.items()
    }
    if not any(values.values()):
        raise BadFileError(
            f'{path} has no line such as "Model loading took" or "Available KV cache memory"',
            next_step="give the whole log of a vLLM server's start (VLLM_LOGGING_LEVEL=INFO)",
        )
    release = _RELEASE.search(text)
    return Logged(release=release[1] if release else "", **values)


def of_answer(answer: Answer, logged: Logged) -> Expected:
    """Return what an answer says, whose question had the log's ``budgets`` beside its own."""
    figures = answer.figures
    if figures is None:
        return Expected(weights=None, cache=None)
    stages = figures.stages
    least = min(min(stage.held, stage.loaded or stage.held) for stage in stages)
    most = max(
        stage.most if stage.loaded is not None else stage.held * CONVERSION for stage in stages
    )
    own = figures.rooms[-1] if figures.rooms else None
    exact = own is not None and own.basis == "given" and bool(logged.reserved)
    if exact:
        rooms = [*figures.rooms[-1:]]
    else:
        rooms = [room for room in figures.rooms if room.budget in logged.budgets]
    ends = (rooms[0], rooms[-1]) if rooms else None
    return Expected(
        weights=(least / GIB, most / GIB),
        cache=((own.budget if exact else 0) / GIB, own.budget / GIB) if own else None,
        at_start=figures.cache.at_start / GIB if figures.cache else None,
        length=figures.max_model_len,
        tokens=(ends[0].tokens, ends[1].tokens) if ends else None,
        requests=(ends[0].concurrency, ends[1].concurrency) if ends else None,
    )


def of_server(server: Deployment, hardware: Hardware) -> Expected:
    """Return what the terms of a planned server say."""
    cache, weights = server.cache, server.weights
    budget = hardware.memory.high * server.utilization
    return Expected(
        weights=(weights.amount.low, weights.amount.high) if weights else None,
        cache=(0.0, budget - weights.amount.low) if weights else None,
        at_start=cache.start if cache else None,
        length=cache.length if cache else None,
    )


def compare(expected: Expected, logged: Logged) -> Against:
    """Return the terms of the log beside the plan's, those of the plan first."""
    rows = (*_planned(expected, logged), *_others(logged))
    return Against(release=logged.release, rows=rows)


def _planned(expected: Expected, logged: Logged) -> Iterator[Compared]:
    if logged.length and expected.length is not None:
        yield _within("--max-model-len", logged.length, (expected.length, expected.length), 0.0)
    if logged.weights and expected.weights:
        margin = _NEAR * expected.weights[1] + _ROUNDING
        yield _within("weights", logged.weights, expected.weights, margin)
    yield from _cache(expected, logged)
    if logged.needed and expected.at_start is not None:
        ends = (expected.at_start, expected.at_start)
        yield _within("KV cache needed at start", logged.needed, ends, _ROUNDING * 2)
    if logged.tokens and expected.tokens:
        yield _within("tokens in the KV cache", logged.tokens, expected.tokens, 0.0)
    if logged.requests and expected.requests:
        yield _within("requests at once", logged.requests, expected.requests, _ROUNDING)


def _cache(expected: Expected, logged: Logged) -> Iterator[Compared]:
    if logged.reserved and expected.cache:
        yield _within("KV cache", logged.reserved, expected.cache, _ROUNDING)
    elif logged.available and expected.cache:
        high = expected.cache[1]
        if logged.share and logged.memory and expected.weights:
            # The server's own card, which may be another one.
            high = min(logged.memory) * min(logged.share) - expected.weights[0]
        rest = high - min(logged.available)
        note = f"{rest:.2f} for activations and CUDA graphs"
        yield Compared(
            term="KV cache, at most",
            low=None,
            high=high,
            logged=logged.available,
            verdict=AGREES if rest >= -_ROUNDING else DIFFERS,
            note=note if rest > 0 else "",
        )


def _others(logged: Logged) -> Iterator[Compared]:
    for term, values in (
        ("weights and memory outside PyTorch", logged.consumed),
        ("peak of activations", logged.activations),
        ("CUDA graphs", logged.graphs),
    ):
        if values:
            yield Compared(term=term, low=None, high=None, logged=values, verdict=LOG_ONLY)


def _within(
    term: str, logged: tuple[float, ...], ends: tuple[float, float], margin: float
) -> Compared:
    low, high = ends
    good = all(low - margin <= value <= high + margin for value in logged)
    verdict: Agreement = AGREES if good else DIFFERS
    return Compared(term=term, low=low, high=high, logged=logged, verdict=verdict)


def text(given: Against) -> str:
    """Return the terms as a table; sizes are GiB on one GPU."""
    cells = [
        (
            row.term,
            _ends(row),
            _range(min(row.logged), max(row.logged)),
            row.verdict + (f": {row.note}" if row.note else ""),
        )
        for row in given.rows
    ]
    log = f"log of {given.release}" if given.release else "log"
    return texts.columns(cells, head=("GiB on one GPU", "plan", log, ""), indent=2)


def check(given: Against | None) -> None:
    """Raise FindingsError for the first term that differs."""
    for row in given.rows if given else ():
        if row.verdict == DIFFERS:
            logged = _range(min(row.logged), max(row.logged))
            raise FindingsError(
                f"the log differs from the plan: {row.term}: planned {_ends(row)}, logged {logged}",
                next_step="plan with the server's release and arguments; if they are the same, "
                "report the difference with the log",
            )


def _ends(row: Compared) -> str:
    if row.high is None:
        return "-"
    return _range(row.high if row.low is None else row.low, row.high)


def _range(low: float, high: float) -> str:
    first, second = (
        f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"
        for value in (low, high)
    )
    return first if first == second else f"{first}-{second}"
