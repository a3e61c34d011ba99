"""The environments that tests of a release run in: made of its lock, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sm12x.core import files, lockfile, pipconfig, process
from sm12x.core.errors import BadFileError, NoSpaceError, ToolFailedError
from sm12x.stack.model.base import Base

# The folder of the environments, in the cache.
HOMES = "witness"
# Folder of an environment for the packages that only some witnesses see (tests/witness/kernels.py).
APART = "apart"
# pytest, which no release depends on, with hashes.
_TOOLS_LOCK = Path("tests/witness/requirements.lock")
# <version>-<machine>-<kind>-<key>
_NAME = re.compile(r"^([^-]+)-(x86_64|aarch64)-([a-z]+)-[0-9a-f]{12}$")
_FULL = re.compile("No space left on device|Disk quota exceeded|os error 28")


def environment(
    base: Base,
    *,
    root: Path,
    cache: Path,
    say: Callable[[str], None],
    machine: str = platform.machine(),
) -> Path:
    """Return the Python that runs the witnesses, in an environment made of the base's lock.

    It is kept in ``cache`` and made once for each content of the lock.

    Args:
        root: the checkout, for the locked test tools.
        say: told what is about to be downloaded, before it is.

    Raises:
        BadFileError: base.toml names a package that the lock does not have.
        ToolFailedError: uv could not install.
        NoSpaceError: too little room for what is about to be installed.
    """
    apart = _apart(base, machine)
    home = cache / HOMES / environment_name(base, machine=machine, root=root)
    python = home / "bin" / "python"
    if not python.exists():

        def commands(fresh: Path) -> list[list[str]]:
            venv = (pipconfig.find_uv(), "venv", "--quiet", "--relocatable", "--python")
            into = pip_install("--python", str(fresh / "bin" / "python"))
            listed = fresh.with_name("apart.txt")
            listed.write_text(apart, encoding="utf-8")
            beside = [[*into[:-1], "--target", str(fresh / APART), into[-1], str(listed)]]
            return [[*venv, sys.executable, str(fresh)], *(beside if apart else ()), into]

        # Unpacked, wheels take 1.7 times their size, and once only: uv links the files of its
        # cache. The rest is for wheels on their way.
        install(
            base,
            home,
            requirements(base, machine=machine, root=root),
            commands,
            whole=python,
            what="the witnesses",
            mib=base.witness.download_mib,
            say=say,
        )
    return python


def pip_install(*where: str) -> list[str]:
    """Return uv's command to install a lock, whose path is to follow, ``where``."""
    return [
        *(pipconfig.find_uv(), "pip", "install", *where),
        # The lock has been resolved; what it leaves out is left out on purpose.
        *("--no-deps", "--require-hashes", "--only-binary=:all:"),
        # torch alone takes 3 s longer without, in each of the many processes.
        *("--compile-bytecode", "--requirement"),
    ]


def install(
    base: Base,
    home: Path,
    lock: str,
    commands: Callable[[Path], Sequence[Sequence[str]]],
    *,
    whole: Path,
    what: str,
    mib: int,
    say: Callable[[str], None],
) -> None:
    """Make ``home``, whole or not at all; ``whole`` is what is then there.

    Args:
        lock: the text of the lock that is installed.
        commands: those that make the folder they are given; the last one takes a lock.
        what: the user of the packages in messages: "the witnesses".
        mib: how much may have to be downloaded.

    Raises:
        ToolFailedError: uv could not install.
        NoSpaceError: too little room, before or on the way.
    """
    say(
        f"installing {len(lockfile.parse(lock).pins)} packages for {what} of {base.version} "
        f"into {home}: up to {mib} MiB to download"
    )
    files.require_space(home.parent, mib * 3 / 1024, what=f"the environment of {what}")
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}.") as name:
        fresh = Path(name) / "environment"
        listed = Path(name) / "requirements.txt"
        listed.write_text(lock, encoding="utf-8")
        *before, last = commands(fresh)
        for words in (*before, [*last, str(listed)]):
            _uv(base, words, what)
        # Under its final name only when it is whole: a killed run starts over.
        try:
            fresh.rename(home)
        except OSError:
            # Another run made the same one meanwhile.
            if not whole.exists():
                raise


