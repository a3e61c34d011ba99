"""The libraries in a container image: a `save` archive, an OCI archive or an exported file system.

Layers are read from the lowest up, as streams; a later layer replaces, hides or removes what an
earlier one has. Only the library that is being read is held in memory.
"""

from __future__ import annotations

import json
import lzma
import posixpath
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import zstandard

from sm12x.audit import library
from sm12x.audit.model import Audit, LibraryAudit
from sm12x.core import unpack
from sm12x.core.errors import BadFileError, Sm12xError

_OnProgress = Callable[[int], None]

# A file `.wh.NAME` in a layer removes NAME; `.wh..wh..opq` empties its folder (OCI image spec,
# "Whiteouts").
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_BLOCK = 1 << 20
# Of a manifest or an index.
_JSON_BYTES = 16 << 20
# OverflowError: a name whose header says that it is longer than memory could be.
_DAMAGE = (
    tarfile.TarError, EOFError, OSError, OverflowError, zlib.error, lzma.LZMAError,
    zstandard.ZstdError,
)  # fmt: skip


@dataclass(kw_only=True)
class _Layer:
    """The content of one tar: libraries, every other path it sets, and the paths it removes."""

    libraries: dict[str, LibraryAudit] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    removed: set[str] = field(default_factory=set)
    emptied: set[str] = field(default_factory=set)


def _random(raw: IO[bytes], path: Path) -> tarfile.TarFile:
    """Open a tar file, compressed or not, whose members are read in any order."""
    try:
        stream = unpack.tar_stream(raw, str(path), path.stat().st_size)
        return tarfile.open(fileobj=stream, mode="r:", tarinfo=unpack.Member)
    except _DAMAGE:
        raise BadFileError(
            f"{path} is neither a file of code, a folder, a wheel nor an image archive",
            next_step="check that it is complete, and its type with `file`",
        ) from None


