"""The figures of a model's memory that the release's own code gives: question, answer, doubts.

Amounts are bytes on one GPU. vLLM is asked by ``sm12x.runtime.planner``, inside the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from sm12x.core.declared import Declared
from sm12x.core.text import GIB

# Weights of all ranks against the checkpoint: what all ranks repeat makes them more, and what is
# not loaded (a draft's layers, a vision tower) less. Undetected quantization doubles them at least.
_LEAST, _MOST = 0.75, 1.6
Basis = Literal["given", "at most"]
AGREES: Final = "agrees"
DIFFERS: Final = "differs"
LOG_ONLY: Final = "log only"
Agreement = Literal["agrees", "differs", "log only"]


@dataclass(frozen=True, kw_only=True)
class Question(Declared):
    """What is asked of vLLM: ``arguments`` and ``env`` of ``vllm serve``, without the model.

    ``budgets`` are sizes of the KV cache to plan for, besides the one that the arguments give.
    """

    folder: str
    arguments: tuple[str, ...] = ()
    env: dict[str, str]
    budgets: tuple[int, ...] = ()
    draft: str = ""


@dataclass(frozen=True, kw_only=True)
class Stage(Declared):
    """The first GPU of a pipeline stage: parameters and buffers of the model and of its draft.

    ``held`` is every tensor that is left after building, LoRA's included; ``loaded`` is that after
    vLLM has converted the weights, None where ``unconverted`` says what needs a GPU for it.
    ``host`` is in the machine's memory instead.
    """

    weights: int
    draft: int
    held: int
    host: int
    loaded: int | None
    unconverted: str = ""

    @property
    def most(self) -> int:
        return max(self.held, self.loaded or 0)


@dataclass(frozen=True, kw_only=True)
class Group(Declared):
    """Layers that share a table of blocks; ``page`` is one layer's part of a block, in bytes."""

    kind: str
    layers: int
    block_size: int
    page: int
    details: str


@dataclass(frozen=True, kw_only=True)
class Cache(Declared):
    """The KV cache: what a block, a token and one request of --max-model-len take.

    ``at_start`` is the least with which vLLM starts; ``token`` is what one more token takes where
    windows and states are full.
    """

    groups: tuple[Group, ...]
    backends: tuple[str, ...]
    layout: str
    block: int
    request: int
    at_start: int
    token: float
    states: bool


@dataclass(frozen=True, kw_only=True)
class Room(Declared):
    """What fits in a KV cache of ``budget`` bytes; ``refusal`` is vLLM's own.

    ``basis``: "given", or "at most" where it is what the weights leave of the utilization, from
    which vLLM subtracts its activations and CUDA graphs. ``sequences`` is the largest
    --max-num-seqs with which vLLM starts, None without a limit.
    """

    budget: int
    basis: Basis
    blocks: int
    tokens: int
    concurrency: float
    length: int
    sequences: int | None
    refusal: str = ""


@dataclass(frozen=True, kw_only=True)
class Figures(Declared):
    """The release's answer. ``quantization`` is what vLLM takes the weights for, "" for none.

    ``limit`` is the longest context of the model itself, ``max_model_len`` the one planned.
    """

    architecture: str
    quantization: str
    kv_dtype: str
    tp: int
    pp: int
    dp: int
    dcp: int
    experts: bool
    max_model_len: int
    limit: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float
    stages: tuple[Stage, ...]
    cache: Cache | None
    rooms: tuple[Room, ...]

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.most)


@dataclass(frozen=True, kw_only=True)
class Source(Declared):
    """The files of a checkpoint: bytes of its tensors, None where no file says them.

    ``quantized`` is whether the folder declares a quantization.
    """

    tensors: int | None
    quantized: bool


@dataclass(frozen=True, kw_only=True)
class Compared(Declared):
    """One term of a plan, from ``low`` to ``high``, beside all values of a server's log.

    Sizes are GiB. An upper bound has no ``low``; a term that only the log has has neither.
    """

    term: str
    low: float | None
    high: float | None
    logged: tuple[float, ...]
    verdict: Agreement
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Against(Declared):
    """The comparison with a log of vLLM ``release``, "" where it does not say."""

    release: str
    rows: tuple[Compared, ...]


@dataclass(frozen=True, kw_only=True)
class Answer(Declared):
    """The answer to one question: figures, or vLLM's own reason for having none in ``failure``."""

    schema: Literal[1] = 1
    release: str
    stack: str
    card: str
    model: str
    arguments: tuple[str, ...]
    source: Source
    figures: Figures | None = None
    failure: str = ""
    doubts: tuple[str, ...] = ()
    against: Against | None = None


