"""A small DeepSeek V4 with random weights, as a checkpoint: python -m tests.gpu.deepseek_v4 DIR

Layer by layer it has the widths of DeepSeek-V4-Flash: 64 heads of 512, a window of 128 tokens,
compression by 4 with an indexer and by 128 without, MXFP4 experts, FP8 blocks with powers of two as
scales. It has fewer layers and experts, and a vocabulary of bytes. `--load-format dummy` would not
do: it leaves the experts of the hashed layers unset and draws scales that are no powers of two.
One layer more drafts tokens (MTP).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm12x.runtime import tiny

if TYPE_CHECKING:
    import torch

BLOCK = 128
# Values that share a scale in MXFP4.
GROUP = 32
CONTEXT = 65536
# What the attention of a layer reads besides its window: nothing, or 4 or 128 tokens in one.
RATIOS = (0, 0, 4, 128, 4, 128)
# The layer that predicts one token more (MTP) follows the others, and reads its window alone.
DRAFT_RATIO = 0
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [*RATIOS, DRAFT_RATIO],
    "num_nextn_predict_layers": 1,
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": CONTEXT,
    },
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    # The last layer alone is routed by its input: with random weights a rounding error that
    # chooses another expert changes all that follows. Where layers are spread over pipeline stages,
    # those that are routed by a table must be in the first one.
    "num_hash_layers": int(os.environ.get("SM12X_HASH_LAYERS", "5")),
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "max_position_embeddings": CONTEXT,
}


class Weights:
    """Draws the tensors of one checkpoint. Rows are outputs, columns are inputs."""

    block = BLOCK

    def __init__(self, config: dict[str, Any], device: str, seed: int) -> None:
        import torch

        self._torch = torch
        self._config = config
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def all(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with the name that the release looks for, one layer after the other."""
        config = self._config
        vocabulary, hidden = config["vocab_size"], config["hidden_size"]
        yield "embed.weight", self._normal(vocabulary, hidden)
        for layer in range(config["num_hidden_layers"]):
            for name, tensor in self._layer(layer):
                yield f"layers.{layer}.{name}", tensor
        yield from self._head()
        for name, tensor in self._draft():
            yield f"mtp.0.{name}", tensor

    def _head(self) -> Iterator[tuple[str, torch.Tensor]]:
        hidden, streams = self._config["hidden_size"], self._config["hc_mult"]
        yield from self._mixer("hc_head", streams, streams, 1)
        yield "norm.weight", self._ones(hidden)
        yield "head.weight", self._matrix(self._config["vocab_size"], hidden)

    def _draft(self) -> Iterator[tuple[str, torch.Tensor]]:
        hidden = self._config["hidden_size"]
        yield "emb.tok_emb.weight", self._normal(self._config["vocab_size"], hidden)
        for name in ("enorm", "hnorm"):
            yield f"{name}.weight", self._ones(hidden)
        for name in ("e_proj", "h_proj"):
            yield from self._blocks(name, hidden, hidden)
        yield from self._layer(self._config["num_hidden_layers"])
        yield from self._head()

    def _layer(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        config, torch = self._config, self._torch
        hidden, heads, width = config["hidden_size"], config["num_attention_heads"], 512
        rank, groups = config["q_lora_rank"], config["o_groups"]
        joined = groups * config["o_lora_rank"]
        for name in ("hc_attn", "hc_ffn"):
            # Into the layer, out of it, and one stream into another.
            streams = config["hc_mult"]
            yield from self._mixer(name, (2 + streams) * streams, streams, 3)
        yield "attn_norm.weight", self._ones(hidden)
        yield "ffn_norm.weight", self._ones(hidden)
        yield "attn.attn_sink", self._normal(heads, dtype=torch.float32)
        yield "attn.q_norm.weight", self._ones(rank)
        yield "attn.kv_norm.weight", self._ones(width)
        yield from self._blocks("attn.wq_a", rank, hidden)
        yield from self._blocks("attn.wkv", width, hidden)
        yield from self._blocks("attn.wq_b", heads * width, rank)
        yield from self._blocks("attn.wo_a", joined, heads * width // groups)
        yield from self._blocks("attn.wo_b", hidden, joined)
        yield from self._sparse(layer)
        yield from self._experts(layer)

    def _sparse(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What compresses the tokens that a layer reads, and chooses among them."""
        config = self._config
        ratio, width = config["compress_ratios"][layer], config["head_dim"]
        if ratio:
            yield from self._compressor("attn.compressor", ratio, width)
        if ratio == 4:
            hidden, rank = config["hidden_size"], config["q_lora_rank"]
            index, heads = config["index_head_dim"], config["index_n_heads"]
            yield from self._blocks("attn.indexer.wq_b", heads * index, rank)
            yield "attn.indexer.weights_proj.weight", self._matrix(heads, hidden)
            yield from self._compressor("attn.indexer.compressor", ratio, index)

    def _compressor(self, name: str, ratio: int, width: int) -> Iterator[tuple[str, torch.Tensor]]:
        # With a ratio of 4 two windows overlap, each with its half of the columns.
        columns = 2 * width if ratio == 4 else width
        hidden = self._config["hidden_size"]
        yield f"{name}.ape", 0.1 * self._normal(ratio, columns, dtype=self._torch.float32)
        yield f"{name}.wkv.weight", self._matrix(columns, hidden)
        yield f"{name}.wgate.weight", self._matrix(columns, hidden)
        yield f"{name}.norm.weight", self._ones(width)

    def _experts(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        config = self._config
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        yield from self._gate(layer)
        for name, rows, columns in (
            ("w1", inner, hidden),
            ("w2", hidden, inner),
            ("w3", inner, hidden),
        ):
            yield from self._blocks(f"ffn.shared_experts.{name}", rows, columns)
            for expert in range(config["n_routed_experts"]):
                yield from self._nibbles(f"ffn.experts.{expert}.{name}", rows, columns)

    def _gate(self, layer: int) -> Iterator[tuple[str, torch.Tensor]]:
        config, torch = self._config, self._torch
        experts, chosen = config["n_routed_experts"], config["num_experts_per_tok"]
        yield "ffn.gate.weight", self._matrix(experts, config["hidden_size"])
        if layer < config["num_hash_layers"]:
            # Each token has its own experts, no two of them alike.
            order = torch.rand(
                config["vocab_size"], experts, generator=self._generator, device=self._device
            ).argsort(dim=1)
            yield "ffn.gate.tid2eid", order[:, :chosen].to(torch.int32).contiguous()
        else:
            yield "ffn.gate.bias", 0.1 * self._normal(experts, dtype=torch.float32)

    def _mixer(
        self, name: str, rows: int, streams: int, scales: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        torch = self._torch
        columns = streams * self._config["hidden_size"]
        yield f"{name}_fn", self._normal(rows, columns, dtype=torch.float32) / math.sqrt(columns)
        yield f"{name}_base", 0.5 * self._normal(rows, dtype=torch.float32)
        yield f"{name}_scale", torch.full((scales,), 0.5, device=self._device)

    def _blocks(self, name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
        """A matrix of FP8 (e4m3), and the scale of each ``block`` x ``block`` of it."""
        torch = self._torch
        yield f"{name}.weight", self._normal(rows, columns).to(torch.float8_e4m3fn)
        yield f"{name}.scale", self._scales(rows // self.block, columns // self.block, columns, 1.0)

    def _nibbles(self, name: str, rows: int, columns: int) -> Iterator[tuple[str, torch.Tensor]]:
        """A matrix of FP4 (e2m1), two values per byte, and the scale of each 32 in a row."""
        torch = self._torch
        shape = (rows, columns // 2)
        packed = torch.randint(
            0, 256, shape, generator=self._generator, device=self._device, dtype=torch.uint8
        )
        yield f"{name}.weight", packed
        # The root mean square of e2m1's 16 values.
        yield f"{name}.scale", self._scales(rows, columns // GROUP, columns, 2.92)

    def _scales(self, rows: int, columns: int, inputs: int, size: float) -> torch.Tensor:
        """Powers of two: products with ``inputs`` values of ``size`` are about 1."""
        torch = self._torch
        middle = 127 + round(math.log2(1 / (size * math.sqrt(inputs))))
        exponents = torch.randint(
            middle - 1,
            middle + 2,
            (rows, columns),
            generator=self._generator,
            device=self._device,
            dtype=torch.uint8,
        )
        return exponents.view(torch.float8_e8m0fnu)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        return self._normal(rows, columns) / math.sqrt(columns)

    def _ones(self, size: int) -> torch.Tensor:
        return self._torch.ones(size, dtype=self._torch.bfloat16, device=self._device)

    def _normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        torch = self._torch
        return torch.randn(
            *shape,
            generator=self._generator,
            device=self._device,
            dtype=dtype or torch.bfloat16,
        )


def make(folder: Path, *, experts: int = 32, device: str = "cuda", seed: int = 0) -> None:
    """Write config, tokenizer (bytes) and weights, 13 GiB for 256 experts, 3 GiB for 32."""
    from safetensors.torch import save_file

    tiny.make(folder)
    path = folder / "config.json"
    told = json.loads(path.read_text())
    # Rows that every kernel of the release can split.
    config = {**CONFIG, "n_routed_experts": experts, "vocab_size": 512}
    config |= {name: told[name] for name in ("eos_token_id", "pad_token_id")}
    path.write_text(json.dumps(config, indent=1))
    tensors = {name: tensor.cpu() for name, tensor in Weights(config, device, seed).all()}
    save_file(tensors, folder / "model.safetensors")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
