"""The pool's own metrics, and those of its servers with a label that names the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?( .+)")
# Endings of the samples of one family.
_PARTS = ("_bucket", "_sum", "_count", "_created", "_total")
LABEL = "pool_model"


class Metrics:
    """The pool's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model = [LABEL]
        per: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "sm12x_pool_requests", "Requests by their answer's status.", [LABEL, "status"], **per
        )
        self.refusals = Counter(
            "sm12x_pool_refusals", "Requests that the pool refused.", [LABEL, "reason"], **per
        )
        self.held = Histogram(
            "sm12x_pool_hold_seconds",
            "How long requests waited for a wake-up.",
            model,
            buckets=_SECONDS,
            **per,
        )
        self.gone = Counter(
            "sm12x_pool_disconnects",
            "Clients that left before the end.",
            model,
            **per,
        )
        self.bytes = Counter("sm12x_pool_bytes", "Bytes passed on.", [LABEL, "direction"], **per)
        self.swaps = Counter("sm12x_pool_swaps", "Swaps by their end.", [LABEL, "result"], **per)
        self.swap_seconds = Histogram(
            "sm12x_pool_swap_seconds",
            "Seconds of each step of swaps to a model.",
            [LABEL, "step"],
            buckets=_SECONDS,
            **per,
        )
        self.freed = Counter(
            "sm12x_pool_freed_bytes", "Bytes that sleeps were proved to free.", model, **per
        )
        self.canaries = Counter(
            "sm12x_pool_canaries", "Canaries by their result.", [LABEL, "result"], **per
        )
        self.ends = Counter(
            "sm12x_pool_server_ends", "Servers that ended, or did not answer.", model, **per
        )
        self.phase = Gauge(
            "sm12x_pool_state", "1 for the state that a model is in.", [LABEL, "state"], **per
        )
        self.waiting = Gauge("sm12x_pool_queue_requests", "Requests that wait.", model, **per)
        self.waiting_bytes = Gauge("sm12x_pool_queue_bytes", "Bytes of their bodies.", model, **per)
        self.running = Gauge("sm12x_pool_running_requests", "Requests in flight.", model, **per)

    def text(self, servers: Mapping[str, str]) -> bytes:
        """Return all metrics; ``servers`` has the text of each server's /metrics by its model."""
        return generate_latest(self.registry) + merged(servers).encode()


def merged(servers: Mapping[str, str]) -> str:
    """Return the metrics of several servers as one text: one header for each family."""
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for model, text in servers.items():
        label = f'{LABEL}="{_escaped(model)}"'
        mine: dict[str, list[str]] = {}
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                words = line.split(" ", 3)
                mine.setdefault(words[2], []).append(line)
            elif match := _SAMPLE.fullmatch(line):
                name, labels, value = match.groups()
                family = name
                for part in _PARTS:
                    if name not in mine and name.endswith(part):
                        family = name.removesuffix(part)
                        break
                family = family if family in mine else name
                inside = f"{labels},{label}" if labels else label
                samples.setdefault(family, []).append(f"{name}{{{inside}}}{value}")
        for family, lines in mine.items():
            headers.setdefault(family, lines)
    lines = []
    for family, rows in samples.items():
        lines += headers.get(family, []) + rows
    return "".join(f"{line}\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
