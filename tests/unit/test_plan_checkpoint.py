"""Checkpoints: config.json, the index, and the headers of the files."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_plan_kvcache import DEEPSEEK_V4_FLASH, DEEPSEEK_V4_PRO, LLAMA_3_8B

from sm12x.core.errors import BadFileError
from sm12x.core.text import GIB
from sm12x.plan import checkpoint

SMALL = {**LLAMA_3_8B, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}


def index_only(folder: Path, config: Mapping[str, Any], total: int) -> checkpoint.Checkpoint:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": {"a": "model-1.safetensors"}})
    )
    return checkpoint.read(folder)


def with_files(folder: Path, tensors: Mapping[str, int]) -> checkpoint.Checkpoint:
    """A checkpoint whose files have headers and none of the data."""
    (folder / "config.json").write_text(json.dumps(SMALL))
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, size in tensors.items():
            if files[name] == file:
                header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
                at += size
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text)
    return checkpoint.read(folder)


@pytest.mark.parametrize(
    ("config", "total", "tp", "logged"),
    [
        # 148 GiB; vllm#40899 and #41834 at TP=2: "Model loading took 74.8 GiB memory".
        (DEEPSEEK_V4_FLASH, 148 * GIB, 2, 74.8),
        # "Checkpoint size: 805.33 GiB" and "Model loading took 102.39 GiB", vllm#40899, TP=8.
        (DEEPSEEK_V4_PRO, int(805.33 * GIB), 8, 102.39),
    ],
)
def test_weights_per_gpu_are_what_vllm_logs(
    tmp_path: Path, config: Mapping[str, Any], total: int, tp: int, logged: float
) -> None:
    """The draft layers in the checkpoint and load-time padding are the rest of the difference."""
    found = checkpoint.weights(index_only(tmp_path, config, total), tp=tp)

    assert found.total / GIB == pytest.approx(logged, rel=0.03)
    assert not found.exact


def test_the_17_gib_of_the_four_gpu_recipe_are_not_the_checkpoint_s(tmp_path: Path) -> None:
    """17 GiB per GPU are reported at TP=4; 148 GiB of checkpoint do not go into 4 x 17.

    A quarter is 37, and 74.8 are logged at TP=2. The budget is the same either way, as vLLM fills
    utilization x memory; the host copies are not: 152 GiB instead of 68.
    """
    found = checkpoint.weights(index_only(tmp_path, DEEPSEEK_V4_FLASH, 148 * GIB), tp=4)

    assert found.total / GIB == pytest.approx(37.9, abs=0.1)


def test_headers_tell_apart_what_is_split_and_what_is_whole(tmp_path: Path) -> None:
    read = with_files(
        tmp_path,
        {
            "model.embed_tokens.weight": 800,
            "model.layers.0.self_attn.q_proj.weight": 400,
            "model.layers.0.self_attn.k_proj.weight": 200,
            "model.layers.0.mlp.gate_proj.weight": 400,
            "model.layers.0.mlp.gate.weight": 7,
            "model.layers.0.input_layernorm.weight": 5,
            "model.layers.1.self_attn.q_a_proj.weight": 11,
            "model.layers.1.self_attn.indexer.wq_b.weight": 13,
            "model.layers.2.mlp.down_proj.weight": 1000,
            "mtp.0.head.weight": 1000,
        },
    )
    one, four = checkpoint.weights(read, tp=1), checkpoint.weights(read, tp=4)

    assert (one.split, one.whole, one.draft, one.exact) == (1800, 36, 2000, True)
    # Two KV heads on four ranks: each lies on two of them.
    assert (four.split, four.whole) == ((800 + 400 + 400) / 4 + 200 * 2 / 4, 36)
    assert read.total == 3836


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    with_files(tmp_path, {"model.norm.weight": 8})
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model-0.safetensors").rename(tmp_path / "model.safetensors")

    assert checkpoint.read(tmp_path).total == 8


def test_terms_say_how_they_are_known(tmp_path: Path) -> None:
    read = index_only(tmp_path, DEEPSEEK_V4_FLASH, 148 * GIB)

    weights = checkpoint.weights_term(read, tp=4)
    kv = checkpoint.kv_term(
        read, tp=4, kv_dtype="fp8", tokens=131072, sequences=12, chunk=8192, block=None
    )

    assert weights.basis == kv.basis == "estimated"
    assert "total_size of its index" in weights.source
    assert str(kv.amount) == "6.3-9.6"
    assert "the same on every rank" in kv.source
    assert "12 x 131072 tokens" in kv.source


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, r"config\.json cannot be read"),
        ({"config.json": "{"}, r"config\.json:1: not JSON"),
        ({"config.json": "[]"}, r"config\.json is not a table"),
        ({"config.json": "{}"}, "has neither"),
        ({"config.json": "{}", "model.safetensors.index.json": "{}"}, "no weight_map"),
        (
            {"config.json": "{}", "model.safetensors.index.json": '{"weight_map": {"a": "b"}}'},
            "no metadata.total_size",
        ),
        ({"config.json": "{}", "model.safetensors": "tiny"}, "is not a safetensors file"),
        ({"config.json": "{}", "model.safetensors": "x" * 100}, "is not a safetensors file"),
    ],
)
def test_a_spoilt_checkpoint_is_one_error(
    tmp_path: Path, files: Mapping[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    with pytest.raises(BadFileError, match=said):
        checkpoint.read(tmp_path)


def test_a_key_that_is_null_is_as_one_left_out(tmp_path: Path) -> None:
    plain = checkpoint.weights(index_only(tmp_path, SMALL, GIB), tp=2)
    null = {**SMALL, "quantization_config": None, "layer_types": None, "num_experts": None}
    assert checkpoint.weights(index_only(tmp_path, null, GIB), tp=2) == plain


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**12},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"num_key_value_heads": "2"},
        {"num_key_value_heads": [2, 2]},
        {"hidden_size": 1},
        {"head_dim": -64},
        {"head_dim": 10**30},
        {"layer_types": ["full_attention"]},
        {"layer_types": {"a": 1}},
        {"layer_types": ["mlp", "mlp"]},
        {"hybrid_override_pattern": 5},
        {"hybrid_layer_pattern": [1]},
        {"full_attention_interval": "4"},
        {"sliding_window": 128, "sliding_window_pattern": -1},
        {"compress_ratios": 5},
        {"compress_ratios": ["x", "x"]},
        {"compress_ratios": [[4], [4]]},
        {"compress_ratios": [4]},
    ],
    ids=str,
)
def test_a_config_with_a_strange_value_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    found = index_only(tmp_path, {**SMALL, **wrong}, GIB)
    with pytest.raises(BadFileError, match=f"{[*wrong][-1]}|layers"):
        checkpoint.kv_term(found, tp=2, kv_dtype="auto", tokens=1, sequences=1, chunk=1)


@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"a": {"9" * 5000}}}'], ids=["deep", "long"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_python_cannot_hold_is_refused(tmp_path: Path, name: str, text: str) -> None:
    index_only(tmp_path, SMALL, GIB)
    (tmp_path / name).write_text(text)
    with pytest.raises(BadFileError, match=name):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize("metadata", [None, [], {"total_size": True}, {"total_size": 10**400}])
def test_an_index_without_a_size_is_refused(tmp_path: Path, metadata: object) -> None:
    index_only(tmp_path, SMALL, GIB)
    text = json.dumps({"metadata": metadata, "weight_map": {"a": "a\0b"}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadFileError, match="total_size"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    "described", [1, {}, *({"data_offsets": one} for one in (None, [5, 1], ["x", "y"], [0, 1, 2]))]
)
def test_a_tensor_without_a_size_is_refused(tmp_path: Path, described: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    text = json.dumps({"a": described}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(BadFileError, match="a has no data_offsets"):
        checkpoint.read(tmp_path)
