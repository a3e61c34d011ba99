"""A small DeepSeek V4.1 with random weights, text alone: python -m tests.gpu.deepseek_v41 DIR

Layer by layer it is what vLLM 0.33.0 reads of DeepSeek-V4.1-Flash: 64 heads of 512, a window of 128
tokens, caches that keep every token and every second one, which several layers share, an indexer of
32 heads, MXFP4 experts, and FP8 in blocks of 32 x 32 with powers of two as scales. It has fewer
layers and experts, a vocabulary of bytes, no tables of n-grams, no pictures and no draft.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.gpu import deepseek_v4

from sm12x.runtime import tiny

if TYPE_CHECKING:
    import torch

# What the attention of a layer reads besides its window: nothing, every second token or every one.
RATIOS = (0, 2, 2, 1, 2, 1, 1, 1)
# Layers that write a cache, which those behind them read, and layers with an indexer of their own.
# The second of two stages of a pipeline begins at layer 4: one that writes a cache, but not the
# last such, where 0.33.0 fails, and with caches of the same kinds as the first (vllm#54711).
KV_SOURCES = (1, 3, 4, 5)
INDEX_SOURCES = (1, 3, 4, 5, 7)
OF_V4 = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "qk_rope_head_dim"),
    *("o_lora_rank", "o_groups", "sliding_window", "compress_rope_theta", "rope_theta"),
    *("rope_scaling", "index_head_dim", "index_topk", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "scoring_func"),
    *("topk_method", "routed_scaling_factor", "swiglu_limit", "hidden_act", "hc_mult"),
    *("hc_sinkhorn_iters", "hc_eps", "rms_norm_eps", "expert_dtype", "max_position_embeddings"),
)
TEXT: dict[str, Any] = {
    **{name: deepseek_v4.CONFIG[name] for name in OF_V4},
    "num_hidden_layers": len(RATIOS),
    "q_lora_rank": 1280,
    "compress_ratios": list(RATIOS),
    "kv_source_layer_ids": list(KV_SOURCES),
    "index_source_layer_ids": list(INDEX_SOURCES),
    "candidate_source_layer_id": -1,
    "index_n_heads": 32,
    "num_hash_layers": 0,
    "num_nextn_predict_layers": 0,
}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "quantization_config": {
        **deepseek_v4.CONFIG["quantization_config"],
        "weight_block_size": [32, 32],
    },
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


class Weights(deepseek_v4.Weights):
    """Draws the tensors of one checkpoint."""

    block = 32

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        config = self._config
        vocabulary, hidden = config["vocab_size"], config["hidden_size"]
        yield "embed.weight", self._normal(vocabulary, hidden)
        for layer in range(config["num_hidden_layers"]):
            for name, tensor in self._layer(layer):
                yield f"layers.{layer}.{name}", tensor
        yield "norm.weight", self._ones(hidden)
        yield "head.weight", self._matrix(vocabulary, hidden)
        for name in ("start", "end", "newline"):
            # Loaded without the encoder of pictures, too.
            yield f"image_{name}", self._normal(hidden, dtype=self._torch.float32)

    def _sparse(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        config = self._config
        width, index = config["head_dim"], config["index_head_dim"]
        if layer in KV_SOURCES:
            yield from self._pooling("attn.compressor", config["compress_ratios"][layer], width)
        if layer in INDEX_SOURCES:
            rank, heads = config["q_lora_rank"], config["index_n_heads"]
            yield from self._blocks("attn.indexer.wq_b", heads * index, rank)
            yield "attn.indexer.weights_proj.weight", self._matrix(heads, config["hidden_size"])
        if layer in KV_SOURCES:
            yield "attn.indexer.wk.weight", self._matrix(index, width)
            yield "attn.indexer.k_norm.weight", self._ones(index)

    def _pooling(self, name: str, ratio: int, width: int) -> Iterator[tuple[str, torch.Tensor]]:
        hidden = self._config["hidden_size"]
        yield f"{name}.wkv.weight", self._matrix(width, hidden)
        if ratio > 1:
            yield f"{name}.wgate.weight", self._matrix(width, hidden)
        yield f"{name}.norm.weight", self._ones(width)

    def _gate(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Every token has the same experts: a rounding error must not choose another one."""
        experts, hidden = self._config["n_routed_experts"], self._config["hidden_size"]
        yield "ffn.gate.weight", 0 * self._normal(experts, hidden)
        yield "ffn.gate.bias", 0.1 * self._normal(experts, dtype=self._torch.float32)


def make(folder: Path, *, experts: int = 32, device: str = "cuda", seed: int = 0) -> None:
    """Write config, tokenizer (bytes) and weights, 4 GiB for 32 experts."""
    from safetensors.torch import save_file

    tiny.make(folder)
    path = folder / "config.json"
    told = json.loads(path.read_text())
    text = {**TEXT, "n_routed_experts": experts, "vocab_size": 512}
    ends = {name: told[name] for name in ("eos_token_id", "pad_token_id")}
    path.write_text(json.dumps({**CONFIG, **ends, "text_config": text}, indent=1))
    tensors = {name: tensor.cpu() for name, tensor in Weights(text, device, seed).all()}
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
