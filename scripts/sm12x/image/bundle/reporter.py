"""Where the progress of a bundle goes; the command layer prints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Reporter(Protocol):
    """Remarks, and phases of the work."""

    def say(self, text: str) -> None: ...

    def phase(
        self, label: str, *, live: bool = True
    ) -> AbstractContextManager[Callable[[str], None]]:
        """A phase of the work; the block is given what shows the step it is at.

        With ``live=False`` the terminal is left to progress bars of the block's own.
        """
        ...
