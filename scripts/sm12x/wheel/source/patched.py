"""The patched source: the release's sdist, unpacked, verified, with the stack on it.

Beside the tree two records are written. ``<tree>.json`` names every file the stack changed, with
the hash it had in the release and the one it has now. ``<tree>.native.json`` has only native code,
so that an edit of a Python patch does not change it, nor invalidate the cached build steps that
read only this file.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from sm12x.core import declared, files
from sm12x.core.declared import Declared, KeyFaultError
from sm12x.core.errors import BadFileError, HashMismatchError
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.worktree import apply, tree
from sm12x.wheel import selection

_NEXT = "make the tree with `sm12x build source`"


@dataclass(frozen=True, kw_only=True)
class SourceFile(Declared):
    """A file the stack touches. Hashes are sha256 in hex: "" where the file is not there."""

    path: str
    base_sha256: str
    sha256: str

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts:
            raise KeyFaultError("path", "is outside the tree")


@dataclass(frozen=True, kw_only=True)
class SourceRecord(Declared):
    """A patched tree. ``states`` maps each patch to "applied", or "upstream" (in the base already).

    ``files`` are those that now differ from the release.
    """

    base_version: str
    sdist_sha256: str
    stack_id: str
    states: dict[str, str]
    files: tuple[SourceFile, ...]
    schema: Literal[1] = 1


@dataclass(frozen=True, kw_only=True)
class TouchedRecord(Declared):
    """The native code that the stack touches: source files, and the modules made of them."""

    base_version: str
    sdist_sha256: str
    files: tuple[SourceFile, ...]
    targets: tuple[str, ...]
    schema: Literal[1] = 1


def _record_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.json")


def _touched_path(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.native.json")


def prepare(base: Base, sdist: Path, out: Path) -> tuple[SourceRecord, bool]:
    """Make ``out`` the patched source of ``base``.

    Returns the record, and whether anything was done: an existing tree with the same inputs is left
    alone.

    Raises:
        HashMismatchError: ``sdist`` is not the pinned one.
        BadFileError: ``out`` holds something that this step did not make.
        PatchConflictError: a patch does not apply.
        BuildFailedError: the stack changes native code that belongs to no known module.
    """
    out = out.absolute()
    stack = series.load(base)
    _check_sdist(base, sdist)
    if out.exists() and any(out.iterdir()):
        current = _current(out, base, stack.id)
        if current is not None:
            return current, False
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        staging.chmod(0o755)
        tree.unpack(sdist, staging)
        paths = sorted({file.path for patch in stack.patches for file in patch.files})
        before = {path: _sha256(staging / path) for path in paths}
        report = apply.apply(base, stack, staging)
        record = SourceRecord(
            base_version=base.version,
            sdist_sha256=base.sdist.sha256,
            stack_id=stack.id,
            states={result.name: result.state for result in report.results},
            files=tuple(
                SourceFile(path=path, base_sha256=before[path], sha256=_sha256(staging / path))
                for path in sorted(report.changed)
            ),
        )
        modules = selection.touched(base, report.changed)
        native = TouchedRecord(
            base_version=base.version,
            sdist_sha256=base.sdist.sha256,
            files=tuple(file for file in record.files if selection.is_native(file.path)),
            targets=tuple(module.target for module in modules),
        )
        # Order: move the old tree away, write the records, move the new tree in. After a kill in
        # between the next run finds no tree and makes it again; a tree never has the record of
        # another one.
        if out.exists():
            out.rename(staging.with_name(f"{staging.name}.old"))
        declared.write_json(_touched_path(out), native)
        declared.write_json(_record_path(out), record)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(staging.with_name(f"{staging.name}.old"), ignore_errors=True)
    return record, True


def read(directory: Path) -> SourceRecord:
    """Return the record of a tree that ``prepare`` made. Raises BadFileError."""
    return declared.read_json(SourceRecord, _record_path(directory.absolute()), next_step=_NEXT)


def read_touched(directory: Path) -> TouchedRecord:
    """Return the record of the native code of a tree that ``prepare`` made. Raises BadFileError."""
    return declared.read_json(TouchedRecord, _touched_path(directory.absolute()), next_step=_NEXT)


def verify(directory: Path, entries: Iterable[SourceFile]) -> None:
    """Raise BadFileError if a file of ``entries`` is not what the record says."""
    for file in entries:
        if _sha256(directory / file.path) != file.sha256:
            raise BadFileError(
                f"{directory / file.path} was changed after the stack was applied",
                next_step="run `sm12x build source` again; make lasting changes in a tree of "
                "`sm12x-dev apply`",
            )


def _current(out: Path, base: Base, stack_id: str) -> SourceRecord | None:
    """Return the record of ``out`` where that is the tree to make, else None."""
    if not _record_path(out).is_file():
        raise BadFileError(
            f"{out} is not empty and has no record of this command",
            next_step="name a new folder, or remove that one",
        )
    try:
        record = read(out)
    except BadFileError:
        return None
    inputs = (record.base_version, record.sdist_sha256, record.stack_id)
    same = (
        inputs == (base.version, base.sdist.sha256, stack_id)
        and _touched_path(out).is_file()
        and all(_sha256(out / file.path) == file.sha256 for file in record.files)
    )
    return record if same else None


def _check_sdist(base: Base, sdist: Path) -> None:
    if not sdist.is_file():
        raise BadFileError(f"{sdist} is not there", next_step="fetch it with `sm12x fetch`")
    digest = files.sha256(sdist)
    if digest != base.sdist.sha256:
        raise HashMismatchError(
            f"{sdist} has sha256 {digest}, base.toml pins {base.sdist.sha256}",
            next_step=f"fetch {base.sdist.name} again with `sm12x fetch`",
        )


def _sha256(path: Path) -> str:
    return files.sha256(path) if path.is_file() else ""
