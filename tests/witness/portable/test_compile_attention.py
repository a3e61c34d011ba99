"""Each tile of the sparse attention compiles for SM12x without a GPU, within what plan() goes by.

All configurations are compiled by ``check`` in the image.
"""

from __future__ import annotations

import re

import pytest
from portable_mla import sparse_mla
from portable_mla.compile import SM12X_SHARED_MEMORY, compile_for

CONFIGURATIONS = sparse_mla.configurations()
# Every tile, the caches of both models, with and without a split; the merge of splits.
COMPILED = (
    "sparse_mla_merge",
    "sparse_mla[heads=16,stages=1,window=64,block=64,split=False]",
    "sparse_mla[heads=16,stages=3,window=32,block=128,split=True]",
    "sparse_mla[heads=32,stages=1,window=64,block=2,split=False]",
)
# Bytes of stack frame per thread with Triton 3.8: what is spilled are addresses and constants of
# the two loops, before each of them. An accumulator would be stored in each step of a loop.
SPILL_BOUNDS = {"merge": 0, "heads=16": 96, "heads=32": 384}
# A line of nvdisasm's text, as Triton writes it: an instruction, of 16 bytes, or a label.
LINE = re.compile(r"^(?:(?P<label>LBB\d+):|\S+:\S*\t(?P<instruction>.*))$")


def loops(sass: str) -> list[list[str]]:
    """The instructions of each loop: from the target of a branch back to the branch."""
    rows: list[str] = []
    labels: dict[str, int] = {}
    found = []
    for line in map(LINE.match, sass.splitlines()):
        if line is None:
            continue
        if line["label"]:
            labels[line["label"]] = len(rows)
            continue
        rows.append(line["instruction"])
        target = re.search(r"\bBRA\S*.*?\b(0x[0-9a-f]+|LBB\d+);", rows[-1])
        if target:
            name = target[1]
            first = int(name, 16) // 16 if name.startswith("0x") else labels.get(name, len(rows))
            if first < len(rows):
                found.append(rows[first:])
    return found


def test_no_tile_is_listed_that_does_not_fit() -> None:
    assert {c.constexprs.get("BLOCK_H") for c in CONFIGURATIONS} == {None, 16, 32}
    wide = sparse_mla.configurations(232448)
    assert {c.constexprs.get("BLOCK_H") for c in wide} == {None, 16, 32, 64}


@pytest.mark.parametrize("name", COMPILED)
def test_sm12x(name: str) -> None:
    (configuration,) = (c for c in CONFIGURATIONS if c.name == name)
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
            steps = [loop for loop in loops(compiled.sass) if "HMMA" in "".join(loop)]
            assert len(steps) == 1 + bool(configuration.constexprs["COMPRESSED"])
            assert not any(re.search(r"\bSTL\b", row) for loop in steps for row in loop)
    if "merge" not in configuration.name:
        (tile,) = (
            t
            for t in sparse_mla.TILES
            if (t.block_h, t.num_stages)
            == (configuration.constexprs["BLOCK_H"], configuration.num_stages)
        )
        # What plan() goes by.
        assert max(sizes) <= tile.shared_memory
