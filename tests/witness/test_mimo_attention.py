"""MiMo-V2's attention on SM12x, whose FlashAttention is version 2: no sinks, one head size.

Its K has heads of 192 values and its V of 128, and half of its layers have sinks.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from tests.witness.kernels import Gpu, KernelProcess

MODULE = "vllm.model_executor.models.mimo_v2"
PRELOAD = (MODULE,)
HEADS, KV_HEADS, K_SIZE, V_SIZE = 4, 2, 192, 128


def attend(q: Any, k: Any, v: Any) -> Any:
    """[T, heads, size of V] float64: causal softmax attention."""
    torch: Any = importlib.import_module("torch")
    tokens = q.shape[0]
    q = q.double().view(tokens, HEADS, K_SIZE)
    k = k.double().view(tokens, KV_HEADS, K_SIZE).repeat_interleave(HEADS // KV_HEADS, 1)
    v = v.double().view(tokens, KV_HEADS, -1).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * K_SIZE**-0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v)


def layer(gpu: Gpu, version: int, v_size: int, cuda: bool) -> tuple[Any, dict[str, Any]]:
    """The release's layer between stand-ins, and what it asked of the attention."""
    torch: Any = importlib.import_module("torch")
    gpu.become((12, 0))
    module: Any = importlib.import_module(MODULE)
    asked: dict[str, Any] = {}

    class Attention(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, heads: int, size: int, scale: float, **options: Any) -> None:
            super().__init__()
            asked.update(options)

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            asked["v"] = v.shape[-1] // KV_HEADS
            return attend(q, k, v).flatten(1)

    class Linear(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, *_: Any, **options: Any) -> None:
            super().__init__()

        def forward(self, given: Any) -> Any:
            return given, None

    replaced = {
        "Attention": Attention,
        "QKVParallelLinear": Linear,
        "RowParallelLinear": Linear,
        "get_rope": lambda **_: lambda positions, q, k: (q, k),
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_flash_attn_version": lambda *_, **__: version,
    }
    vars(module).update(replaced)
    if not cuda:
        platforms: Any = importlib.import_module("vllm.platforms")
        type(platforms.current_platform).is_cuda = lambda self: False
    made = module.MiMoV2Attention(
        1024,
        HEADS,
        KV_HEADS,
        K_SIZE,
        v_head_dim=v_size,
        v_scale=0.5,
        sliding_window_size=128,
        add_swa_attention_sink_bias=True,
        prefix="model.layers.0.self_attn",
    )
    return made, asked


# ---- what runs in the tree ----


def outcome(gpu: Gpu, version: int, v_size: int = V_SIZE, cuda: bool = True) -> list[Any]:
    """Head size of V that the attention is asked for and given, its backend, and the error."""
    torch: Any = importlib.import_module("torch")
    made, asked = layer(gpu, version, v_size, cuda)
    torch.manual_seed(0)
    tokens = 7
    given = torch.randn(tokens, HEADS * K_SIZE + KV_HEADS * (K_SIZE + v_size))
    out = made(torch.arange(tokens), given)
    q, k, v = given.split([HEADS * K_SIZE, KV_HEADS * K_SIZE, KV_HEADS * v_size], dim=-1)
    wanted = attend(q, k, v * 0.5).flatten(1)
    backend = asked["attn_backend"]
    error = float((out - wanted).norm() / wanted.norm()) if out.shape == wanted.shape else -1.0
    return [
        asked["head_size_v"],
        asked["v"],
        backend.get_name() if backend else "",
        asked["sinks"] is not None,
        0 <= error < 1e-6,
    ]


# ---- what the layer is to do ----


def test_v_is_padded_where_version_2_is_all(compiled: KernelProcess) -> None:
    assert compiled.call(outcome, version=2) == [K_SIZE, K_SIZE, "", True, True]


@pytest.mark.guard
@pytest.mark.parametrize("version", [3, 4])
def test_versions_3_and_4_keep_their_backend(compiled: KernelProcess, version: int) -> None:
    wanted = [V_SIZE, V_SIZE, "FLASH_ATTN_DIFFKV", True, True]
    assert compiled.call(outcome, version=version) == wanted


@pytest.mark.guard
def test_one_head_size_needs_no_padding(compiled: KernelProcess) -> None:
    assert compiled.call(outcome, version=2, v_size=K_SIZE) == [K_SIZE, K_SIZE, "", True, True]


@pytest.mark.guard
def test_other_platforms_keep_their_backend(compiled: KernelProcess) -> None:
    wanted = [V_SIZE, V_SIZE, "FLASH_ATTN_DIFFKV", True, True]
    assert compiled.call(outcome, version=2, cuda=False) == wanted
