"""Grouped block-scaled FP8 product against float64."""

import pytest
import torch
from gemm_inputs import DEVICE, fp8, relative_error
from portable_mla import block_fp8_einsum
from portable_mla.block_fp8_einsum import EinsumTile, fp8_einsum_bhr_hdr_bhd
from portable_mla.compile import SM12X_SHARED_MEMORY
from portable_mla.deepgemm_reference import fp8_einsum_reference

# bf16 output: about 1.7e-3 in the norm when rounded to nearest, as a GPU does, and
# 3.4e-3 when truncated, as Triton's interpreter does.
TOLERANCE = 4e-3
TILES = block_fp8_einsum._tiles(SM12X_SHARED_MEMORY)


def powers(*shape: int, low: int, high: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(low, high + 1, shape, generator=generator).float()


def case(tokens: int, groups: int, depth: int, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments with the strides that fused_inv_rope_fp8_quant produces."""
    generator = torch.Generator().manual_seed(seed)
    blocks = depth // 128
    a = fp8(groups, tokens, depth, generator=generator).transpose(0, 1)
    padded = -(-tokens // 4) * 4
    a_scale = torch.full((groups * blocks * padded,), torch.nan).as_strided(
        (groups, tokens, blocks), (blocks * padded, 1, padded)
    )
    a_scale.copy_(powers(groups, tokens, blocks, low=-6, high=3, seed=seed))
    b_scale = powers(groups, rows // 128, blocks, low=-9, high=-4, seed=seed + 1)
    return {
        "a": a,
        "a_scale": a_scale.transpose(0, 1).to(DEVICE),
        "b": fp8(groups, rows, depth, generator=generator),
        "b_scale": b_scale.to(DEVICE),
    }


def check(arguments: dict[str, torch.Tensor], tile: EinsumTile | None = None) -> None:
    tokens, groups, _ = arguments["a"].shape
    rows = arguments["b"].shape[-2] // (groups if arguments["b"].dim() == 2 else 1)
    storage = torch.full((tokens + 1, groups, rows), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    out = storage[:tokens]
    result = fp8_einsum_bhr_hdr_bhd(**arguments, out=out, tile=tile)
    assert result is out
    expected = fp8_einsum_reference(**arguments)
    assert out.isfinite().all()
    assert relative_error(out, expected) < TOLERANCE
    assert storage[tokens:].isnan().all()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("blocks", [1, 3, 5])
def test_every_tile(tile: EinsumTile, blocks: int) -> None:
    """Part of a token tile; a number of blocks no multiple of the slices."""
    check(case(tile.tokens + 3, 2, blocks * 128, 128, seed=blocks), tile)


@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 17, 33])
def test_tokens(tokens: int) -> None:
    check(case(tokens, 2, 512, 256, seed=tokens))


@pytest.mark.parametrize("groups", [1, 3, 8])
def test_groups(groups: int) -> None:
    check(case(3, groups, 256, 128, seed=groups))


def test_weights_as_the_layer_holds_them() -> None:
    """2-D weights and scales, float32 and UE8M0."""
    arguments = case(4, 2, 256, 256)
    arguments["b"] = arguments["b"].flatten(0, 1)
    arguments["b_scale"] = arguments["b_scale"].flatten(0, 1)
    check(arguments)
    arguments["b_scale"] = arguments["b_scale"].to(torch.float8_e8m0fnu)
    check(arguments)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_ue8m0_scales(tile: EinsumTile) -> None:
    arguments = case(3, 2, 256, 128)
    arguments["b_scale"] = arguments["b_scale"].to(torch.float8_e8m0fnu)
    check(arguments, tile)


def test_ue8m0_zero_byte_is_zero() -> None:
    arguments = case(2, 1, 256, 128)
    raw = arguments["b_scale"].to(torch.float8_e8m0fnu).view(torch.uint8)
    raw[:, :, 1] = 0
    arguments["b_scale"] = raw.view(torch.float8_e8m0fnu)
    check(arguments)


def test_strided_arguments() -> None:
    """Contiguous a, transposed scales, a slice of out."""
    arguments = case(5, 2, 384, 256)
    arguments["a"] = arguments["a"].contiguous()
    arguments["a_scale"] = arguments["a_scale"].contiguous()
    scale = arguments["b_scale"]
    arguments["b_scale"] = scale.transpose(1, 2).contiguous().transpose(1, 2)
    check(arguments)
    wide = torch.full((5, 4, 256), 3.0, dtype=torch.bfloat16, device=DEVICE)
    fp8_einsum_bhr_hdr_bhd(**arguments, out=wide[:, 1:3])
    expected = fp8_einsum_reference(**arguments)
    assert relative_error(wide[:, 1:3], expected) < TOLERANCE
    assert (wide[:, [0, 3]] == 3.0).all()


@pytest.mark.parametrize("exponent", [-60, 60])
def test_scales_at_both_ends(exponent: int) -> None:
    arguments = case(3, 1, 256, 128)
    arguments["a_scale"].fill_(2.0**exponent)
    arguments["b_scale"].fill_(2.0**exponent)
    for tile in TILES:
        check(arguments, tile)


def test_blocks_of_different_size_keep_their_scale() -> None:
    """One block carries the result: a scale of the wrong block shows."""
    for at in range(4):
        arguments = case(2, 2, 512, 256, seed=at)
        arguments["a_scale"].fill_(2.0**-30)
        arguments["a_scale"][:, :, at] = 1.0
        arguments["b_scale"].fill_(2.0**-30)
        arguments["b_scale"][1, 0, at] = 1.0
        check(arguments)


def test_non_finite_values_of_the_last_block_stay_in_their_token() -> None:
    """Blocks past D are read from the last one: NaN must not spread."""
    arguments = case(3, 1, 384, 128)
    arguments["a_scale"][1, 0, 2] = torch.inf
    out = torch.empty((3, 1, 128), dtype=torch.bfloat16, device=DEVICE)
    fp8_einsum_bhr_hdr_bhd(**arguments, out=out)
    assert out[[0, 2]].isfinite().all()
    assert not out[1].isfinite().any()


def test_repeated_calls_give_equal_bits() -> None:
    arguments = case(7, 2, 512, 128)
    first, second = (
        fp8_einsum_bhr_hdr_bhd(
            **arguments,
            out=torch.empty((7, 2, 128), dtype=torch.bfloat16, device=DEVICE),
        )
        for _ in range(2)
    )
    assert torch.equal(first, second)


def test_no_tokens() -> None:
    arguments = case(0, 2, 256, 128)
    out = torch.empty((0, 2, 128), dtype=torch.bfloat16, device=DEVICE)
    assert fp8_einsum_bhr_hdr_bhd(**arguments, out=out) is out


def test_tile_choice() -> None:
    for groups in (1, 2, 4, 8):
        for tokens in (1, 16, 17, 64, 65, 1024, 32768):
            tile = block_fp8_einsum._tile(tokens, groups, 1024, 188, SM12X_SHARED_MEMORY)
            assert tile in TILES
            assert (tile.tokens == 16) == (tokens <= 64)
    wide = block_fp8_einsum._tile(32768, 8, 1024, 188, SM12X_SHARED_MEMORY)
    small = block_fp8_einsum._tile(1, 2, 1024, 188, SM12X_SHARED_MEMORY)
    assert (wide.tokens, wide.rows) == (128, 128)
    assert (small.tokens, small.rows) == (16, 16)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("a", lambda t: t.float()),
        ("a", lambda t: t[0]),
        ("a", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        ("a_scale", lambda t: t[:, :, :1]),
        ("a_scale", lambda t: t.view(torch.int32)),
        ("b", lambda t: t[:, :100]),
        ("b", lambda t: t[:1]),
        ("b", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        ("b_scale", lambda t: t[:, :, :1]),
        ("b_scale", lambda t: t.half()),
        ("out", lambda t: t.float()),
        ("out", lambda t: t[:, :, :100]),
        ("out", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
    ],
)
def test_rejects(argument: str, change: object) -> None:
    arguments = case(2, 2, 256, 256)
    arguments["out"] = torch.zeros((2, 2, 256), dtype=torch.bfloat16, device=DEVICE)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        fp8_einsum_bhr_hdr_bhd(**arguments)
