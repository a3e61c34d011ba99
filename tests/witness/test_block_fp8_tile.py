"""The block-FP8 matrix product of decode on SM12x: rows that nothing needs, and their cost.

Where no tuned file is for a device and a shape, the release computes 64 rows for one token.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from tests.witness.kernels import SM12X_SHARED, SM90_SHARED, Gpu, KernelProcess, Launch

FP8_UTILS = "vllm.model_executor.layers.quantization.utils.fp8_utils"
PRELOAD = (FP8_UTILS,)
# The fewest rows that tl.dot takes.
LEAST_ROWS = 16
# What the release takes for every number of rows.
RELEASE = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 32,
    "num_warps": 4,
    "num_stages": 2,
}
# (block_n, block_k) of quantized weights; three stages of the fifth do not fit.
SHAPES = ((128, 128), (64, 128), (128, 256), (64, 512), (256, 256))
# Steps of the loop over K that the kernel may load ahead on SM12x.
AHEAD = 2


def launch(gpu: Gpu, m: int, block_n: int = 128, block_k: int = 128) -> Launch:
    """Launch the release's product of [m, 1024] and [1024, 1024] in FP8."""
    torch: Any = importlib.import_module("torch")
    utils: Any = importlib.import_module(FP8_UTILS)
    n = k = 1024
    utils.w8a8_triton_block_scaled_mm(
        torch.zeros(m, k, dtype=torch.float8_e4m3fn),
        torch.zeros(n, k, dtype=torch.float8_e4m3fn),
        torch.ones(m, k // block_k),
        torch.ones(n // block_n, k // block_k),
        [block_n, block_k],
        torch.bfloat16,
    )
    return gpu.launches[-1]


# ---- what runs where Triton compiles ----


def rows_computed(gpu: Gpu, capability: list[int]) -> dict[str, int]:
    """Rows of the result that are computed, by rows that are asked for."""
    gpu.become((capability[0], capability[1]))
    found = {}
    for m in (1, 2, 7, 8):
        done = launch(gpu, m)
        columns = 1024 // done.config["BLOCK_SIZE_N"]
        found[str(m)] = done.grid[0] // columns * done.config["BLOCK_SIZE_M"]
    return found


def tensor_core_instructions(gpu: Gpu) -> dict[str, int]:
    """FP8 matrix instructions of the machine code that one warp executes for one step of K."""
    gpu.become((12, 0))
    return {str(m): launch(gpu, m).count(r"QMMA\.") for m in (1, 64)}


def shared_of_shapes(gpu: Gpu) -> list[list[int]]:
    """[block_n, block_k, rows of a tile, shared memory] of the decode kernel."""
    gpu.become((12, 1))
    found = []
    for block_n, block_k in SHAPES:
        done = launch(gpu, 1, block_n, block_k)
        found.append([block_n, block_k, done.config["BLOCK_SIZE_M"], done.shared])
    return found


def spills(gpu: Gpu) -> int:
    gpu.become((12, 0))
    return launch(gpu, 8).resources()["LOCAL"]


def configurations(
    gpu: Gpu, capability: list[int], shared: int, rocm: bool, rows: list[int]
) -> list[dict[str, int]]:
    """What the release's launches are given, by the device."""
    utils: Any = importlib.import_module(FP8_UTILS)
    gpu.become((capability[0], capability[1]), shared=shared)
    if rocm:
        enum = importlib.import_module("vllm.platforms.interface").PlatformEnum
        type(utils.current_platform)._enum = enum.ROCM
    return recorded(utils, rows)


def with_a_tuned_file(gpu: Gpu, tuned: dict[str, int]) -> list[dict[str, int]]:
    utils: Any = importlib.import_module(FP8_UTILS)
    gpu.become((12, 0))
    utils.get_w8a8_block_fp8_configs = lambda *_: {1: tuned, 64: tuned}
    return recorded(utils, [1, 8, 64])


def recorded(utils: Any, rows: list[int]) -> list[dict[str, int]]:
    """The options of the launches for these numbers of rows; nothing is compiled."""
    torch: Any = importlib.import_module("torch")
    given: list[dict[str, int]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: given.append(options)

    utils._w8a8_triton_block_scaled_mm = Kernel()
    weight = torch.zeros(256, 256, dtype=torch.float8_e4m3fn)
    for m in rows:
        utils.w8a8_triton_block_scaled_mm(
            torch.zeros(m, 256, dtype=torch.float8_e4m3fn),
            weight,
            torch.ones(m, 2),
            torch.ones(2, 2),
            [128, 128],
            torch.bfloat16,
        )
    return given


# ---- what runs where Triton interprets ----


def largest_error(gpu: Gpu, m: int, n: int, k: int, dtype: str) -> float:
    """Largest error of the product, relative to the largest value that the reference has.

    The reference is the product of the dequantized matrices in float64, [m, n].
    """
    torch: Any = importlib.import_module("torch")
    utils: Any = importlib.import_module(FP8_UTILS)
    gpu.become((12, 1))
    torch.manual_seed(m * 1000 + n + k)
    blocks_n, blocks_k = -(-n // 128), -(-k // 128)
    a = (torch.randn(m, k) * 8).to(torch.float8_e4m3fn)
    b = (torch.randn(n, k) * 8).to(torch.float8_e4m3fn)
    # Scales of all sizes: a row with another's scale is far off.
    a_scale = torch.exp2(torch.randint(-6, 7, (m, blocks_k)).float())
    b_scale = torch.exp2(torch.randint(-6, 7, (blocks_n, blocks_k)).float())
    got = utils.w8a8_triton_block_scaled_mm(
        a, b, a_scale, b_scale, [128, 128], getattr(torch, dtype)
    )
    assert got.shape == (m, n)
    assert got.dtype == getattr(torch, dtype)
    left = a.double() * a_scale.double().repeat_interleave(128, 1)[:, :k]
    spread = b_scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    wanted = left @ (b.double() * spread).T
    error = (got.double() - wanted).abs().amax(1) / wanted.abs().amax(1)
    return float(error.max())


# ---- the tests ----


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_a_decode_step_computes_no_more_rows_than_it_must(
    compiled: KernelProcess, capability: tuple[int, int]
) -> None:
    assert compiled.call(rows_computed, capability=capability) == dict.fromkeys(
        ("1", "2", "7", "8"), LEAST_ROWS
    )


def test_a_decode_step_takes_a_quarter_of_the_tensor_core_work(compiled: KernelProcess) -> None:
    found = compiled.call(tensor_core_instructions)
    assert found["64"] > 0, "no FP8 tensor-core instruction in the machine code"
    assert found["1"] * 4 == found["64"], f"instructions for 1 row and for 64: {found}"


def test_two_steps_are_loaded_ahead_where_they_fit(compiled: KernelProcess) -> None:
    for block_n, block_k, rows, shared in compiled.call(shared_of_shapes):
        shape = f"block shape [{block_n}, {block_k}]"
        assert rows == LEAST_ROWS, f"{shape}: a tile has {rows} rows"
        assert shared <= SM12X_SHARED, f"{shape} takes {shared} bytes of shared memory"
        ahead = AHEAD * (rows + block_n) * block_k
        if ahead <= SM12X_SHARED:
            assert shared >= ahead, f"{shape}: {shared} bytes hold fewer than {AHEAD} steps"


@pytest.mark.guard
def test_nothing_spills(compiled: KernelProcess) -> None:
    assert compiled.call(spills) == 0


@pytest.mark.guard
@pytest.mark.parametrize(
    ("capability", "shared", "rocm"),
    [
        ((8, 0), 166912, False),
        ((8, 9), SM12X_SHARED, False),
        ((9, 0), SM90_SHARED, False),
        ((10, 0), SM90_SHARED, False),
        ((10, 3), SM90_SHARED, False),
        # gfx942, and gfx1200, whose capability is 12.0, too.
        ((9, 4), 65536, True),
        ((12, 0), 65536, True),
    ],
)
def test_other_devices_keep_their_configuration(
    compiled: KernelProcess, capability: tuple[int, int], shared: int, rocm: bool
) -> None:
    given = compiled.call(
        configurations, capability=capability, shared=shared, rocm=rocm, rows=[1, 8, 9, 64]
    )
    assert given == [RELEASE] * 4


@pytest.mark.guard
def test_more_rows_keep_their_configuration(compiled: KernelProcess) -> None:
    given = compiled.call(
        configurations, capability=(12, 0), shared=SM12X_SHARED, rocm=False, rows=[9, 16, 64, 4096]
    )
    assert given == [RELEASE] * 4


@pytest.mark.guard
def test_a_tuned_file_is_taken(compiled: KernelProcess) -> None:
    tuned = {**RELEASE, "BLOCK_SIZE_M": 32, "num_stages": 4}
    assert compiled.call(with_a_tuned_file, tuned=tuned) == [tuned] * 3


@pytest.mark.guard
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9])
@pytest.mark.parametrize(("n", "k"), [(256, 384), (200, 320)])
def test_the_product_is_the_references(interpreted: KernelProcess, m: int, n: int, k: int) -> None:
    error = interpreted.call(largest_error, m=m, n=n, k=k, dtype="float32")
    assert error < 2e-6, f"float32: {error}"
    error = interpreted.call(largest_error, m=m, n=n, k=k, dtype="bfloat16")
    # bfloat16 has 8 bits.
    assert error < 2**-7, f"bfloat16: {error}"
