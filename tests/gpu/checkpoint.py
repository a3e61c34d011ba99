"""Random weights for a configuration, as a checkpoint: python -m tests.gpu.checkpoint DIR

DIR has the config.json of a model that transformers knows, and gets its weights, drawn as
transformers draws those of a new model. `--load-format dummy` would not do: with values of at most
0.001, norms among them, the layers add nothing to the embedding of the last token, and an answer
is the same whatever they hold. With FP8 and blocks in the configuration the projections of the
layers are stored so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Each tensor's copies on the host and the GPU are at most of this size.
SHARD = "2GB"
RANK = 8


def make(folder: Path, *, device: str = "cuda", seed: int = 0) -> None:
    """Write the weights; config.json stays as it is."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = folder / "config.json"
    told = path.read_text(encoding="utf-8")
    config = json.loads(told)
    quantization = config.pop("quantization_config", None)
    # The weights are drawn for a configuration without.
    path.write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16
        )
    # As large as what a layer adds. With transformers' 0.02 the text is one token again and again.
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    model.save_pretrained(folder, max_shard_size=SHARD)
    path.write_text(told, encoding="utf-8")
    if quantization:
        rows, columns = quantization["weight_block_size"]
        for shard in folder.glob("*.safetensors"):
            in_fp8(shard, rows, columns, device)


def in_fp8(shard: Path, rows: int, columns: int, device: str) -> None:
    """Store the layers' projections of one file in FP8, each with a scale per block."""
    from safetensors.torch import load_file, save_file

    tensors = dict[str, "torch.Tensor"]()
    for name, tensor in load_file(shard, device=device).items():
        is_projection = name.endswith("_proj.weight")
        tensors |= blocks(name, tensor, rows, columns) if is_projection else {name: tensor}
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, shard)


def blocks(name: str, weight: torch.Tensor, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """One matrix as e4m3, by rows x columns, and the float32 scale that each block times."""
    import torch

    height, width = weight.shape
    parts = weight.float().view(height // rows, rows, width // columns, columns)
    scales = parts.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    packed = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(height, width)
    return {name: packed, f"{name}_scale_inv": scales}


def make_adapter(base: Path, folder: Path, *, seed: int = 0) -> None:
    """Write a LoRA adapter of rank RANK for the queries of each layer of ``base``, as PEFT does."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        # As large as the queries of the layer themselves: the text is another one.
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=drawn) * 0.02
        tensors[f"{name}.lora_B.weight"] = torch.randn(heads, RANK, generator=drawn)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {
        "peft_type": "LORA",
        "base_model_name_or_path": f"{base}",
        "bias": "none",
        "lora_alpha": RANK,
        "r": RANK,
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
