"""Reads a checkpoint: config.json, the index of its files, and their headers where they are there.

The index names every tensor and the size of all of them together; only the headers of the files
say the size of each. With the headers each tensor is known to be split or repeated by TP; without
them that is estimated from the config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sm12x.core.errors import BadFileError, UsageError
from sm12x.core.text import GIB
from sm12x.plan import modelconfig
from sm12x.plan.budget import KV, WEIGHTS, Amount, States, Term
from sm12x.plan.modelconfig import Config, number
from sm12x.plan.tensors import CONFIG, INDEX, LARGEST, SINGLE, read_json, sizes

# Linear layers that vLLM keeps whole on every rank: MLA's down projections, the sparse indexer, the
# compressors and hyper-connections of DeepSeek V4, expert routers, and every norm.
_WHOLE = re.compile(
    r"norm|layernorm|\bq_a_proj\b|\bkv_a_proj_with_mqa\b|\bwq_a\b|\bwkv\b|indexer|compressor"
    r"|\bhc_|_hc\b|attn_sink|mlp\.gate\.|ffn\.gate\.|router|\.mixer\.(A|D|dt_bias)\b"
)
_KV = re.compile(r"\.(k_proj|v_proj)\.")
_LAYER = re.compile(r"\blayers\.([0-9]{1,9})\.")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """``tensors`` is the size in bytes of each tensor, None where no headers could be read."""

    folder: Path
    config: Config
    total: int
    names: tuple[str, ...]
    tensors: Mapping[str, int] | None

    @property
    def gib(self) -> float:
        return self.total / GIB


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Bytes on one GPU. ``draft`` loads only with speculative decoding and is not in the others."""

    split: float
    whole: float
    draft: float
    exact: bool

    @property
    def total(self) -> float:
        return self.split + self.whole


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint's folder. Raises BadFileError that names the file."""
    config = read_json(folder / CONFIG, "the folder of a checkpoint as its repository has it")
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "the index that belongs to the checkpoint")
        files = index.get("weight_map")
        if not isinstance(files, dict) or not files:
            raise BadFileError(
                f"{folder / INDEX} has no weight_map",
                next_step="fetch the index that belongs to the checkpoint",
            )
        tensors = sizes(folder, sorted({str(name) for name in files.values()}))
        metadata = index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if tensors is not None:
            total = sum(tensors.values())
        if not isinstance(total, int) or isinstance(total, bool) or not 0 < total <= LARGEST:
            raise BadFileError(
                f"{folder / INDEX} has no metadata.total_size in bytes, and the files are not all "
                "there",
                next_step="fetch the checkpoint's files, or an index with its size",
            )
        names = tuple(sorted(files))
    else:
        tensors = sizes(folder, [SINGLE])
        if tensors is None:
            raise BadFileError(
                f"{folder} has neither {INDEX} nor {SINGLE}",
                next_step="give the folder of a safetensors checkpoint",
            )
        names, total = tuple(sorted(tensors)), sum(tensors.values())
    return Checkpoint(folder=folder, config=config, total=total, names=names, tensors=tensors)


