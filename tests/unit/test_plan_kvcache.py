"""The KV cache of real models against published figures; each case names its source."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest

from sm12x.core.errors import BadFileError, UsageError
from sm12x.core.text import GIB
from sm12x.plan import modelconfig
from sm12x.plan.kvcache import Layers, paged

KIB = 1024

# The attention part of each config.json.
GPT2_XL = {
    "num_attention_heads": 25, "num_hidden_layers": 48, "hidden_size": 1600, "dtype": "bfloat16",
}  # fmt: skip
LLAMA_3_8B = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_3_70B = {
    **LLAMA_3_8B,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "hidden_size": 8192,
}
QWEN_25_72B = {**LLAMA_3_70B, "sliding_window": 131072, "use_sliding_window": False}
LLAMA_31_405B = {
    **LLAMA_3_8B, "num_attention_heads": 128, "num_hidden_layers": 126, "hidden_size": 16384,
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V32 = {**DEEPSEEK_V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
GLM_51_DENSE = {**DEEPSEEK_V3, "num_attention_heads": 64, "num_hidden_layers": 78}
DEEPSEEK_V4_FLASH = {
    "num_attention_heads": 64, "num_key_value_heads": 1, "num_hidden_layers": 43, "head_dim": 512,
    "hidden_size": 4096, "q_lora_rank": 1024, "index_head_dim": 128, "index_n_heads": 64,
    "n_routed_experts": 256, "hc_mult": 4, "sliding_window": 128,
    # Two of the window alone, then 4 and 128 in turn, and the draft layer's.
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0], "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
DEEPSEEK_V4_PRO = {
    **DEEPSEEK_V4_FLASH, "num_attention_heads": 128, "num_hidden_layers": 61, "hidden_size": 7168,
    "q_lora_rank": 1536, "n_routed_experts": 384,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
}  # fmt: skip
QWEN3_NEXT = {
    "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 48,
    "hidden_size": 2048, "head_dim": 256, "full_attention_interval": 4,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
MIMO_V2_FLASH = {
    "num_attention_heads": 64, "num_key_value_heads": 4, "num_hidden_layers": 48,
    "hidden_size": 4096, "head_dim": 192, "v_head_dim": 128, "swa_num_key_value_heads": 8,
    "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window": 128,
    "hybrid_layer_pattern": [0, *([1] * 4), 0, *([*([1] * 5), 0] * 7)],
    "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN38_27B = {
    "num_attention_heads": 24, "num_key_value_heads": 4, "num_hidden_layers": 64,
    "hidden_size": 5120, "head_dim": 256, "full_attention_interval": 4,
    "linear_num_value_heads": 48, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32",
    "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_H = {
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 8, "head_dim": 128,
    "hidden_size": 4096, "hybrid_override_pattern": "M-M*-MM-", "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype", "published"),
    [
        # Raschka, LLM Architecture Gallery, "KV cache / token (bf16)", in KiB.
        pytest.param(GPT2_XL, "auto", 300, id="GPT-2 XL, MHA, Raschka: 300 KiB"),
        pytest.param(LLAMA_3_8B, "auto", 128, id="Llama 3 8B, GQA, Raschka: 128 KiB"),
        pytest.param(DEEPSEEK_V3, "auto", 68.6, id="DeepSeek V3, MLA, Raschka: 68.6 KiB"),
        # "Insights into DeepSeek-V3", arXiv 2505.09343, table 1, in KB of 1000 bytes.
        pytest.param(DEEPSEEK_V3, "auto", 70.272e3 / KIB, id="DeepSeek V3: 70.272 KB"),
        pytest.param(QWEN_25_72B, "auto", 327.68e3 / KIB, id="Qwen2.5-72B: 327.680 KB"),
        pytest.param(LLAMA_31_405B, "auto", 516.096e3 / KIB, id="Llama 3.1 405B: 516.096 KB"),
        # 2 x 80 layers x 8 heads x 128 x 2 bytes, draft-calabria-bmwg-ai-fabric-inference-bench,
        # appendix: 1,342,177,280 bytes for 4096 tokens.
        pytest.param(LLAMA_3_70B, "auto", 1_342_177_280 / 4096 / KIB, id="Llama 3 70B: 320 KiB"),
        # Model card of 0xSero/GLM-5.1-478B-A42B-REAP-NVFP4: fp8 pool of 11.3 GiB holds 270k tokens
        # (with the sparse index off).
        pytest.param(GLM_51_DENSE, "fp8", 11.3 * GIB / 270_000 / KIB, id="GLM-5.1: 11.3 GiB"),
    ],
)
def test_bytes_of_a_token_are_the_published_ones(
    config: dict[str, Any], dtype: str, published: float
) -> None:
    found = modelconfig.layout(config, tp=1, kv_dtype=dtype)

    assert found.token_bytes / KIB == pytest.approx(published, rel=0.002)


@pytest.mark.parametrize(
    ("config", "tokens", "published"),
    [
        # "The exact KV cache usage of DeepSeek V4", LocalLLaMA, May 2026: GiB at that length, bf16.
        (DEEPSEEK_V3, 131072, 8.58),
        (DEEPSEEK_V3, 1 << 20, 68.63),
        (DEEPSEEK_V4_FLASH, 131072, 0.84),
        (DEEPSEEK_V4_FLASH, 1 << 20, 6.72),
        (DEEPSEEK_V4_PRO, 131072, 1.20),
        # vllm.ai/blog/deepseek-v4: 9.62 GiB per sequence in bf16 at one million tokens.
        (DEEPSEEK_V4_PRO, 1 << 20, 9.62),
    ],
)
def test_bytes_of_a_long_sequence_are_the_published_ones(
    config: dict[str, Any], tokens: int, published: float
) -> None:
    found = modelconfig.layout(config, tp=1, kv_dtype="bfloat16")

    assert found.token_bytes * tokens / GIB == pytest.approx(published, abs=0.01)


def test_deepseek_v4_takes_584_bytes_an_entry_and_132_an_index_entry() -> None:
    """21 layers keep one of each for 4 tokens, 20 layers one entry for 128."""
    found = modelconfig.layout(DEEPSEEK_V4_FLASH, tp=4, kv_dtype="fp8")

    assert found.token_bytes == 21 * (584 + 132) / 4 + 20 * 584 / 128
    assert found.replicated


def test_deepseek_v4_in_vllm_s_blocks_is_what_its_log_says() -> None:
    """vllm#41834: "Available KV cache memory: 9.15 GiB", "1.32x" at 1,048,576 tokens, TP=2, fp8.

    That is 6.93 GiB for one sequence. Here 21 layers are padded to 22, which that branch did not
    do: 5 % more.
    """
    found = modelconfig.layout(DEEPSEEK_V4_FLASH, tp=2, kv_dtype="fp8")

    assert found.gib(tokens=1 << 20, sequences=1, chunk=8192) == pytest.approx(
        9.15 / 1.32, rel=0.06
    )


def test_the_seven_gib_of_the_four_gpu_recipe_are_twelve_sequences_and_a_prompt_being_read() -> (
    None
):
    """facts: "KV cache about 7 GiB per GPU (max_model_len 131072, max_num_seqs 12, FP8)"."""
    found = modelconfig.layout(DEEPSEEK_V4_FLASH, tp=4, kv_dtype="fp8")

    resting = found.gib(tokens=131072, sequences=12)
    reading = found.gib(tokens=131072, sequences=12, chunk=8192)

    assert (round(resting, 1), round(reading, 1)) == (6.3, 9.6)
    assert found.gib(tokens=131072, sequences=12, chunk=2048) == pytest.approx(7, rel=0.03)


def test_sparse_mla_takes_656_bytes_and_an_index_entry_in_fp8() -> None:
    narrow = modelconfig.layout(DEEPSEEK_V32, tp=8, kv_dtype="fp8")
    wide = modelconfig.layout(DEEPSEEK_V32, tp=8)

    assert narrow.token_bytes == 61 * (656 + 132)
    assert wide.token_bytes == 61 * (1152 + 132)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_mla_is_the_same_on_every_rank(tp: int) -> None:
    found = modelconfig.layout(DEEPSEEK_V3, tp=tp)

    assert found.replicated
    assert found.token_bytes == 61 * 576 * 2


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_kv_heads_are_split_and_then_repeated(tp: int, heads: int) -> None:
    found = modelconfig.layout(LLAMA_3_70B, tp=tp, kv_dtype="fp8")

    assert found.token_bytes == 80 * 2 * heads * 128


def test_hybrid_layers_keep_a_state_instead_of_tokens() -> None:
    """Qwen3-Next: 12 of 48 layers attend (24 KiB per token in bf16), 36 keep a state.

    State of a layer: convolution 3 x 8192 values and 32 heads of 128 x 128, bf16.
    """
    found = modelconfig.layout(QWEN3_NEXT, tp=1)

    assert found.token_bytes == 24 * KIB
    assert found.attention == "GQA + recurrent"
    # One sequence: 12 layers a block; the states are 36 / 12 = 3 blocks, whatever the length.
    full, state = found.groups
    assert state.layers.count == 36
    assert state.layers.state_bytes == 2 * (3 * 8192 + 32 * 128 * 128)
    assert (state.tables, state.blocks(100), state.blocks(100_000)) == (3, 3, 3)
    # vLLM's log at TP=1: "Setting attention block size to 544 tokens to ensure that attention page
    # size is >= mamba page size", "Padding mamba page size by 1.49%".
    assert full.block_tokens == 544
    page = found.block_bytes / 12
    assert page / (2 * (3 * 8192 + 32 * 128 * 128)) == pytest.approx(1.0149, abs=5e-5)


def test_the_blocks_of_a_hybrid_model_are_as_many_as_its_log_says() -> None:
    """vllm#49064, comment of 2026-09-03: 161 blocks in 3.86 GiB, Qwen3.8-27B at TP=2.

    The thread has 48 gated DeltaNet and 16 attention layers; sizes of heads are Qwen3.6-27B's.
    """
    found = modelconfig.layout(QWEN38_27B, tp=2)

    assert found.recurrent
    assert found.block_bytes == 16 * 784 * 2 * 2 * 256 * 2
    assert int(3.86 * GIB / found.block_bytes) == 161
    assert not modelconfig.layout(DEEPSEEK_V4_FLASH, tp=2).recurrent
    assert not modelconfig.layout(MIMO_V2_FLASH, tp=2).recurrent


def test_sliding_window_layers_stop_growing() -> None:
    """MiMo-V2-Flash: 9 of 48 layers keep everything, "nearly 6x" less than all (its paper)."""
    found = modelconfig.layout(MIMO_V2_FLASH, tp=4, kv_dtype="fp8")
    everywhere = {**MIMO_V2_FLASH, "hybrid_layer_pattern": [0] * 48}
    whole = modelconfig.layout(everywhere, tp=4, kv_dtype="fp8")

    assert found.token_bytes == 9 * 1 * (192 + 128)
    assert found.gib(tokens=1 << 18, sequences=1) * 5 < whole.gib(tokens=1 << 18, sequences=1)
    full, window = found.groups
    assert window.blocks(1 << 10) == window.blocks(1 << 18) < window.blocks(1 << 18, 8192)
    assert full.blocks(1 << 18) == 256 * full.blocks(1 << 10)


def test_the_block_of_a_mamba2_model_is_what_its_log_says() -> None:
    """vllm#24280: "672 tokens for nvidia/NVIDIA-Nemotron-Nano-9B-v2", whose state was bf16 then."""
    nano = {**NEMOTRON_H, "mamba_head_dim": 80, "mamba_ssm_cache_dtype": "bfloat16"}

    assert modelconfig.layout(nano, tp=1).groups[0].block_tokens == 672


