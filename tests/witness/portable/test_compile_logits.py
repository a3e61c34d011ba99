"""The indexer's logits compile for SM12x without a GPU.

All configurations are compiled by ``check`` in the image.
"""

from __future__ import annotations

import pytest
import torch
from portable_mla import indexer_logits
from portable_mla.compile import (
    SM12X_SHARED_MEMORY,
    DeviceLimits,
    compile_for,
)
from triton.backends.compiler import GPUTarget

CONFIGURATIONS = indexer_logits.configurations()
# Both kernels; of the pages' the largest tile, with the page of 128, and the smallest.
COMPILED = (
    "mqa_logits[heads=64]",
    "paged_mqa_logits[heads=64,page=128,rows=4]",
    "paged_mqa_logits[heads=32,page=32,rows=1]",
)
# Bytes of stack frame per thread: a few registers spilled outside of the main loop are tolerated,
# an accumulator is not.
SPILL_BOUND = 64


@pytest.mark.parametrize("name", COMPILED)
def test_sm12x(name: str) -> None:
    (configuration,) = (c for c in CONFIGURATIONS if c.name == name)
    for capability in (120, 121):
        compiled = compile_for(configuration, capability)
        assert 0 < compiled.shared_memory <= SM12X_SHARED_MEMORY
        assert 0 < compiled.registers <= 255
        assert compiled.spill_bytes <= SPILL_BOUND
        assert "mma.sync" in compiled.ptx
        if capability == 120:
            assert compiled.tensor_core_instructions().get("QMMA", 0) > 0


def test_names_are_unique() -> None:
    names = [c.name for c in CONFIGURATIONS]
    assert len(set(names)) == len(names)


Specialization = tuple[object, ...]


def listed() -> set[Specialization]:
    """What the configurations describe, in the form that the recorder returns."""
    return {
        (
            c.function.__name__,
            tuple(sorted(c.signature.items())),
            tuple(sorted(c.divisible_by_16)),
            tuple(sorted(c.constexprs.items())),
            c.num_warps,
            c.num_stages,
        )
        for c in CONFIGURATIONS
    }


def launched(patched: pytest.MonkeyPatch) -> set[Specialization]:
    """What Triton's JIT derives from the arguments of launches of many shapes; none is made."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 120, 32))
    found: set[Specialization] = set()

    class Recorder:
        def __init__(self, kernel: object) -> None:
            self.name = kernel.__name__
            self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            assert 0 < grid[0] < 2**31
            assert all(0 < size < 65536 for size in grid[1:])
            return self.record

        def record(
            self, *arguments: object, num_warps: int, num_stages: int, **named: object
        ) -> None:
            bound, specialization, _ = self.bind(
                *arguments, **named, num_warps=num_warps, num_stages=num_stages
            )
            types = dict(zip(bound, specialization, strict=False))
            constexprs = [k for k, v in types.items() if v[0] == "constexpr"]
            found.add(
                (
                    self.name,
                    tuple(sorted((k, v[0]) for k, v in types.items() if k not in named)),
                    tuple(sorted(k for k, v in types.items() if v[1] == "D")),
                    tuple(sorted((k, bound[k]) for k in constexprs)),
                    num_warps,
                    num_stages,
                )
            )

    limits = DeviceLimits(188, SM12X_SHARED_MEMORY)
    for name in ("_mqa_logits_kernel", "_paged_mqa_logits_kernel"):
        patched.setattr(indexer_logits, name, Recorder(getattr(indexer_logits, name)))
    patched.setattr(indexer_logits, "device_limits", lambda _: limits)
    fp8 = torch.float8_e4m3fn
    for heads in indexer_logits.SUPPORTED_HEADS:
        for queries, keys in ((1, 1), (3, 64), (16, 16), (700, 5000)):
            # Bounds, weights and output that start at an odd element.
            bounds = torch.zeros(queries + 1, dtype=torch.int32)
            indexer_logits.mqa_logits(
                torch.zeros((queries, heads, 128), dtype=fp8),
                torch.zeros((keys, 128), dtype=fp8),
                torch.zeros(keys + 1)[1:],
                torch.zeros((queries, heads + 1))[:, 1:],
                bounds[1:],
                bounds[:-1],
                keys,
                torch.zeros((queries, keys + 1))[:, 1:],
            )
        for page in indexer_logits.PAGES:
            for next_n in range(1, 20):
                for requests in (1, 16, 300):
                    indexer_logits.paged_mqa_logits(
                        torch.zeros((requests, next_n, heads, 128), dtype=fp8),
                        torch.zeros((2, page, 1, 132), dtype=torch.uint8),
                        torch.zeros((requests * next_n, heads)),
                        torch.zeros(requests + 1, dtype=torch.int32)[1:],
                        torch.zeros((requests, 17), dtype=torch.int32)[:, 1:],
                        500,
                    )
    return found


def test_launches_are_the_listed_specializations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch code over many shapes compiles what is listed, all of it, and no more."""
    wanted = listed()
    assert launched(monkeypatch) == wanted
