"""The third-party sources that are compiled: out of git, or as given.

A collected source is in the cache as ``third_party/<name>-<pin>-<key>``, with a key over its entry
in base.toml; beside it, ``.sha256`` is a hash over the names and contents of its files. Git gives
one commit as files: fetched alone, verified, without its history.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sm12x.core import files, process
from sm12x.core.errors import (
    BadFileError,
    FetchError,
    ToolFailedError,
    ToolMissingError,
)
from sm12x.core.process import Completed
from sm12x.stack.model.base import Base, ThirdPartySource

# The largest of them, unpacked, with room to spare.
_SPACE_GIB = 0.5

_Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class FoundSource:
    """A source, or why there is none: then ``folder`` is None and ``reason`` a short line.

    ``pin`` is what base.toml asks for. ``origin`` is "git" or "given". ``sha256`` is
    over the names and contents of all its files; "" for one that was given.
    """

    name: str
    pin: str
    folder: Path | None
    origin: str = ""
    sha256: str = ""
    reason: str = ""


def collect(
    base: Base,
    *,
    cache: Path,
    given: Mapping[str, Path] | None = None,
    patch_levels: Collection[str] = (),
    say: _Say = lambda _: None,
) -> dict[str, FoundSource]:
    """Find each source of ``base`` that some module is compiled from.

    Args:
        given: folders that stand for sources, by name; they are checked against the pin.
        patch_levels: sources whose given folder may be of another patch level than pinned.
        say: called with a line on slow steps and on facts about a given folder.

    Raises:
        BadFileError: a given folder is not of the pinned version.
        NoSpaceError: the cache's disk is full.
    """
    used = {name for module in base.modules for name in module.sources}
    sources: dict[str, FoundSource] = {}
    for source in base.sources:
        if given and source.name in given:
            lenient = source.name in patch_levels
            sources[source.name] = _given(source, given[source.name], say, patch_level=lenient)
        elif source.name in used:
            sources[source.name] = _cached(source, cache, say)
    return sources


def content_hash(folder: Path) -> str:
    """Return a sha256 over the names and contents of all files, and over where links point."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            digest.update(f"{name} -> {path.readlink()}\n".encode())
        elif path.is_file():
            digest.update(f"{name} {files.sha256(path)}\n".encode())
    return digest.hexdigest()


def _given(
    source: ThirdPartySource, folder: Path, say: _Say, *, patch_level: bool = False
) -> FoundSource:
    checkout = f"name a checkout of {source.name} {source.pin}"
    if not files.has_files(folder):
        raise BadFileError(
            f"{folder}, given for {source.name}, is not a folder with files", next_step=checkout
        )
    version = require_version(source, folder, patch_level=patch_level)
    other = bool(version) and version != source.pin
    if other:
        say(f"{source.name}: {folder} is {version}; taken in place of {source.pin}, as asked for")
    for name in source.submodules:
        if not files.has_files(folder / name):
            raise BadFileError(
                f"{folder}, given for {source.name}, lacks its submodule {name}",
                next_step=f"run `git -C {shlex.quote(str(folder))} submodule update --init {name}`",
            )
    commit = _head(folder)
    if commit is not None and source.commit and commit != source.commit and not other:
        raise BadFileError(
            f"{folder} has commit {commit} checked out, base.toml pins {source.name} to "
            f"{source.commit}",
            next_step=f"run `git -C {shlex.quote(str(folder))} checkout {source.commit}`",
        )
    if commit is not None:
        done = _run("status", "--porcelain", "--ignore-submodules=none", cwd=folder)
        edited = [line[3:] for line in done.stdout.splitlines()]
        if edited:
            some = ", ".join(edited[:3]) + (", ..." if len(edited) > 3 else "")
            say(f"{source.name}: {len(edited)} files of {folder} differ from the commit: {some}")
    elif source.stand_in and not any((folder / name).is_file() for name in source.stand_in):
        raise BadFileError(
            f"{folder} has no {source.stand_in[0]}: it is not {source.name}", next_step=checkout
        )
    elif source.commit and not other:
        say(f"{source.name}: {folder} is not a git checkout; taken as {source.pin}, not verified")
    return FoundSource(name=source.name, pin=source.pin, folder=folder.resolve(), origin="given")


