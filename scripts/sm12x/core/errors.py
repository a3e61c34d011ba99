"""Every error a user can cause or meet, each kind with its own exit code.

An error says what failed, where, why as far as known, and the next step; the command layer prints
it as one line and exits with ``exit_code``. The table in ``EXIT_CODES`` is the one place where the
codes are documented; ``sm12x --help`` and docs/errors.md are made from it.
"""

from __future__ import annotations

import errno
import re

# What the system answers where a disk, or a share of it, is full.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ERRNO = re.compile(r"\[Errno (\d+)\]")
# Characters of a gathered error that are shown.
_SAID = 300
_OF_A_PATH = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR),
    *(errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG),
)


class Sm12xError(Exception):
    """A failure that has been understood.

    Args:
        message: what failed, where and why, in one line without a final period.
        next_step: what the user can do about it, in one line without a final period.
    """

    exit_code = 20
    meaning = "any failure without an exit code of its own"

    def __init__(self, message: str, *, next_step: str) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}. Next: {self.next_step}."


class FindingsError(Sm12xError):
    exit_code = 1
    meaning = "the check ran and found something: the report lists it"


class UsageError(Sm12xError):
    exit_code = 2
    meaning = "wrong usage: unknown option or argument"


class UnknownBaseError(Sm12xError):
    exit_code = 3
    meaning = "no such base under patches/"


class BadFileError(Sm12xError):
    exit_code = 4
    meaning = "a file is missing, unreadable or malformed"


class HashMismatchError(Sm12xError):
    exit_code = 5
    meaning = "a fetched or stored file does not have its pinned sha256"


class FetchError(Sm12xError):
    exit_code = 6
    meaning = "a file could not be fetched from the package index or found in --find-links"


class NoSpaceError(Sm12xError):
    exit_code = 7
    meaning = "not enough disk space or memory for the step"


class NoEngineError(Sm12xError):
    exit_code = 8
    meaning = "no container engine that can build the image"


class EngineNotRunningError(Sm12xError):
    exit_code = 9
    meaning = "the container engine is installed but does not answer"


class BadArchitectureError(Sm12xError):
    exit_code = 10
    meaning = "an architecture string that SM12x cannot use"


class PatchConflictError(Sm12xError):
    exit_code = 11
    meaning = "a patch does not apply to its base"


class DirtyTreeError(Sm12xError):
    exit_code = 12
    meaning = "the directory is not the untouched source of the base"


class ToolFailedError(Sm12xError):
    exit_code = 13
    meaning = "a program that was called failed"


class ToolMissingError(Sm12xError):
    exit_code = 14
    meaning = "a program that is needed is not installed"


class BuildFailedError(Sm12xError):
    exit_code = 15
    meaning = "a native module, the wheel or the image could not be built"


class UnknownVerdictError(Sm12xError):
    exit_code = 16
    meaning = "the result is unknown: the tests or comparisons that decide it could not run"


class ServerError(Sm12xError):
    exit_code = 17
    meaning = "a server does not answer, or its answer is not that of a vLLM server with sleep mode"


def of_system(error: OSError) -> Sm12xError | None:
    """Return the error for a failed access to a disk or a path; None for any other."""
    where = f"{error.filename}: " if isinstance(error.filename, str) else ""
    message = f"{where}{(error.strerror or str(error)).lower()}"
    number = error.errno
    if number is None:
        # Copying a folder collects the errors of its files, as text.
        match = _ERRNO.search(str(error))
        number = int(match[1]) if match else None
        where, message = "a copy: ", str(error)[:_SAID]
    if number in DISK_FULL:
        place = "there" if where else "on the disks of the checkout, SM12X_CACHE and TMPDIR"
        return NoSpaceError(
            message, next_step=f"free space {place}, and run the same command again"
        )
    # The message of the tempfile module when none of its folders can be written.
    if number == errno.ENOENT and "usable temporary directory" in (error.strerror or ""):
        return NoSpaceError(
            message, next_step="free space there, or set TMPDIR to a folder that can be written"
        )
    if number in _OF_A_PATH and where:
        return BadFileError(message, next_step="check that path and its permissions")
    return None


INTERRUPTED = 130

# Those above: other modules only derive from them, and keep the exit codes.
_KINDS: tuple[type[Sm12xError], ...] = (*Sm12xError.__subclasses__(), Sm12xError)

EXIT_CODES: dict[int, str] = {
    0: "done",
    **{kind.exit_code: kind.meaning for kind in _KINDS},
    INTERRUPTED: "interrupted (Ctrl-C or SIGTERM); run the same command again to resume",
}
