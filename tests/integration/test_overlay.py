"""The Python part of a stack on the files of an image, through real git; tests/image has images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration import stackrepo
from tests.integration.stackrepo import World

from sm12x.core.errors import PatchConflictError, UsageError
from sm12x.image import overlay
from sm12x.image.overlay import InstalledTree
from sm12x.stack.model import series
from sm12x.stack.model.series import Stack


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(overlay, "PACKAGE", "tiny")
    made = stackrepo.make(tmp_path, monkeypatch)
    directory = made.applied("author")
    made.commit(directory, "Correct line ten", "tiny/a.py", "a = 10\n", "a = 'ten'\n")
    made.commit(directory, "Correct line ten again", "tiny/a.py", "a = 'ten'\n", "a = 'TEN'\n")
    made.commit(directory, "Correct b", "tiny/b.py", "b = 5\n", "b = 'five'\n")
    made.commit(directory, "Add a module", "tiny/sub/c.py", "", "c = 1\n")
    return made


@pytest.fixture
def stack(world: World) -> Stack:
    return series.load(world.base)


def files(stack: Stack, directory: Path) -> dict[str, bytes]:
    """What an image with this tree would give."""
    paths = (path for path in overlay.python_files(stack) if (directory / path).is_file())
    return {path: (directory / path).read_bytes() for path in paths}


def test_the_files_become_those_of_the_patched_source(world: World, stack: Stack) -> None:
    made = overlay.patch(stack, files(stack, world.fresh()), source="image")
    assert sorted(made) == ["tiny/a.py", "tiny/b.py", "tiny/sub/c.py"]
    patched = world.applied("patched")
    for path, content in made.items():
        assert content == (patched / path).read_bytes()


def test_a_file_that_is_patched_already_needs_no_overlay(world: World, stack: Stack) -> None:
    have = files(stack, world.applied("patched"))
    assert overlay.patch(stack, have, source="image") == {}
    mixed = {**have, "tiny/b.py": files(stack, world.fresh())["tiny/b.py"]}
    made = overlay.patch(stack, mixed, source="image")
    assert list(made) == ["tiny/b.py"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace(b"a = 10\n", b"a = 11\n"),
        # It would fit, ten lines on: the file is another one all the same.
        lambda text: b"# moved\n" * 10 + text,
        lambda text: None,
    ],
)
def test_a_file_of_another_version_is_refused(world: World, stack: Stack, edit: object) -> None:
    have = files(stack, world.fresh())
    assert callable(edit)
    text = edit(have.pop("tiny/a.py"))
    if text is not None:
        have["tiny/a.py"] = text
    with pytest.raises(PatchConflictError) as caught:
        overlay.patch(stack, have, source="image")
    for fact in ("0001-Correct-line-ten.patch", "image", "tiny/a.py"):
        assert fact in caught.value.message
    assert "\n" not in str(caught.value)


def test_what_is_written_says_what_it_was_made_from(
    world: World, stack: Stack, tmp_path: Path
) -> None:
    have = files(stack, world.fresh())
    made = overlay.patch(stack, have, source="image")
    installed = InstalledTree(top="/usr/lib/dist-packages", version="9.9.0", root=True, files=have)
    out = tmp_path / "out put"
    for _ in range(2):
        written = overlay.write(made, installed, stack, "image", out)
        record = json.loads((out / overlay.RECORD).read_text())
    assert record["stack"] == stack.id
    assert record["files"]["tiny/a.py"]["mount"] == "/usr/lib/dist-packages/tiny/a.py"
    assert (out / "tiny/a.py").read_bytes() == made["tiny/a.py"]
    docker, nomad = overlay.volume_lines(written, out, root=True)
    assert f"'{out}/tiny/a.py:/usr/lib/dist-packages/tiny/a.py:ro'" in docker
    assert "sm12x-rootcache:/root/.cache" in docker
    assert f'"/usr/lib/dist-packages/tiny/a.py" = "{out}/tiny/a.py"' in nomad
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("")
    with pytest.raises(UsageError, match=str(taken)):
        overlay.write(made, installed, stack, "image", taken)
