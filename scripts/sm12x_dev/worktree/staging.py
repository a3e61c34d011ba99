"""A base's folder that is made whole beside its place, and takes its name at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sm12x.core import files
from sm12x.core.errors import BadFileError, DirtyTreeError


def require_free(target: Path, *, force: bool) -> None:
    """Raise DirtyTreeError unless a base's folder may be written as ``target``."""
    if not target.exists():
        return
    if not force:
        raise DirtyTreeError(
            f"{target} exists, and nothing is overwritten",
            next_step="add --force to replace it, or --out DIR to write elsewhere",
        )
    if not (target / "base.toml").is_file():
        raise DirtyTreeError(
            f"{target} exists and is not a base's folder (it has no base.toml)",
            next_step="move it away yourself",
        )


def require_writable(parent: Path) -> None:
    """Raise BadFileError unless a folder can be made in ``parent``, which need not exist yet."""
    try:
        # Tests by writing: permissions do not tell whether root can write there.
        with tempfile.TemporaryDirectory(dir=files.existing(parent.absolute()), prefix=".sm12x-"):
            pass
    except OSError as error:
        raise BadFileError(
            f"no folder can be made in {parent}: {error.strerror or error}",
            next_step="name another folder with --out DIR",
        ) from None


@contextmanager
def fresh(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a folder to fill that becomes ``target`` if the block succeeds, and goes otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, and one level down, where nothing looks for a base.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name:
        folder = Path(name) / target.name
        folder.mkdir()
        yield folder
        # Another process may have made it meanwhile.
        require_free(target, force=force)
        before = Path(name) / "before"
        try:
            if target.exists():
                target.rename(before)
            folder.rename(target)
        except BaseException:
            # Stopped between the two: what lies in here is deleted.
            if before.exists() and not target.exists():
                before.rename(target)
            raise
