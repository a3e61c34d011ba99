"""Patches an image that others made, without building one: its own Python files, patched, to mount.

The files are taken out of the image that will run. The Python part of the stack is applied to them
strictly: a patch that does not apply is an error, and no file of another origin is mounted.

An overlay is less than a bundle: where a patch has a native part too, the image keeps its own. On
the stand-in driver 8 of the 70 tests of the allocator and the worker are green untouched, 37 with
the overlay alone, all with the whole stack; none of the 8 turns red (counted on the first base).
Frees and sleeps wait for the device, and a failing copy leaves no garbage awake; but an error in
the C extension still sticks, and a rollback that needs it still fails.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm12x.core import declared
from sm12x.core import files as writing
from sm12x.core.errors import PatchConflictError, ToolFailedError, UsageError
from sm12x.deploy import hcl
from sm12x.image.engine.engine import Engine
from sm12x.stack.model.patchfile import Patch
from sm12x.stack.model.series import Stack
from sm12x.stack.worktree import tree

PACKAGE = "vllm"
RECORD = "overlay.json"
# Where an image that runs as root keeps what it compiles; read-only containers need it mounted.
_ROOT_CACHE = "/root/.cache"
# The package is located, not imported: importing vllm takes long, and fails without a driver.
_LOOK = """
import base64, importlib.metadata, importlib.util, json, os, pathlib, sys
spec = importlib.util.find_spec("vllm")
if spec is None or not spec.submodule_search_locations:
    sys.exit("no vllm here")
top = pathlib.Path(spec.submodule_search_locations[0]).resolve().parent
files = {}
for path in sys.argv[1:]:
    if (top / path).is_file():
        files[path] = base64.b64encode((top / path).read_bytes()).decode()
print(json.dumps({"top": str(top), "version": importlib.metadata.version("vllm"),
                  "root": os.getuid() == 0, "files": files}))
"""


@dataclass(frozen=True, kw_only=True)
class InstalledTree:
    """vLLM as it lies in an image: ``top`` is the folder that `vllm/` is in there.

    ``files`` holds those that were asked for and are there. ``root`` says whether it runs as root.
    """

    top: str
    version: str
    root: bool
    files: Mapping[str, bytes]

    @property
    def release(self) -> str:
        """The version without a local part: what tells a base."""
        return self.version.partition("+")[0]


@dataclass(frozen=True, kw_only=True)
class OverlayFile:
    """Where a file is mounted, and the sha256 of the image's own ("" has one too) and of ours."""

    mount: str
    image_sha256: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class OverlayRecord:
    """What an overlay was made from; ``files`` are by path below the folder of the overlay."""

    schema: Literal[1] = 1
    image: str
    vllm: str
    stack: str
    files: Mapping[str, OverlayFile]


def python_files(stack: Stack) -> tuple[str, ...]:
    """The Python files that the stack changes."""
    return tuple(sorted({path for one in stack.patches for path in _split(one)[0]}))


def native_halves(stack: Stack) -> dict[str, tuple[str, ...]]:
    """Return the files that an overlay cannot bring, by the name of their patch."""
    return {one.name: other for one in stack.patches if (other := _split(one)[1])}


