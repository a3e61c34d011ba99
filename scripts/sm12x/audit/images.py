"""Audit an image by name, through whichever container engine has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from sm12x.audit import scan, tars
from sm12x.audit.model import Audit
from sm12x.core import process
from sm12x.core.errors import BadFileError, NoEngineError

ENGINES = ("docker", "podman", "buildah")
# name[:tag][@digest], with an optional registry before it.
_REFERENCE = re.compile(r"[a-z0-9][\w.:/-]*(@sha256:[0-9a-f]{64})?", re.ASCII)


def looks_like_image(name: str) -> bool:
    """Whether a name for which there is no file can be an image's."""
    return bool(_REFERENCE.fullmatch(name)) and not name.endswith((".whl", ".so", ".tar", ".zip"))


def audit(name: str, *, on_progress: Callable[[int], None] | None = None) -> Audit:
    """Audit the image ``name``; "podman:NAME" and the like ask one engine only.

    Nothing is pulled or started: a container is created, exported as a stream and removed.

    Raises:
        NoEngineError: no engine is installed.
        BadFileError: none of them has the image; the message says what each answered.
        ToolFailedError: the engine failed in between.
    """
    prefix, _, rest = name.partition(":")
    chosen, image = ((prefix,), rest) if rest and prefix in ENGINES else (ENGINES, name)
    programs = [engine for engine in chosen if process.which(engine)]
    if not programs:
        raise NoEngineError(
            f"{name} is no file, and to look for an image there is no {' or '.join(chosen)}",
            next_step="check the path, or install an engine",
        )
    answers: list[str] = []
    for engine in programs:
        kind = ["inspect", "--type", "image"] if engine == "buildah" else ["image", "inspect"]
        asked = process.run([engine, *kind, image], check=False)
        if asked.returncode == 0:
            read = _mounted if engine == "buildah" else _exported
            return read(engine, image, on_progress)
        said = asked.stderr.strip().splitlines()
        answers.append(f"{engine}: {said[-1] if said else f'exit status {asked.returncode}'}")
    raise BadFileError(
        f"{name} is neither a file nor an image ({'; '.join(answers)})",
        next_step="check the path, or list the images with `" + programs[0] + " images`",
    )


def _exported(engine: str, image: str, on_progress: Callable[[int], None] | None) -> Audit:
    # The command is never run, but an image without one cannot be created from.
    created = process.run([engine, "create", image, "true"])
    container = created.stdout.strip().splitlines()[-1]
    try:
        with process.reading([engine, "export", container]) as stream:
            return tars.file_system(stream, image, on_progress=on_progress)
    finally:
        process.run([engine, "rm", "--force", container], check=False)


def _mounted(engine: str, image: str, on_progress: Callable[[int], None] | None) -> Audit:
    """buildah cannot export to a stream; it can show the file system as a folder."""
    step = "run it as root, or inside `buildah unshare`"
    container = process.run([engine, "from", "--pull=never", image]).stdout.strip()
    try:
        folder = process.run([engine, "mount", container], next_step=step).stdout.strip()
        plan = scan.plan(Path(folder))
        found = scan.run(plan, on_progress=on_progress)
        return Audit(subject=image, kind="image", libraries=found.libraries)
    finally:
        process.run([engine, "rm", container], check=False)
