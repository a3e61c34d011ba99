"""Scales of FP8 blocks that are powers of two (E8M0), for CUTLASS, which takes float32 alone.

DeepSeek V4 has such scales. On SM12x its linear layers go to CUTLASS where DeepGEMM is switched off
or is not installed, and the first of them fails.
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


# ---- what the linear layers are to do ----


@pytest.mark.guard
def test_sm12x_takes_cutlass(compiled: KernelProcess) -> None:
    assert compiled.call(choice) == "CutlassFp8BlockScaledMMKernel"


def test_powers_of_two_are_decoded_without_loss(compiled: KernelProcess) -> None:
    found = compiled.call(decoded, name="CutlassFp8BlockScaledMMKernel")
    assert found == ["torch.float32", True]


@pytest.mark.guard
@pytest.mark.parametrize("name", ["CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel"])
def test_other_scales_stay_as_they_are(compiled: KernelProcess, name: str) -> None:
    assert compiled.call(kept, name=name) == ["torch.float32", True]


@pytest.mark.guard
def test_triton_keeps_them(compiled: KernelProcess) -> None:
    """Its kernel decodes them itself."""
    found = compiled.call(decoded, name="TritonFp8BlockScaledMMKernel")
    assert found[0] == "torch.float8_e8m0fnu"
