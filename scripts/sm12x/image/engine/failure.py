"""The error for a build that an engine gave up, of what it printed."""

from __future__ import annotations

from pathlib import Path

from sm12x.core.errors import (
    BadFileError,
    BuildFailedError,
    NoSpaceError,
    PatchConflictError,
    Sm12xError,
)
from sm12x.image.engine.engine import Engine
from sm12x.image.engine.follow import Follower

# A step of ours ends with the code of its error: these are not about the build itself.
_KINDS = {kind.exit_code: kind for kind in (BadFileError, NoSpaceError, PatchConflictError)}


def of(
    engine: Engine, dockerfile: str, follower: Follower, log: Path, *, rest_gib: float
) -> Sm12xError:
    """What to raise. ``follower`` has read all that was printed, which is in ``log``; ``rest_gib``
    is what the bundle still takes in the engine's storage.
    """
    if follower.no_space:
        return NoSpaceError(
            f"the disk of {engine.name} is full ({engine.storage()})",
            next_step=f"free about {rest_gib:.0f} GiB there ({engine.more_room}), and run the same "
            "command again: it resumes",
        )
    inside = f" (inside the builder: {follower.next_step})" if follower.next_step else ""
    kind = _KINDS.get(follower.exit_code, BuildFailedError)
    return kind(
        f"{engine.name} could not build {dockerfile}: {follower.reason}",
        next_step=f"read {log}; the same command resumes at the step that failed{inside}",
    )
