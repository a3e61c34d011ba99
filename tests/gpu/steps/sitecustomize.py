"""In every Python process with this folder on PYTHONPATH: log when a sleep and a wake-up of the
sleep-mode backend `keep` made their steps.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
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


class Finder(MetaPathFinder):
    """Finds the module once, for `log_steps` after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_log(module: ModuleType) -> None:
            run(module)
            log_steps(module)

        spec.loader.exec_module = run_and_log  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
