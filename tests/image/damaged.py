"""Folders of models with damaged files, each made of a seed: for what the verb `plan` reads."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# What stands in the place of a value: other types, and numbers that no model has.
_VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "nonsense", [], {}, [[]], {"a": {}}, ["full_attention"] * 3),
    *(0, -1, 1, 3, 7, 10**6, 10**9, 2**31, 2**63, 10**18, -(10**18)),
    *(0.0, -0.5, 1e-300, 1e300, float("nan"), float("inf")),
    *("../../etc/passwd", "a" * 100_000, "\x00", "{model}", "bfloat16"),
)
# Sizes that decide how much is built: damaged more often than others.
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "max_position_embeddings",
    "sliding_window",
)
_CODE = "open('/tmp/ran', 'w').write('ran')\nprint('own code runs')\nraise SystemExit(77)\n"


def write(folder: Path, config: dict[str, Any], seed: int) -> str:
    """Write a model's folder with one to three damages, and return what they are."""
    # S311: a seed that gives the same damages again, nothing secret.
    rng = random.Random(seed)  # noqa: S311
    folder.mkdir()
    config = json.loads(json.dumps(config))
    files: dict[str, bytes] = {}
    names = [_damage(rng, config, files) for _ in range(rng.randint(1, 3))]
    text = json.dumps(config, indent=1).encode()
    if rng.random() < 0.05:
        names.append("truncated")
        text = text[: rng.randrange(len(text))]
    files.setdefault("config.json", text)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return ", ".join(names)


def _damage(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    kinds: Sequence[tuple[int, Callable[..., str]]] = (
        (5, _replace),
        (4, _size),
        (3, _remove),
        (1, _nest),
        (1, _quantization),
        (1, _architecture),
        (1, _own_code),
        (1, _weights),
        (1, _other_file),
    )
    (kind,) = rng.choices([one for _, one in kinds], [weight for weight, _ in kinds])
    return kind(rng, config, files)


def _place(rng: random.Random, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return a table of the configuration, and one of its keys."""
    tables = [config, *(part for part in config.values() if isinstance(part, dict) and part)]
    table = rng.choice(tables)
    return table, rng.choice([*table])


def _replace(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    table, key = _place(rng, config)
    table[key] = rng.choice(_VALUES)
    return f"{key} = {str(table[key])[:30]!r}"


def _size(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    inner = config.get("text_config")
    table = inner if isinstance(inner, dict) else config
    key = rng.choice([name for name in _SIZES if name in table] or [*table])
    table[key] = rng.choice([value for value in _VALUES if isinstance(value, int)])
    return f"{key} = {table[key]}"


def _remove(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    table, key = _place(rng, config)
    if len(config) > 1:
        del table[key]
    return f"no {key}"


def _nest(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    depth = rng.choice((2, 50, 400))
    table = config
    for _ in range(depth):
        table["text_config"] = {"model_type": config.get("model_type")}
        table = table["text_config"]
    return f"text_config nested {depth} times"


def _quantization(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    method = rng.choice(("fp8", "modelopt", "compressed-tensors", "awq", "mxfp4", "no_such"))
    config["quantization_config"] = {"quant_method": method, "bits": rng.choice(_VALUES)}
    return f"quantization {method}"


def _architecture(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    names = ("LlamaForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "No", "os.system")
    config["architectures"] = [rng.choice(names)]
    return f"architecture {config['architectures'][0]}"


def _own_code(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    config["model_type"] = rng.choice((config.get("model_type"), "own_type"))
    files["own.py"] = _CODE.encode()
    return "code of its own"


def _weights(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    header = rng.choice(
        (
            struct.pack("<Q", 2 << 40) + b"{}",
            struct.pack("<Q", 2) + b"[]",
            b"abc",
            struct.pack("<Q", 30) + b'{"a": {"data_offsets": [5, 1]}}'[:30],
        )
    )
    if rng.random() < 0.5:
        files["model.safetensors"] = header
        return "damaged header"
    index = rng.choice((b"{", b"[]", b'{"weight_map": {"a": "../../x"}}', b'{"weight_map": 7}'))
    files["model.safetensors.index.json"] = index
    return "damaged index"


def _other_file(rng: random.Random, config: dict[str, Any], files: dict[str, bytes]) -> str:
    name = rng.choice(
        ("generation_config.json", "hf_quant_config.json", "tokenizer_config.json", "params.json")
    )
    files[name] = rng.choice((b"", b"{", b"[]", b"\xff\xfe", b'{"quantization": 7}', b"null"))
    return f"damaged {name}"
