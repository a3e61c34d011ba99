"""What every suite of tests needs."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Have SIGINT as a terminal gives it.

    A shell starts what it puts in the background with SIGINT ignored, and children inherit that;
    tests send it to themselves and to what they start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
