"""Which kernels serve NVFP4 experts on SM12x where b12x is installed: not Marlin, which decodes."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.world import World

MODULE = "vllm.model_executor.layers.fused_moe.oracle.nvfp4"
pytestmark = pytest.mark.loads(MODULE)


def chosen(
    world: World,
    *,
    family: int = 120,
    installed: bool = True,
    experts: int = 128,
    supports: tuple[str, ...] = ("B12X", "MARLIN"),
    limit: float | None = None,
    force_a16: bool = False,
) -> tuple[str, list[Any]]:
    """The backend of the release's choice, and the activations that b12x was asked about.

    ``supports``: the backends whose kernels say that they support the layer.
    """
    module: Any = importlib.import_module(MODULE)
    asked: list[Any] = []

    def kernel(backend: Any) -> Any:
        def supported(cls: Any, config: Any, weight: Any, activation: Any, form: Any) -> Any:
            if backend.value == "B12X":
                asked.append(activation)
            return backend.value in supports, "the test"

        return SimpleNamespace(is_supported_config=supported)

    module.backend_to_kernel_cls = lambda backend: [kernel(backend)]
    module.prioritize_humming = lambda backends: backends
    packages: Any = importlib.import_module("vllm.utils.b12x")
    packages._HAS_B12X = installed
    module.envs = SimpleNamespace(VLLM_B12X_MOE_FP4_FORCE_A16=force_a16)
    # The untouched release asks no platform.
    if hasattr(module, "current_platform"):
        module.current_platform = SimpleNamespace(
            is_cuda=lambda: True, is_device_capability_family=lambda asked: asked == family
        )
    config = SimpleNamespace(
        num_experts=experts,
        swiglu_limit=limit,
        moe_backend="auto",
        moe_parallel_config=SimpleNamespace(use_batched_activation_format=False),
    )
    backend, _ = module.select_nvfp4_moe_backend(config, "nvfp4", "activation")
    return backend.value, asked


def test_b12x_comes_before_marlin(world: World) -> None:
    assert chosen(world) == ("B12X", ["activation"])


def test_it_can_clamp(world: World) -> None:
    assert chosen(world, limit=7.0) == ("B12X", ["activation"])


def test_a_forced_type_of_activations_is_asked_about(world: World) -> None:
    assert chosen(world, force_a16=True) == ("B12X", [None])


@pytest.mark.guard
@pytest.mark.parametrize("first", ["FLASHINFER_CUTLASS", "VLLM_CUTLASS"])
def test_what_computes_in_fp4_stays_before_it(world: World, first: str) -> None:
    assert chosen(world, supports=(first, "B12X", "MARLIN"))[0] == first


@pytest.mark.guard
@pytest.mark.parametrize("experts", [512, 1024])
def test_not_for_512_experts(world: World, experts: int) -> None:
    assert chosen(world, experts=experts) == ("MARLIN", [])


def test_for_511_experts(world: World) -> None:
    assert chosen(world, experts=511)[0] == "B12X"


@pytest.mark.guard
def test_not_for_layers_that_it_refuses(world: World) -> None:
    assert chosen(world, supports=("MARLIN",))[0] == "MARLIN"


@pytest.mark.guard
@pytest.mark.parametrize(("family", "installed"), [(120, False), (90, True), (100, True)])
def test_others_take_marlin(world: World, family: int, installed: bool) -> None:
    assert chosen(world, family=family, installed=installed) == ("MARLIN", [])
