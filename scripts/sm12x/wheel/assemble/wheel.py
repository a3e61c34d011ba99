"""The wheel: the official one with the stack's Python files and the modules compiled here.

Unchanged members are copied in compressed form: compressing 550 MB of machine code again would take
most of a minute, and its bytes would depend on the zlib of the machine. ``zipfile`` has no call for
this; what is used of it here beyond its documented interface has not changed since Python 3.5, and
typeshed lists it.
"""

from __future__ import annotations

import base64
import copy
import csv
import hashlib
import io
import re
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

import sm12x
from sm12x.core import declared, files
from sm12x.core.errors import BadFileError, BuildFailedError
from sm12x.wheel import ledger as ledgers
from sm12x.wheel import selection
from sm12x.wheel.compile.native import NativeRecord
from sm12x.wheel.source.patched import SourceFile, SourceRecord

# Paths that a patch may change although they are not in the wheel.
_NOT_SHIPPED = ("tests/", "docs/", "benchmarks/", "examples/", ".github/", ".buildkite/")

_VERSION_LINE = re.compile(rb"^Version: .*$", re.MULTILINE)
_TAG_LINE = re.compile(r"^Tag: (?P<python>[^-\s]+)-(?P<abi>[^-\s]+)-\S+$")
_MODULE_VERSION = re.compile(r"^(?P<names>__version__ = version = )'[^'\n]*'$", re.MULTILINE)
_MODULE_TUPLE = re.compile(
    r"^(?P<names>__version_tuple__ = version_tuple = )\((?P<parts>[^()\n]*)\)$", re.MULTILINE
)
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_(\w+)")


@dataclass(frozen=True, kw_only=True)
class Official:
    """The release's own wheel: its file names, and the parts of its name that ours keeps."""

    path: Path
    members: frozenset[str]
    dist_info: str
    package: str
    python_abi: str
    platform: str


@dataclass(frozen=True, kw_only=True)
class Change:
    """A file of the wheel that is to be other than the official one's. ``data`` None removes it."""

    path: str
    origin: str
    base_sha256: str
    data: bytes | None

    def entry(self) -> ledgers.FileEntry:
        return ledgers.FileEntry(
            path=self.path,
            sha256="" if self.data is None else hashlib.sha256(self.data).hexdigest(),
            base_sha256=self.base_sha256,
            origin=self.origin,
        )


