"""DeepSeek V4's output projection on SM12x where the linear layers do without DeepGEMM."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
from tests.witness import portable_tests
from tests.witness.kernels import Gpu, KernelProcess

SWITCH = "VLLM_TRITON_MLA_SPARSE"
PORTABLE = "vllm.v1.attention.backends.mla.portable"
REFERENCE = "vllm.v1.attention.ops.portable_mla.deepgemm_reference"
WRAPPERS = "vllm.utils.deep_gemm"
RECIPES = "vllm.models.deepseek_v4.nvidia.ops.o_proj"
PRELOAD = (WRAPPERS, RECIPES)
# bf16 results.
ROUNDED = 8e-3


def wrappers(
    gpu: Gpu, value: str | None, deep_gemm: bool, capability: tuple[int, int] = (12, 0)
) -> tuple[Any, Any]:
    """torch and vllm.utils.deep_gemm where DeepGEMM computes the linear layers, or does not."""
    torch: Any = importlib.import_module("torch")
    os.environ.pop(SWITCH, None)
    if value is not None:
        os.environ[SWITCH] = value
    gpu.become(capability)
    torch.manual_seed(0)
    module: Any = importlib.import_module(WRAPPERS)
    vars(importlib.import_module(PORTABLE))["is_deep_gemm_supported"] = lambda: deep_gemm
    module._lazy_init = lambda: None
    module._fp8_einsum_impl = lambda *_, **__: "DeepGEMM"
    return torch, module


# ---- what runs where Triton interprets ----


def einsum(gpu: Gpu, value: str | None, e8m0: bool) -> float:
    torch, module = wrappers(gpu, value, False)
    reference: Any = importlib.import_module(REFERENCE)
    a = torch.randn(5, 2, 256).to(torch.float8_e4m3fn)
    # As the layer holds them: not of three dimensions.
    b = torch.randn(2 * 128, 256).to(torch.float8_e4m3fn)
    a_scale, b_scale = torch.rand(5, 2, 2) + 0.5, torch.rand(2, 2) + 0.5
    if e8m0:
        power = torch.tensor([[126, 127], [128, 125]], dtype=torch.uint8)
        b_scale = power.view(torch.float8_e8m0fnu)
    out = torch.zeros(5, 2, 128, dtype=torch.bfloat16)
    recipe = importlib.import_module(RECIPES).compute_fp8_einsum_recipe()[0]
    module.fp8_einsum("bhr,hdr->bhd", (a, a_scale), (b, b_scale), out, recipe=recipe)
    wanted = reference.fp8_einsum_reference(a, a_scale, b, b_scale)
    return float((out.double() - wanted).norm() / wanted.norm())


# ---- what runs where Triton compiles ----


def recipe(gpu: Gpu, capability: list[int], value: str | None, deep_gemm: bool) -> list[Any]:
    wrappers(gpu, value, deep_gemm, (capability[0], capability[1]))
    found = importlib.import_module(RECIPES).compute_fp8_einsum_recipe()
    return [list(found[0]), found[1]]


def other(gpu: Gpu) -> str:
    torch, module = wrappers(gpu, None, False)
    pair = (torch.zeros(1), torch.zeros(1))
    try:
        module.fp8_einsum("bhr,hdr->bhd", pair, pair, torch.zeros(1), recipe=(1, 1, 128))
    except NotImplementedError as problem:
        return str(problem)
    return ""


def with_deep_gemm(gpu: Gpu, value: str | None) -> Any:
    _, module = wrappers(gpu, value, True)
    return module.fp8_einsum("bhr,hdr->bhd", None, None, None, recipe=(1, 1, 128))


# ---- the tests ----


@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.parametrize("value", [None, "1"])
def test_the_output_projection(interpreted: KernelProcess, value: str | None, e8m0: bool) -> None:
    assert interpreted.call(einsum, value=value, e8m0=e8m0) <= ROUNDED


# Rows of 128 with scales in float32, and rows of one with packed scales.
PLAIN, PACKED, HOPPER = [[1, 128, 128], False], [[1, 1, 128], True], [[1, 128, 128], False]


@pytest.mark.parametrize(
    ("capability", "value", "deep_gemm", "wanted"),
    [
        ((12, 0), None, False, PLAIN),
        ((12, 1), "1", False, PLAIN),
        ((12, 0), "0", False, PACKED),
        # wo_a's scales are DeepGEMM's then.
        ((12, 0), "1", True, PACKED),
        ((12, 0), None, True, PACKED),
        ((9, 0), None, True, HOPPER),
        ((9, 0), "1", False, PLAIN),
        ((10, 0), None, False, PACKED),
    ],
)
def test_the_layout_of_scales(
    compiled: KernelProcess,
    capability: tuple[int, int],
    value: str | None,
    deep_gemm: bool,
    wanted: list[Any],
) -> None:
    found = compiled.call(recipe, capability=capability, value=value, deep_gemm=deep_gemm)
    assert found == wanted


def test_a_recipe_without_a_kernel_is_named(compiled: KernelProcess) -> None:
    assert "(1, 1, 128)" in compiled.call(other)


@pytest.mark.parametrize("value", [None, "1"])
def test_deep_gemm_s_linear_layers_keep_its_product(
    compiled: KernelProcess, value: str | None
) -> None:
    assert compiled.call(with_deep_gemm, value=value) == "DeepGEMM"


def test_the_kernels_against_float64(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_block_fp8_einsum.py", tmp_path, interpret=True)


def test_the_kernels_compile_for_sm12x(tree: Path, tmp_path: Path) -> None:
    portable_tests.run(tree, "test_compile_einsum.py", tmp_path, interpret=False)