def doubts(figures: Figures, source: Source) -> Iterator[str]:
    """Why the weights are not to be believed: one text for each reason."""
    if source.quantized and not figures.quantization:
        yield (
            "the checkpoint declares a quantization that vLLM does not see in this folder: the "
            "weights count as not quantized"
        )
    if source.tensors is None:
        return
    loaded = sum(stage.weights + stage.host for stage in figures.stages) * figures.tp
    loaded += max(stage.draft for stage in figures.stages) * figures.tp
    # Data parallel engines repeat the model, except for experts that are split over all of them.
    least = _LEAST / (figures.dp if figures.experts else 1)
    share = loaded / source.tensors
    if not least <= share <= _MOST:
        yield (
            f"the weights of {figures.tp * figures.pp} GPUs are {loaded / GIB:.1f} GiB, "
            f"{share:.2f} times the {source.tensors / GIB:.1f} GiB of the checkpoint"
        )


def text(answer: Answer, *, details: bool = False) -> str:
    """Return the answer for people to read: what fits first, its terms below."""
    words = " ".join(answer.arguments)
    lines = [f"{answer.model} on {answer.card}, vLLM {answer.release} ({answer.stack}): {words}"]
    if answer.figures is None:
        return "\n".join((*lines, f"  vLLM does not plan it: {answer.failure}"))
    lines += [f"  not to be believed: {doubt}" for doubt in answer.doubts]
    lines += _rooms(answer.figures, answer.card)
    lines += _terms(answer.figures, details=details)
    return "\n".join(lines)


def changes(figures: Figures, room: Room) -> Iterator[str]:
    """Yield what lets vLLM start in a room where it does not; nothing where it does."""
    if room.refusal and room.length > 0:
        yield f"--max-model-len {room.length} at most"
    elif room.refusal:
        yield "more GPUs (--tensor-parallel-size), or a larger --gpu-memory-utilization"
    elif room.sequences is not None and figures.max_num_seqs > room.sequences:
        yield f"--max-num-seqs {room.sequences} at most"


def _rooms(figures: Figures, card: str) -> Iterator[str]:
    """Yield what each size of the KV cache holds, that of the arguments first."""
    for room in (*figures.rooms[-1:], *figures.rooms[:-1]):
        size = f"{room.budget / GIB:.2f} GiB"
        where = f"a KV cache of {size}"
        if room.basis == "at most":
            share = f"{figures.utilization:g} of {card}"
            where = f"{share}, whose weights leave {size} for KV cache, activations and CUDA graphs"
            if room.budget <= 0:
                where = f"{share}: the weights are {-room.budget / GIB:.2f} GiB larger than that"
        change = [*changes(figures, room)]
        start = "does not start in" if change else "starts in"
        yield f"  {start} {where}"
        if room.refusal:
            yield f"    vLLM: {room.refusal}"
        yield from (f"    change: {text}" for text in change)
        most = "no limit" if room.sequences is None else f"{room.sequences:,}"
        if room.length:
            yield f"    largest --max-model-len {room.length:,}, largest --max-num-seqs {most}"
        if not room.refusal:
            yield (
                f"    {room.tokens:,} tokens in {room.blocks:,} blocks: {room.concurrency:.2f} "
                f"requests of {figures.max_model_len:,} tokens at once"
            )


def _terms(figures: Figures, *, details: bool) -> Iterator[str]:
    kind = figures.quantization or "not quantized"
    split = f"TP={figures.tp} PP={figures.pp} DP={figures.dp}"
    yield f"  {figures.architecture}, {kind}, {split}, KV cache in {figures.kv_dtype}"
    for number, stage in enumerate(figures.stages):
        line = f"  weights on each GPU{f' of stage {number}' if figures.pp > 1 else ''}: "
        line += f"{stage.weights / GIB:.3f} GiB"
        if stage.draft:
            line += f", draft {stage.draft / GIB:.3f}"
        line += f"; held {stage.held / GIB:.3f}, after conversion "
        line += f"{stage.loaded / GIB:.3f}" if stage.loaded is not None else "not known"
        yield line + (f"; in host memory {stage.host / GIB:.3f}" if stage.host else "")
        if details and stage.unconverted:
            yield f"    not converted: {stage.unconverted}"
    if cache := figures.cache:
        yield (
            f"  {cache.token:.1f} bytes a token, {cache.request / GIB:.3f} GiB a request of "
            f"{figures.max_model_len:,} tokens, {cache.at_start / GIB:.3f} GiB needed at start"
        )
        if details:
            yield f"    a block of {cache.block} bytes, {cache.layout}, {', '.join(cache.backends)}"
            yield from (
                f"    {group.layers} x {group.kind}, {group.block_size} tokens, {group.page} bytes"
                f" ({group.details})"
                for group in cache.groups
            )
