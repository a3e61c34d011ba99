"""Writes a zip out of another, copying unchanged members as they are, still compressed.

Compressing 550 MB of machine code again would take most of a minute, and its bytes would depend
on the zlib of the machine. ``zipfile`` has no call for this; what is used of it here beyond its
documented interface has not changed since Python 3.5, and typeshed lists it.
"""

from __future__ import annotations

import copy
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sm12x.core.errors import BadFileError

# Local file header: signature, five 16-bit and three 32-bit fields, lengths of name and extra.
_LOCAL = struct.Struct("<4s5H3L2H")
_SIZES_FOLLOW = 0x08
_ENCRYPTED = 0x01
_BLOCK = 1 << 20

Date = tuple[int, int, int, int, int, int]


class Rewriter:
    """Takes members from ``source`` and new ones into a new zip, in the order of the calls."""

    def __init__(self, source: zipfile.ZipFile, target: zipfile.ZipFile, date: Date) -> None:
        self._source = source
        self._target = target
        self._date = date

    def keep(self, info: zipfile.ZipInfo, *, name: str | None = None) -> None:
        """Copy a member of the source, under another name if given, without decompressing it."""
        reader, writer = self._source.fp, self._target.fp
        assert reader is not None  # noqa: S101 - it is open
        assert writer is not None  # noqa: S101 - it is open
        reader.seek(info.header_offset)
        fields = _LOCAL.unpack(reader.read(_LOCAL.size))
        if fields[0] != b"PK\x03\x04" or info.flag_bits & _ENCRYPTED:
            raise BadFileError(
                f"{self._source.filename}: {info.filename} cannot be copied",
                next_step="fetch the file again",
            )
        reader.seek(fields[9] + fields[10], 1)
        taken = copy.copy(info)
        taken.filename = name or info.filename
        # The sizes are known now and go in front; other extra fields hold times and owners.
        taken.flag_bits &= ~_SIZES_FOLLOW
        taken.extra = b""
        taken.header_offset = self._target.start_dir
        writer.seek(self._target.start_dir)
        writer.write(taken.FileHeader())
        _copy(reader, writer, info.compress_size)
        self._target.start_dir = writer.tell()
        self._target.filelist.append(taken)
        self._target.NameToInfo[taken.filename] = taken

    def write(self, name: str, data: bytes, *, mode: int = 0o644) -> None:
        """Add a new member; ``mode`` are its permissions."""
        info = zipfile.ZipInfo(name, date_time=self._date)
        info.compress_type = zipfile.ZIP_DEFLATED
        # The upper half is Unix's: a regular file, and its permissions.
        info.external_attr = (0o100000 | mode) << 16
        info.create_system = 3
        self._target.writestr(info, data)


@contextmanager
def rewriting(source: zipfile.ZipFile, target: Path, date: Date) -> Iterator[Rewriter]:
    """Write ``target`` out of ``source``; new members are dated ``date``."""
    with zipfile.ZipFile(target, "w") as archive:
        yield Rewriter(source, archive, date)


def _copy(reader: IO[bytes], writer: IO[bytes], size: int) -> None:
    while size:
        block = reader.read(min(size, _BLOCK))
        if not block:
            raise BadFileError("the zip ends in the middle", next_step="fetch the file again")
        writer.write(block)
        size -= len(block)
