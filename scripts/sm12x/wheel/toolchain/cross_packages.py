"""Another machine's packages, unpacked to link with: never installed, never run.

Separate from ``cross``, which also runs without a package index.
"""

from __future__ import annotations

from pathlib import Path

from sm12x.core import files, lockfile, pipconfig, process
from sm12x.core.errors import BadFileError
from sm12x.stack.model.base import Base
from sm12x.wheel.toolchain import cross

# In a folder of such packages: the lock they are of.
_LOCK = "target.lock"


def lock(base: Base, machine: str) -> str:
    """The lock of ``cross.PACKAGES`` for ``machine``, without what these need to run."""
    path = base.build_lock_path(machine)
    whole = lockfile.read(path)
    kept = [pin.text for pin in whole.pins if pin.name in cross.PACKAGES]
    if len(kept) != len(cross.PACKAGES):
        raise BadFileError(
            f"{path} does not have all of {', '.join(cross.PACKAGES)}",
            next_step=f"make it with `make lock BASE={base.version}`",
        )
    return f"# What is linked with for {machine}.\n{whole.head}{''.join(kept)}"


def unpack(base: Base, machine: str, out: Path, *, uv: str, find_links: Path | None = None) -> bool:
    """Unpack ``cross.PACKAGES`` for ``machine`` in ``out`` (1 GB), unless they are there already.

    Args:
        uv: the program.
        find_links: a folder with wheels to take besides the index's.

    Returns:
        Whether anything was done.

    Raises:
        BadFileError: ``out`` is a folder of something else, or the lock lacks a package.
        ToolFailedError: uv cannot fetch or unpack them.
    """
    text = lock(base, machine)
    marker = out / _LOCK
    if marker.is_file() and marker.read_text(encoding="utf-8") == text:
        return False
    with files.replacing_folder(out, _LOCK) as made:
        (made / _LOCK).write_text(text, encoding="utf-8")
        words: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        words += ["--python-platform", base.locks[machine].platform]
        words += ["--python-version", base.python, "--target", made]
        words += ["--find-links", find_links] if find_links else []
        process.run(
            [*words, "--requirement", made / _LOCK],
            env={**pipconfig.load().uv_environment(), "UV_PYTHON_DOWNLOADS": "never"},
            next_step="check network, proxy and index address, and run it again",
        )
    return True
