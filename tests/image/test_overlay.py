"""`sm12x overlay` on the bundle, and on an image with the release's own files in it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from sm12x import layout
from sm12x.commands.overlay import command
from sm12x.core import index, process
from sm12x.image import overlay
from sm12x.image.bundle.record import Record
from sm12x.image.engine.engine import BuildRequest, Engine
from sm12x.stack.model import base as bases
from sm12x.stack.model import series

TAG = "sm12x-test:untouched"
# As in Dockerfile.bundle.
USER = 1000


@pytest.fixture(scope="module")
def untouched(
    base: bases.Base, engine: Engine, made: Record, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The bundle with the official wheel's files where the stack changed them."""
    context = tmp_path_factory.mktemp("untouched")
    wheel = base.wheels[made.machine]
    official = index.fetch("vllm", wheel.name, wheel.sha256, cache=layout.cache(), find_links=None)
    with zipfile.ZipFile(official) as archive:
        theirs = set(archive.namelist())
        paths = overlay.python_files(series.load(base))
        for path in paths:
            if path in theirs:
                archive.extract(path, context)
    top = overlay.look(engine, made.tags[0]).top
    lines = [f"FROM {made.tags[0]}", f"COPY vllm {top}/vllm"]
    # What the stack adds, the release has not.
    if added := [f"{top}/{path}" for path in paths if path not in theirs]:
        user = f"USER {USER}"
        lines += ["USER root", f"RUN {json.dumps(['rm', *added])}", user]
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    engine.build(
        BuildRequest(dockerfile=context / "Dockerfile", context=context, target="", tags=(TAG,)),
        on_line=print,
    )
    yield TAG
    process.run([engine.program, "rmi", TAG], check=False)


def test_the_bundle_needs_no_overlay(engine: Engine, made: Record, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [made.tags[0], "--out", str(out), "--engine", engine.name]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "has every Python patch" in done.output
    assert not out.exists()


def test_mounted_files_are_those_of_the_bundle(
    engine: Engine, made: Record, untouched: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = [untouched, "--out", str(out), "--engine", engine.name, "--json"]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0
    record = json.loads((out / overlay.RECORD).read_text())
    bundled = overlay.look(engine, made.tags[0], list(record["files"]))
    assert len(record["files"]) > 1
    for path in record["files"]:
        assert (out / path).read_bytes() == bundled.files[path]
    if engine.name == "buildah":
        return
    mounts = [
        word
        for path, entry in record["files"].items()
        for word in ("-v", f"{out / path}:{entry['mount']}:ro")
    ]
    names = [entry["mount"] for entry in record["files"].values()]
    shown = process.run(
        [engine.program, "run", "--rm", *mounts, "--entrypoint", "sha256sum", untouched, *names]
    ).stdout
    assert [line.split()[0] for line in shown.splitlines()] == [
        entry["sha256"] for entry in record["files"].values()
    ]
