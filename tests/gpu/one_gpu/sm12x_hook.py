"""In every process of a payload with this folder on PYTHONPATH: all ranks of a server are on the
first GPU. NCCL allows that with NCCL_MULTI_RANK_GPU_ENABLE=1; ranks that share a GPU show what is
correct, not what is fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

MODULE = "vllm.engine.arg_utils"


def first_gpu(engine: Any) -> list[int] | None:
    """Return the GPU of each rank; `--device-ids` refuses the same one twice."""
    ranks: int = engine.tensor_parallel_size * engine.pipeline_parallel_size
    return [0] * ranks if ranks > 1 else None


class Loader(SourceFileLoader):
    """Loads the module as ever, but for what gives ranks their GPUs."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module)["EngineArgs"]._resolve_device_ids = first_gpu


class Finder(MetaPathFinder):
    """Finds the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
