"""A base's folder that is made whole beside its place, and takes its name at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sm12x.core import files
from sm12x.core.errors import BadFileError, DirtyTreeError
from sm12x_dev.worktree import export


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
def fresh(
    target: Path, *, force: bool, keep: Path | None = None
) -> Iterator[tuple[Path, list[Path]]]:
    """A folder to fill that becomes ``target`` if the block succeeds, and is deleted otherwise.

    Yields the folder, and a list that holds the copy of the one it replaces once it has; remains of
    killed runs for the same target are removed.

    Args:
        keep: the folder under which that copy is made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent, target.name)
    kept: list[Path] = []
    # Hidden, and one level down, where nothing looks for a base.
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as name,
        # For others to see that it is in use: the system lets go of it if we are killed.
        files.locked(Path(name)),
    ):
        folder = Path(name) / target.name
        folder.mkdir()
        yield folder, kept
        # Another process may have made it meanwhile.
        require_free(target, force=force)
        if target.exists() and keep is not None:
            kept.append(export.copy_aside(target, keep))
        before = Path(name) / "before"
        try:
            if target.exists():
                target.rename(before)
            folder.rename(target)
        except BaseException:
            # Stopped in between as well: what lies in here is deleted.
            if before.exists() and not target.exists():
                before.rename(target)
            raise


def leftovers(parent: Path) -> list[Path]:
    """The remains of killed runs in ``parent``, beside the bases' folders."""
    return [
        path
        for path in sorted(parent.glob(".*"))
        if (path.is_dir() and path.name[1:2].isdigit() and not files.is_locked(path))
        or path.name.startswith(".status.toml.")
    ]


def sweep(parent: Path, name: str) -> list[Path]:
    """Remove remains of killed runs in ``parent`` for the folder ``name``; a base is restored.

    A folder in which a process is working stays.
    """
    gone: list[Path] = []
    for left in sorted(parent.glob(f".{name}.*")):
        if not left.is_dir() or files.is_locked(left):
            continue
        before = left / "before"
        if (before / "base.toml").is_file() and not (parent / name).exists():
            # Killed between two renames.
            before.rename(parent / name)
        shutil.rmtree(left, ignore_errors=True)
        gone.append(left)
    return gone