def archive(path: Path, *, on_progress: _OnProgress | None = None) -> Audit:
    """Audit a tar file: `docker save`, an OCI archive, or the tar of a file system.

    Raises:
        BadFileError: it is no tar, damaged, cut off, holds more than one image, or unpacks to more
            than ``unpack`` allows.
    """
    packed = path.stat().st_size
    try:
        with path.open("rb") as raw, _random(_counted(raw, on_progress), path) as outer:
            layers = _layers(outer, path)
            if layers is None:
                raw.seek(0)
                return file_system(raw, path.name, packed)
            merged: dict[str, LibraryAudit] = {}
            share = library.Share()
            for member in layers:
                handle = outer.extractfile(member)
                if handle is None:
                    raise BadFileError(
                        f"{path}: the layer {member} is not a file",
                        next_step="save the image again",
                    )
                # A compressed archive of compressed layers has no more in it than it takes itself.
                size = min(packed, outer.getmember(member).size)
                with handle:
                    _apply(merged, _read(handle, f"{path}: {member}", size, share))
    except (*_DAMAGE, KeyError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(str(path), error) from None
    return library.assemble(path.name, "image", merged.values())


def file_system(stream: IO[bytes], subject: str, packed: int | None = None) -> Audit:
    """Audit the tar of a whole file system, as `docker export` writes it, from a stream.

    Args:
        packed: bytes of the file that it is read from; None for the stream of an engine.

    Raises:
        BadFileError: the tar is damaged or cut off, or unpacks to more than ``unpack`` allows.
    """
    try:
        layer = _read(stream, subject, packed, library.Share())
    except _DAMAGE as error:
        raise _damaged(subject, error) from None
    return library.assemble(subject, "image", layer.libraries.values())


def _damaged(subject: str, error: Exception) -> Sm12xError:
    if library.is_refusal(error):
        return library.no_memory(subject)
    return BadFileError(
        f"{subject} cannot be read as an image: {error}",
        next_step="save or export the image again",
    )


def _layers(outer: tarfile.TarFile, path: Path) -> list[str] | None:
    """The names of the layers, lowest first, or None for a plain file system."""
    names = set()
    for number, info in enumerate(outer):
        unpack.check_number(number, str(path))
        names.add(_clean(info.name))
    if "manifest.json" in names:
        images = _json(outer, "manifest.json")
        if isinstance(images, list) and images and "Layers" in images[0]:
            if len(images) > 1:
                raise BadFileError(
                    f"{path} holds {len(images)} images", next_step="save one image at a time"
                )
            return [str(layer) for layer in images[0]["Layers"]]
    if "oci-layout" in names and "index.json" in names:
        return _oci_layers(outer, _json(outer, "index.json"), path)
    return None


def _oci_layers(outer: tarfile.TarFile, index: Any, path: Path) -> list[str]:
    manifests: list[Any] = list(index["manifests"])
    images: list[list[str]] = []
    seen: set[str] = set()
    while manifests:
        name = _blob(manifests.pop(0))
        # Indexes can name each other in a circle.
        if name in seen:
            continue
        seen.add(name)
        content = _json(outer, name)
        # An index may name indexes, with one manifest per platform.
        manifests.extend(content.get("manifests", []))
        layers = content.get("layers", [])
        # Attestations are manifests too; their layers are documents.
        if layers and all(".tar" in layer["mediaType"] for layer in layers):
            images.append([_blob(layer) for layer in layers])
    if len(images) != 1:
        raise BadFileError(
            f"{path} holds {len(images)} images", next_step="save one image, for one platform"
        )
    return images[0]


def _blob(descriptor: Any) -> str:
    return "blobs/" + str(descriptor["digest"]).replace(":", "/", 1)


def _json(outer: tarfile.TarFile, name: str) -> Any:
    try:
        handle = outer.extractfile(name)
    except KeyError:
        handle = outer.extractfile(f"./{name}")
    if handle is None:
        raise ValueError(f"{name} is not a file")
    with handle:
        return json.loads(handle.read(_JSON_BYTES))


def _read(stream: IO[bytes], what: str, packed: int | None, share: library.Share) -> _Layer:
    layer = _Layer()
    if packed is not None:
        stream = unpack.tar_stream(stream, what, packed)
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK, tarinfo=unpack.Member) as tar:
        for number, info in enumerate(tar):
            unpack.check_number(number, what)
            # tarfile keeps each, which only a reader in any order needs.
            tar.members = []  # type: ignore[attr-defined]
            path = _clean(info.name)
            folder, name = posixpath.split(path)
            if name == _OPAQUE:
                layer.emptied.add(folder)
            elif name.startswith(_WHITEOUT):
                layer.removed.add(posixpath.join(folder, name.removeprefix(_WHITEOUT)))
            elif info.islnk() and _clean(info.linkname) in layer.libraries:
                twin = layer.libraries[_clean(info.linkname)]
                layer.libraries[path] = replace(twin, path=path)
            elif info.isdir():
                layer.folders.add(path)
            else:
                entry = _member(tar, info, path, packed, share) if info.isreg() else None
                # A path can come twice in one tar: the later one counts.
                layer.libraries.pop(path, None)
                layer.others.discard(path)
                if entry is None:
                    layer.others.add(path)
                else:
                    layer.libraries[path] = entry
    return layer


def _member(
    tar: tarfile.TarFile,
    info: tarfile.TarInfo,
    path: str,
    packed: int | None,
    share: library.Share,
) -> LibraryAudit | None:
    handle = tar.extractfile(info)
    if handle is None:
        return None
    head = handle.read(library.HEAD_BYTES)
    if not library.may_be(path, head):
        return None
    if not info.size:
        return library.unreadable(path, 0, "it is empty")
    unpack.bounded(path, info.size, unpack.MOST_OF_ONE if packed is None else packed)
    with library.unpacked(handle, head, info.size, path) as data:
        return share.counted(library.audit(path, data))


def _apply(merged: dict[str, LibraryAudit], layer: _Layer) -> None:
    """Put a layer over what the lower ones hold."""
    gone = layer.others | layer.removed
    # All files below a folder that was removed, emptied or replaced by a file or link are gone.
    emptied = gone | layer.emptied
    for path in list(merged):
        if path in gone or path in layer.folders or not emptied.isdisjoint(_parents(path)):
            del merged[path]
    merged.update(layer.libraries)


def _parents(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


def _clean(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")


class _Counting:
    """A binary file that tells how far it has been read."""

    def __init__(self, handle: IO[bytes], on_progress: _OnProgress) -> None:
        self._handle = handle
        self._on_progress = on_progress

    def read(self, size: int = -1) -> bytes:
        data = self._handle.read(size)
        self._on_progress(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _counted(handle: IO[bytes], on_progress: _OnProgress | None) -> IO[bytes]:
    # All of IO but `read` goes through __getattr__, which a type checker cannot see.
    return handle if on_progress is None else _Counting(handle, on_progress)  # type: ignore[return-value]
