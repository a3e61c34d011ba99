"""What DeepSeek V4 calls DeepGEMM for, on SM12x, for which DeepGEMM has no kernel."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from tests.witness import portable_tests
from tests.witness.deepseek_v4 import MODULES, prepare
from tests.witness.kernels import SM12X_SHARED, SM90_SHARED, Gpu, KernelProcess

INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
REFERENCE = "vllm.v1.attention.ops.portable_mla.deepgemm_reference"
PRELOAD = MODULES
# fp8 products of the indexer and sums in fp32; bf16 results.
EXACT, ROUNDED = 1e-4, 8e-3


def wrappers(gpu: Gpu) -> tuple[Any, Any, Any]:
    """torch, vllm.utils.deep_gemm and the references, on a 12.0 without DeepGEMM."""
    torch: Any = importlib.import_module("torch")
    prepare()
    gpu.become((12, 0))
    torch.manual_seed(0)
    module: Any = importlib.import_module("vllm.utils.deep_gemm")
    assert not module.has_deep_gemm(), "DeepGEMM is installed: this shows nothing"
    return torch, module, importlib.import_module(REFERENCE)


def error(got: Any, wanted: Any) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


# ---- what runs where Triton interprets ----


def einsum(gpu: Gpu) -> float:
    torch, module, reference = wrappers(gpu)
    a = torch.randn(5, 2, 256).to(torch.float8_e4m3fn)
    b = torch.randn(2, 128, 256).to(torch.float8_e4m3fn)
    a_scale, b_scale = torch.rand(5, 2, 2) + 0.5, torch.rand(2, 1, 2) + 0.5
    out = torch.zeros(5, 2, 128, dtype=torch.bfloat16)
    module.fp8_einsum("bhr,hdr->bhd", (a, a_scale), (b, b_scale), out, recipe=(1, 128, 128))
    return error(out, reference.fp8_einsum_reference(a, a_scale, b, b_scale))


def other_einsum(gpu: Gpu) -> str:
    torch, module, _ = wrappers(gpu)
    pair = (torch.zeros(1), torch.zeros(1))
    try:
        module.fp8_einsum("bhr,hdr->bhd", pair, pair, torch.zeros(1), recipe=(1, 1, 128))
    except NotImplementedError as problem:
        return str(problem)
    return ""


def flat_logits(gpu: Gpu) -> list[float]:
    torch, module, reference = wrappers(gpu)
    q = torch.randn(7, 64, 128).to(torch.float8_e4m3fn)
    k = torch.randn(90, 128).to(torch.float8_e4m3fn)
    scale, weights = torch.rand(90) + 0.1, torch.randn(7, 64)
    ks = torch.zeros(7, dtype=torch.int32)
    ke = torch.arange(30, 100, 10, dtype=torch.int32)
    got = module.fp8_fp4_mqa_logits((q, None), (k, scale), weights, ks, ke, clean_logits=True)
    wanted = reference.mqa_logits_reference(q, k, scale, weights, ks, ke)
    inside = wanted.isfinite()
    assert (got.isfinite() == inside).all()
    return [error(got[inside], wanted[inside])]


def paged_logits(gpu: Gpu, next_n: int) -> float:
    torch, module, reference = wrappers(gpu)
    requests, length = 2, 150
    q = torch.randn(requests, next_n, 64, 128).to(torch.float8_e4m3fn)
    cache = reference.encode_indexer_cache(
        torch.randn(8, 64, 128).to(torch.float8_e4m3fn), torch.rand(8, 64) + 0.1
    )
    weights = torch.randn(requests * next_n, 64)
    lens = torch.tensor([[140] * next_n, [65] * next_n], dtype=torch.int32)
    table = torch.tensor([[3, 0, 7], [1, 5, 2]], dtype=torch.int32)
    got = module.fp8_fp4_paged_mqa_logits(
        (q, None),
        cache.unsqueeze(-2) if cache.dim() == 3 else cache,
        weights,
        lens,
        table,
        torch.empty(0),
        max_model_len=length,
        clean_logits=True,
    )
    wanted = reference.paged_mqa_logits_reference(q, cache, weights, lens, table, length)
    inside = wanted.isfinite()
    assert (got.isfinite() == inside).all()
    return error(got[inside], wanted[inside])


def mxfp4(gpu: Gpu) -> str:
    torch, module, _ = wrappers(gpu)
    some = torch.zeros(1)
    try:
        module.fp8_fp4_mqa_logits((some, some), (some, some), some, some, some, False)
    except NotImplementedError as problem:
        return str(problem)
    return ""


def prenorm(gpu: Gpu) -> list[float]:
    torch, module, reference = wrappers(gpu)
    x, fn = torch.randn(5, 512).to(torch.bfloat16), torch.randn(24, 512)
    out, sums = torch.full((3, 5, 24), 7.0), torch.full((3, 5), 7.0)
    module.tf32_hc_prenorm_gemm(x, fn, out, sums, 3)
    wanted, squares = reference.hc_prenorm_reference(x, fn)
    return [error(out.sum(0), wanted), error(sums.sum(0), squares)]


# ---- what runs where Triton compiles ----


def indexer_starts(gpu: Gpu) -> bool:
    torch, _, _ = wrappers(gpu)
    module: Any = importlib.import_module(INDEXER)
    kind = module.SparseAttnIndexer
    # What a custom operator asks of the configuration is not the point.
    kind.__mro__[1].__init__ = lambda self: torch.nn.Module.__init__(self)
    kind(None, 128, "ue8m0", 512, 128, 1024, 4096, torch.zeros(1))
    return True


def topk_fits(gpu: Gpu, columns: int, shared: int, value: str | None) -> bool:
    torch: Any = importlib.import_module("torch")
    prepare()
    import os
    from types import SimpleNamespace

    if value is not None:
        os.environ["VLLM_TRITON_MLA_SPARSE"] = value
    gpu.become((12, 0), shared=shared)
    portable: Any = importlib.import_module("vllm.v1.attention.backends.mla.portable")
    portable.device_limits = lambda _: SimpleNamespace(sm_count=188, shared_memory=shared)
    fits: bool = portable.persistent_topk_fits(torch.empty(1, columns, device="meta"))
    return fits


# ---- the tests ----


def test_the_output_projection(interpreted: KernelProcess) -> None:
    assert interpreted.call(einsum) <= ROUNDED


def test_a_recipe_without_a_kernel_is_named(interpreted: KernelProcess) -> None:
    assert "(1, 1, 128)" in interpreted.call(other_einsum)


def test_logits_of_gathered_keys(interpreted: KernelProcess) -> None:
    assert max(interpreted.call(flat_logits)) <= EXACT


@pytest.mark.parametrize("next_n", [1, 3])
def test_logits_of_paged_keys(interpreted: KernelProcess, next_n: int) -> None:
    assert interpreted.call(paged_logits, next_n=next_n) <= EXACT


def test_mxfp4_queries_are_refused(interpreted: KernelProcess) -> None:
    assert "use_fp4_indexer_cache" in interpreted.call(mxfp4)


def test_the_norm_of_hyper_connections(interpreted: KernelProcess) -> None:
    assert max(interpreted.call(prenorm)) <= EXACT


def test_the_indexer_starts_without_deep_gemm(compiled: KernelProcess) -> None:
    assert compiled.call(indexer_starts)


@pytest.mark.parametrize(
    ("columns", "shared", "value", "fits"),
    [
        (32768, SM12X_SHARED, None, True),
        (32769, SM12X_SHARED, None, False),
        (262144, SM12X_SHARED, None, False),
        (262144, SM12X_SHARED, "0", True),
        (262144, SM90_SHARED, "1", True),
    ],
)
def test_top_k_of_wide_rows(
    compiled: KernelProcess, columns: int, shared: int, value: str | None, fits: bool
) -> None:
    assert compiled.call(topk_fits, columns=columns, shared=shared, value=value) == fits


@pytest.mark.parametrize(
    "name", ["test_indexer_logits.py", "test_block_fp8_einsum.py", "test_hc_prenorm.py"]
)
def test_the_kernels_against_float64(tree: Path, tmp_path: Path, name: str) -> None:
    portable_tests.run(tree, name, tmp_path, interpret=True)


def test_every_configuration_compiles_for_sm12x(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_compile.py", tmp_path, interpret=False)