def inspect(path: Path) -> Official:
    """Read the names in an official wheel. Raises BadFileError when it is not one."""
    try:
        _, _, _, tags = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            members = frozenset(archive.namelist())
            (record,) = (name for name in members if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
            dist_info = record.rpartition("/")[0]
            packages = archive.read(f"{dist_info}/top_level.txt").decode().split()
    except (OSError, zipfile.BadZipFile, InvalidWheelFilename, KeyError, ValueError) as error:
        raise BadFileError(
            f"{path} is not a wheel that can be read: {error}",
            next_step="fetch it again with `sm12x fetch`",
        ) from None
    (python_abi,) = {f"{tag.interpreter}-{tag.abi}" for tag in tags}
    return Official(
        path=path,
        members=members,
        dist_info=dist_info,
        package=packages[0],
        python_abi=python_abi,
        platform=".".join(sorted(tag.platform for tag in tags)),
    )


def changes(
    official: Official,
    source: Path,
    record: SourceRecord,
    native_folder: Path,
    native: NativeRecord,
    version: str,
) -> list[Change]:
    """List the files in which our wheel differs from the official one, in order of path.

    Raises:
        BuildFailedError: a patched file is in the official wheel with another text than in the
            sdist, or could not reach the wheel; a patched native file was not compiled.
    """
    with zipfile.ZipFile(official.path) as archive:

        def theirs(path: str) -> str:
            there = path in official.members
            return hashlib.sha256(archive.read(path)).hexdigest() if there else ""

        entries = [
            _patched(official, source, file, theirs(file.path))
            for file in record.files
            if _is_shipped(official, file)
        ]
        entries += [
            Change(
                path=module.path,
                origin="compiled",
                base_sha256=theirs(module.path),
                data=(native_folder / module.path).read_bytes(),
            )
            for module in native.modules
        ]
        path = f"{official.package}/_version.py"
        text = archive.read(path).decode() if path in official.members else ""
        entries.append(
            Change(
                path=path,
                origin="generated",
                base_sha256=theirs(path),
                data=version_module(text, version).encode(),
            )
        )
    return sorted(entries, key=lambda change: change.path)


def name(official: Official, base_version: str, version: str, native: NativeRecord) -> str:
    """Return the file name of our wheel.

    The official build tag is left out: it orders uploads of one version, and this is another. The
    platform is the official one, or a later manylinux where what was compiled here needs that.
    """
    distribution = official.dist_info.removesuffix(f"-{base_version}.dist-info")
    needed = [module.glibc for module in native.modules if module.glibc]
    platform = ".".join(platform_for(tag, needed) for tag in official.platform.split("."))
    return f"{distribution}-{version}-{official.python_abi}-{platform}.whl"


def platform_for(tag: str, glibc: Sequence[str]) -> str:
    """Return ``tag``, with its glibc version raised to the newest of ``glibc`` where that is newer.

    PEP 600: `manylinux_2_24_x86_64` promises to run with glibc 2.24.
    """
    match = _MANYLINUX.fullmatch(tag)
    if match is None:
        return tag
    ours = max((tuple(int(part) for part in text.split(".")[:2]) for text in glibc), default=(0, 0))
    major, minor = max(ours, (int(match[1]), int(match[2])))
    return f"manylinux_{major}_{minor}_{match[3]}"


def write(
    official: Official, target: Path, changed: Sequence[Change], ledger: ledgers.Ledger
) -> None:
    """Write the wheel to ``target``, whole or not at all. The same input gives the same bytes."""
    version = ledger.wheel_version
    dist_info = f"{target.name.split('-')[0]}-{version}.dist-info"
    platform = target.name.removesuffix(".whl").rpartition("-")[2]
    by_path = {change.path: change for change in changed}
    with (
        files.replacing(target) as temporary,
        zipfile.ZipFile(official.path) as source,
        zipfile.ZipFile(temporary, "w") as archive,
    ):
        out = _Rewriter(source, archive)
        rows = _record(source.read(f"{official.dist_info}/RECORD"))
        record: list[tuple[str, str, str]] = []

        def put(path: str, data: bytes) -> None:
            out.write(path, data, mode=0o755 if path.endswith(".so") else 0o644)
            record.append((path, _record_hash(data), str(len(data))))

        for info in source.infolist():
            folder, _, rest = info.filename.partition("/")
            if folder == official.dist_info:
                path = f"{dist_info}/{rest}"
                if rest == "METADATA":
                    put(path, _metadata(source.read(info), version))
                elif rest == "WHEEL":
                    put(path, _wheel_file(source.read(info).decode(), platform).encode())
                elif rest != "RECORD":
                    out.keep(info, name=path)
                    record.append((path, *rows[info.filename]))
            elif info.filename in by_path:
                change = by_path.pop(info.filename)
                if change.data is not None:
                    put(change.path, change.data)
            else:
                out.keep(info)
                if not info.is_dir():
                    record.append((info.filename, *rows[info.filename]))
        for change in by_path.values():
            if change.data is not None:
                put(change.path, change.data)
        put(f"{dist_info}/{ledgers.NAME}", declared.to_json(ledger, sort_keys=True).encode())
        out.write(f"{dist_info}/RECORD", _record_text(record, dist_info))


def _metadata(text: bytes, version: str) -> bytes:
    """Return METADATA with another version. Raises BadFileError when it has not exactly one."""
    head, blank, body = text.partition(b"\n\n")
    head, count = _VERSION_LINE.subn(f"Version: {version}".encode(), head)
    if count != 1:
        raise BadFileError(
            f"METADATA of the official wheel has {count} Version lines",
            next_step="report it: this release's wheel has another layout",
        )
    return head + blank + body


def _wheel_file(text: str, platform: str) -> str:
    """Return WHEEL for the platform of the file's name.

    The official one says `linux_x86_64` in a file called manylinux: its name was changed after it
    was made. Installers use the name; here both agree.
    """
    lines: list[str] = []
    for line in text.splitlines():
        match = _TAG_LINE.match(line)
        if line.startswith("Generator: "):
            lines.append(f"Generator: sm12x ({sm12x.__version__})")
        elif match:
            lines += [f"Tag: {match['python']}-{match['abi']}-{tag}" for tag in platform.split(".")]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def version_module(text: str, version: str) -> str:
    """Return the package's generated _version.py with another version.

    The local part ends the tuple, as setuptools-scm has it. vLLM compares the first two elements
    only, and reads the last one as a commit if it begins with "g", which "sm12x" does not.

    Raises BuildFailedError when the text is not as setuptools-scm writes it.
    """
    public, _, local = version.partition("+")
    parts = [*public.split("."), *([repr(local)] if local else [])]
    text, versions = _MODULE_VERSION.subn(rf"\g<names>{version!r}", text)
    text, tuples = _MODULE_TUPLE.subn(rf"\g<names>({', '.join(parts)})", text)
    if versions != 1 or tuples != 1:
        raise BuildFailedError(
            "_version.py of the official wheel is not as setuptools-scm writes it: "
            "the version cannot be put in",
            next_step="compare the release's file with _MODULE_VERSION in wheel/assemble/wheel.py",
        )
    return text


def _is_shipped(official: Official, file: SourceFile) -> bool:
    if file.path.startswith(f"{official.package}/"):
        return True
    if selection.is_native(file.path) or file.path.startswith(_NOT_SHIPPED):
        return False
    raise BuildFailedError(
        f"the stack changes {file.path}, which the official wheel lacks: the change would be lost",
        next_step="leave it out of the patch",
    )


def _patched(official: Official, source: Path, file: SourceFile, theirs: str) -> Change:
    if theirs != file.base_sha256:
        what = "is not in" if not theirs else "has another text in"
        if not file.base_sha256:
            what = "is new in the stack and already in"
        raise BuildFailedError(
            f"{file.path} {what} {official.path.name}: the patch was made for the sdist's file",
            next_step="leave that file out of the stack",
        )
    path = source / PurePosixPath(file.path)
    return Change(
        path=file.path,
        origin="patched" if file.sha256 else "removed",
        base_sha256=file.base_sha256,
        data=path.read_bytes() if file.sha256 else None,
    )


def _record(data: bytes) -> Mapping[str, tuple[str, str]]:
    return {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(data.decode())) if row}