def _cached(source: ThirdPartySource, cache: Path, say: _Say) -> FoundSource:
    result = FoundSource(name=source.name, pin=source.pin, folder=None)
    if not source.git:
        return replace(result, reason="no repository is known")
    contents = ("git", "commit", "submodules")
    spec = json.dumps([asdict(source)[name] for name in contents], sort_keys=True)
    key = hashlib.sha256(spec.encode()).hexdigest()[:12]
    folder = cache / "third_party" / f"{source.name}-{source.pin}-{key}"
    stamp = folder.with_name(f"{folder.name}.sha256")
    if folder.is_dir() and stamp.is_file():
        digest = stamp.read_text(encoding="ascii").strip()
        if content_hash(folder) == digest:
            return replace(result, folder=folder, origin="git", sha256=digest)
        say(f"{source.name}: {folder} was changed since it was collected; collecting it again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    files.require_space(folder.parent, _SPACE_GIB, what=f"unpacking {source.name}")
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        staging.chmod(0o755)
        fetch(source.git, source.commit, source.submodules, staging)
        require_version(source, staging)
        digest = content_hash(staging)
        for path in staging.rglob("*"):
            # ninja compares dates: a repeated collection must not be newer.
            os.utime(path, (files.DATE, files.DATE), follow_symlinks=False)
        # The old folder is removed first and the new one moved in last: a hash never describes
        # another folder.
        shutil.rmtree(folder, ignore_errors=True)
        files.write_text(stamp, f"{digest}\n")
        staging.rename(folder)
        say(f"{source.name} {source.pin}: from git")
    except FetchError as error:
        return replace(result, reason=error.message)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return replace(result, folder=folder, origin="git", sha256=digest)


# Seconds. The first is for a line of text; a host that takes longer is not reachable for us.
PROBE_TIMEOUT = 20.0
_FETCH_TIMEOUT = 1800.0

_ENVIRONMENT: dict[str, str | None] = {
    # The user's own configuration counts here (proxies, mirrors by `insteadOf`), but no repository
    # around us does, and git asks for no password.
    "GIT_DIR": None,
    "GIT_WORK_TREE": None,
    "GIT_INDEX_FILE": None,
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=10",
    "LC_ALL": "C",
}
_SETTINGS = (
    # Bytes are bytes, whatever the machine's configuration says of line ends.
    *("-c", "core.autocrlf=false"),
    *("-c", "core.symlinks=true"),
    *("-c", "gc.auto=0"),
    *("-c", "advice.detachedHead=false"),
    # A connection that has died: less than 1 kB/s for 20 s.
    *("-c", "http.lowSpeedLimit=1000"),
    *("-c", "http.lowSpeedTime=20"),
)


def fetch(url: str, commit: str, submodules: Sequence[str], folder: Path) -> None:
    """Make ``folder`` (empty, or not there) the files of ``commit``, with those ``submodules``.

    Raises:
        FetchError: no git, the host is not reachable, or it does not have that commit. The message
            is one short line.
    """
    try:
        # Asked first: a host behind a firewall must not cost minutes.
        _run("ls-remote", "--quiet", url, "HEAD", timeout=PROBE_TIMEOUT)
    except ToolMissingError:
        raise _missing("git is not installed") from None
    except ToolFailedError:
        raise _missing(f"the git host of {url} is not reachable") from None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _run("init", "--quiet", "--template=", cwd=folder)
        _run("fetch", "--quiet", "--depth=1", "--no-tags", url, commit, cwd=folder)
        _run("checkout", "--quiet", "--detach", "FETCH_HEAD", cwd=folder)
        # A submodule whose address is relative is looked up beside this one.
        _run("remote", "add", "origin", url, cwd=folder)
        for name in submodules:
            _run("submodule", "--quiet", "update", "--init", "--depth=1", "--", name, cwd=folder)
    except ToolFailedError as error:
        last = error.message.strip().splitlines()[-1].strip()
        raise _missing(f"commit {commit[:12]} of {url} could not be fetched: {last}") from None
    got = _head(folder)
    if got != commit:
        raise _missing(f"{url} gave commit {got} for {commit}")
    for path in (folder / ".git", *(folder / name / ".git" for name in submodules)):
        # A submodule's is a file.
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _head(folder: Path) -> str | None:
    """Return the commit checked out in ``folder`` itself; None where it is no git checkout."""
    if not (folder / ".git").exists():
        return None
    done = _run("rev-parse", "--verify", "--quiet", "HEAD", cwd=folder, check=False)
    return done.stdout.strip() or None


def _run(
    *words: str, cwd: Path | None = None, timeout: float = _FETCH_TIMEOUT, check: bool = True
) -> Completed:
    argv = ["git", *_SETTINGS, *words]
    return process.run(argv, cwd=cwd, env=_ENVIRONMENT, timeout=timeout, check=check)


def _missing(message: str) -> FetchError:
    return FetchError(message, next_step="give a checkout of it as --source NAME=DIR")


def require_version(source: ThirdPartySource, folder: Path, *, patch_level: bool = False) -> str:
    """Return the version in the files of ``folder``; "" where they have none.

    Args:
        patch_level: whether another patch level of the pinned minor release will do.

    Raises:
        BadFileError: they are of another version than pinned.
    """
    version = _version_of(source, folder)
    if not version or version == source.pin:
        return version
    # "v4.7" of "v4.7.1".
    near = version.rpartition(".")[0] == source.pin.rpartition(".")[0]
    if near and patch_level:
        return version
    step = f"name a folder with {source.name} {source.pin}"
    if near:
        step += f", or take this patch level with --accept-patch-level {source.name}"
    raise BadFileError(
        f"{folder} is {source.name} {version}, base.toml pins {source.pin}", next_step=step
    )


def _version_of(source: ThirdPartySource, folder: Path) -> str:
    """Return the version in the files of ``folder``, as base.toml writes it; "" without one.

    Raises:
        BadFileError: the file that says it is not there, or does not.
    """
    if not source.version_file:
        return ""
    path = folder / source.version_file
    next_step = f"name a folder with {source.name} {source.pin}"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise BadFileError(
            f"{folder} has no {source.version_file}: it is not {source.name}", next_step=next_step
        ) from None
    numbers: list[str] = []
    for name in source.defines:
        match = re.search(rf"^\s*#\s*define\s+{re.escape(name)}\s+(\d+)", text, re.MULTILINE)
        if match is None:
            raise BadFileError(f"{path} does not define {name}", next_step=next_step)
        numbers.append(match[1])
    prefix = "v" if source.pin.startswith("v") else ""
    return prefix + ".".join(numbers)
