"""bench.json: what ran, on what, and what came out; data/schemas/bench-1.json is made from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from sm12x.core.declared import shown
from sm12x.verify.report import VerifyReport

StepKind = Literal["canary", "benchy", "serve", "tools", "gsm8k", "swap"]
StepState = Literal["done", "failed", "skipped", "interrupted"]
BenchVerdict = Literal["running", "stopped", "incomplete", "failed", "passed"]

_Seconds = Annotated[float, Field(ge=0)]
_UTC = r"^20\d\d-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\d\+00:00$"
_Count = Annotated[int, Field(ge=0)]


class _Kept:
    """Base of what is written and read again; what is computed of the fields is not read."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="ignore", strict=True, allow_inf_nan=False
    )


@dataclass(frozen=True, kw_only=True)
class Metric(_Kept):
    """All values of a figure, in the order of the tool's report."""

    values: tuple[float, ...]

    @shown
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None


@dataclass(frozen=True, kw_only=True)
class Cell(_Kept):
    """One cell of llama-benchy's grid. Sizes are in tokens, speeds in tokens/s, times in ms.

    ``context_phase``: the figures are of the context that is sent before the prompt. ``prefill``
    and ``decode`` are of all requests together, ``..._each`` of one; ``peak`` is the fastest second
    of decoding. ``failed`` counts requests without a result, of ``requests``.
    """

    depth: _Count
    prompt: _Count
    output: _Count
    concurrency: Annotated[int, Field(ge=1)]
    context_phase: bool
    requests: _Count
    failed: _Count
    latency_ms: float
    prefill: Metric | None
    prefill_each: Metric | None
    prefill_ms: Metric | None
    decode: Metric | None
    decode_each: Metric | None
    peak: Metric | None
    peak_each: Metric | None
    first_response_ms: Metric | None
    first_token_ms: Metric | None


@dataclass(frozen=True, kw_only=True)
class GpuSamples(_Kept):
    """What one GPU did during a step: [lowest, median, highest], null where the driver is silent.

    ``memory`` is in bytes, ``clock`` of the multiprocessors in MHz, ``pcie`` the generation of the
    link, which falls on an idle card.
    """

    gpu: _Count
    samples: _Count
    watts: tuple[float, float, float] | None
    celsius: tuple[float, float, float] | None
    clock: tuple[float, float, float] | None
    memory: tuple[float, float, float] | None
    pcie: tuple[float, float, float] | None


@dataclass(frozen=True, kw_only=True)
class ToolFile(_Kept):
    """A tool's own file in tools/. ``hidden``: names or secrets in it were replaced."""

    name: str
    sha256: str
    hidden: bool


@dataclass(frozen=True, kw_only=True)
class Answer(_Kept):
    """Greedy text of one of verify's prompts; ``garbage`` says what is wrong with it, "" nothing.

    ``sha256`` is that of the text.
    """

    prompt: Annotated[int, Field(ge=1)]
    sha256: str
    garbage: str


@dataclass(frozen=True, kw_only=True)
class Step(_Kept):
    """One step. ``figures`` are those of its tool by name; ``command`` has no secrets.

    ``acceptance_by_position`` is the accepted share of a draft's first, second, ... token.
    ``drafted`` and ``accepted`` are tokens of speculative decoding during it, ``cached`` and
    ``looked_up`` tokens of prompts that were in the prefix cache and that were looked up there;
    null where /metrics does not count them.
    """

    name: str
    kind: StepKind
    state: StepState
    why: str = ""
    begun: str = ""
    seconds: _Seconds = 0.0
    seed: _Count | None = None
    command: tuple[str, ...] = ()
    files: tuple[ToolFile, ...] = ()
    cells: tuple[Cell, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    acceptance_by_position: tuple[float, ...] = ()
    answers: tuple[Answer, ...] = ()
    drafted: _Count | None = None
    accepted: _Count | None = None
    cached: _Count | None = None
    looked_up: _Count | None = None
    gpus: tuple[GpuSamples, ...] = ()

    @shown
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None


@dataclass(frozen=True, kw_only=True)
class GpuFacts(_Kept):
    """One GPU. Sizes in bytes, power in watts, clocks in MHz; null where the driver is silent."""

    index: _Count
    name: str
    hardware: str
    memory_total: _Count | None
    power_limit: float | None
    power_limit_default: float | None
    clock_max: float | None
    memory_clock_max: float | None
    pcie_generation_max: _Count | None
    pcie_width: _Count | None
    pcie_width_max: _Count | None


@dataclass(frozen=True, kw_only=True)
class HostFacts(_Kept):
    """The server's host. ``unseen`` says why GPUs are not known, "" where they are."""

    machine: str
    kernel: str
    memory_total: _Count | None
    driver: str
    gpus: tuple[GpuFacts, ...]
    unseen: str


@dataclass(frozen=True, kw_only=True)
class ServerFacts(_Kept):
    """What the server says of itself; "" and null where it does not say.

    ``prefix_caching`` and ``kv_cache_dtype`` are of its /metrics.
    """

    version: str
    model: str
    root: str
    revision: str
    max_model_len: _Count | None
    prefix_caching: bool | None
    kv_cache_dtype: str


@dataclass(frozen=True, kw_only=True)
class StackFacts(_Kept):
    """What was built: ``stack_id`` and ``mode`` are in the server's version, "" in a stock one.

    ``ledger_sha256`` is "" where no ledger of that stack was there; its text is in ledger.json.
    ``image_digest`` is that of a registry, or the id of an image that was made here.
    """

    release: str
    stack_id: str
    mode: str
    ledger_sha256: str
    image: str
    image_digest: str


@dataclass(frozen=True, kw_only=True)
class RecipeFacts(_Kept):
    """The recipe's file, and the settings and arguments that were given on top."""

    key: str
    model: str
    text: str
    runs_sha256: str
    overrides: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Finding(_Kept):
    """Something about the figures. ``impossible``: no such hardware can do it."""

    level: Literal["impossible", "warning"]
    step: str
    text: str


@dataclass(frozen=True, kw_only=True)
class BenchReport(_Kept):
    """The report of `sm12x bench`, complete or partial.

    ``verdict``: ``running`` or ``stopped`` (the run can go on), ``incomplete`` where a step could
    not run, ``failed`` where one failed or a figure is impossible, else ``passed``. ``corpus`` is
    the text that prompts are made of. ``tools``: name -> version.
    """

    schema: Literal[1] = 1
    begun: Annotated[str, Field(pattern=_UTC, description="UTC, ISO 8601")]
    seconds: Annotated[float, Field(ge=0, lt=1e8)]
    verdict: BenchVerdict
    sm12x: str
    preset: str
    prefix_caching: bool
    random_weights: bool
    seed: _Count
    tools: Mapping[str, str]
    corpus: str
    corpus_sha256: str
    server: ServerFacts
    stack: StackFacts
    recipe: RecipeFacts | None
    host: HostFacts
    steps: tuple[Step, ...]
    swap: VerifyReport | None
    findings: tuple[Finding, ...]
