"""The process every witness is forked from. Reads requests from stdin, one JSON object a line.

python -m tests.witness.zygote TREE LIBRARIES
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.witness import forked
from tests.witness.world import Loaded, World, load


def call(loaded: Loaded, request: dict[str, Any]) -> None:
    """Import the test's file and call the test with a world."""
    spec = importlib.util.spec_from_file_location("witness_under_test", request["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    getattr(module, request["test"])(World(loaded), **request["arguments"])


def main() -> None:
    # Answers go to the real stdout; whatever vLLM prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    loaded = load(Path(sys.argv[1]), Path(sys.argv[2]))
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"passed": True, "text": ""}
        if "test" in request:
            # Here, once, and not in every fork: these imports take seconds.
            for name in request["loads"]:
                importlib.import_module(name)
            # A collection in a fork, of which sleep and wake_up make one each, would go through
            # all that was imported, and copy the memory it is in.
            gc.freeze()

            def body(request: dict[str, Any] = request) -> None:
                call(loaded, request)

            outcome = forked.run(body, request["seconds"], idle=forked.IDLE)
            answer = {"passed": outcome.passed, "text": outcome.text}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
