"""Archives of strangers: what they unpack to is bounded by what they take packed.

The libraries of 0.33.0's closure (torch, vLLM, NVIDIA's packages) have up to 517 MiB and unpack to
at most 6 times their packed size (measured on 2026-11-28); deflate can do 1032 times, bzip2 and xz
thousands.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
from typing import IO, Any, NoReturn

from sm12x.core import text
from sm12x.core.errors import BadFileError

# Times its packed size that anything may unpack to, and bytes that are free of that: a small file
# of zeros is no danger.
RATIO, FREE = 25, 16 * text.MIB
# Of a whole archive, whose other files are read past and not kept.
_FREE_OF_ALL = text.GIB
# Of one library: several times the largest there is.
MOST_OF_ONE = 8 * text.GIB
# Ten times what the largest wheels unpack to.
_MOST_OF_ALL = 64 * text.GIB
# Files in a tar: each takes memory, and compressed headers are small.
_MOST_MEMBERS = 1_000_000
# Of a header that goes on in blocks of its own: a long name, or PAX records.
_MOST_HEADER = text.MIB
_NEXT = "unpack what you trust of it into a folder, and name that folder"


def bounded(what: str, size: int, packed: int, *, whole: bool = False) -> None:
    """Raise BadFileError unless ``packed`` bytes may unpack to ``size``; ``what`` names them.

    Args:
        whole: they are an archive, not one file that is to be held in memory.
    """
    most = _most(packed, whole)
    if size > most:
        least = text.size(_FREE_OF_ALL if whole else FREE)
        raise BadFileError(
            f"{what} claims to unpack to {text.size(size)} from {text.size(packed)}; the limit is "
            f"{text.size(most)} ({RATIO} times that, or {least}, and never more than "
            f"{text.size(_MOST_OF_ALL if whole else MOST_OF_ONE)})",
            next_step=_NEXT,
        )


def _most(packed: int, whole: bool) -> int:
    free, most = (_FREE_OF_ALL, _MOST_OF_ALL) if whole else (FREE, MOST_OF_ONE)
    return min(most, max(free, RATIO * packed))


def opened(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Return a member of a zip as a stream.

    Raises NotImplementedError for any compression but deflate, which wheels have: ``zipfile``
    unpacks a block of the others whole, whatever number of bytes is asked for.
    """
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise NotImplementedError(
            f"its compression is of type {info.compress_type}, and not deflate (8)"
        )
    return archive.open(info)


def small(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """Return at most ``most`` first bytes of a member of a zip. Raises as ``opened``."""
    with opened(archive, info) as handle:
        return handle.read(most)


class _Limited:
    """A stream that ends with BadFileError where it yields more than it may."""

    def __init__(self, stream: IO[bytes], what: str, packed: int) -> None:
        self._stream, self._what, self._packed = stream, what, packed
        self._most = _most(packed, whole=True)

    def read(self, size: int = -1) -> bytes:
        # One byte more than may come tells whether it does.
        limit = self._most - self._stream.tell() + 1
        data = self._stream.read(limit if size < 0 else min(size, limit))
        if self._stream.tell() > self._most:
            bounded(self._what, self._most + 1, self._packed, whole=True)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if not whence and offset > self._most:
            bounded(self._what, offset, self._packed, whole=True)
        return self._stream.seek(offset, whence)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tar_stream(handle: IO[bytes], what: str, packed: int) -> IO[bytes]:
    """Return the unpacked bytes of a tar, which may be compressed to ``packed`` bytes.

    Reading raises BadFileError where it unpacks to more than ``bounded`` lets a whole archive.
    """
    head = handle.read(6)
    handle.seek(0)
    stream: Any
    if head.startswith(b"\x1f\x8b"):
        stream = gzip.GzipFile(fileobj=handle)
    elif head.startswith(b"BZh"):
        stream = bz2.BZ2File(handle)
    elif head == b"\xfd7zXZ\0":
        stream = lzma.LZMAFile(handle)  # noqa: SIM115 - its reader closes it
    elif head.startswith(b"\x28\xb5\x2f\xfd"):
        # Not in an image, where a ledger is read through this module.
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(handle, read_across_frames=True)
    else:
        return handle
    # All of IO but `read` and `seek` goes through __getattr__, which a type checker cannot see.
    return _Limited(stream, what, packed)  # type: ignore[return-value]


_LONG = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)


class Member(tarfile.TarInfo):
    """A file of a tar whose name and records are of a sane length: tarfile reads them whole.

    A map of holes that goes on in the data is refused: it takes twenty times its size in memory.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Member:
        member = super().frombuf(buf, encoding, errors)
        if member.type in _LONG and member.size > _MOST_HEADER:
            raise tarfile.ReadError(f"a header of {text.size(member.size)}")
        return member

    def _proc_sparse(self, archive: tarfile.TarFile) -> NoReturn:
        raise tarfile.ReadError("a file with holes")

    def _proc_gnusparse_10(self, *_: object) -> NoReturn:
        raise tarfile.ReadError("a file with holes")


def check_number(number: int, what: str) -> None:
    """Raise BadFileError at more than ``_MOST_MEMBERS`` files in a tar."""
    if number > _MOST_MEMBERS:
        raise BadFileError(f"{what} has more than {_MOST_MEMBERS} files", next_step=_NEXT)
