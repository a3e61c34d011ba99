"""The sleep-mode backend that the image has where the release can choose one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from sm12x.recipes import options

# scripts/sleep-keep, and the name of its backend.
PACKAGE = "vllm-sleep-keep"
NAME = "keep"
# The release's own file with the registry of backends.
_REGISTRY = "vllm/device_allocator/sleep_mode_backend.py"
# With these the command has chosen: the second one takes effect with vLLM's own backend alone.
_CHOSEN = ("sleep-mode-backend", "sleep-mode-offload-cudagraph")


def is_for(site: Path) -> bool:
    """Whether the release in ``site`` has backends, and so the image has this one."""
    return (site / _REGISTRY).is_file()


def is_installed() -> bool:
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


def arguments(serve: Sequence[str] | None, *, installed: bool) -> tuple[str, ...]:
    """What chooses the backend for ``vllm serve`` with these arguments, where nothing else does."""
    given = options.parse(list(serve or ()))
    if not installed or "enable-sleep-mode" not in given or any(name in given for name in _CHOSEN):
        return ()
    return ("--sleep-mode-backend", NAME)
