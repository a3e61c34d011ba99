"""The process every witness is forked from. Reads requests from stdin, one JSON object a line.

python -m tests.witness.zygote TREE LIBRARIES
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.witness import forked
from tests.witness.world import Loaded, World, load


def call(loaded: Loaded, request: dict[str, Any]) -> None:
    """Call the test with a world."""
    module = forked.witness(request["file"])
    getattr(module, request["test"])(World(loaded), **request["arguments"])


def prepare() -> Callable[[dict[str, Any]], forked.Outcome]:
    loaded = load(Path(sys.argv[1]), Path(sys.argv[2]))

    def answer(request: dict[str, Any]) -> forked.Outcome:
        if "test" not in request:
            return forked.Outcome(passed=True)
        # Here, once, and not in every fork: these imports take seconds.
        forked.witness(request["file"])
        for name in request["loads"]:
            importlib.import_module(name)
        # A collection in a fork, of which sleep and wake_up make one each, would go through
        # all that was imported, and copy the memory it is in.
        gc.freeze()
        return forked.run(lambda: call(loaded, request), request["seconds"], idle=forked.IDLE)

    return answer


if __name__ == "__main__":
    forked.serve(prepare)