def weights(checkpoint: Checkpoint, *, tp: int) -> Weights:
    """The weights on one GPU of ``tp``.

    Linear layers and embeddings are split evenly; what stands in _WHOLE is on every rank, and so
    are key and value projections as far as there are more ranks than KV heads. Conversions at load
    time (Marlin's padding, for one) are not in it.
    """
    config = modelconfig.text(checkpoint.config)
    if checkpoint.tensors is None:
        whole = min(float(checkpoint.total), _whole_estimate(config, tp))
        return Weights(split=(checkpoint.total - whole) / tp, whole=whole, draft=0.0, exact=False)
    layers = modelconfig.layers(config)
    repeat = min(tp, max(1, tp // _kv_heads(config)))
    split = whole = draft = 0.0
    for name, size in checkpoint.tensors.items():
        if _is_draft(name, layers):
            draft += size / tp
        elif _WHOLE.search(name):
            whole += size
        elif _KV.search(name) and repeat > 1:
            split += size * repeat / tp
        else:
            split += size / tp
    return Weights(split=split, whole=whole, draft=draft, exact=True)


def _is_draft(name: str, layers: int) -> bool:
    """A tensor of the multi-token-prediction layers: after the last layer, or called mtp."""
    layer = _LAYER.search(name)
    return (
        name.startswith("mtp.") or ".mtp" in name or (layer is not None and int(layer[1]) >= layers)
    )


def weights_term(checkpoint: Checkpoint, *, tp: int) -> Term:
    """The weights as a term of the budget, in GiB."""
    found = weights(checkpoint, tp=tp)
    size = found.total / GIB
    how = (
        "headers of its files" if found.exact else "total_size of its index, rest from config.json"
    )
    return Term(
        name=WEIGHTS,
        amount=Amount.of(size),
        basis="estimated",
        source=f"{checkpoint.folder.name}: {how}; {found.whole / GIB:.1f} GiB on every rank",
    )


def _whole_estimate(config: Config, tp: int) -> float:
    """Bytes that every rank keeps whole, from the sizes in the config (norms are left out).

    MLA keeps its down projections (hidden x (q_lora_rank + kv_lora_rank + rope)), the sparse
    indexer its own; DeepSeek V4 also its compressors (bf16) and hyper-connections (fp32). Routers
    are bf16.
    """
    layers = modelconfig.layers(config)
    hidden = number(config, "hidden_size", "n_embd")
    quantization = config.get("quantization_config")
    quantized = isinstance(quantization, dict) and quantization.get("quant_method") == "fp8"
    size = 1 if quantized else 2
    experts = number(config, "n_routed_experts", "num_experts", "num_local_experts", default=0)
    query = number(config, "q_lora_rank", default=0)
    index = number(config, "index_head_dim", default=0)
    keys = number(config, "index_n_heads", default=0)
    total = layers * hidden * experts * 2.0
    if config.get("compress_ratios"):
        ratios = modelconfig.compress_ratios(config)
        head = number(config, "head_dim")
        four, wide = ratios.count(4), ratios.count(128)
        total += layers * hidden * (query + head) * size
        total += hidden * 2.0 * (four * 4 * (head + index) + wide * 2 * head)
        total += four * (query * keys * index * size + hidden * keys * 2.0)
        streams = number(config, "hc_mult", default=0)
        total += layers * 2 * (streams * hidden) * (streams * (streams + 2)) * 4.0
    elif config.get("kv_lora_rank") is not None:
        latent = number(config, "kv_lora_rank") + number(config, "qk_rope_head_dim")
        total += layers * hidden * (query + latent) * size
        total += layers * (query * keys * index * size + hidden * (index + keys) * 2.0)
    elif tp > _kv_heads(config):
        heads = number(config, "num_attention_heads", "n_head")
        head = number(config, "head_dim", default=hidden // heads)
        # Each rank holds one head of keys and values where an even split would give it a part.
        extra = 1 - _kv_heads(config) / tp
        total += modelconfig.kinds_of(config).count("full") * 2 * hidden * head * size * extra
    return total


def _kv_heads(config: Config) -> int:
    return number(
        config,
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        default=number(config, "num_attention_heads", "n_head"),
    )


def kv_term(
    checkpoint: Checkpoint,
    *,
    tp: int,
    kv_dtype: str,
    tokens: int | None,
    sequences: int,
    chunk: int,
    block: int | None = None,
) -> Term:
    """The KV cache as a term: from the sequences at rest to one prompt being read on top."""
    layout = modelconfig.layout(checkpoint.config, tp=tp, kv_dtype=kv_dtype, block=block)
    length = tokens or number(modelconfig.text(checkpoint.config), "max_position_embeddings")
    if length < 1 or sequences < 1:
        raise UsageError(
            "--max-model-len and --max-num-seqs must be at least 1",
            next_step="give the values you serve with",
        )
    low = layout.gib(tokens=length, sequences=sequences)
    high = layout.gib(tokens=length, sequences=sequences, chunk=chunk)
    if math.isclose(low, high):
        high = low
    copies = "the same on every rank" if layout.replicated else f"one of {tp} ranks"
    return Term(
        name=KV,
        amount=Amount(low=low, high=high),
        basis="estimated",
        source=f"{checkpoint.folder.name}: {layout.attention}, {layout.token_bytes / 1024:.2f} KiB "
        f"per token ({copies}), {sequences} x {length} tokens, {kv_dtype}",
    )


def states(
    checkpoint: Checkpoint,
    *,
    tp: int,
    kv_dtype: str,
    default: int | None,
    block: int | None = None,
) -> States | None:
    """What the states of a hybrid model take; None for a model that keeps none."""
    layout = modelconfig.layout(checkpoint.config, tp=tp, kv_dtype=kv_dtype, block=block)
    if not layout.recurrent:
        return None
    return States(block=layout.block_bytes / GIB, default=default)
