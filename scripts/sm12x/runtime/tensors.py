"""The files of a checkpoint, read within limits: JSON files, and headers of safetensors files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from sm12x.core.errors import BadFileError

CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# safetensors allows no longer header; a longer one is not such a file.
_MAX_HEADER = 100_000_000
# The longest configs and indexes have a few million bytes.
_MAX_JSON = 200_000_000
# More bytes than any checkpoint has.
_LARGEST = 1 << 60


def read_json(path: Path, content: str) -> dict[str, Any]:
    """Read a JSON file that holds a table; ``content`` says which file the user should give.

    Raises:
        BadFileError: it cannot be read, is too long, or is no table.
    """
    try:
        with path.open("rb") as handle:
            raw = handle.read(_MAX_JSON + 1)
        if len(raw) > _MAX_JSON:
            raise ValueError(f"longer than {_MAX_JSON} bytes")
        table = json.loads(raw.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise BadFileError(
            f"{path}:{error.lineno}: not JSON: {error.msg}", next_step=f"give {content}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        # Too many digits in a number, or too many tables in each other, among others.
        raise BadFileError(f"{path} cannot be read: {error}", next_step=f"give {content}") from None
    if not isinstance(table, dict):
        raise BadFileError(f"{path} is not a table of keys", next_step=f"give {content}")
    return table


def total(folder: Path) -> int | None:
    """Return the bytes of all tensors of a checkpoint: by headers, else by its index, else None.

    Raises BadFileError for an index or a header that is damaged.
    """
    if not (folder / _INDEX).is_file():
        return _bytes(folder, {_SINGLE})
    index = read_json(folder / _INDEX, "the index that belongs to the checkpoint")
    files = index.get("weight_map")
    if isinstance(files, dict) and files:
        size = _bytes(folder, {str(name) for name in files.values()})
        if size is not None:
            return size
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, int | float) and 0 < size <= _LARGEST else None


def _bytes(folder: Path, names: set[str]) -> int | None:
    """Return the bytes of the tensors of these files; None if one is not there."""
    size = 0
    for name in sorted(names):
        path = folder / name
        try:
            if not path.is_file():
                return None
        except (OSError, ValueError):
            # A name that no file can have.
            return None
        for tensor, described in _header(path).items():
            if tensor != "__metadata__":
                size += _size(described, f"{path}: {tensor}")
    return size or None


def _size(described: object, where: str) -> int:
    offsets = described.get("data_offsets") if isinstance(described, dict) else None
    match offsets:
        case [int(first), int(last)] if 0 <= first <= last <= _LARGEST:
            return last - first
    raise BadFileError(f"{where} has no data_offsets", next_step="fetch it again")


def _header(path: Path) -> dict[str, Any]:
    """safetensors: 8 bytes little endian that count the bytes of the JSON that follows."""
    try:
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > _MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(handle.read(length))
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise BadFileError(
            f"{path} is not a safetensors file: {error}", next_step="fetch it again"
        ) from None
    if not isinstance(header, dict):
        raise BadFileError(f"{path} has no table of tensors", next_step="fetch it again")
    return header
