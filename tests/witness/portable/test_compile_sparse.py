"""Every configuration of the sparse attention compiles for SM12x without a GPU."""

from __future__ import annotations

import re

import pytest
from portable_mla import sparse_mla
from portable_mla.compile import SM12X_SHARED_MEMORY, KernelConfiguration, compile_for

CONFIGURATIONS = sparse_mla.configurations()
# Bytes of stack frame per thread. 16 heads of a program spill nothing; 32 spill addresses and
# constants of the loops, before them. An accumulator would be stored in each step: 64 registers.
SPILL_BOUNDS = {"merge": 0, "heads=16": 0, "heads=32": 176}
STORES_AFTER_THE_FIRST_PRODUCT = 8


def test_no_tile_is_listed_that_does_not_fit() -> None:
    assert {c.constexprs.get("BLOCK_H") for c in CONFIGURATIONS} == {None, 16, 32}
    wide = sparse_mla.configurations(232448)
    assert {c.constexprs.get("BLOCK_H") for c in wide} == {None, 16, 32, 64}


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.name)
def test_sm12x(configuration: KernelConfiguration) -> None:
    bound = next(size for name, size in SPILL_BOUNDS.items() if name in configuration.name)
    sizes = []
    for capability in (120, 121):
        compiled = compile_for(configuration, capability)
        assert compiled.shared_memory <= SM12X_SHARED_MEMORY
        assert compiled.spill_bytes <= bound
        sizes.append(compiled.shared_memory)
        if "merge" in configuration.name:
            continue
        assert "mma.sync" in compiled.ptx
        if capability == 120:
            assert compiled.tensor_core_instructions().get("HMMA", 0) > 0
            steps = compiled.sass[compiled.sass.index("HMMA") :]
            assert len(re.findall(r"\bSTL\b", steps)) <= STORES_AFTER_THE_FIRST_PRODUCT
    if "merge" not in configuration.name:
        (tile,) = (
            t
            for t in sparse_mla.TILES
            if (t.block_h, t.num_stages)
            == (configuration.constexprs["BLOCK_H"], configuration.num_stages)
        )
        # What plan() goes by.
        assert max(sizes) <= tile.shared_memory
