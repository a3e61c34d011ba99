"""When a module of host copies makes the steps of a sleep, and of a wake-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# By name of a step: the begin of its first call and the end of its last, in seconds since the
# sleep's begin, and the sum of its calls.
Spans = dict[str, tuple[float, float, float]]


class Steps:
    """Times the steps that the module makes, from here until `taken`."""

    def __init__(self, module: Any) -> None:
        self._start = time.monotonic()
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._wrapped: list[tuple[Any, str, Any]] = []
        for step, owner, name in (
            ("digests", module.HostCopies, "_digests"),
            ("touch", module, "touch"),
            ("register", module.Runtime, "register"),
            ("copy", module.Runtime, "copy"),
            ("wait", module.Runtime, "wait"),
            ("unmap", module.HostCopies, "_put_to_sleep"),
            ("map", module.HostCopies, "_map_and_restore"),
            ("collect", module.gc, "collect"),
            ("synchronize", module.torch.cuda, "synchronize"),
            ("empty cache", module.torch.cuda, "empty_cache"),
        ):
            call = getattr(owner, name)
            self._wrapped.append((owner, name, call))
            setattr(owner, name, self._timed(step, call))

    def _timed(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        spans = self._spans.setdefault(step, [])

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.monotonic()
            try:
                return call(*arguments, **named)
            finally:
                spans.append((begin - self._start, time.monotonic() - self._start))

        return timed

    def taken(self) -> Spans:
        """The spans so far. From here on nothing is timed."""
        for owner, name, call in self._wrapped:
            setattr(owner, name, call)
        return {
            step: (
                min(begin for begin, _ in spans),
                max(end for _, end in spans),
                sum(end - begin for begin, end in spans),
            )
            for step, spans in self._spans.items()
            if spans
        }
