"""Do the Triton kernels that the stack adds compile for SM12x, and fit its shared memory?"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from sm12x.runtime.check.native import Ask
from sm12x.runtime.check.report import Line, failed, passed
from sm12x.runtime.places import Places

TOPIC = "kernels"
# The package whose modules list what they launch; a stack without it has nothing to compile.
PACKAGE = PurePosixPath("vllm/v1/attention/ops/portable_mla")
_CAPABILITIES = (120, 121)
# Shared memory that one block can have on 12.0 and 12.1, bytes (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
_SHARED_MEMORY = 101376
REBUILD = "rebuild the image with the stack as it is; on a changed kernel, choose smaller tiles"


def check(places: Places, ask: Ask) -> list[Line]:
    """Compile every configuration for 12.0 and 12.1 (about two minutes on two cores)."""
    folder = places.site / PACKAGE
    if not folder.is_dir():
        return []
    question = {"folder": str(folder), "capabilities": _CAPABILITIES}
    answer: list[dict[str, Any]] = ask("kernels", question, {"TRITON_INTERPRET": None})
    lines = []
    for one in answer:
        where = f"{one['name']} for sm_{one['capability']}"
        if one["error"]:
            lines.append(failed(TOPIC, f"{where} does not compile: {one['error']}", REBUILD))
        elif one["shared"] > _SHARED_MEMORY:
            text = f"{where} takes {one['shared']} bytes of shared memory, over {_SHARED_MEMORY}"
            lines.append(failed(TOPIC, text, REBUILD))
    if not answer:
        lines.append(failed(TOPIC, f"{PACKAGE} lists no configuration", REBUILD))
    if lines:
        return lines
    most = max(one["shared"] for one in answer)
    targets = " and ".join(f"sm_{capability}" for capability in _CAPABILITIES)
    count = len({one["name"] for one in answer})
    text = f"{count} configurations compile for {targets}; at most {most} of {_SHARED_MEMORY} bytes"
    return [passed(TOPIC, f"{text} of shared memory")]
