"""Pictures: a figure of matplotlib, where it is installed, and its PNG."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sm12x.core import files
from sm12x.core.errors import ToolMissingError


def figure(option: str, **settings: Any) -> Any:
    """Return a new figure. Raises ToolMissingError, which names ``option``, without matplotlib."""
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ToolMissingError(
            f"{option} needs matplotlib, which is not installed",
            next_step="pip install matplotlib, or leave the picture out: the text report has the "
            "same figures",
        ) from None
    return module.Figure(**settings)


def write(drawn: Any, path: Path) -> None:
    """Write a figure as a PNG, whole or not at all."""
    with files.writing(path) as temporary:
        drawn.savefig(temporary, format="png", dpi=150, bbox_inches="tight", facecolor="white")
