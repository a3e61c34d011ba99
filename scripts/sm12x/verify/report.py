"""The report of `sm12x verify`; data/schemas/verify-1.json is made from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from sm12x.core.declared import Declared, schema, shown

CheckVerdict = Literal["ok", "breach", "not seen"]
RunVerdict = Literal["passed", "breached", "unknown", "stopped", "running"]
TextVerdict = Literal["equal", "differs", "unsteady"]
When = Literal["before", "after"]

_Seconds = Annotated[float, Field(ge=0)]
_Count = Annotated[int, Field(ge=0)]
_Tag = Annotated[str, Field(max_length=1000)]


def _limit(description: str) -> Any:
    return Field(ge=0, description=description)


@dataclass(frozen=True, kw_only=True)
class Limits(Declared):
    """The limits. Each field is an option of the same name; docs/verify.md lists them."""

    max_first_sleep: Annotated[
        float, _limit("seconds that the first sleep of a server in the run may take")
    ] = 60.0
    max_sleep: Annotated[float, _limit("seconds that any later sleep may take")] = 5.0
    max_wake: Annotated[float, _limit("seconds that a wake-up may take")] = 5.0
    max_swap: Annotated[
        float, _limit("seconds that a later sleep and the other server's wake-up may take")
    ] = 10.0
    min_freed: Annotated[
        float, _limit("share of its GPU memory that a server must free when it sleeps, 0 to 1")
    ] = 0.5
    max_residue: Annotated[
        float, _limit("GiB on one GPU that a sleeping server may keep, its CUDA context included")
    ] = 5.0
    max_growth: Annotated[
        float,
        _limit("MiB on one GPU that the residue may grow by, from the second sleep to the last"),
    ] = 2.0
    max_conversation: Annotated[
        float,
        _limit("multiple of a cached first token's time that one may take after a swap"),
    ] = 2.0
    max_frozen: Annotated[
        float, _limit("seconds after a wake-up in which a frozen stream has to go on")
    ] = 1.0
    min_speed: Annotated[
        float, _limit("share of the tokens per second before the cycles that must be left after")
    ] = 0.6
    min_acceptance: Annotated[
        float, _limit("share of the acceptance rate before the cycles that must be left after")
    ] = 0.8


def limits() -> Iterator[tuple[str, float, str]]:
    """Name, default and meaning of each limit."""
    for name, about in schema(Limits)["properties"].items():
        yield name, about["default"], about["description"]


@dataclass(frozen=True, kw_only=True)
class ServerReport:
    """One server. ``steady`` counts the prompts whose greedy text was the same twice, before."""

    name: str
    url: str
    version: str
    model: str
    asleep_at_start: bool
    prompts: _Count
    steady: _Count


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Bytes in use on one GPU by all processes, and by the server that the turn puts to sleep.

    Each is null where the driver does not say. ``held`` is also null where no process of the GPU
    could be told to be the server's.
    """

    gpu: _Count
    used: _Count | None
    held: _Count | None


@dataclass(frozen=True, kw_only=True)
class RankUse:
    """Bytes of one rank's GPU memory by tag while its server sleeps, and of its copies on the host.

    ``dp``, ``pp`` and ``tp`` are its ranks in data, pipeline and tensor parallel groups.
    """

    # The aliases are the names in the server's answer.
    dp: Annotated[_Count, Field(validation_alias="dp_rank")]
    pp: Annotated[_Count, Field(validation_alias="pp_rank")]
    tp: Annotated[_Count, Field(validation_alias="tp_rank")]
    asleep: Annotated[dict[_Tag, _Count], Field(validation_alias="asleep_bytes")]
    awake: Annotated[dict[_Tag, _Count], Field(validation_alias="awake_bytes")]
    host_copies: Annotated[_Count, Field(validation_alias="host_copy_bytes")]


