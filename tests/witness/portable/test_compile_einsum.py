"""The output projection's product compiles for SM12x without a GPU.

All configurations are compiled by ``check`` in the image.
"""

from __future__ import annotations

import pytest
from portable_mla import block_fp8_einsum
from portable_mla.compile import SM12X_SHARED_MEMORY, compile_for

# Bytes of stack frame per thread: a few registers spilled outside of the main loop are tolerated,
# an accumulator is not.
SPILL_BOUND = 64


# The largest and the smallest tile.
COMPILED = (
    "fp8_einsum[tokens=128,rows=128,slices=1,e8m0=True]",
    "fp8_einsum[tokens=16,rows=16,slices=4,e8m0=False]",
)


@pytest.mark.parametrize("name", COMPILED)
def test_sm12x(name: str) -> None:
    (configuration,) = (c for c in block_fp8_einsum.configurations() if c.name == name)
    for capability in (120, 121):
        compiled = compile_for(configuration, capability)
        assert 0 < compiled.shared_memory <= SM12X_SHARED_MEMORY
        assert 0 < compiled.registers <= 255
        assert compiled.spill_bytes <= SPILL_BOUND
        assert "mma.sync" in compiled.ptx
        if capability == 120:
            assert compiled.tensor_core_instructions().get("QMMA", 0) > 0
