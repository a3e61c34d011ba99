"""Packed caches and slot lists for the tests of the sparse attention."""

from __future__ import annotations

import os
from typing import Any

import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# Bytes of a token in ``fp8_ds_mla``, and what a block is padded to.
TOKEN = 584
ALIGNMENT = 576


def pack(
    values: torch.Tensor, power: torch.Tensor, rope: torch.Tensor, tokens: int, padding: int = 0
) -> torch.Tensor:
    """A cache [n / tokens, tokens, 584] of n tokens; what no kernel may use is garbage.

    ``values`` [n, 448] uint8 (e4m3), ``power`` [n, 7] uint8 (UE8M0), ``rope`` [n, 64] bfloat16.
    """
    n = values.shape[0]
    blocks = n // tokens
    size = -(-tokens * TOKEN // ALIGNMENT) * ALIGNMENT + padding
    raw = torch.full((blocks, size), 0xFF, dtype=torch.uint8)
    data = torch.cat([values, rope.contiguous().view(torch.uint8).reshape(n, 128)], 1)
    raw[:, : tokens * 576] = data.reshape(blocks, tokens * 576)
    unused = torch.full((n, 1), 255, dtype=torch.uint8)
    scales = torch.cat([power, unused], 1).reshape(blocks, tokens * 8)
    raw[:, tokens * 576 : tokens * TOKEN] = scales
    return torch.as_strided(raw.to(DEVICE), (blocks, tokens, TOKEN), (size, TOKEN, 1))


def cache(
    blocks: int, tokens: int, seed: int, low: int = 120, high: int = 124, padding: int = 0
) -> torch.Tensor:
    """A cache of normal values with scales 2**(low - 127) .. 2**(high - 127)."""
    generator = torch.Generator().manual_seed(seed)
    n = blocks * tokens
    values = torch.randn(n, 448, generator=generator) * 60
    e4m3 = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    power = torch.randint(low, high + 1, (n, 7), generator=generator).to(torch.uint8)
    rope = torch.randn(n, 64, generator=generator).to(torch.bfloat16)
    return pack(e4m3, power, rope, tokens, padding)


def integers(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32).to(DEVICE)


def draw(low: int, high: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return integers(torch.randint(low, high, shape, generator=generator))


def queries(tokens: int, heads: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, 512, generator=generator).to(torch.bfloat16).to(DEVICE)


def sinks(heads: int, seed: int) -> torch.Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
