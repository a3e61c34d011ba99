"""The sparse indexer's logits on SM12x where DeepGEMM computes none: pages of 128 entries."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness import portable_tests
from tests.witness.kernels import Gpu, KernelProcess

SWITCH = "VLLM_TRITON_MLA_SPARSE"
PORTABLE = "vllm.v1.attention.backends.mla.portable"
REFERENCE = "vllm.v1.attention.ops.portable_mla.deepgemm_reference"
WRAPPERS = "vllm.utils.deep_gemm"
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
PRELOAD = (WRAPPERS,)
# fp8 products and fp32 sums.
EXACT = 1e-4


def wrappers(
    gpu: Gpu, value: str | None, installed: bool, capability: tuple[int, int] = (12, 0)
) -> tuple[Any, Any]:
    """torch and vllm.utils.deep_gemm on a device where DeepGEMM is ``installed``, or is not."""
    torch: Any = importlib.import_module("torch")
    os.environ.pop(SWITCH, None)
    if value is not None:
        os.environ[SWITCH] = value
    gpu.become(capability)
    torch.manual_seed(0)
    module: Any = importlib.import_module(WRAPPERS)
    # The untouched release has no such module; the guards run there, too.
    with contextlib.suppress(ModuleNotFoundError):
        vars(importlib.import_module(PORTABLE))["has_deep_gemm"] = lambda: installed
    # What DeepGEMM is asked for is recorded by the name of its function.
    module._lazy_init = lambda: None
    for name in ("mqa_logits", "paged_mqa_logits"):
        setattr(module, f"_fp8_fp4_{name}_impl", lambda *_, name=name, **__: f"DeepGEMM {name}")
    module._get_paged_mqa_logits_metadata_impl = lambda *_, **__: "DeepGEMM schedule"
    return torch, module


def error(got: Any, wanted: Any) -> float:
    inside = wanted.isfinite()
    return float((got.double() - wanted)[inside].norm() / wanted[inside].norm())


# ---- what runs where Triton interprets ----


def flat(gpu: Gpu, value: str | None, installed: bool) -> float:
    """Of two requests, as a chunk of prefill has them: each row begins in column 0."""
    torch, module = wrappers(gpu, value, installed)
    reference: Any = importlib.import_module(REFERENCE)
    q = torch.randn(7, 32, 128).to(torch.float8_e4m3fn)
    k = torch.randn(90, 128).to(torch.float8_e4m3fn)
    scale, weights = torch.rand(90) + 0.1, torch.randn(7, 32)
    ks = torch.tensor([0, 0, 0, 50, 50, 50, 50], dtype=torch.int32)
    ke = torch.tensor([48, 49, 50, 87, 88, 89, 90], dtype=torch.int32)
    got = module.fp8_fp4_mqa_logits((q, None), (k, scale), weights, ks, ke, 50)
    assert got.shape == (7, 50)
    return error(got, reference.mqa_logits_reference(q, k, scale, weights, ks, ke, 50))


def paged(gpu: Gpu, page: int, next_n: int, value: str | None, installed: bool) -> float:
    torch, module = wrappers(gpu, value, installed)
    reference: Any = importlib.import_module(REFERENCE)
    q = torch.randn(2, next_n, 32, 128).to(torch.float8_e4m3fn)
    values = torch.randn(8, page, 128).to(torch.float8_e4m3fn)
    cache = reference.encode_indexer_cache(values, torch.rand(8, page) + 0.1)
    weights = torch.randn(2 * next_n, 32)
    lens = torch.tensor([[140] * next_n, [2 * page + 1] * next_n], dtype=torch.int32)
    table = torch.tensor([[3, 0, 7], [1, 5, 2]], dtype=torch.int32)
    schedule = module.get_paged_mqa_logits_metadata(lens, page, 48)
    assert schedule.shape == (49, 2)
    assert schedule.dtype == torch.int32
    got = module.fp8_fp4_paged_mqa_logits(
        (q, None), cache, weights, lens, table, schedule, max_model_len=300
    )
    wanted = reference.paged_mqa_logits_reference(q, cache, weights, lens, table, 300)
    assert got.shape == wanted.shape
    return error(got, wanted)


# ---- what runs where Triton compiles ----


def choices(
    gpu: Gpu, capability: list[int], value: str | None, installed: bool
) -> dict[str, bool | str]:
    """What the logits of gathered keys, and of pages of each size, are computed with."""
    _, module = wrappers(gpu, value, installed, (capability[0], capability[1]))
    found: dict[str, bool | str] = {}
    for page in (None, 32, 64, 128):
        try:
            found[str(page)] = module._portable_logits(page) is not None
        except ValueError as problem:
            found[str(page)] = str(problem)
    return found


def stock(gpu: Gpu, capability: list[int], page: int) -> list[str]:
    """What answers where the portable kernels are not asked."""
    torch, module = wrappers(gpu, None, True, (capability[0], capability[1]))
    lens = torch.zeros(2, 1, dtype=torch.int32)
    cache = torch.zeros(2, page, 1, 132, dtype=torch.uint8)
    some = torch.zeros(1)
    return [
        module.fp8_fp4_mqa_logits((some, None), (some, some), some, some, some, 1),
        module.get_paged_mqa_logits_metadata(lens, page, 48),
        module.fp8_fp4_paged_mqa_logits((some, None), cache, some, lens, lens, some, 1),
    ]


def mxfp4(gpu: Gpu) -> str:
    torch, module = wrappers(gpu, "1", True)
    some = torch.zeros(1)
    try:
        module.fp8_fp4_mqa_logits((some, some), (some, some), some, some, some, 1)
    except NotImplementedError as problem:
        return str(problem)
    return ""


def indexer_starts(gpu: Gpu, value: str | None) -> str:
    """What the indexer's constructor does where DeepGEMM is not installed."""
    torch, _ = wrappers(gpu, value, False)
    module: Any = importlib.import_module(INDEXER)
    module.has_deep_gemm = lambda: False
    parallel = SimpleNamespace(
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pcp_shard_decode_requests=False,
    )
    kernel = SimpleNamespace(sparse_indexer_topk_backend="auto", enable_jit_warmup=False)
    config = SimpleNamespace(parallel_config=parallel, kernel_config=kernel)
    module.get_current_vllm_config = lambda: config
    kind = module.SparseAttnIndexer
    # What a custom operator asks of the configuration is not the point.
    kind.__mro__[1].__init__ = lambda self: torch.nn.Module.__init__(self)
    try:
        kind(None, 128, "ue8m0", 512, 128, 1024, 4096, torch.zeros(1))
    except RuntimeError as problem:
        return str(problem)
    return ""


