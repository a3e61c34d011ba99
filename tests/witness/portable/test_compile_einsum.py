"""Every configuration of the output projection's product compiles for SM12x without a GPU."""

from __future__ import annotations

import pytest
from portable_mla import block_fp8_einsum
from portable_mla.compile import SM12X_SHARED_MEMORY, KernelConfiguration, compile_for

# Bytes of stack frame per thread: a few registers spilled outside of the main loop are tolerated,
# an accumulator is not.
SPILL_BOUND = 64


@pytest.mark.parametrize("configuration", block_fp8_einsum.configurations(), ids=lambda c: c.name)
def test_sm12x(configuration: KernelConfiguration) -> None:
    for capability in (120, 121):
        compiled = compile_for(configuration, capability)
        assert 0 < compiled.shared_memory <= SM12X_SHARED_MEMORY
        assert 0 < compiled.registers <= 255
        assert compiled.spill_bytes <= SPILL_BOUND
        assert "mma.sync" in compiled.ptx
        if capability == 120:
            assert compiled.tensor_core_instructions().get("QMMA", 0) > 0
