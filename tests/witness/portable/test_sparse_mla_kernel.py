"""Sparse attention over packed caches against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from portable_mla import sparse_mla as module
from portable_mla.compile import SM12X_SHARED_MEMORY
from portable_mla.sparse_mla import Plan, plan, scratch_bound, sparse_mla
from portable_mla.sparse_mla_reference import read_slots, sparse_mla_reference
from sparse_inputs import DEVICE, cache, draw, integers, pack, queries, sinks

SCALE = 512**-0.5
# Norm of the error over the norm of the result; on a GPU it is 0.0017. Triton's interpreter cuts
# bfloat16 off instead of rounding it.
TOLERANCE = 4e-3 if DEVICE == "cuda" else 6e-3
H200 = 232448


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    norm = wanted.norm()
    return float((out.double() - wanted).norm() / (norm if norm > 0 else 1.0))


def launch_of(tile: Any, tokens: int, heads: int, splits: int) -> Plan:
    cells = 0 if splits == 1 else tokens * splits * heads
    return Plan(tile, splits, cells * 513)


def check(launch: Plan | None = None, **given: Any) -> torch.Tensor:
    out = torch.full_like(given["q"], 7.0)
    sparse_mla(scale=SCALE, out=out, launch=launch, **given)
    wanted = sparse_mla_reference(scale=SCALE, **given)
    assert error(out, wanted) <= TOLERANCE
    return out


def case(tokens: int = 3, heads: int = 16, width: int = 40, extra: int = 24, seed: int = 0) -> Any:
    given: dict[str, Any] = {
        "q": queries(tokens, heads, seed),
        "swa_cache": cache(3, 64, seed + 1),
        "swa_slots": draw(0, 3 * 64, (tokens, width), seed + 2),
        "swa_lens": draw(1, width + 1, (tokens,), seed + 3),
        "sink": sinks(heads, seed + 4),
    }
    if extra:
        given["comp_cache"] = cache(4, 64, seed + 5)
        given["comp_slots"] = draw(-1, 4 * 64, (tokens, extra), seed + 6)
        given["comp_lens"] = draw(0, extra + 1, (tokens,), seed + 7)
    return given


@pytest.mark.parametrize("tile", module.TILES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_every_tile(tile: Any, splits: int) -> None:
    check(launch_of(tile, 2, 18, splits), **case(tokens=2, heads=18, width=70, extra=70))


@pytest.mark.parametrize("heads", [1, 5, 16, 33, 64])
def test_heads(heads: int) -> None:
    check(**case(tokens=1, heads=heads))


def test_a_layer_that_does_not_compress() -> None:
    check(**case(extra=0))


@pytest.mark.parametrize("splits", [1, 2, 7, 32])
def test_splits(splits: int) -> None:
    """More splits than steps leave some without a candidate."""
    launch = launch_of(module.SHORT_16, 2, 16, splits)
    check(launch, **case(tokens=2, width=70, extra=33))


@pytest.mark.parametrize("splits", [1, 4])
def test_queries_without_a_candidate_give_zeros(splits: int) -> None:
    given = case(tokens=4)
    given["swa_lens"] = integers([0, 5, 0, -3])
    given["comp_lens"] = integers([0, 0, 6, -1])
    given["comp_slots"][2] = -1
    out = check(launch_of(module.SHORT_16, 4, 16, splits), **given)
    assert not out[0].any()
    assert out[1].any()
    assert not out[2].any()
    assert not out[3].any()


def test_one_candidate() -> None:
    given = case(tokens=2, extra=0)
    given["swa_lens"] = integers([1, 1])
    given["sink"] = torch.full((16,), -torch.inf, device=DEVICE)
    out = check(**given)
    alone = read_slots(given["swa_cache"], given["swa_slots"][:, 0])
    assert torch.equal(out.double(), alone[:, None, :].expand_as(out))


def test_candidates_that_are_listed_more_than_once() -> None:
    given = case(tokens=1)
    given["swa_slots"][:] = 5
    given["comp_slots"][:] = 9
    check(**given)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sink", [-torch.inf, -1e4, 0.0, 1e4, torch.inf])
def test_sinks(sink: float, splits: int) -> None:
    given = case(tokens=1)
    given["sink"] = torch.full((16,), sink, device=DEVICE)
    out = check(launch_of(module.SHORT_16, 1, 16, splits), **given)
    if sink >= 1e4:
        assert not out.any()


def test_the_padding_of_heads_has_sinks() -> None:
    given = case(tokens=1, heads=5)
    given["sink"] = torch.cat([given["sink"], torch.full((59,), -torch.inf, device=DEVICE)])
    check(**given)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (1, 3), (60, 200), (118, 134), (135, 140)])
def test_scales_at_both_ends(low: int, high: int) -> None:
    given = case(tokens=1, extra=0)
    given["swa_cache"] = cache(3, 64, 1, low, high)
    # Logits of order 1, whatever the keys are.
    q = given["q"].double() * 2.0 ** (127 - max(high, 110))
    given["q"] = q.to(torch.bfloat16)
    check(**given)


def test_scales_of_groups_are_not_mixed_up() -> None:
    tokens = 64
    values = torch.ones(tokens, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    power = torch.arange(100, 107, dtype=torch.uint8).repeat(tokens, 1)
    power += (torch.arange(tokens) % 20).to(torch.uint8)[:, None]
    rope = torch.zeros(tokens, 64, dtype=torch.bfloat16)
    given = case(tokens=2, extra=0)
    given["swa_cache"] = pack(values, power, rope, tokens)
    given["swa_slots"] = draw(0, tokens, (2, 40), 1)
    given["swa_lens"] = integers([1, 40])
    check(**given)


def test_unused_memory_of_a_block_is_not_read() -> None:
    """NaN lies in slots that nobody lists, in padding and in the unused scale byte."""
    given = case(tokens=2, extra=0)
    blocks = given["swa_cache"]
    blocks[0].fill_(0xFF)
    given["swa_slots"].clamp_(min=64)
    given["swa_slots"][:, 7] = -1
    assert check(**given).isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("window", "tokens"), [*module._LAYERS, module._HALVED])
def test_blocks_of_every_layer(window: int, tokens: int, splits: int) -> None:
    """V4's blocks and V4.1's, which lie beside those of other layers."""
    given = case(tokens=3, extra=24 if tokens else 0)
    given["swa_cache"] = cache(6, window, 2, padding=576)
    if tokens:
        blocks = 256 // tokens
        given["comp_cache"] = cache(blocks, tokens, 3, padding=4 * 576)
        given["comp_slots"] = draw(-1, blocks * tokens, (3, 24), 8)
    check(launch_of(module.SHORT_16, 3, 16, splits), **given)


def test_a_long_row_of_slots_is_shared() -> None:
    """A list with stride 0, as every query of a C128A layer could have."""
    given = case(tokens=3)
    given["comp_slots"] = draw(0, 256, (1, 24), 3).expand(3, 24)
    check(**given)


def test_hostile_lists_read_nothing_outside() -> None:
    given = case(tokens=4)
    largest = 2**31 - 1
    given["swa_slots"][0] = largest
    given["swa_slots"][1] = -largest - 1
    given["comp_slots"][2] = largest
    given["swa_lens"] = integers([largest, 40, 3, 1])
    given["comp_lens"] = integers([largest, -largest, 24, 0])
    out = torch.full_like(given["q"], 7.0)
    sparse_mla(scale=SCALE, out=out, **given)
    assert out.isfinite().all()


def test_strides() -> None:
    """Heads that are part of a padded q and out, and blocks that lie far apart."""
    given = case(tokens=2, heads=5)
    wide = torch.full((2, 64, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    wide[:, :5] = given["q"]
    given["q"] = wide[:, :5]
    given["swa_cache"] = cache(3, 64, 1, padding=4 * 576)
    wide_out = torch.full_like(wide, 7.0)
    sparse_mla(scale=SCALE, out=wide_out[:, :5], **given)
    wanted = sparse_mla_reference(scale=SCALE, **given)
    assert error(wide_out[:, :5], wanted) <= TOLERANCE
    assert (wide_out[:, 5:] == 7.0).all()


@pytest.mark.parametrize("seed", range(8))
def test_random(seed: int) -> None:
    shape = torch.randint(1, 50, (5,), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens, heads, width, extra, splits = shape
    tokens, heads, splits = tokens % 3 + 1, heads % 34 + 1, splits % 5 + 1
    tile = module.TILES[seed % len(module.TILES)]
    given = case(tokens, heads, width, extra if seed % 3 else 0, seed)
    check(launch_of(tile, tokens, heads, splits), **given)


def test_no_tokens() -> None:
    given = case(tokens=1)
    empty = given["q"][:0]
    given.update(q=empty, out=empty.clone())
    assert sparse_mla(scale=SCALE, **given).shape == (0, 16, 512)


@pytest.mark.parametrize("shared", [SM12X_SHARED_MEMORY, H200])
@pytest.mark.parametrize("chunk", [None, 1, 64, 512])
def test_plans_fit_the_device_and_the_reserved_scratch(shared: int, chunk: int | None) -> None:
    for heads in (1, 8, 16, 20, 32, 64, 128):
        for sms in (1, 48, 132, 188):
            for width in (1, 128, 640, 8320):
                bound = scratch_bound(heads, width, sms, 4096, chunk)
                for tokens in (1, 2, 3, 7, 8, 64, 100, 132, 1000, 4096):
                    chosen = plan(tokens, heads, width, sms, shared, chunk=chunk)
                    assert chosen.tile.shared_memory <= shared
                    assert 1 <= chosen.num_splits <= module.MAX_SPLITS
                    assert chosen.scratch_elements <= bound


def test_scratch_does_not_grow_with_the_tokens() -> None:
    assert scratch_bound(16, 640, 188, 1) == scratch_bound(16, 640, 188, 65536)


def test_few_queries_are_split_and_many_are_not() -> None:
    assert plan(1, 16, 640, 188).num_splits > 8
    assert plan(4096, 16, 640, 188).num_splits == 1


@pytest.mark.parametrize("heads", [16, 32])
def test_a_head_block_is_taken(heads: int) -> None:
    assert plan(4096, 64, 640, 188, head_block=heads).tile.block_h == heads


@pytest.mark.parametrize("wrong", [{"head_block": 64}, {"head_block": 8}, {"chunk": 0}])
def test_what_does_not_fit_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="sparse_mla: "):
        plan(1, 64, 640, 188, **wrong)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda t: t.float()),
        ("q", lambda t: t[..., :448]),
        ("out", lambda t: t[:, :3]),
        ("swa_cache", lambda t: t[..., :576]),
        ("swa_cache", lambda t: t[:, :3]),
        ("swa_cache", lambda t: t.to(torch.int32)),
        ("swa_slots", lambda t: t.long()),
        ("swa_slots", lambda t: t[:, :0]),
        ("swa_slots", lambda t: t[:1]),
        ("swa_lens", lambda t: t[:1]),
        ("sink", lambda t: t[:3]),
        ("comp_slots", lambda t: None),
        ("comp_cache", lambda t: None),
        ("scratch", lambda t: torch.zeros(3, device=DEVICE)),
    ],
)
def test_other_shapes_are_refused(name: str, change: Any) -> None:
    given = case(tokens=2)
    given["out"] = torch.empty_like(given["q"])
    given[name] = change(given.get(name))
    launch = launch_of(module.SHORT_16, 2, 16, 2)
    with pytest.raises(ValueError, match="sparse_mla: "):
        sparse_mla(scale=SCALE, launch=launch, **given)
