"""The release's portable sparse attention over a bf16 cache, which GLM-5 takes on SM12x.

Lists of slots end in -1, and a query may have none. On SM12x a masked load of an address that is
not there can end the process.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from tests.witness.kernels import Gpu, KernelProcess

MODULE = "vllm.v1.attention.ops.xpu_mla_sparse"
PRELOAD = (MODULE,)
SLOTS, TOPK, HEADS, WIDTH, VALUES = 96, 64, 20, 576, 512
SCALE = WIDTH**-0.5
# Triton's interpreter rounds as a GPU does; bf16 products and weights.
TOLERANCE = 6e-3


def lists(kind: str) -> Any:
    """[queries, TOPK] int32 slots."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(len(kind))
    slots = torch.stack([torch.randperm(SLOTS)[:TOPK] for _ in range(4)]).to(torch.int32)
    if kind == "tails":
        for row, live in enumerate((1, 15, 16, 33)):
            slots[row, live:] = -1
    elif kind == "heads":
        for row, empty in enumerate((1, 16, 17, 63)):
            slots[row, :empty] = -1
    elif kind == "none":
        slots[::2] = -1
    elif kind == "outside":
        slots[:, 3::5] = 2**31 - 1
        slots[:, 4::5] = -(2**31)
        slots[:, 5::5] = SLOTS
    return slots


def run(kind: str) -> tuple[Any, Any, Any, Any]:
    torch: Any = importlib.import_module("torch")
    module: Any = importlib.import_module(MODULE)
    slots = lists(kind)
    torch.manual_seed(1)
    q = torch.randn(len(slots), HEADS, WIDTH, dtype=torch.bfloat16)
    cache = torch.randn(SLOTS, 1, WIDTH, dtype=torch.bfloat16)
    out, _, _ = module.triton_bf16_mla_sparse_interface(q, cache, slots[:, None], SCALE)
    return q, cache, slots, out


# ---- what runs where Triton interprets ----


def error(gpu: Gpu, kind: str) -> float:
    """Norm over norm, against float64; infinite where a result is no number."""
    torch: Any = importlib.import_module("torch")
    gpu.become((12, 0))
    q, cache, slots, out = run(kind)
    live = (slots >= 0) & (slots < SLOTS)
    keys = cache[slots.where(live, 0).long(), 0].double()
    scores = torch.einsum("thd,tsd->ths", q.double(), keys) * SCALE
    scores = scores.masked_fill(~live[:, None], -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    wanted = torch.einsum("ths,tsd->thd", weights, keys[..., :VALUES])
    if not bool(out.isfinite().all()):
        return float("inf")
    return float((out.double() - wanted).norm() / wanted.norm())


def outside(gpu: Gpu, kind: str) -> int:
    """Addresses of loads, of masked lanes too, that lie in none of the kernel's tensors."""
    numpy: Any = importlib.import_module("numpy")
    torch: Any = importlib.import_module("torch")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    gpu.become((12, 0))
    spans: list[tuple[int, int]] = []
    original_load = interpreter.InterpreterBuilder.create_masked_load
    found = 0

    def load(self: Any, pointers: Any, *rest: Any) -> Any:
        nonlocal found
        at = pointers.data.astype(numpy.uint64)
        inside = numpy.zeros(at.shape, dtype=bool)
        for first, last in spans:
            inside |= (at >= first) & (at < last)
        found += int((~inside).sum())
        return original_load(self, pointers, *rest)

    interpreter.InterpreterBuilder.create_masked_load = load
    module: Any = importlib.import_module(MODULE)
    kernel = module._bf16_mla_sparse_kernel

    class Launch:
        def __getitem__(self, grid: Any) -> Any:
            def start(**given: Any) -> None:
                for value in given.values():
                    if isinstance(value, torch.Tensor):
                        storage = value.untyped_storage()
                        spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
                kernel[grid](**given)

            return start

    module._bf16_mla_sparse_kernel = Launch()
    run(kind)
    assert spans, "the kernel was not launched by keywords"
    return found


# ---- what the kernel is to do ----


@pytest.mark.parametrize("kind", ["heads", "none"])
def test_a_list_may_begin_with_nothing(interpreted: KernelProcess, kind: str) -> None:
    assert interpreted.call(error, kind=kind) <= TOLERANCE


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["full", "tails", "outside"])
def test_live_slots_are_attended(interpreted: KernelProcess, kind: str) -> None:
    assert interpreted.call(error, kind=kind) <= TOLERANCE


@pytest.mark.parametrize("kind", ["tails", "heads", "outside"])
def test_no_address_is_outside_of_the_cache(interpreted: KernelProcess, kind: str) -> None:
    assert interpreted.call(outside, kind=kind) == 0
