"""Which version the files of a third-party source say they are."""

from __future__ import annotations

import re
from pathlib import Path

from sm12x.core.errors import BadFileError
from sm12x.stack.model.base import ThirdPartySource


def require(source: ThirdPartySource, folder: Path) -> None:
    """Raise BadFileError where the files in ``folder`` are of another version than pinned."""
    version = version_of(source, folder)
    if version and version != source.pin:
        raise BadFileError(
            f"{folder} is {source.name} {version}, base.toml pins {source.pin}",
            next_step=f"name a folder with {source.name} {source.pin}",
        )


def version_of(source: ThirdPartySource, folder: Path) -> str:
    """The version that the files in ``folder`` say they are, as base.toml pins it; "" if unsaid.

    Raises:
        BadFileError: the file that says it is not there, or does not.
    """
    if not source.version_file:
        return ""
    path = folder / source.version_file
    next_step = f"name a folder with {source.name} {source.pin}"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise BadFileError(
            f"{folder} has no {source.version_file}: it is not {source.name}", next_step=next_step
        ) from None
    numbers: list[str] = []
    for name in source.defines:
        match = re.search(rf"^\s*#\s*define\s+{re.escape(name)}\s+(\d+)", text, re.MULTILINE)
        if match is None:
            raise BadFileError(f"{path} does not define {name}", next_step=next_step)
        numbers.append(match[1])
    prefix = "v" if source.pin.startswith("v") else ""
    return prefix + ".".join(numbers)
