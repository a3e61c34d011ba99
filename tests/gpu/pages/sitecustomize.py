"""In every Python process with this folder on PYTHONPATH: the indexer of DeepSeek V4.1 has pages of
128 entries, as on SM12x, where vLLM would give it 64 on 9.0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

MODULE = "vllm.v1.attention.backends.mla.indexer"


class Loader(SourceFileLoader):
    """Loads the module as ever, but for the size of the pages."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        backend = vars(module)["DeepseekV41IndexerBackend"]
        backend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [128])


class Finder(MetaPathFinder):
    """Finds the module, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


sys.meta_path.insert(0, Finder())
