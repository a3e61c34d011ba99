"""The hyper-connection of DeepSeek V4's first layer, without DeepGEMM.

There all residual streams are the embedding, so the release projects one of them by the sum of the
streams' weights, and asks DeepGEMM for that whether it is there or not: a server on SM12x with
VLLM_USE_DEEP_GEMM=0 ends in its profiling run. Every other layer's projection is TileLang's then.

TileLang needs a GPU: its two kernels have stand-ins here. The projection's checks the shapes that
the real one declares.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
from tests.witness.kernels import Gpu, KernelProcess

KERNELS = "vllm.model_executor.kernels.mhc.tilelang_kernels"
TILELANG = "vllm.model_executor.kernels.mhc.tilelang"
DEEP_GEMM = "vllm.utils.deep_gemm"
TOKENS, HIDDEN, STREAMS = 3, 64, 4
OUTPUTS = STREAMS * (2 + STREAMS)
PRELOAD = (TILELANG, DEEP_GEMM)


class Stand:
    """TileLang's kernels and DeepGEMM's call: which ran, and what the next step was given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.product: Any = None
        self.squares: Any = None

    def _project(self, name: str, x: Any, fn: Any, out: Any, squares: Any) -> None:
        self.calls.append(name)
        out.zero_()
        squares.zero_()
        out[0] = x.float() @ fn.T
        squares[0] = x.float().square().sum(-1)

    def by_tilelang(
        self, x: Any, fn: Any, out: Any, squares: Any, hidden: int, streams: int
    ) -> None:
        assert x.shape[1] == fn.shape[1] == hidden * streams
        assert out.shape[0] == squares.shape[0] == 1
        self._project("tilelang", x, fn, out, squares)

    def by_deep_gemm(self, x: Any, fn: Any, out: Any, squares: Any, splits: int) -> None:
        assert out.shape[0] == squares.shape[0] == splits
        self._project("deep_gemm", x, fn, out, squares)

    def fuse(self, product: Any, squares: Any, *rest: Any, **more: Any) -> None:
        self.product, self.squares = product.sum(0), squares.sum(0)


def projected(gpu: Gpu, *, deep_gemm: bool) -> list[Any]:
    """What projected, and how far product and sums of squares are from float64's at most."""
    torch: Any = importlib.import_module("torch")
    stand = Stand()
    kernels: Any = types.ModuleType(KERNELS)
    kernels.compute_num_split = lambda block, width, grid: 2
    kernels._HC_PRENORM_GEMM_TILELANG_KERNEL = stand.by_tilelang
    kernels._MHC_PRE_BIG_FUSE_TILELANG_KERNEL = stand.fuse
    sys.modules[KERNELS] = kernels
    library: Any = importlib.import_module(DEEP_GEMM)
    library.is_deep_gemm_supported = lambda: deep_gemm
    if deep_gemm:
        library.tf32_hc_prenorm_gemm = stand.by_deep_gemm
    torch.manual_seed(0)
    embedding = torch.randn(TOKENS, HIDDEN).to(torch.bfloat16)
    weights = torch.randn(OUTPUTS, STREAMS * HIDDEN)
    summed = weights.view(OUTPUTS, STREAMS, HIDDEN).sum(1)
    importlib.import_module(TILELANG).mhc_pre_broadcast_tilelang(
        embedding,
        weights,
        torch.ones(3),
        torch.zeros(OUTPUTS),
        rms_eps=1e-6,
        hc_pre_eps=1e-6,
        hc_sinkhorn_eps=1e-6,
        hc_post_mult_value=2.0,
        sinkhorn_repeat=1,
        norm_weight=torch.ones(HIDDEN, dtype=torch.bfloat16),
        fn_broadcast=summed,
    )
    exact = embedding.double().repeat(1, STREAMS) @ weights.double().T
    squares = embedding.double().square().sum(-1)
    return [
        stand.calls,
        float((stand.product - exact).abs().max()),
        float((stand.squares - squares).abs().max()),
    ]


# ---- what the first layer is to do ----


def test_without_deepgemm_tilelang_projects_the_one_stream(compiled: KernelProcess) -> None:
    calls, product, squares = compiled.call(projected, deep_gemm=False)
    assert calls == ["tilelang"]
    assert product < 1e-3
    assert squares < 1e-3


@pytest.mark.guard
def test_with_deepgemm_it_is_asked(compiled: KernelProcess) -> None:
    calls, product, squares = compiled.call(projected, deep_gemm=True)
    assert calls == ["deep_gemm"]
    assert product < 1e-3
    assert squares < 1e-3
