"""The figures of a model's memory that the release's own code gives: question, answer, doubts.

Amounts are bytes on one GPU. vLLM is asked by ``sm12x.runtime.planner``, inside the image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sm12x.core.declared import Declared
from sm12x.core.text import GIB

# Weights of all ranks against the checkpoint: what all ranks repeat makes them more, and what is
# not loaded (a draft's layers, a vision tower) less. Undetected quantization doubles them at least.
_LEAST, _MOST = 0.75, 1.6
Basis = Literal["given", "at most"]


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
    """The release's answer. ``quantization`` is what vLLM takes the weights for, "" for none."""

    architecture: str
    quantization: str
    kv_dtype: str
    tp: int
    pp: int
    dp: int
    dcp: int
    experts: bool
    max_model_len: int
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


def text(answer: Answer) -> str:
    """Return the answer for people to read: the verdict first, its terms below."""
    words = " ".join(answer.arguments)
    lines = [f"{answer.model}, vLLM {answer.release} ({answer.stack}), {answer.card}: {words}"]
    if answer.figures is None:
        return "\n".join((*lines, f"  vLLM does not plan it: {answer.failure}"))
    given = answer.figures
    lines += [f"  not to be believed: {doubt}" for doubt in answer.doubts]
    for room in given.rooms:
        size = f"{room.budget / GIB:.2f} GiB" + (" at most" if room.basis == "at most" else "")
        if room.refusal:
            lines.append(f"  KV cache of {size}: vLLM does not start: {room.refusal}")
            continue
        line = f"  KV cache of {size}: {room.tokens:,} tokens in {room.blocks:,} blocks, "
        line += f"{room.concurrency:.2f} requests of {given.max_model_len:,} tokens"
        if room.sequences is not None:
            line += f", --max-num-seqs {room.sequences} at most"
            if given.max_num_seqs > room.sequences:
                line += f": vLLM does not start with {given.max_num_seqs}"
        lines.append(line)
    split = f"TP={given.tp} PP={given.pp} DP={given.dp}"
    kind = given.quantization or "not quantized"
    lines.append(f"  {given.architecture}, {kind}, {split}, KV cache in {given.kv_dtype}")
    for number, stage in enumerate(given.stages):
        line = f"  weights on each GPU{f' of stage {number}' if given.pp > 1 else ''}: "
        line += f"{stage.weights / GIB:.3f} GiB"
        if stage.draft:
            line += f", draft {stage.draft / GIB:.3f}"
        line += f"; held {stage.held / GIB:.3f}, after conversion "
        line += f"{stage.loaded / GIB:.3f}" if stage.loaded is not None else "not known"
        lines.append(line + (f"; in host memory {stage.host / GIB:.3f}" if stage.host else ""))
    if cache := given.cache:
        lines.append(
            f"  {cache.token:.1f} bytes a token, {cache.request / GIB:.3f} GiB a request of "
            f"{given.max_model_len:,} tokens, {cache.at_start / GIB:.3f} GiB needed at start"
        )
        lines += [
            f"    {group.layers} x {group.kind}, {group.block_size} tokens, {group.page} bytes"
            f" ({group.details})"
            for group in cache.groups
        ]
    return "\n".join(lines)
