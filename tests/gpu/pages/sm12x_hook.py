"""In every process of a payload with this folder on PYTHONPATH: DeepSeek V4.1 has the pages of
SM12x, 128 entries, where vLLM gives its attention and its indexer 64 on 9.0. Pages are packed, so
both need one size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

# Classes by module.
BACKENDS = {
    "vllm.v1.attention.backends.mla.indexer": "DeepseekV41IndexerBackend",
    "vllm.models.deepseek_v41.sparse_mla": "DeepseekV4SparseMLABackend",
}


class Loader(SourceFileLoader):
    """Loads a module as ever, but for the size of the pages."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        backend = vars(module)[BACKENDS[module.__name__]]
        backend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [128])


class Finder(MetaPathFinder):
    """Finds the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in BACKENDS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
