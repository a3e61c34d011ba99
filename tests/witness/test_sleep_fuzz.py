"""Random operations on the allocator: no byte that has to be kept is lost, and nothing is left.

A longer run: SM12X_SEEDS=100 makes 20,000 operations, SM12X_TREE as `sm12x-dev witness` sets it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.witness.fuzz import Fuzzer, Settings, seeds
from tests.witness.world import World

OPERATIONS = 200


def note(counts: object) -> None:
    """For a longer run: what was done, one line a seed, in the file that SM12X_FUZZ_LOG names."""
    path = os.environ.get("SM12X_FUZZ_LOG")
    if path:
        with Path(path).open("a", encoding="utf-8") as log:
            log.write(f"{counts}\n")


@pytest.mark.parametrize("seed", seeds(3))
def test_random_operations(world: World, seed: int) -> None:
    note(Fuzzer(world, Settings(operations=OPERATIONS, seed=seed)).run())
