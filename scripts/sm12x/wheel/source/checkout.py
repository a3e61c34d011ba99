"""One commit of a git repository, as files: fetched alone, verified, without its history."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import FetchError, ToolFailedError, ToolMissingError
from sm12x.core.process import Completed

# Seconds. The first is for a line of text; a host that takes longer is not reachable for us.
PROBE_TIMEOUT = 20.0
FETCH_TIMEOUT = 1800.0

_ENVIRONMENT: dict[str, str | None] = {
    # The user's own configuration counts here (proxies, mirrors by `insteadOf`), but no repository
    # around us does, and nobody is asked for a password.
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
    got = head(folder)
    if got != commit:
        raise _missing(f"{url} gave commit {got} for {commit}")
    for path in [folder, *(folder / name for name in submodules)]:
        _forget(path / ".git")


def head(folder: Path) -> str | None:
    """The commit that is checked out in ``folder`` itself, or None: it is no git checkout."""
    if not (folder / ".git").exists():
        return None
    done = _run("rev-parse", "--verify", "--quiet", "HEAD", cwd=folder, check=False)
    return done.stdout.strip() or None


def changed(folder: Path) -> list[str]:
    """The files of a checkout that are not as committed, new ones included."""
    done = _run("status", "--porcelain", "--ignore-submodules=none", cwd=folder)
    return [line[3:] for line in done.stdout.splitlines()]


def _run(
    *words: str, cwd: Path | None = None, timeout: float = FETCH_TIMEOUT, check: bool = True
) -> Completed:
    argv = ["git", *_SETTINGS, *words]
    return process.run(argv, cwd=cwd, env=_ENVIRONMENT, timeout=timeout, check=check)


def _missing(message: str) -> FetchError:
    return FetchError(message, next_step="give a checkout of it as --source NAME=DIR")


def _forget(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