def _split(patch: Patch) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files of a patch: Python files of the package, and all others."""
    paths = [file.path for file in patch.files]
    # Not those that are not installed: the release's own tools.
    ours = [path for path in paths if path.startswith(f"{PACKAGE}/") and path.endswith(".py")]
    return tuple(ours), tuple(path for path in paths if path not in ours)


def look(engine: Engine, image: str, paths: Sequence[str] = ()) -> InstalledTree:
    """Ask the image's own Python for the version, the place and these files of its vLLM.

    Raises:
        ToolFailedError: the image cannot be run, or has no Python with vllm.
    """
    output = engine.run(image, "python3", "-c", _LOOK, *paths)
    try:
        # An entry point that could not be replaced may have printed before.
        report = json.loads(output.strip().splitlines()[-1])
        return InstalledTree(
            top=report["top"],
            version=report["version"],
            root=report["root"],
            files={path: base64.b64decode(text) for path, text in report["files"].items()},
        )
    except (ValueError, KeyError, IndexError, TypeError):
        raise ToolFailedError(
            f"{image} printed no report of its vLLM, but {output[-200:]!r}",
            next_step="give an image whose python3 has vLLM installed",
        ) from None


def patch(stack: Stack, files: Mapping[str, bytes], *, source: str) -> dict[str, bytes]:
    """Apply the Python part of the stack to files of an image, strictly and all or nothing.

    Args:
        files: the image's files by path, all that the stack changes and the image has.
        source: what to call the image in an error.

    Returns:
        The patched files by path, without those that had the whole stack already.

    Raises:
        PatchConflictError: a file has another text than the stack is for, or is not there.
    """
    last = {
        file.path: file.new_blob for one in stack.patches for file in one.files if file.new_blob
    }
    changed = [
        path
        for path in python_files(stack)
        if path not in files or not tree.blob_id(files[path]).startswith(last.get(path, "none"))
    ]
    with tempfile.TemporaryDirectory(prefix="sm12x-overlay-") as name:
        folder = Path(name)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        with tree.scratch(folder) as git:
            for one in stack.patches:
                paths = [path for path in _split(one)[0] if path in changed]
                outcome = git.apply_cached(one.content(), include=paths) if paths else None
                if outcome and (not outcome.ok or outcome.offsets):
                    raise PatchConflictError(
                        f"{one.name} does not apply to {source}: "
                        f"{(outcome.errors or outcome.offsets)[0]}; nothing was written",
                        next_step="give an image of the untouched release, or build one with "
                        "`sm12x bundle`",
                    )
            there = [path for path in changed if path in git.index_entries()]
            git.checkout_index(folder / "made", there)
        return {path: (folder / "made" / path).read_bytes() for path in there}


def write(
    files: Mapping[str, bytes], installed: InstalledTree, stack: Stack, image: str, out: Path
) -> OverlayRecord:
    """Write the patched files and what they were made from under ``out``, whole or not at all.

    Raises:
        UsageError: ``out`` exists and is not an overlay of an earlier run.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / RECORD).is_file())):
        raise UsageError(
            f"{out} exists and is not an overlay", next_step="name another folder with --out"
        )
    for path, content in files.items():
        with writing.replacing(out / path) as temporary:
            temporary.write_bytes(content)
    record = OverlayRecord(
        image=image,
        vllm=installed.version,
        stack=stack.id,
        files={
            path: OverlayFile(
                mount=f"{installed.top}/{path}",
                image_sha256=hashlib.sha256(installed.files.get(path, b"")).hexdigest(),
                sha256=hashlib.sha256(content).hexdigest(),
            )
            for path, content in files.items()
        },
    )
    # Last: a folder with a record is whole.
    declared.write_json(out / RECORD, record)
    return record


def volume_lines(record: OverlayRecord, out: Path, *, root: bool) -> tuple[str, str]:
    """The options of `docker run`, and Nomad's variable and docker-driver lines, for an overlay.

    ``root``: the image runs as root, and keeps what it compiles where a volume has to be.
    """
    where = out.resolve()
    binds = [f"{where / path}:{file.mount}:ro" for path, file in record.files.items()]
    cache = [f"sm12x-rootcache:{_ROOT_CACHE}"] if root else []
    docker = " \\\n  ".join(f"-v {shlex.quote(bind)}" for bind in [*binds, *cache])
    pairs = ", ".join(
        f"{hcl.quoted(file.mount)} = {hcl.quoted(str(where / path))}"
        for path, file in record.files.items()
    )
    volumes = hcl.rows([("volumes", binds)])
    return f"  {docker}\n", f"-var 'overlay={{{pairs}}}'\n\n{volumes}\n"
