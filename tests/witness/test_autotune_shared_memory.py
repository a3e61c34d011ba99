"""Configurations that SM12x has not the shared memory for: the autotuner must not compile them.

The release's autotuner compiles each configuration in full, is told by Triton's launcher that the
device cannot take it, and drops it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.kernels import SM12X_SHARED, SM90_SHARED, Compiled, Gpu, KernelProcess

DELTA_H = "vllm.third_party.flash_linear_attention.ops.chunk_delta_h"
CHUNK_SCAN = "vllm.model_executor.layers.mamba.ops.ssd_chunk_scan"
# What they decide at import does not depend on the device.
PRELOAD = (DELTA_H, CHUNK_SCAN)
# A configuration: its block sizes, in the order of the release, and its stages.
Config = list[int]
# The autotuner of a kernel, and what launches the kernel as the release does.
Kernel = tuple[Any, Callable[[], None]]
# Tiles of 32 and 64 columns with 2, 3 and 4 stages, as the release has them: for 2 and for 4 warps.
DELTA_H_ALL = [[32, 2], [64, 2], [32, 3], [64, 3], [32, 4], [64, 4]]
DELTA_H_TWICE = DELTA_H_ALL * 2
# Of 128x256x64, 3 stages; 64x256x32, 128x64x64 and 64x128x64, 4 stages. The first three are for
# states of 256 and more too large by the tiles of one loop, the last by those of the other.
SCAN_TOO_LARGE = [[128, 256, 64, 3], [64, 256, 32, 4], [128, 64, 64, 4], [64, 128, 64, 4]]
SCAN_FITS = [128, 64, 32, 4]


def autotuner(kernel: Any) -> Any:
    """The autotuner around or inside ``kernel``."""
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    return kernel


def sizes(config: Any) -> Config:
    return [*config.kwargs.values(), config.num_stages]


def delta_h(heads: int = 4, k: int = 128, v: int = 128, by_key: bool = False) -> Kernel:
    """The state recurrence of gated DeltaNet, or of KDA (``by_key``), on two sequences."""
    torch: Any = importlib.import_module("torch")
    module: Any = importlib.import_module(DELTA_H)
    # The stand-in device has no pinned memory.
    vars(importlib.import_module("vllm.utils.torch_utils"))["PIN_MEMORY"] = False
    tokens = 128

    def launch() -> None:
        wide = torch.zeros(1, tokens, heads, k, dtype=torch.bfloat16)
        gate = torch.zeros(1, tokens, heads, k) if by_key else torch.zeros(1, tokens, heads)
        module.chunk_gated_delta_rule_fwd_h(
            wide,
            wide.clone(),
            torch.zeros(1, tokens, heads, v, dtype=torch.bfloat16),
            g=None if by_key else gate,
            gk=gate if by_key else None,
            initial_state=torch.zeros(2, heads, v, k),
            output_final_state=True,
            cu_seqlens=torch.tensor([0, 50, tokens], dtype=torch.int32),
        )

    return autotuner(module.chunk_gated_delta_rule_fwd_kernel_h_blockdim64), launch


def chunk_scan(dstate: int = 256, initial: bool = True) -> Kernel:
    """The last step of Mamba 2 on two chunks of 128 tokens."""
    torch: Any = importlib.import_module("torch")
    module: Any = importlib.import_module(CHUNK_SCAN)
    chunks, chunk, heads, width = 2, 128, 4, 64

    def launch() -> None:
        x = torch.zeros(chunks * chunk, heads, width, dtype=torch.bfloat16)
        module._chunk_scan_fwd(
            torch.zeros(chunks, 1, chunk, chunk),
            x,
            torch.zeros(heads, chunks, chunk),
            torch.zeros(heads, chunks, chunk),
            torch.zeros(chunks * chunk, 1, dstate, dtype=torch.bfloat16),
            torch.zeros(chunks, heads, width, dstate),
            torch.tensor([0, chunk, 2 * chunk], dtype=torch.int32),
            torch.zeros_like(x),
            torch.zeros(chunks, dtype=torch.int32),
            D=torch.zeros(heads),
            initial_states=torch.zeros(1, heads, width, dstate) if initial else None,
        )

    return autotuner(module._chunk_scan_fwd_kernel), launch


KERNELS: dict[str, Callable[..., Kernel]] = {"delta_h": delta_h, "chunk_scan": chunk_scan}


# ---- what runs where Triton compiles ----


def compiled_of(
    gpu: Gpu,
    shared: int,
    kernel: str,
    keep: list[Config],
    warps: int | None,
    shape: dict[str, Any],
) -> list[list[Any]]:
    """[configuration, its shared memory] of what autotuning compiles for 12.0 with ``shared``.

    Of the release's configurations those in ``keep`` are left, with ``warps`` if that is given.
    """
    gpu.become((12, 0), shared=shared)
    tuner, launch = KERNELS[kernel](**shape)
    tuner.configs = [
        config
        for config in tuner.configs
        if sizes(config) in keep and warps in (None, config.num_warps)
    ]
    # What autotuning finds is kept in a file, for other kernels with the same arguments, too.
    tuner.cache_results = False
    # All that were asked for are in the release.
    assert sorted(map(sizes, tuner.configs)) == sorted(keep)
    launch()
    names = list(tuner.configs[0].kwargs)

    def stands_for(done: Compiled) -> Config:
        return [done.config[name] for name in (*names, "num_stages")]

    assert gpu.launches[-1].shared <= shared
    return [[stands_for(done), done.shared] for done in gpu.compiled]


def measured_on(
    gpu: Gpu,
    kernel: str,
    capability: list[int],
    shared: int,
    rocm: bool,
    shape: dict[str, Any],
) -> list[Config]:
    """The configurations that the autotuner would compile and measure; nothing is compiled."""
    gpu.become((capability[0], capability[1]), shared=shared)
    if rocm:
        platforms: Any = importlib.import_module("vllm.platforms")
        enum = importlib.import_module("vllm.platforms.interface").PlatformEnum
        type(platforms.current_platform)._enum = enum.ROCM
    tuner, launch = KERNELS[kernel](**shape)
    found: list[Config] = []

    def measure(*arguments: Any, config: Any, **options: Any) -> list[float]:
        found.append(sizes(config))
        return [1.0, 1.0, 1.0]

    tuner._bench = measure
    tuner.cache_results = False
    tuner.fn = SimpleNamespace(run=lambda *arguments, **options: None)
    launch()
    # Triton 3.8 does not measure the only one.
    return found or [sizes(tuner.best_config)]


def failure(gpu: Gpu) -> str:
    """The exception where none of two configurations fits."""
    gpu.become((12, 0), shared=16384)
    tuner, launch = delta_h(k=64, v=64)
    tuner.configs = [config for config in tuner.configs if sizes(config)[-1] == 2][:2]
    try:
        launch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


# ---- the tests ----


@pytest.mark.parametrize(
    ("kernel", "shape", "keep", "warps"),
    [
        ("delta_h", {}, [[64, 3], [64, 4]], 4),
        ("delta_h", {"by_key": True}, [[64, 3], [32, 4]], 4),
        ("chunk_scan", {}, [SCAN_FITS, *SCAN_TOO_LARGE[1::2]], None),
    ],
)
def test_nothing_is_compiled_in_vain(
    compiled: KernelProcess, kernel: str, shape: dict[str, Any], keep: list[Config], warps: int
) -> None:
    options = {"kernel": kernel, "shape": shape, "keep": keep, "warps": warps}
    # With the shared memory of an H100 all of them run: this is what they need.
    needed = compiled.call(compiled_of, shared=SM90_SHARED, **options)
    assert sorted(config for config, _ in needed) == sorted(keep)
    done = compiled.call(compiled_of, shared=SM12X_SHARED, **options)
    refused = [entry for entry in done if entry[1] > SM12X_SHARED]
    assert not refused, f"compiled and refused, with the bytes they need: {refused}"
    assert done == [entry for entry in needed if entry[1] <= SM12X_SHARED]


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
@pytest.mark.parametrize(
    ("kernel", "shape", "too_large"),
    [
        ("delta_h", {"k": 128}, DELTA_H_ALL[4:]),
        # Two thirds of the last tile are empty, and loaded.
        ("delta_h", {"k": 72, "v": 192}, DELTA_H_ALL[4:]),
        ("delta_h", {"k": 256}, DELTA_H_ALL[2:]),
        ("chunk_scan", {"dstate": 64}, [SCAN_TOO_LARGE[0], SCAN_TOO_LARGE[2]]),
        ("chunk_scan", {"dstate": 128}, [SCAN_TOO_LARGE[0], SCAN_TOO_LARGE[2]]),
        # Without initial states those of the chunk before are loaded under a condition.
        (
            "chunk_scan",
            {"dstate": 256, "initial": False},
            [SCAN_TOO_LARGE[0], SCAN_TOO_LARGE[2]],
        ),
        ("chunk_scan", {"dstate": 256}, SCAN_TOO_LARGE),
    ],
)
def test_only_what_is_too_large_is_left_out(
    compiled: KernelProcess,
    capability: tuple[int, int],
    kernel: str,
    shape: dict[str, Any],
    too_large: list[Config],
) -> None:
    every = compiled.call(
        measured_on, kernel=kernel, capability=(9, 0), shared=SM90_SHARED, rocm=False, shape=shape
    )
    found = compiled.call(
        measured_on,
        kernel=kernel,
        capability=capability,
        shared=SM12X_SHARED,
        rocm=False,
        shape=shape,
    )
    assert found == [config for config in every if config not in too_large]


def test_one_is_left_where_none_fits(compiled: KernelProcess) -> None:
    found = compiled.call(
        measured_on, kernel="delta_h", capability=(12, 0), shared=16384, rocm=False, shape={}
    )
    assert found == [DELTA_H_ALL[0]]


@pytest.mark.guard
def test_where_none_fits_the_launch_says_so(compiled: KernelProcess) -> None:
    assert compiled.call(failure).startswith("OutOfResources: out of resource: shared memory")


@pytest.mark.guard
def test_a_small_head_keeps_every_configuration(compiled: KernelProcess) -> None:
    found = compiled.call(
        measured_on,
        kernel="delta_h",
        capability=(12, 0),
        shared=SM12X_SHARED,
        rocm=False,
        shape={"k": 64, "v": 64},
    )
    assert found == DELTA_H_TWICE


@pytest.mark.guard
@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize(
    ("capability", "shared", "rocm"),
    [
        ((8, 0), 166912, False),
        # With no more shared memory than SM12x: not this patch's.
        ((8, 9), SM12X_SHARED, False),
        ((9, 0), SM90_SHARED, False),
        ((10, 0), SM90_SHARED, False),
        # gfx1200, whose capability is 12.0, too.
        ((12, 0), 65536, True),
    ],
)
def test_other_devices_measure_every_configuration(
    compiled: KernelProcess, kernel: str, capability: tuple[int, int], shared: int, rocm: bool
) -> None:
    found = compiled.call(
        measured_on, kernel=kernel, capability=capability, shared=shared, rocm=rocm, shape={}
    )
    if kernel == "delta_h":
        assert found == DELTA_H_TWICE
    else:
        assert len(found) == 23
