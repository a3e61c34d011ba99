"""Indexer logits against float64: rows from column 0 on, and pages of 32, 64 and 128."""

import pytest
import torch
from gemm_inputs import DEVICE, fp8, normal, relative_error
from portable_mla import indexer_logits
from portable_mla.deepgemm_reference import (
    decode_indexer_cache,
    encode_indexer_cache,
    mqa_logits_reference,
    paged_mqa_logits_reference,
)
from portable_mla.indexer_logits import mqa_logits, paged_mqa_logits

# FP8 products and float32 sums of at most 128 * 128 terms. Tensor cores of 9.0 keep about 14 bits
# of a sum of FP8 products: on an H200 cases are at most 2.2e-4 away, one of two logits 5.3e-4.
TOLERANCE = 1e-3 if DEVICE == "cuda" else 1e-5
SENTINEL = 12345.0


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def longest(ranges: list[tuple[int, int]], num_keys: int) -> int:
    return max(0, *(min(ke, num_keys) - ks for ks, ke in ranges))


def compare_inside(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within tolerance where the reference is finite."""
    inside = expected.isfinite()
    assert actual[inside].isfinite().all()
    assert relative_error(actual[inside], expected[inside]) < TOLERANCE


def flat_case(num_queries: int, num_keys: int, heads: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (
        fp8(num_queries, heads, 128, generator=generator),
        fp8(num_keys, 128, generator=generator),
        normal(num_keys, generator=generator).abs() + 0.01,
        normal(num_queries, heads, generator=generator),
    )


FLAT_RANGES = {
    # name: (N, [(ks, ke) per query])
    "causal": (300, [(0, i + 1) for i in range(0, 300, 13)]),
    "two_requests": (200, [(0, 5), (0, 90), (90, 91), (90, 140), (90, 200)]),
    "empty": (130, [(0, 0), (5, 5), (130, 130), (40, 20), (0, 130), (129, 130)]),
    "all_empty": (130, [(7, 7)] * 3),
    "one_row": (1, [(0, 1)]),
    "tile_edges": (256, [(0, 128), (128, 256), (127, 129), (128, 128), (255, 256)]),
    "past_the_end": (100, [(0, 400), (-3, 50), (100, 300), (99, 100)]),
    "unsorted": (384, [(256, 384), (0, 1), (383, 384), (0, 384), (1, 1), (100, 110)]),
    "many_rows": (140, [(i % 3, 139 - i % 7) for i in range(37)]),
}


@pytest.mark.parametrize("name", FLAT_RANGES)
@pytest.mark.parametrize("spare", [0, 37])
def test_flat_ranges(name: str, spare: int) -> None:
    """A row begins with the first key of its query, and what is past its end is not touched."""
    num_keys, ranges = FLAT_RANGES[name]
    q, k, k_scale, weights = flat_case(len(ranges), num_keys, 64, seed=1)
    ks, ke = (ints([r[i] for r in ranges]) for i in (0, 1))
    max_len = longest(ranges, num_keys) + spare
    expected = mqa_logits_reference(q, k, k_scale, weights, ks, ke, max_len)
    storage = torch.full((len(ranges) + 1, max_len + 5), SENTINEL, device=DEVICE)
    out = storage[:-1, :max_len]
    mqa_logits(q, k, k_scale, weights, ks, ke, max_len, out)
    compare_inside(out, expected)
    assert (out[~expected.isfinite()] == SENTINEL).all()
    assert (storage[:, max_len:] == SENTINEL).all()
    assert (storage[-1] == SENTINEL).all()


def test_flat_longer_than_the_rows() -> None:
    """A range longer than the rows ends with them: the next row is not written."""
    q, k, k_scale, weights = flat_case(3, 300, 32, seed=2)
    ks, ke = ints([0, 100, 5]), ints([300, 260, 6])
    storage = torch.full((3, 64), SENTINEL, device=DEVICE)
    expected = mqa_logits_reference(q, k, k_scale, weights, ks, ke, 50)
    mqa_logits(q, k, k_scale, weights, ks, ke, 50, storage[:, :50])
    compare_inside(storage[:, :50], expected)
    assert (storage[:, 50:] == SENTINEL).all()


@pytest.mark.parametrize("heads", indexer_logits.SUPPORTED_HEADS)
def test_flat_heads_and_padded_strides(heads: int) -> None:
    num_queries, num_keys = 9, 150
    q, k, k_scale, weights = flat_case(num_queries, num_keys, heads, seed=heads)
    wide_weights = torch.full((num_queries, heads + 5), torch.nan, device=DEVICE)
    wide_weights[:, :heads] = weights
    ks, ke = ints([i % 4 for i in range(9)]), ints([150 - i for i in range(9)])
    expected = mqa_logits_reference(q, k, k_scale, weights, ks, ke, num_keys)
    actual = mqa_logits(q, k, k_scale, wide_weights[:, :heads], ks, ke, num_keys)
    compare_inside(actual, expected)
    assert actual.stride(0) % 64 == 0


@pytest.mark.parametrize("queries_per_program", [1, 8, 128])
def test_flat_chunks(queries_per_program: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_logits, "_queries_per_program", lambda *_: queries_per_program)
    q, k, k_scale, weights = flat_case(19, 130, 32, seed=4)
    ks = ints([0] * 19)
    ke = ints([(i * 37) % 131 for i in range(19)])
    expected = mqa_logits_reference(q, k, k_scale, weights, ks, ke, 130)
    compare_inside(mqa_logits(q, k, k_scale, weights, ks, ke, 130), expected)


def test_flat_queries_per_program() -> None:
    """Powers of two within the tile; fewer only when the grid would be short."""
    tile = indexer_logits._mqa_tile(64, 101376)
    for num_queries in (1, 7, 8, 100, 8192):
        for num_keys in (1, 128, 4096, 10**6):
            for sm_count in (1, 48, 188):
                count = indexer_logits._queries_per_program(tile, num_queries, num_keys, sm_count)
                assert count in (8, 16, 32, 64, 128)
                twice = -(-num_keys // tile.keys) * -(-num_queries // (2 * count))
                assert count == 128 or 2 * twice < 3 * sm_count


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_flat_nothing_to_do(num_queries: int, num_keys: int) -> None:
    q, k, k_scale, weights = flat_case(num_queries, num_keys, 64, seed=0)
    bounds = torch.zeros(num_queries, dtype=torch.int32, device=DEVICE)
    out = mqa_logits(q, k, k_scale, weights, bounds, bounds, 7)
    assert out.shape == (num_queries, 7)


def test_flat_scales_at_both_ends() -> None:
    q, k, k_scale, weights = flat_case(3, 40, 64, seed=5)
    for scale in (2.0**-100, 2.0**100):
        k_scale.fill_(scale)
        ks, ke = ints([0] * 3), ints([40] * 3)
        expected = mqa_logits_reference(q, k, k_scale, weights, ks, ke, 40)
        compare_inside(mqa_logits(q, k, k_scale, weights, ks, ke, 40), expected)


def test_flat_largest_values() -> None:
    """448 * 448 * 128 per product and negative weights stay exact in fp32."""
    q = torch.full((2, 64, 128), 448.0, device=DEVICE).to(torch.float8_e4m3fn)
    k = torch.full((3, 128), 448.0, device=DEVICE).to(torch.float8_e4m3fn)
    k[1] = -448.0
    weights = torch.full((2, 64), -2.0, device=DEVICE)
    out = mqa_logits(q, k, torch.ones(3, device=DEVICE), weights, ints([0, 0]), ints([3, 3]), 3)
    largest = -2.0 * 64 * 128 * 448 * 448
    assert out[:, [0, 2]].tolist() == [[largest] * 2] * 2
    assert (out[:, 1] == 0).all()


def flat_arguments() -> dict[str, object]:
    q, k, k_scale, weights = flat_case(2, 20, 64, seed=0)
    return {
        "q": q,
        "k": k,
        "k_scale": k_scale,
        "weights": weights,
        "ks": ints([0, 0]),
        "ke": ints([20, 20]),
        "max_len": 20,
    }


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", lambda t: t[:, :40]),
        ("q", lambda t: t[:, :, :64]),
        ("q", lambda t: t.float()),
        ("q", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)),
        ("k", lambda t: t[:, :64]),
        ("k", lambda t: t[::2]),
        ("k", lambda t: t.half()),
        ("k_scale", lambda t: t[:-1]),
        ("k_scale", lambda t: t.double()),
        ("weights", lambda t: t[:1]),
        ("weights", lambda t: t.T.contiguous().T),
        ("weights", lambda t: t.bfloat16()),
        ("ks", lambda t: t.long()),
        ("ke", lambda t: t[:1]),
        ("max_len", lambda t: -t),
    ],
)
def test_flat_rejects(argument: str, change: object) -> None:
    arguments = flat_arguments()
    mqa_logits(**arguments)
    arguments[argument] = change(arguments[argument])
    with pytest.raises(ValueError, match=argument):
        mqa_logits(**arguments)


def paged_case(
    context_lens: list[list[int]],
    heads: int,
    columns: int,
    num_blocks: int,
    seed: int,
    block_stride: int | None = None,
    page: int = 64,
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    requests, next_n = len(context_lens), len(context_lens[0])
    values = fp8(num_blocks, page, 128, generator=generator)
    scales = normal(num_blocks, page, generator=generator).abs() + 0.01
    table = torch.randint(0, num_blocks, (requests, columns), generator=generator)
    return {
        "q": fp8(requests, next_n, heads, 128, generator=generator),
        "cache": encode_indexer_cache(values, scales, block_stride),
        "weights": normal(requests * next_n, heads, generator=generator),
        "context_lens": torch.tensor(context_lens, dtype=torch.int32, device=DEVICE),
        "block_table": table.to(torch.int32).to(DEVICE),
    }


def check_paged(case: dict[str, torch.Tensor], max_len: int, **extra: object) -> None:
    """Logits, and untouched memory past the end of a context."""
    expected = paged_mqa_logits_reference(**case, max_len=max_len)
    storage = torch.full((expected.shape[0] + 1, max_len + 24), SENTINEL, device=DEVICE)
    out = storage[:-1, :max_len]
    paged_mqa_logits(**case, max_len=max_len, out=out, **extra)
    compare_inside(out, expected)
    assert (out[~expected.isfinite()] == SENTINEL).all()
    assert (storage[-1] == SENTINEL).all()
    assert (storage[:, max_len:] == SENTINEL).all()


def test_cache_layout() -> None:
    """The encoder's bytes follow the layout of vLLM's indexer cache."""
    generator = torch.Generator().manual_seed(0)
    values = fp8(3, 64, 128, generator=generator)
    scales = normal(3, 64, generator=generator)
    cache = encode_indexer_cache(values, scales)
    assert cache.stride(0) == 8640
    assert cache.stride(0) % 576 == 0
    block = torch.as_strided(cache, (3, 8640), (8640, 1))
    assert torch.equal(block[1, 5 * 128 : 6 * 128], values[1, 5].view(torch.uint8))
    at = 64 * 128 + 5 * 4
    assert block[1, at : at + 4].view(torch.float32).item() == scales[1, 5].item()
    expected = values.double() * scales.double()[:, :, None]
    assert torch.equal(decode_indexer_cache(cache), expected)


@pytest.mark.parametrize("page", indexer_logits.PAGES)
@pytest.mark.parametrize(
    "lengths",
    [
        [[0], [1], [-1], [0], [1]],
        [[128], [127], [129], [192], [0]],
        [[10**9], [31], [32], [33], [-5]],
        [[255], [256], [257], [65], [97]],
    ],
    ids=["short", "edges", "past_the_end", "longer"],
)
def test_paged_lengths(page: int, lengths: list[list[int]]) -> None:
    case = paged_case(lengths, 64, columns=3, num_blocks=7, seed=2, page=page)
    check_paged(case, max_len=270)


@pytest.mark.parametrize("page", indexer_logits.PAGES)
def test_paged_layout(page: int) -> None:
    """Pages of V4.1 lie in blocks that hold other layers' pages, too."""
    case = paged_case([[150], [90]], 32, 2, 5, seed=21, block_stride=page * 132 + 4608, page=page)
    check_paged(case, max_len=256)


@pytest.mark.parametrize("max_len", [1, 63, 64, 100, 300])
def test_paged_max_len_and_table_width(max_len: int) -> None:
    """The context is bounded by max_len and by the columns of the block table."""
    case = paged_case([[90], [400]], 32, columns=3, num_blocks=5, seed=3)
    check_paged(case, max_len=max_len)


@pytest.mark.parametrize("next_n", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("heads", indexer_logits.SUPPORTED_HEADS)
def test_paged_rows_of_a_request(next_n: int, heads: int) -> None:
    lengths = [[65 + j for j in range(next_n)], [max(0, j - 1) for j in range(next_n)]]
    case = paged_case(lengths, heads, columns=2, num_blocks=4, seed=next_n)
    check_paged(case, max_len=128)


@pytest.mark.parametrize("form", ["flat", "column", "strided"])
def test_paged_context_forms(form: str) -> None:
    case = paged_case([[70, 70], [5, 5]], 32, columns=2, num_blocks=4, seed=4)
    lens = case["context_lens"]
    if form == "flat":
        case["context_lens"] = lens[:, 0].contiguous()
    elif form == "column":
        case["context_lens"] = lens[:, :1]
    else:
        case["context_lens"] = lens.T.contiguous().T
    check_paged(case, max_len=128)


@pytest.mark.parametrize("splits", [1, 2, 3, 100])
def test_paged_splits(splits: int) -> None:
    lengths = [[449], [64], [130]]
    case = paged_case(lengths, 32, columns=8, num_blocks=9, seed=5)
    check_paged(case, max_len=512, splits=splits)


@pytest.mark.parametrize("block_stride", [64 * 132, 64 * 132 + 16, 9216])
def test_paged_block_strides(block_stride: int) -> None:
    case = paged_case([[130], [64]], 32, 3, 6, seed=6, block_stride=block_stride)
    check_paged(case, max_len=192)


def test_paged_block_ids_out_of_range() -> None:
    """Ids are clamped, so that the reads stay within the cache."""
    case = paged_case([[256], [200]], 32, columns=4, num_blocks=3, seed=7)
    case["block_table"][0] = ints([-1, 3, 10**9, 2])
    case["block_table"][1] = ints([-(2**31), 0, 2**31 - 1, 1])
    check_paged(case, max_len=256)


def test_paged_reads_stay_within_one_block() -> None:
    """A cache of one block in the middle of NaN bytes gives finite logits."""
    case = paged_case([[64], [64]], 32, columns=1, num_blocks=1, seed=8)
    storage = torch.full((3, 8640), 0x7F, dtype=torch.uint8, device=DEVICE)
    storage[1, : 64 * 132] = torch.as_strided(case["cache"], (64 * 132,), (1,))
    case["cache"] = storage[1:2].as_strided((1, 64, 1, 132), (8640, 132, 132, 1), 8640)
    case["block_table"].fill_(77)
    check_paged(case, max_len=64)


def test_paged_wide_table_rows() -> None:
    """A slice of a wider block table and of wider weights."""
    case = paged_case([[130], [190]], 32, columns=3, num_blocks=6, seed=9)
    wide = torch.full((2, 11), -7, dtype=torch.int32, device=DEVICE)
    wide[:, :3] = case["block_table"]
    case["block_table"] = wide[:, :3]
    weights = torch.full((2, 65), torch.nan, device=DEVICE)
    weights[:, 1:33] = case["weights"]
    case["weights"] = weights[:, 1:33]
    check_paged(case, max_len=192)


@pytest.mark.parametrize(("requests", "columns", "max_len"), [(0, 2, 128), (2, 0, 128), (2, 2, 0)])
def test_paged_nothing_to_do(requests: int, columns: int, max_len: int) -> None:
    case = paged_case([[64]] * 2, 64, columns=2, num_blocks=3, seed=0)
    case["q"], case["weights"] = case["q"][:requests], case["weights"][:requests]
    case["context_lens"] = case["context_lens"][:requests]
    case["block_table"] = case["block_table"][:requests, :columns]
    assert paged_mqa_logits(**case, max_len=max_len).shape == (requests, max_len)


def test_paged_random() -> None:
    chance = torch.Generator().manual_seed(11)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=chance))

    for seed in range(10):
        requests, next_n, columns = draw(1, 4), draw(1, 4), draw(1, 4)
        page = indexer_logits.PAGES[draw(0, 2)]
        lengths = [[draw(-1, columns * page + 5) for _ in range(next_n)] for _ in range(requests)]
        case = paged_case(lengths, 32, columns, draw(1, 6), seed=seed, page=page)
        check_paged(case, max_len=draw(1, 280), splits=draw(1, 5))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", lambda t: t[:, :, :40]),
        ("q", lambda t: t[0]),
        ("cache", lambda t: t[:, :48]),
        ("cache", lambda t: t[:0]),
        ("cache", lambda t: t.view(torch.int8)),
        ("cache", lambda t: t[:, :, :, :128]),
        ("cache", lambda t: torch.as_strided(t, t.shape, (8449, 132, 132, 1))),
        ("cache", lambda t: torch.as_strided(t, t.shape, (8320, 132, 132, 1))),
        ("weights", lambda t: t[:1]),
        ("context_lens", lambda t: t.long()),
        ("context_lens", lambda t: t[:1]),
        ("block_table", lambda t: t[:1]),
        ("block_table", lambda t: t.T.contiguous().T),
        ("block_table", lambda t: t.long()),
    ],
)
def test_paged_rejects(argument: str, change: object) -> None:
    case = paged_case([[64, 64], [5, 5]], 64, columns=3, num_blocks=3, seed=0)
    paged_mqa_logits(**case, max_len=64)
    case[argument] = change(case[argument])
    with pytest.raises(ValueError, match=argument):
        paged_mqa_logits(**case, max_len=64)


def test_paged_splits_depend_on_shapes_only() -> None:
    for requests in (1, 3, 128, 4096):
        for blocks in (1, 16, 2048):
            for sm_count in (48, 132, 188):
                splits = indexer_logits._paged_splits(requests, 1, blocks, sm_count)
                assert 1 <= splits <= blocks
                assert splits == blocks or splits * requests >= sm_count
