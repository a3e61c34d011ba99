"""Inputs shared by the tests of the portable DeepGEMM kernels."""

import os

import torch

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def fp8(*shape: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Normal values in float8_e4m3fn on the test device."""
    values = torch.randn(shape, generator=generator) * scale
    return values.to(torch.float8_e4m3fn).to(DEVICE)


def normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """Normal float32 values on the test device."""
    return torch.randn(shape, generator=generator).to(DEVICE)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected values, in float64."""
    difference = (actual.double() - expected.double()).norm()
    norm = expected.double().norm()
    return float(difference / norm) if float(norm) > 0 else float(difference)