# ---- the tests ----


@pytest.mark.parametrize(("value", "installed"), [("1", True), (None, False)])
def test_rows_of_gathered_keys_begin_in_column_0(
    interpreted: KernelProcess, value: str | None, installed: bool
) -> None:
    assert interpreted.call(flat, value=value, installed=installed) <= EXACT


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize(
    ("page", "value", "installed"),
    [(128, None, True), (32, None, True), (64, "1", True), (64, None, False)],
)
def test_pages(
    interpreted: KernelProcess, page: int, value: str | None, installed: bool, next_n: int
) -> None:
    found = interpreted.call(paged, page=page, next_n=next_n, value=value, installed=installed)
    assert found <= EXACT


@pytest.mark.parametrize(
    ("capability", "value", "installed", "wanted"),
    [
        ((12, 0), None, True, [False, True, False, True]),
        ((12, 1), None, True, [False, True, False, True]),
        ((12, 1), "", False, [True] * 4),
        ((12, 0), "1", True, [True] * 4),
        ((12, 0), "0", False, [False] * 4),
        ((9, 0), None, True, [False] * 4),
        ((9, 0), None, False, [False] * 4),
        ((9, 0), "1", True, [True] * 4),
        ((10, 0), None, True, [False] * 4),
        ((10, 3), "0", True, [False] * 4),
    ],
)
def test_which_pages_are_served(
    compiled: KernelProcess,
    capability: tuple[int, int],
    value: str | None,
    installed: bool,
    wanted: list[bool],
) -> None:
    found = compiled.call(choices, capability=capability, value=value, installed=installed)
    assert list(found.values()) == wanted


def test_10_x_is_refused(compiled: KernelProcess) -> None:
    found = compiled.call(choices, capability=(10, 0), value="1", installed=True)
    assert all(SWITCH in said and "10.x" in said for said in found.values())


def test_a_bad_value_is_refused(compiled: KernelProcess) -> None:
    found = compiled.call(choices, capability=(12, 0), value="2", installed=True)
    assert all(SWITCH in said and "0 or 1" in said for said in found.values())


@pytest.mark.guard
@pytest.mark.parametrize(
    ("capability", "page"), [((9, 0), 64), ((9, 0), 32), ((10, 0), 64), ((12, 0), 64)]
)
def test_deep_gemm_answers_otherwise(
    compiled: KernelProcess, capability: tuple[int, int], page: int
) -> None:
    found = compiled.call(stock, capability=capability, page=page)
    assert found == ["DeepGEMM mqa_logits", "DeepGEMM schedule", "DeepGEMM paged_mqa_logits"]


def test_mxfp4_queries_are_refused(compiled: KernelProcess) -> None:
    assert "indexer_kv_dtype" in compiled.call(mxfp4)


def test_the_indexer_starts_without_deep_gemm(compiled: KernelProcess) -> None:
    assert compiled.call(indexer_starts, value=None) == ""


@pytest.mark.guard
def test_the_indexer_needs_deep_gemm_where_this_is_off(compiled: KernelProcess) -> None:
    assert "DeepGEMM" in compiled.call(indexer_starts, value="0")


def test_the_kernels_against_float64(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_logits.py", tmp_path, interpret=True)


def test_the_kernels_compile_for_sm12x(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_compile_logits.py", tmp_path, interpret=False)