@dataclass(frozen=True, kw_only=True)
class AnswerReport:
    """Greedy text of one prompt after a wake-up, compared with the texts before.

    ``unsteady``: another text than before, from a prompt that had several texts before. ``garbage``
    says what is wrong with the text itself, "" for nothing; ``text`` is the text from shortly
    before where it parts from the one before, "" where it is equal and no garbage.
    """

    prompt: Annotated[int, Field(ge=1)]
    verdict: TextVerdict
    garbage: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TurnReport:
    """One server is put to sleep, then one is woken up: the same, or in a rotation the other.

    ``before``, ``asleep`` and ``after`` are the GPUs before the sleep, between and after the
    wake-up, null where memory was not seen. Times of unfinished steps are null. ``ranks`` is what
    the server says of its ranks while it sleeps, null where it does not say. ``first_sleep`` and
    ``first_wake``: of this server, in this run. ``answers`` are of the server that was woken up,
    null where it has none to compare with, or gave no answer.
    """

    cycle: Annotated[int, Field(ge=1)]
    sleeps: str
    wakes: str
    first_sleep: bool
    first_wake: bool
    sleep_seconds: _Seconds | None = None
    wake_seconds: _Seconds | None = None
    answer_seconds: Annotated[
        _Seconds | None, Field(description="the first answer after the wake-up, of one token")
    ] = None
    before: tuple[GpuUse, ...] | None = None
    asleep: tuple[GpuUse, ...] | None = None
    after: tuple[GpuUse, ...] | None = None
    ranks: tuple[RankUse, ...] | None = None
    answers: tuple[AnswerReport, ...] | None = None

    @shown
    def swap_seconds(self) -> float | None:
        """Sleep and wake-up together; null unless the two are of different servers."""
        if self.sleeps == self.wakes or self.sleep_seconds is None or self.wake_seconds is None:
            return None
        return self.sleep_seconds + self.wake_seconds


@dataclass(frozen=True, kw_only=True)
class StressReport:
    """Requests that were sent at a time, before the first cycle or after the last wake-up.

    ``drafted`` and ``accepted`` are tokens of speculative decoding during it, null where /metrics
    does not count them. ``faults`` are the first different ones of failed and garbled requests.
    """

    server: str
    when: When
    requests: _Count
    failed: _Count
    garbled: _Count
    seconds: _Seconds
    tokens: _Count
    median_seconds: _Seconds | None
    slowest_seconds: _Seconds | None
    drafted: _Count | None
    accepted: _Count | None
    faults: tuple[str, ...]

    @shown
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @shown
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None


@dataclass(frozen=True, kw_only=True)
class ConversationReport:
    """A conversation of so many tokens: seconds to its first token, and a stream of it.

    ``cold_seconds`` are those of a prompt that was new, ``cached_seconds`` of the same again, and
    ``after_seconds`` after the server slept with mode=keep. ``frozen_seconds`` is the time from
    the answer to /wake_up to the next piece of a stream that this sleep froze, null where its text
    was complete before; ``frozen_text`` compares its text with that of an undisturbed one.
    """

    server: str
    tokens: _Count
    cold_seconds: _Seconds
    cached_seconds: _Seconds
    after_seconds: _Seconds
    frozen_seconds: _Seconds | None
    frozen_text: TextVerdict


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The result of one check. ``option`` changes its limit, "" for a check without one."""

    check: str
    server: str
    verdict: CheckVerdict
    found: float | None
    limit: float | None
    unit: str
    option: str
    text: str


@dataclass(frozen=True, kw_only=True)
class TrendReport:
    """The growth of a server's residue on one GPU, from its second sleep to its last."""

    server: str
    gpu: _Count
    of_server: Annotated[bool, Field(description="false: memory of all processes")]
    sleeps: _Count
    last_bytes: _Count
    mib_per_cycle: float | None


@dataclass(frozen=True, kw_only=True)
class StopReport:
    """Why the run ended before its last step, and during what."""

    during: str
    why: str
    next_step: str
    interrupted: bool


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The report of `sm12x verify`, complete or partial.

    ``verdict`` is ``running`` in a file that was written while the run went on, ``stopped`` where
    it ended early, and ``unknown`` where no limit was exceeded but the answers could not be
    compared. ``memory_unseen`` is the reason, "" where memory was seen. ``left`` has each server's
    final state.
    """

    schema: Literal[1] = 1
    begun: Annotated[str, Field(description="UTC, ISO 8601")]
    seconds: _Seconds
    verdict: RunVerdict
    cycles: Annotated[int, Field(ge=1, description="the requested number of cycles")]
    level: Annotated[int, Field(ge=1, le=2)]
    limits: Limits
    memory_unseen: str
    servers: tuple[ServerReport, ...]
    turns: tuple[TurnReport, ...]
    stress: tuple[StressReport, ...]
    conversations: tuple[ConversationReport, ...]
    trends: tuple[TrendReport, ...]
    checks: tuple[CheckReport, ...]
    stopped: StopReport | None
    left: tuple[str, ...]