def test_mamba2_states_are_split_over_the_ranks() -> None:
    one, four = (
        next(
            group.layers
            for group in modelconfig.layout(NEMOTRON_H, tp=tp).groups
            if group.layers.state_bytes
        )
        for tp in (1, 4)
    )

    # Convolution 3 x (8192 + 2 x 8 x 128) in bf16, matrices 128 x 64 x 128 in fp32; 4 such layers.
    assert one.count == four.count == 4
    assert one.state_bytes == 3 * (8192 + 2048) * 2 + 128 * 64 * 128 * 4
    assert four.state_bytes == one.state_bytes / 4


@pytest.mark.parametrize(
    ("extra", "kinds"),
    [
        ({}, "ffffff"),
        ({"sliding_window": 4096}, "wwwwww"),
        ({"sliding_window": 4096, "use_sliding_window": False}, "ffffff"),
        ({"sliding_window": 4096, "max_window_layers": 4}, "ffffww"),
        ({"sliding_window": 4096, "sliding_window_pattern": 6}, "wwwwwf"),
        ({"layer_types": ["linear_attention", "full_attention"] * 3}, "sfsfsf"),
        ({"layers_block_type": ["mamba"] * 5 + ["attention"]}, "sssssf"),
        ({"hybrid_override_pattern": "MEM*E-"}, "snsfnn"),
        ({"full_attention_interval": 3}, "ssfssf"),
    ],
)
def test_every_way_to_say_what_a_layer_is(extra: dict[str, Any], kinds: str) -> None:
    found = modelconfig.kinds_of({"num_hidden_layers": 6, **extra})

    assert "".join(kind[0] for kind in found) == kinds


