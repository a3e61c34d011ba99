"""All access to the machine: files below a root, programs, the NVML library."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm12x.core import files, process
from sm12x.core.errors import Sm12xError

# Seconds that a program may take to answer; a daemon that hangs must not hang us.
_ANSWER_WITHIN = 20
# Characters of a file that are read.
_MOST_TEXT = 1 << 18


@dataclass(frozen=True)
class Unseen:
    """Could not be read; ``why`` in words, without a final period.

    A fact that could not be read is this, never an empty value: "no process uses the GPU" and "the
    processes cannot be listed" lead to opposite advice.
    """

    why: str


def _ask(argv: Sequence[str]) -> process.Completed | Unseen:
    """Run a program that changes nothing. Unseen when it is missing, hangs or fails."""
    try:
        done = process.run(argv, check=False, timeout=_ANSWER_WITHIN, env={"LC_ALL": "C"})
    except Sm12xError as error:
        return Unseen(error.message)
    except OSError as error:
        return Unseen(f"{argv[0]}: {error.strerror}")
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = f": {lines[0].rstrip('.')}" if lines else ""
        return Unseen(f"`{' '.join(argv[:2])}` ended with {done.returncode}{reason}")
    return done


def _file_system_size(path: Path) -> int:
    """Return the size in bytes of the file system that holds ``path``. Raises OSError."""
    statistics = os.statvfs(path)
    return statistics.f_blocks * statistics.f_frsize


def _user() -> str:
    return os.environ.get("USER") or os.environ.get("LOGNAME") or str(os.getuid())


@dataclass(frozen=True, kw_only=True)
class Host:
    """The machine to examine; tests give a folder that looks like one.

    ``nvml`` imports the module of nvidia-ml-py, and raises ImportError where there is none.
    """

    root: Path = Path("/")
    home: str = field(default_factory=lambda: str(files.home()))
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    user: str = field(default_factory=_user)
    ask: Callable[[Sequence[str]], process.Completed | Unseen] = _ask
    which: Callable[[str], Path | None] = process.which
    nvml: Callable[[], Any] = lambda: importlib.import_module("pynvml")
    size_of: Callable[[Path], int] = _file_system_size

    def path(self, absolute: str | Path) -> Path:
        return self.root / str(absolute).lstrip("/")

    def text(self, absolute: str | Path) -> str | Unseen:
        """A small file, stripped. Unseen when it is missing or may not be read."""
        try:
            with self.path(absolute).open(encoding="utf-8", errors="replace") as file:
                return file.read(_MOST_TEXT).strip()
        # ValueError: a path that another file gave, and that has a NUL.
        except (OSError, ValueError) as error:
            return Unseen(f"{absolute}: {getattr(error, 'strerror', error)}")

    def word(self, absolute: str | Path) -> str:
        """A small file as ``text``, "" when it is missing or may not be read."""
        text = self.text(absolute)
        return "" if isinstance(text, Unseen) else text

    def exists(self, absolute: str | Path) -> bool:
        try:
            return self.path(absolute).exists()
        except OSError:  # A folder we may not look into has to be there.
            return True

    def number(self, absolute: str | Path) -> int | Unseen:
        text = self.text(absolute)
        if isinstance(text, Unseen):
            return text
        if not re.fullmatch(r"[0-9]{1,20}", text):
            return Unseen(f"{absolute} says {text!r}")
        return int(text)

    def names(self, absolute: str | Path) -> tuple[str, ...]:
        """The names in a folder, sorted; none where there is no such folder."""
        try:
            return tuple(sorted(entry.name for entry in self.path(absolute).iterdir()))
        except OSError:
            return ()