def _uv(base: Base, words: Sequence[str], what: str) -> None:
    """Run uv; a full disk raises another error than a package that does not fit this Python."""
    try:
        process.run(
            words,
            env={**pipconfig.load().uv_environment(), "UV_PYTHON_DOWNLOADS": "never"},
            next_step="read uv's message above; a package that needs another Python than "
            f"{platform.python_version()} (the release is for {base.python}) needs --python of an "
            "environment that has pytest and torch",
        )
    except ToolFailedError as error:
        if not _FULL.search(error.message):
            raise
        raise NoSpaceError(
            f"the environment of {what} of {base.version} cannot be installed: the disk is full",
            next_step="free space there, or move the cache with SM12X_CACHE",
        ) from None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """An environment in the cache: ``size`` in bytes as they lie there, ``bases`` that use it.

    uv links the files of its own cache, so that removing one of two that hold the same frees less.
    """

    path: Path
    size: Annotated[int, Field(alias="bytes")]
    bases: tuple[str, ...]


def environments(
    releases: Sequence[Base], *, root: Path, cache: Path, machine: str = platform.machine()
) -> list[Environment]:
    """Return the environments in the cache, stopped runs' too, and the base of each in use.

    Raises:
        BadFileError: the lock of one of ``releases`` cannot be read.
    """
    used = {
        environment_name(base, machine=machine, root=root): base.version
        for base in releases
        if base.lock_path(machine).is_file()
    }
    homes = cache / HOMES
    folders = sorted(path for path in homes.glob("*") if path.is_dir()) if homes.is_dir() else []
    # Environments of other tests of a base: the newest one counts as in use.
    newest: dict[tuple[str, ...], Path] = {}
    for path in sorted(folders, key=lambda path: path.stat().st_mtime):
        match = _NAME.match(path.name)
        if match and match[1] in {base.version for base in releases}:
            newest[match.groups()] = path
    used |= {path.name: groups[0] for groups, path in newest.items()}
    return [
        Environment(
            path=path, size=_size(path), bases=(used[path.name],) if path.name in used else ()
        )
        for path in folders
    ]


def remove(environment: Environment) -> None:
    """Delete an environment; a run that is using it fails."""
    # Under another name first: a half deleted folder must not count as a complete one.
    aside = environment.path
    if not aside.name.startswith("."):
        aside = aside.rename(aside.with_name(f".{aside.name}.removed"))
    if aside.is_symlink():
        # What it names, such as a folder on another disk, is not ours.
        aside.unlink()
    else:
        shutil.rmtree(aside)


def _size(folder: Path) -> int:
    """Return the bytes of a folder, a file of several names once."""
    sizes: dict[int, int] = {}
    for top, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(top, name))  # noqa: PTH118 - 40,000 files
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def home_name(base: Base, lock: str, machine: str, kind: str = "") -> str:
    """Return the name of an environment's folder; ``kind`` is of one that is not the witnesses'."""
    version = platform.python_version()
    key = hashlib.sha256(f"{version}\n{lock}".encode()).hexdigest()[:12]
    return f"{base.version}-{machine}-{kind}{key}"


def requirements(base: Base, *, machine: str, root: Path) -> str:
    """Return the packages of the witnesses' environment, as a requirements file with hashes."""
    key = f"{base.folder / 'base.toml'}: witness.packages"
    return pinned(base, base.witness.packages, root / _TOOLS_LOCK, key, machine)


def environment_name(base: Base, *, machine: str, root: Path) -> str:
    """Return the name of the folder of the witnesses' environment."""
    lock = requirements(base, machine=machine, root=root) + _apart(base, machine)
    return home_name(base, lock, machine)


def _apart(base: Base, machine: str) -> str:
    """Return the packages that lie apart in it, as a requirements file; "" where there are none."""
    key = f"{base.folder / 'base.toml'}: witness.apart"
    return pinned(base, base.witness.apart, None, key, machine)


def pinned(base: Base, names: Sequence[str], tools: Path | None, key: str, machine: str) -> str:
    """Return the pins in the lock of ``base`` of ``names``, the value of ``key``, and ``tools``.

    Raises:
        BadFileError: the lock does not have one.
    """
    path = base.lock_path(machine)
    pins = {pin.name: pin for pin in lockfile.read(path).pins}
    absent = sorted(set(names) - pins.keys())
    if absent:
        raise BadFileError(
            f"{key} names {', '.join(absent)}, which {path.name} does not have",
            next_step="name packages of the lock, as it writes them",
        )
    chosen = [*(pins[name] for name in names), *(lockfile.read(tools).pins if tools else ())]
    return "".join(pin.text for pin in chosen)