def test_a_multi_modal_config_is_read_where_the_language_model_is() -> None:
    outer = {"torch_dtype": "bfloat16", "text_config": {**LLAMA_3_8B, "torch_dtype": None}}

    assert modelconfig.layout({**outer}, tp=1).token_bytes == 128 * KIB


@pytest.mark.parametrize(
    ("config", "tp", "said"),
    [
        (LLAMA_3_8B, 3, "32 attention heads cannot be split over TP=3"),
        ({**LLAMA_3_8B, "num_attention_heads": 48, "num_key_value_heads": 8}, 6, "8 KV heads"),
        ({**LLAMA_3_8B, "layer_types": ["rwkv"] * 32}, 1, "'rwkv'"),
        ({**LLAMA_3_8B, "linear_attn_config": {}}, 1, "Kimi Delta Attention"),
        ({**LLAMA_3_8B, "torch_dtype": "int3"}, 1, "'int3'"),
        ({"num_attention_heads": 32, "num_hidden_layers": 2}, 1, "no hidden_size"),
        ({"architectures": ["Adapter"]}, 1, "no num_attention_heads"),
        ({**DEEPSEEK_V4_FLASH, "compress_ratios": [4, 8]}, 1, "compress_ratios has 2 entries"),
        ({**QWEN3_NEXT, "linear_num_value_heads": 2}, 4, "2 recurrent heads"),
    ],
)
def test_what_cannot_be_computed_is_said(config: dict[str, Any], tp: int, said: str) -> None:
    with pytest.raises((BadFileError, UsageError), match=said):
        modelconfig.layout(config, tp=tp)


