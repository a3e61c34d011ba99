"""What a model's config.json says about its attention, as the layers that kvcache.py lays out."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from sm12x.core.errors import BadFileError, UsageError
from sm12x.plan import kvcache
from sm12x.plan.kvcache import DEFAULT_BLOCK, Layers, Layout

Config = Mapping[str, Any]

# Names that model families give a layer, sorted into what matters for the cache.
_FULL = {"full_attention", "attention", "global_attention", "full", "*"}
_WINDOW = {"sliding_attention", "sliding_window", "local_attention", "swa"}
_STATE = {"linear_attention", "mamba", "mamba2", "M"}
_NONE = {"mlp", "moe", "-", "E"}
# Beyond any model: larger numbers would only fill memory, or no float.
_LARGEST = 1 << 40
_MOST_LAYERS = 10_000
_SPARSE_MLA_BYTES = 656
# DeepSeek's KV cache blocks where the base's attention asks for them.
_V4_BLOCK = 256


def text(config: Config) -> Config:
    """The part of a multi-modal model's config that describes the language model."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return {
                **{key: config[key] for key in ("torch_dtype", "dtype") if key in config},
                **inner,
            }
    return config


def number(config: Config, *names: str, default: int | None = None) -> int:
    """The first of ``names`` that the config has; one that is null is not there.

    Raises BadFileError if it has none of them, or one that is no size: a whole number from 1 on,
    or from 0 on where ``default`` is 0.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        least = 0 if default == 0 else 1
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not least <= value <= _LARGEST:
            raise _unfit(f"{name} is {_shown(value)}, not a whole number from {least} on")
        return int(value)
    if default is None:
        raise _unfit(f"it has no {' or '.join(names)}")
    return default


def layers(config: Config) -> int:
    """The number of layers. Raises BadFileError if there is none, or more than any model has."""
    count = number(config, "num_hidden_layers", "n_layer")
    if count > _MOST_LAYERS:
        raise _unfit(f"it has {count} layers")
    return count


def _listed(config: Config, name: str) -> list[Any]:
    """What a list has for each layer, draft layers left out; a string is one of letters.

    Raises BadFileError if it is no list, or one for fewer layers.
    """
    value, count = config[name], layers(config)
    if not isinstance(value, list | str):
        raise _unfit(f"{name} is {_shown(value)}, not a list")
    if len(value) < count:
        raise _unfit(f"{name} has {len(value)} entries for {count} layers")
    return list(value[:count])


def _unfit(why: str) -> BadFileError:
    return BadFileError(
        f"config.json: {why}",
        next_step="check that it is the model's own, not a processor's or an adapter's",
    )


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str | float | bool | None) else type(value).__name__
    if isinstance(value, int) and not isinstance(value, bool):
        text = str(value) if abs(value) < 1 << 64 else "too large"
    return text if len(text) < 40 else f"{text[:36]} ..."


def layout(config: Config, *, tp: int, kv_dtype: str = "auto", block: int | None = None) -> Layout:
    """The KV cache of the model on one GPU of ``tp``; layers of a draft model are left out.

    Raises:
        BadFileError: the config lacks what the formula needs.
        UsageError: the TP size does not divide the heads, or the attention is not known here.
    """
    config = text(config)
    heads = number(config, "num_attention_heads", "n_head")
    if tp < 1 or heads % tp:
        raise UsageError(
            f"{heads} attention heads cannot be split over TP={tp}",
            next_step="give a --tp that divides them",
        )
    if "linear_attn_config" in config:
        raise UsageError(
            "linear_attn_config (Kimi Delta Attention) is not known here",
            next_step="take the KV cache size from vLLM's log and put it in the recipe",
        )
    if config.get("compress_ratios"):
        return _compressed(config, kv_dtype, block)
    if config.get("kv_lora_rank") is not None:
        return _latent(config, kv_dtype, block or DEFAULT_BLOCK)
    return _grouped(config, tp, heads, kv_dtype, block or DEFAULT_BLOCK)


def _dtype(config: Config) -> str:
    return str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix(
        "torch."
    )


def compress_ratios(config: Config) -> list[int]:
    """DeepSeek V4's ratio of every layer. Raises BadFileError for one that is not known."""
    # Pure window layers say null, 0 or 1.
    found = [ratio or 0 for ratio in _listed(config, "compress_ratios")]
    unknown = [ratio for ratio in found if ratio not in (0, 1, 4, 128)]
    if unknown:
        raise _unfit(f"compress_ratios has {_shown(unknown[0])}, not 0, 1, 4 or 128")
    return found


