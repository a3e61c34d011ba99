"""In every process of a payload with this folder on PYTHONPATH: log when a sleep and a wake-up of
the sleep-mode backend `keep` made their steps.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

MODULE = "vllm_sleep_keep.host_copies"


def log_steps(module: Any) -> None:
    """Have the module's `HostCopies` log the steps of each call."""
    for name in ("sleep", "wake_up"):
        setattr(module.HostCopies, name, _logging(module, name, getattr(module.HostCopies, name)))


def _logging(module: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def logging(*arguments: Any) -> Any:
        # By its name in this folder: of the checkout, a process may see this folder alone.
        steps = importlib.import_module("sleep_steps").Steps(module)
        try:
            return call(*arguments)
        finally:
            spans = {
                step: [round(seconds, 4) for seconds in span]
                for step, span in steps.taken().items()
            }
            module.logger.info("Steps of %s: %s", name, json.dumps(spans))

    return logging


class Loader(SourceFileLoader):
    """Loads the module as ever, for `log_steps`."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        log_steps(module)


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
