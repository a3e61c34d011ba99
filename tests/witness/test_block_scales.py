"""Scales of FP8 blocks that are powers of two (E8M0), for kernels that take float32 alone.

DeepSeek V4 has such scales. On SM12x, where DeepGEMM has no kernel, its linear layers go to
CUTLASS, and the first of them fails.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from tests.witness.kernels import Gpu, KernelProcess

KERNELS = "vllm.model_executor.kernels.linear"
QUANT = "vllm.model_executor.layers.quantization.utils.quant_utils"
OUTPUTS, INPUTS, BLOCK = 256, 384, 128
PRELOAD = (KERNELS, QUANT)


def linear(gpu: Gpu, name: str) -> Any:
    """A kernel of the release for block-quantized FP8 on a 12.0: the named class, or its choice."""
    torch: Any = importlib.import_module("torch")
    gpu.become((12, 0))
    kernels: Any = importlib.import_module(KERNELS)
    quant: Any = importlib.import_module(QUANT)
    chosen = getattr(kernels, name, None) if name else None
    config: Any = importlib.import_module("vllm.config")
    with config.set_current_vllm_config(config.VllmConfig()):
        return kernels.init_fp8_linear_kernel(
            activation_quant_key=quant.kFp8Dynamic128Sym,
            weight_quant_key=quant.kFp8Static128BlockSym,
            weight_shape=(OUTPUTS, INPUTS),
            input_dtype=torch.bfloat16,
            out_dtype=torch.bfloat16,
            force_kernel=chosen,
        )


def exponents() -> Any:
    """[2, 3] uint8, both ends of E8M0's numbers among them."""
    torch: Any = importlib.import_module("torch")
    return torch.tensor([[1, 127, 254], [119, 0, 130]], dtype=torch.uint8)


def loaded(gpu: Gpu, name: str, *, e8m0: bool) -> Any:
    """A layer whose weights have been through the kernel's processing after the load."""
    torch: Any = importlib.import_module("torch")
    layer = torch.nn.Module()
    weight = torch.randn(OUTPUTS, INPUTS).to(torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    scale = exponents().view(torch.float8_e8m0fnu)
    if not e8m0:
        scale = torch.rand(2, 3)
    layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    layer.weight_block_size = [BLOCK, BLOCK]
    layer.before = scale.clone()
    layer.kernel = linear(gpu, name)
    layer.kernel.process_weights_after_loading(layer)
    return layer


# ---- what runs in the tree ----


def choice(gpu: Gpu) -> str:
    return type(linear(gpu, "")).__name__


def decoded(gpu: Gpu, name: str) -> list[Any]:
    """Type of the scales that the kernel will be given, and whether each is exactly its power."""
    torch: Any = importlib.import_module("torch")
    layer = loaded(gpu, name, e8m0=True)
    scale = layer.weight_scale_inv
    wanted = torch.exp2(exponents().double() - 127)
    # 2**-127 is a subnormal float32: exponent 0 stands for it in E8M0 and for 0 in float32.
    wanted[wanted == 2.0**-127] = 0
    return [str(scale.dtype), bool((scale.data.double() == wanted).all())]


def kept(gpu: Gpu, name: str) -> list[Any]:
    layer = loaded(gpu, name, e8m0=False)
    scale = layer.weight_scale_inv
    return [str(scale.dtype), bool((scale.data == layer.before).all())]


def others(gpu: Gpu) -> dict[str, bool]:
    """Kernels of FP8 blocks that keep E8M0 scales as they are."""
    kernels: Any = importlib.import_module(KERNELS)
    torch: Any = importlib.import_module("torch")
    base: Any = importlib.import_module(
        "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel"
    )
    found = {}
    for kind in (kernels.DeepGemmFp8BlockScaledMMKernel, kernels.AiterFp8BlockScaledMMKernel):
        layer = torch.nn.Module()
        weight = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        scale = exponents().view(torch.float8_e8m0fnu)
        layer.weight_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
        kernel = kind.__new__(kind)
        base.Fp8BlockScaledMMLinearKernel.process_weights_after_loading(kernel, layer)
        found[kind.__name__] = layer.weight_scale_inv.dtype == torch.float8_e8m0fnu
    return found


def product(gpu: Gpu, name: str, rows: int) -> float:
    """Error of a whole call, from bf16 to bf16, against float64; the kernel is interpreted."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(rows)
    layer = loaded(gpu, name, e8m0=True)
    middle = torch.tensor([[126, 127, 128], [125, 129, 127]], dtype=torch.uint8)
    layer.weight_scale_inv = torch.nn.Parameter(
        middle.view(torch.float8_e8m0fnu), requires_grad=False
    )
    layer.kernel.process_weights_after_loading(layer)
    given = torch.randn(rows, INPUTS, dtype=torch.bfloat16)
    module: Any = importlib.import_module("vllm.model_executor.kernels.linear.scaled_mm.triton")
    # The operator has an implementation for CUDA tensors only.
    library = torch.library.Library("vllm", "FRAGMENT")
    operator = "w8a8_triton_block_scaled_mm_func"
    library.impl(operator, module._w8a8_triton_block_scaled_mm_func, "CPU")
    scale = given.float().view(rows, -1, BLOCK).abs().amax(-1) / 448
    values = (given.float().view(rows, -1, BLOCK) / scale[..., None]).to(torch.float8_e4m3fn)
    out = layer.kernel.apply_block_scaled_mm(
        values.view(rows, INPUTS), layer.weight, scale, layer.weight_scale_inv
    )
    powers = torch.exp2(middle.double() - 127)
    powers = powers.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    exact = (values.double() * scale.double()[..., None]).view(rows, INPUTS)
    wanted = exact @ (layer.weight.data.double() * powers).T
    return float((out.double() - wanted).norm() / wanted.norm())


# ---- what the linear layers are to do ----


@pytest.mark.guard
def test_sm12x_takes_cutlass(compiled: KernelProcess) -> None:
    assert compiled.call(choice) == "CutlassFp8BlockScaledMMKernel"


@pytest.mark.parametrize("name", ["CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"])
def test_powers_of_two_are_decoded_without_loss(compiled: KernelProcess, name: str) -> None:
    assert compiled.call(decoded, name=name) == ["torch.float32", True]


@pytest.mark.guard
@pytest.mark.parametrize("name", ["CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"])
def test_other_scales_stay_as_they_are(compiled: KernelProcess, name: str) -> None:
    assert compiled.call(kept, name=name) == ["torch.float32", True]


@pytest.mark.guard
def test_other_kernels_keep_them(compiled: KernelProcess) -> None:
    assert all(compiled.call(others).values())


@pytest.mark.parametrize("rows", [1, 20])
def test_the_product_is_right(interpreted: KernelProcess, rows: int) -> None:
    error = interpreted.call(product, name="TritonFp8BlockScaledMMKernel", rows=rows)
    assert error <= 0.004
