"""The canary: a question after each wake-up, whose answer has to be the recorded one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sm12x.pool.config import CanaryConfig
from sm12x.pool.engines import Engine, EngineError
from sm12x.verify import judge
from sm12x.verify.client import ACCEPTED, DRAFTED

# How often the answer is taken when it is recorded: a server may have several.
_TIMES = 2
# Cosine of two embeddings of one text, below which they differ.
_ALIKE = 0.99
_QUOTED = 60


@dataclass(frozen=True, kw_only=True)
class Record:
    """The answers before the first sleep: texts, or an embedding, by ``kind``.

    ``acceptance`` is the share of drafted tokens that were accepted; None without speculation.
    """

    kind: str
    texts: tuple[str, ...] = ()
    vector: tuple[float, ...] = ()
    acceptance: float | None = None


def stored(record: Record, fingerprint: str) -> dict[str, Any]:
    """Return what ``restored`` reads."""
    return {
        "fingerprint": fingerprint,
        "kind": record.kind,
        "texts": record.texts,
        "vector": record.vector,
        "acceptance": record.acceptance,
    }


def restored(raw: Any, fingerprint: str) -> Record | None:
    """Return a record of a pool before; None of a server that was started with other words."""
    if not isinstance(raw, dict) or raw.get("fingerprint") != fingerprint:
        return None
    try:
        return Record(
            kind=str(raw["kind"]),
            texts=tuple(map(str, raw["texts"])),
            vector=tuple(map(float, raw["vector"])),
            acceptance=raw["acceptance"],
        )
    except (KeyError, TypeError, ValueError):
        return None


async def ask(
    engine: Engine,
    model: str,
    record: Record | None,
    settings: CanaryConfig,
    kind: str,
    limit: float,
) -> tuple[Record, str]:
    """Return the record, which is made where there is none, and what is wrong; "" for nothing.

    Raises EngineError where there is no answer.
    """
    if record is None:
        made = await _record(engine, model, settings, kind, limit)
        fault = "" if settings.random_weights or not made.texts else judge.garbage(made.texts[0])
        return made, f"its text is garbage: {fault}" if fault else ""
    if record.kind == "none":
        return record, ""
    if record.kind == "embedding":
        vector = await engine.embed(model, settings.prompt, limit)
        cosine = _cosine(vector, record.vector)
        return record, "" if cosine >= _ALIKE else f"its embedding differs: cosine {cosine:.3f}"
    if record.acceptance is None:
        text = await engine.generate(model, settings.prompt, settings.tokens, limit)
    else:
        text, acceptance = await _drafted(engine, model, settings, limit)
        least = settings.least_acceptance * record.acceptance
        if acceptance is not None and acceptance < least:
            return record, (
                f"{acceptance:.0%} of its drafted tokens were accepted, {record.acceptance:.0%} "
                "before"
            )
    verdict = judge.compared(text, record.texts)
    if verdict == "differs":
        return record, f"{text[:_QUOTED]!r} where {record.texts[0][:_QUOTED]!r} was recorded"
    # A model that has several texts is judged by its garbage alone.
    garbage = verdict == "unsteady" and not settings.random_weights and judge.garbage(text)
    return record, f"its text is garbage: {garbage}" if garbage else ""


async def _record(
    engine: Engine, model: str, settings: CanaryConfig, kind: str, limit: float
) -> Record:
    if kind == "none":
        return Record(kind="none")
    if kind in ("auto", "completion"):
        try:
            text, acceptance = await _drafted(engine, model, settings, limit)
            more = [
                await engine.generate(model, settings.prompt, settings.tokens, limit)
                for _ in range(_TIMES - 1)
            ]
            texts = tuple(dict.fromkeys([text, *more]))
            return Record(kind="completion", texts=texts, acceptance=acceptance)
        except EngineError as error:
            if kind == "completion" or error.status not in (400, 404, 405, 422, 501):
                raise
    try:
        vector = await engine.embed(model, settings.prompt, limit)
        return Record(kind="embedding", vector=tuple(vector))
    except EngineError as error:
        if kind == "embedding" or error.status not in (400, 404, 405, 422, 501):
            raise
    # Neither text nor embeddings, as of a model that only transcribes.
    return Record(kind="none")


async def _drafted(
    engine: Engine, model: str, settings: CanaryConfig, limit: float
) -> tuple[str, float | None]:
    """Return the text, and the share of its drafted tokens that were accepted."""
    before = _counters(await engine.metrics())
    text = await engine.generate(model, settings.prompt, settings.tokens, limit)
    if before is None:
        return text, None
    after = _counters(await engine.metrics())
    drafted = after[0] - before[0] if after else 0.0
    return text, (after[1] - before[1]) / drafted if after and drafted > 0 else None


def _counters(text: str) -> tuple[float, float] | None:
    """Return drafted and accepted tokens; None of a server that does not speculate."""
    if DRAFTED not in text:
        return None
    sums = {DRAFTED: 0.0, ACCEPTED: 0.0}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in sums:
                    sums[sample.name] += sample.value
    except ValueError:
        return None
    return sums[DRAFTED], sums[ACCEPTED]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    if len(one) != len(other) or not one:
        return 0.0
    length = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / length if length else 0.0