def test_layers_of_one_kind_share_one_table() -> None:
    found = paged("MLA", [Layers(name="a", count=4, token_bytes=Fraction(10))])

    assert found.gib(tokens=32, sequences=1) * GIB == 32 * 4 * 10
    assert found.gib(tokens=33, sequences=1) * GIB == 48 * 4 * 10


STRANGE: tuple[object, ...] = (
    None,
    0,
    -1,
    1,
    3,
    10**30,
    1e300,
    0.5,
    True,
    "",
    "12",
    "auto",
    [],
    [4],
    [None],
    {},
)


@pytest.mark.parametrize("seed", range(4))
def test_no_config_ends_in_anything_but_a_layout_or_an_error(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    models = [model for name, model in globals().items() if name.isupper() and _is_model(model)]
    laid_out = 0
    for _ in range(1000):
        config = dict(draw.choice(models))
        for _ in range(draw.randint(1, 3)):
            config[draw.choice([*config])] = draw.choice(STRANGE)
        try:
            layout = modelconfig.layout(config, tp=draw.choice((1, 2, 4)), kv_dtype="fp8")
            size = layout.gib(tokens=8192, sequences=3)
        except (BadFileError, UsageError):
            continue
        laid_out += 1
        assert 0 < size < float("inf")
    assert laid_out > 50


def _is_model(value: object) -> bool:
    return isinstance(value, dict) and "num_hidden_layers" in value
