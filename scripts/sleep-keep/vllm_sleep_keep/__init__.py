"""A sleep-mode backend for vLLM that keeps the host copy of weights between two sleeps.

With this package installed, `--enable-sleep-mode --sleep-mode-backend keep`.
"""

NAME = "keep"


def register() -> None:
    """Register the backend; `vllm.general_plugins` has vLLM call this in each process.

    Raises:
        RuntimeError: this vLLM has no sleep-mode backends.

    """
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory
    except ImportError as error:
        raise RuntimeError(
            "vllm-sleep-keep is installed, but this vLLM has no sleep-mode backends: "
            "take a newer vLLM, or uninstall vllm-sleep-keep"
        ) from error
    if NAME not in SleepModeBackendFactory._registry:
        SleepModeBackendFactory.register_backend(
            NAME, "vllm_sleep_keep.backend", "KeepBackend"
        )
