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
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import zstandard

from sm12x.audit import library
from sm12x.audit.model import Audit, LibraryAudit
from sm12x.core.errors import BadFileError, Sm12xError

_OnProgress = Callable[[int], None]

# A file `.wh.NAME` in a layer removes NAME; `.wh..wh..opq` empties its folder (OCI image spec,
# "Whiteouts").
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK = 1 << 20
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


def is_tar(path: Path) -> bool:
    """Whether ``path`` is a tar archive, compressed or not."""
    try:
        return tarfile.is_tarfile(path)
    except _DAMAGE:
        return False


def archive(path: Path, *, on_progress: _OnProgress | None = None) -> Audit:
    """Audit a tar file: `docker save`, an OCI archive, or the tar of a file system.

    Raises:
        BadFileError: it is damaged, cut off, or holds more than one image.
    """
    try:
        with path.open("rb") as raw, tarfile.open(fileobj=_counted(raw, on_progress)) as outer:
            layers = _layers(outer, path)
            if layers is None:
                raw.seek(0)
                return file_system(raw, path.name)
            merged: dict[str, LibraryAudit] = {}
            for member in layers:
                handle = outer.extractfile(member)
                if handle is None:
                    raise BadFileError(
                        f"{path}: the layer {member} is not a file",
                        next_step="save the image again",
                    )
                with handle, _unpacked(handle) as stream:
                    _apply(merged, _read(stream))
    except (*_DAMAGE, KeyError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(str(path), error) from None
    return library.assemble(path.name, "image", merged.values())


def file_system(stream: IO[bytes], subject: str) -> Audit:
    """Audit the tar of a whole file system, as `docker export` writes it, from a stream.

    Raises:
        BadFileError: the tar is damaged or cut off.
    """
    try:
        layer = _read(stream)
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
    names = {_clean(name) for name in outer.getnames()}
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
    found: list[list[str]] = []
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
            found.append([_blob(layer) for layer in layers])
    if len(found) != 1:
        raise BadFileError(
            f"{path} holds {len(found)} images", next_step="save one image, for one platform"
        )
    return found[0]


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
        return json.load(handle)


def _read(stream: IO[bytes]) -> _Layer:
    layer = _Layer()
    with tarfile.open(fileobj=stream, mode="r|*", bufsize=_BLOCK) as tar:
        for info in tar:
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
                found = _member(tar, info, path) if info.isreg() else None
                # A path can come twice in one tar: the later one counts.
                layer.libraries.pop(path, None)
                layer.others.discard(path)
                if found is None:
                    layer.others.add(path)
                else:
                    layer.libraries[path] = found
    return layer


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo, path: str) -> LibraryAudit | None:
    handle = tar.extractfile(info)
    if handle is None:
        return None
    head = handle.read(library.HEAD_BYTES)
    if not library.may_be(path, head):
        return None
    if not info.size:
        return library.unreadable(path, 0, "it is empty")
    with library.unpacked(handle, head, info.size, path) as data:
        return library.audit(path, data)


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


@contextmanager
def _unpacked(handle: IO[bytes]) -> Iterator[IO[bytes]]:
    """The tar in a layer. tarfile knows gzip by itself, but not zstd."""
    head = handle.read(4)
    handle.seek(0)
    if head != _ZSTD_MAGIC:
        yield handle
        return
    with zstandard.ZstdDecompressor().stream_reader(handle, read_across_frames=True) as stream:
        yield stream


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