def _record_hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return f"sha256={digest.rstrip(b'=').decode()}"


def _record_text(rows: Sequence[tuple[str, str, str]], dist_info: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([*rows, (f"{dist_info}/RECORD", "", "")])
    return out.getvalue().encode()


# Local file header: signature, five 16-bit and three 32-bit fields, lengths of name and extra.
_LOCAL = struct.Struct("<4s5H3L2H")
_SIZES_FOLLOW = 0x08
_ENCRYPTED = 0x01
_BLOCK = 1 << 20

# A zip must date its members; the earliest possible date keeps the bytes reproducible.
_DATE = (1980, 1, 1, 0, 0, 0)


class _Rewriter:
    """Takes members from ``source`` and new ones into a new zip, in the order of the calls."""

    def __init__(self, source: zipfile.ZipFile, target: zipfile.ZipFile) -> None:
        self._source = source
        self._target = target

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
                next_step="check the disk with that file, or report it",
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
        info = zipfile.ZipInfo(name, date_time=_DATE)
        info.compress_type = zipfile.ZIP_DEFLATED
        # The upper half is Unix's: a regular file, and its permissions.
        info.external_attr = (0o100000 | mode) << 16
        info.create_system = 3
        self._target.writestr(info, data)


def _copy(reader: IO[bytes], writer: IO[bytes], size: int) -> None:
    while size:
        block = reader.read(min(size, _BLOCK))
        if not block:
            raise BadFileError(
                f"{getattr(reader, 'name', 'the wheel')} ends in the middle",
                next_step="check the disk with that file, or report it",
            )
        writer.write(block)
        size -= len(block)
