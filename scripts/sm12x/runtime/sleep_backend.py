"""The sleep-mode backend that the image has, and when a server sleeps by it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from sm12x.core.errors import UsageError
from sm12x.recipes import options

# scripts/sleep-keep, and the name of its backend.
PACKAGE = "vllm-sleep-keep"
_NAME = "keep"
SETTING = "SLEEP_MODE_HOST_COPY"
# The first one where nothing is set.
_KEPT, _RELEASED = ("auto", "keep"), "release"
# Options that choose a backend: the second one takes effect only with vLLM's own backend.
_CHOSEN = ("sleep-mode-backend", "sleep-mode-offload-cudagraph")


def is_installed() -> bool:
    try:
        metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True


def arguments(serve: Sequence[str] | None, *, setting: str, installed: bool) -> tuple[str, ...]:
    """The option that chooses the backend for ``vllm serve``, unless these arguments choose one.

    Args:
        setting: SLEEP_MODE_HOST_COPY, "" where it is not set. With "release" vLLM's own sleeps.

    Raises:
        UsageError: the setting has an unknown value.
    """
    if setting not in ("", *_KEPT, _RELEASED):
        raise UsageError(
            f"{SETTING}={setting} is none of {', '.join(_KEPT)} and {_RELEASED}",
            next_step=f"set one of them, or leave it out for {_KEPT[0]}",
        )
    given = options.parse(list(serve or ()))
    if not installed or "enable-sleep-mode" not in given or any(name in given for name in _CHOSEN):
        return ()
    return () if setting == _RELEASED else ("--sleep-mode-backend", _NAME)
