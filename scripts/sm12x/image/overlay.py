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

from sm12x.core import declared, process
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
class Overlay:
    """``files`` are the patched ones by path; ``done`` are files that had the whole stack already.

    ``halves`` names the patches whose native part an overlay cannot bring, with the files of it.
    """

    files: Mapping[str, bytes]
    done: tuple[str, ...]
    halves: Mapping[str, tuple[str, ...]]


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
    return tuple(
        sorted({path for patch in stack.patches for path in _paths(patch) if _is_python(path)})
    )


def look(engine: Engine, image: str, paths: Sequence[str] = ()) -> InstalledTree:
    """Ask the image's own Python for the version, the place and these files of its vLLM.

    Raises:
        ToolFailedError: the image cannot be run, or has no Python with vllm.
    """
    words = ["python3", "-c", _LOOK, *paths]
    if engine.name == "buildah":
        done = _buildah_run(engine, image, words)
    else:
        first, *rest = words
        # Neither its entry point nor a GPU nor a network is needed to read files.
        done = process.run(
            [
                *(engine.program, "run", "--rm", "--network", "none"),
                *("--entrypoint", first, image, *rest),
            ],
            next_step=f"see that {image} is here and has vLLM: `{engine.name} images`",
        ).stdout
    try:
        # An entry point that could not be replaced may have printed before.
        report = json.loads(done.strip().splitlines()[-1])
        return InstalledTree(
            top=report["top"],
            version=report["version"],
            root=report["root"],
            files={path: base64.b64decode(text) for path, text in report["files"].items()},
        )
    except (ValueError, KeyError, IndexError, TypeError):
        raise ToolFailedError(
            f"{image} printed no report of its vLLM, but {done[-200:]!r}",
            next_step="give an image whose python3 has vLLM installed",
        ) from None


def _buildah_run(engine: Engine, image: str, words: Sequence[str]) -> str:
    container = process.run([engine.program, "from", "--pull-never", image]).stdout.strip()
    try:
        isolation = engine.environment()
        return process.run([engine.program, "run", container, "--", *words], env=isolation).stdout
    finally:
        process.run([engine.program, "rm", container], check=False)


def patch(stack: Stack, files: Mapping[str, bytes], *, source: str) -> Overlay:
    """Apply the Python part of the stack to files of an image, strictly and all or nothing.

    Args:
        files: the image's files by path, all that the stack changes and the image has.
        source: what to call the image in an error.

    Raises:
        PatchConflictError: a file has another text than the stack is for, or is not there.
    """
    last = {
        file.path: file.new_blob
        for one in stack.patches
        for file in one.files
        if _is_python(file.path) and file.new_blob
    }
    done = tuple(
        sorted(
            path
            for path, blob in last.items()
            if path in files and tree.blob_id(files[path]).startswith(blob)
        )
    )
    with tempfile.TemporaryDirectory(prefix="sm12x-overlay-") as name:
        folder = Path(name)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        with tree.scratch(folder) as git:
            for one in stack.patches:
                paths = [path for path in _paths(one) if _is_python(path) and path not in done]
                if not paths:
                    continue
                outcome = git.apply_cached(one.content(), include=paths)
                if not outcome.ok or outcome.offsets:
                    raise PatchConflictError(
                        f"{one.name} does not apply to {source}: "
                        f"{(outcome.errors or outcome.offsets)[0]}; nothing was written",
                        next_step="give an image of the untouched release, or build one with "
                        "`sm12x bundle`",
                    )
            output = folder / "made"
            changed = sorted(set(last) - set(done))
            entries = git.index_entries()
            git.checkout_index(output, [path for path in changed if path in entries])
            patched = {path: (output / path).read_bytes() for path in changed if path in entries}
    return Overlay(files=patched, done=done, halves=_halves(stack))


def write(
    overlay: Overlay, installed: InstalledTree, stack: Stack, image: str, out: Path
) -> OverlayRecord:
    """Write the patched files and what they were made from under ``out``, whole or not at all.

    Raises:
        UsageError: ``out`` exists and is not an overlay of an earlier run.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / RECORD).is_file())):
        raise UsageError(
            f"{out} exists and is not an overlay", next_step="name another folder with --out"
        )
    for path, content in overlay.files.items():
        with writing.replacing(out / path) as temporary:
            temporary.write_bytes(content)
    record = OverlayRecord(
        image=image,
        vllm=installed.version,
        stack=stack.id,
        files={
            path: OverlayFile(
                mount=_target(installed, path),
                image_sha256=hashlib.sha256(installed.files.get(path, b"")).hexdigest(),
                sha256=hashlib.sha256(content).hexdigest(),
            )
            for path, content in overlay.files.items()
        },
    )
    # Last: a folder with a record is whole.
    declared.write_json(out / RECORD, record)
    return record


def _target(installed: InstalledTree, path: str) -> str:
    """Where a file is mounted in the image."""
    return f"{installed.top}/{path}"


def volume_lines(overlay: Overlay, installed: InstalledTree, out: Path) -> tuple[str, str]:
    """The options of `docker run`, and Nomad's variable and docker-driver lines, for an overlay."""
    where = out.resolve()
    binds = [f"{where / path}:{_target(installed, path)}:ro" for path in overlay.files]
    cache = [f"sm12x-rootcache:{_ROOT_CACHE}"] if installed.root else []
    docker = " \\\n  ".join(f"-v {shlex.quote(bind)}" for bind in [*binds, *cache])
    pairs = ", ".join(
        f"{hcl.quoted(_target(installed, path))} = {hcl.quoted(str(where / path))}"
        for path in overlay.files
    )
    volumes = hcl.rows([("volumes", binds)])
    return f"  {docker}\n", f"-var 'overlay={{{pairs}}}'\n\n{volumes}\n"


def _halves(stack: Stack) -> dict[str, tuple[str, ...]]:
    halves: dict[str, tuple[str, ...]] = {}
    for one in stack.patches:
        paths = _paths(one)
        native = tuple(path for path in paths if not _is_python(path))
        if native:
            halves[one.name] = native
    return halves


def _paths(one: Patch) -> list[str]:
    return [file.path for file in one.files]


def _is_python(path: str) -> bool:
    """A Python file that is installed, not one of the release's own tools."""
    return path.startswith(f"{PACKAGE}/") and path.endswith(".py")
