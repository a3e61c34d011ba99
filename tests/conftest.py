"""What every suite of tests needs."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Have SIGINT and SIGHUP as a terminal gives them.

    A shell starts what it puts in the background with SIGINT ignored, nohup what it starts with
    SIGHUP ignored, and children inherit that; tests send both to themselves and to what they start.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