def _compressed(config: Config, kv_dtype: str, block: int | None) -> Layout:
    ratios = tuple(compress_ratios(config))
    return kvcache.compressed(
        ratios=ratios,
        window=number(config, "sliding_window"),
        head=number(config, "head_dim"),
        index=number(config, "index_head_dim", default=128),
        block=block or _V4_BLOCK,
        # The model's attention takes fp8 whatever "auto" would be.
        narrow=kv_dtype not in ("bfloat16", "float16"),
    )


def _latent(config: Config, kv_dtype: str, block: int) -> Layout:
    """MLA: one latent of kv_lora_rank + qk_rope_head_dim values per token, whole on every rank.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1). Sparse MLA (DeepSeek V3.2) with an fp8 cache takes
    656 bytes (512 e4m3, 16 of scales, 64 bf16), and in every layer an index entry of 128 fp8 values
    and one fp32 scale for 128 of them.
    """
    count = layers(config)
    values = number(config, "kv_lora_rank") + number(config, "qk_rope_head_dim")
    size = kvcache.value_bytes(kv_dtype, _dtype(config))
    sparse = config.get("index_topk") is not None
    entry = Fraction(_SPARSE_MLA_BYTES) if sparse and size == 1 else size * values
    kinds = [Layers(name="latent", count=count, token_bytes=entry)]
    if sparse:
        index = number(config, "index_head_dim", default=128)
        kinds.append(
            Layers(name="index", count=count, token_bytes=Fraction(index + 4 * index // 128))
        )
    return kvcache.paged("sparse MLA" if sparse else "MLA", kinds, block=block, replicated=True)


def _grouped(config: Config, tp: int, heads: int, kv_dtype: str, block: int) -> Layout:
    """MHA and GQA: a key and a value for each KV head (2 x heads x head_dim when they are alike).

    KV heads are split over the ranks, and repeated where there are more ranks than heads.
    """
    kinds = kinds_of(config)
    size = kvcache.value_bytes(kv_dtype, _dtype(config))
    shared = number(config, "num_key_value_heads", "num_kv_heads", "n_head_kv", default=heads)
    head = _head_size(config, heads)
    local = _per_rank(shared, tp)
    token = size * local * (head + number(config, "v_head_dim", default=head))
    # MiMo-V2 gives its window layers heads of their own.
    swa_heads = number(config, "swa_num_key_value_heads", default=shared)
    swa_head = number(config, "swa_head_dim", default=head)
    swa_value = number(config, "swa_v_head_dim", default=number(config, "v_head_dim", default=head))
    window = number(config, "sliding_window", "sliding_window_size", default=0)
    if not {*kinds} - {"none"}:
        raise _unfit("none of its layers has a KV cache")
    found = [Layers(name="full attention", count=kinds.count("full"), token_bytes=token)]
    if "window" in kinds:
        found.append(
            Layers(
                name=f"window of {window}",
                count=kinds.count("window"),
                token_bytes=size * _per_rank(swa_heads, tp) * (swa_head + swa_value),
                window=window,
            )
        )
    if "state" in kinds:
        found.append(
            Layers(
                name="recurrent state",
                count=kinds.count("state"),
                state_bytes=_state_bytes(config, tp),
            )
        )
    name = "MHA" if shared == heads else "GQA"
    if len({*kinds} - {"none"}) > 1:
        others = {"window": "sliding window", "state": "recurrent"}
        name = " + ".join([name, *(others[kind] for kind in ("window", "state") if kind in kinds)])
    return kvcache.paged(name, found, block=block)


def _head_size(config: Config, heads: int) -> int:
    if config.get("head_dim") is not None:
        return number(config, "head_dim")
    hidden = number(config, "hidden_size", "n_embd")
    if hidden < heads:
        raise _unfit(f"hidden_size is {hidden}, less than its {heads} heads")
    return hidden // heads


def _per_rank(heads: int, tp: int) -> int:
    if heads % tp and tp % heads:
        raise UsageError(
            f"{heads} KV heads can be neither split nor repeated over TP={tp}",
            next_step="give a --tp that divides them or that they divide",
        )
    return max(1, heads // tp)


def kinds_of(config: Config) -> list[str]:
    """The kind of every layer: "full", "window", "state" or "none" (no cache).

    Model families say it in one of these: a list of names (layer_types, layers_block_type), a list
    of 0 and 1 (MiMo-V2's hybrid_layer_pattern, 1 is a window), a string (Nemotron-H), every n-th
    full (full_attention_interval: recurrent between; sliding_window_pattern: windows between), or
    one window for all layers.
    """
    count = layers(config)
    for key in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        if config.get(key):
            return [_kind(str(name)) for name in _listed(config, key)]
    if config.get("hybrid_layer_pattern"):
        return ["window" if flag else "full" for flag in _listed(config, "hybrid_layer_pattern")]
    every = number(config, "full_attention_interval", default=0)
    if every:
        return ["state" if (layer + 1) % every else "full" for layer in range(count)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return ["full"] * count
    every = number(config, "sliding_window_pattern", default=0)
    if every:
        return ["window" if (layer + 1) % every else "full" for layer in range(count)]
    # Qwen2: windows from that layer on.
    first = number(config, "max_window_layers", default=0)
    return ["full" if layer < first else "window" for layer in range(count)]


def _kind(name: str) -> str:
    for kind, words in (("full", _FULL), ("window", _WINDOW), ("state", _STATE), ("none", _NONE)):
        if name in words:
            return kind
    raise UsageError(
        f"config.json has a layer of type {name!r}, which is not known here",
        next_step="take the KV cache size from vLLM's log and put it in the recipe",
    )


def _state_bytes(config: Config, tp: int) -> int:
    """One sequence's recurrent state in one layer on one GPU.

    Gated DeltaNet and Mamba2 keep the last (kernel - 1) inputs of a convolution in the model's
    dtype, and a matrix per head. vLLM's model_executor/layers/mamba/mamba_utils.py.
    """
    plain = kvcache.value_bytes("auto", _dtype(config))
    if config.get("linear_num_value_heads"):
        values = number(config, "linear_num_value_heads")
        keys = number(config, "linear_num_key_heads")
        key, value = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
        channels = 2 * key * keys + value * values
        kernel, matrix = number(config, "linear_conv_kernel_dim", default=4), values * value * key
        default = ""
    else:
        values = number(config, "mamba_num_heads", "mamba_n_heads")
        width = number(config, "mamba_head_dim", "mamba_d_head")
        state = number(config, "ssm_state_size", "mamba_d_state")
        groups = number(config, "n_groups", "mamba_n_groups", default=1)
        # Groups that the ranks cannot share are repeated.
        groups += tp - groups if groups % tp else 0
        channels = values * width + 2 * groups * state
        kernel, matrix = (
            number(config, "conv_kernel", "mamba_d_conv", default=4),
            values * width * state,
        )
        default = "float32" if "hybrid_override_pattern" in config else ""
    if values % tp:
        raise UsageError(
            f"{values} recurrent heads cannot be split over TP={tp}",
            next_step="give a --tp that divides them",
        )
    given = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or default)
    size = Fraction(4) if given == "float32" else plain
    return int((channels * (kernel - 1) * plain + matrix * size) / tp)
