"""Product and squared norm of the mHC pre block against float64."""

import pytest
import torch
from gemm_inputs import DEVICE, normal, relative_error
from portable_mla import hc_prenorm
from portable_mla.compile import SM12X_SHARED_MEMORY
from portable_mla.deepgemm_reference import hc_prenorm_reference
from portable_mla.hc_prenorm import PrenormTile, tf32_hc_prenorm_gemm

# TF32 keeps 10 bits of the mantissa of fn; the interpreter multiplies in fp32.
TOLERANCE = 1e-3
SQRSUM_TOLERANCE = 1e-5
HOPPER_SHARED_MEMORY = 232448
TILES = hc_prenorm._tiles(SM12X_SHARED_MEMORY)
ALL_TILES = sorted({*TILES, *hc_prenorm._tiles(HOPPER_SHARED_MEMORY)})


def check(
    x: torch.Tensor, fn: torch.Tensor, num_split: int, tile: PrenormTile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every slice is written; their sums match; nothing else is written."""
    tokens, outputs = x.shape[0], fn.shape[0]
    out_storage = torch.full((num_split, tokens + 1, outputs + 3), torch.nan, device=DEVICE)
    sqrsum_storage = torch.full((num_split, tokens + 2), torch.nan, device=DEVICE)
    out = out_storage[:, :tokens, :outputs]
    sqrsum = sqrsum_storage[:, :tokens]
    tf32_hc_prenorm_gemm(x, fn, out, sqrsum, num_split, tile)
    assert out.isfinite().all()
    assert sqrsum.isfinite().all()
    assert out_storage[:, tokens:].isnan().all()
    assert out_storage[:, :, outputs:].isnan().all()
    assert sqrsum_storage[:, tokens:].isnan().all()
    expected_out, expected_sqrsum = hc_prenorm_reference(x, fn)
    assert relative_error(out.double().sum(0), expected_out) < TOLERANCE
    assert relative_error(sqrsum.double().sum(0), expected_sqrsum) < SQRSUM_TOLERANCE
    return out, sqrsum


def case(
    tokens: int, depth: int, outputs: int = 24, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = normal(tokens, depth, generator=generator).bfloat16()
    return x, normal(outputs, depth, generator=generator)


@pytest.mark.parametrize("tile", ALL_TILES, ids=str)
@pytest.mark.parametrize("num_split", [1, 3])
def test_every_tile(tile: PrenormTile, num_split: int) -> None:
    check(*case(tile.tokens + 1, 7 * tile.depth, seed=num_split), num_split, tile)


@pytest.mark.parametrize("outputs", [1, 16, 17, 24, 64])
def test_outputs_of_divided_tiles(outputs: int) -> None:
    """Rows past the last output are zero, and neither term of an output is another's."""
    (tile,) = [tile for tile in TILES if tile.divided]
    check(*case(5, 192, outputs, seed=outputs), 2, tile)


def test_both_terms_count() -> None:
    """fn keeps 16 bits of its mantissa: one term alone has 8."""
    x = torch.ones(1, 64).bfloat16()
    fn = torch.full((2, 64), 1 + 2.0**-14, device=DEVICE)
    for tile in TILES:
        out = torch.empty((1, 1, 2), device=DEVICE)
        tf32_hc_prenorm_gemm(x.to(DEVICE), fn, out, torch.empty((1, 1), device=DEVICE), 1, tile)
        assert (out - 64 * (1 + 2.0**-14)).abs().max() < 64 * 2.0**-17


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 65, 130])
def test_tokens(tokens: int) -> None:
    check(*case(tokens, 256, seed=tokens), 2)


@pytest.mark.parametrize("outputs", [1, 4, 16, 17, 24, 32, 33, 64])
def test_outputs(outputs: int) -> None:
    check(*case(5, 192, outputs, seed=outputs), 2)


@pytest.mark.parametrize("num_split", [1, 2, 3, 5, 7, 16])
def test_ranges_of_the_splits(num_split: int) -> None:
    """Slices hold disjoint whole blocks that cover all columns; empty ones are 0."""
    x, fn = case(3, 5 * 64, seed=num_split)
    x.fill_(1.0)
    _, sqrsum = check(x, fn, num_split)
    columns = sqrsum[:, 0].tolist()
    assert sum(columns) == 320
    assert all(c % 64 == 0 for c in columns)
    assert max(columns) - min(columns) <= 64
    assert num_split <= 5 or min(columns) == 0


def test_model_shape() -> None:
    check(*case(2, 16384), 64)


def test_strided_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    x = normal(6, 512, generator=generator).bfloat16()[:, 128:384]
    fn = normal(24, 320, generator=generator)[:, 16:272]
    check(x, fn, 2)


def test_single_row_of_odd_stride() -> None:
    x, fn = case(1, 128, 1)
    x = x.as_strided((1, 128), (7, 1))
    fn = fn.as_strided((1, 128), (3, 1))
    check(x, fn, 1)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_values_at_both_ends(scale: float) -> None:
    x, fn = case(3, 256)
    check((x.float() * scale).bfloat16(), fn, 2)


def test_non_finite_row_stays_in_its_row() -> None:
    x, fn = case(20, 128)
    x[19, 5] = torch.inf
    out = torch.empty((1, 20, 24), device=DEVICE)
    sqrsum = torch.empty((1, 20), device=DEVICE)
    tf32_hc_prenorm_gemm(x, fn, out, sqrsum, 1)
    assert out[:, :19].isfinite().all()
    assert sqrsum[:, :19].isfinite().all()
    assert sqrsum[0, 19] == torch.inf


def test_no_tokens() -> None:
    x, fn = case(0, 128)
    tf32_hc_prenorm_gemm(
        x,
        fn,
        torch.empty((2, 0, 24), device=DEVICE),
        torch.empty((2, 0), device=DEVICE),
        2,
    )


def test_tile_choice() -> None:
    for tokens in (1, 16, 17, 64, 511, 512, 1000, 8192, 32768):
        for memory in (SM12X_SHARED_MEMORY, HOPPER_SHARED_MEMORY):
            for depth in (192, 256):
                tile = hc_prenorm._tile(tokens, depth, memory)
                assert tile in hc_prenorm._tiles(memory)
                assert depth % tile.depth == 0
                assert tile.tokens == (16 if tokens <= 16 else 64)
                assert tile.divided == (tokens >= 512)
    assert hc_prenorm._tile(512, 256, HOPPER_SHARED_MEMORY).depth == 128


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("x", lambda t: t.float()),
        ("x", lambda t: t[:, :100]),
        ("x", lambda t: t.T.contiguous().T),
        ("x", lambda t: torch.as_strided(t, t.shape, (255, 1))),
        ("x", lambda t: torch.cat((t, t), dim=1)[:, 4:260]),
        ("fn", lambda t: t.bfloat16()),
        ("fn", lambda t: t[:, :128]),
        ("fn", lambda t: t[:0]),
        ("fn", lambda t: t.repeat(4, 1)),
        ("out", lambda t: t[:1]),
        ("out", lambda t: t.double()),
        ("out", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        ("sqrsum", lambda t: t[:1]),
        ("sqrsum", lambda t: t.T.contiguous().T),
        ("num_split", lambda t: 0),
    ],
)
def test_rejects(argument: str, change: object) -> None:
    x, fn = case(3, 256)
    arguments = {
        "x": x,
        "fn": fn,
        "out": torch.zeros((2, 3, 24), device=DEVICE),
        "sqrsum": torch.zeros((2, 3), device=DEVICE),
        "num_split": 2,
    }
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        tf32_hc_prenorm_gemm(**arguments)
