"""What ships: no name in /tmp is fixed, and no module comes out of the working folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core.errors import BadFileError
from sm12x.runtime import tiny

ROOT = layout.root()
PLACES = (
    *("Dockerfile.builder", "Dockerfile.bundle", "Makefile", ".ci", ".github", "scripts"),
    *("recipes", "nomad-examples", "README.md", "CONTRIBUTING.md", "SECURITY.md", "docs"),
)
# A name in /tmp or /var/tmp, where any user of the host can be first.
FIXED = re.compile(r"(?<![\w$}])/(?:var/)?tmp/[\w.-]+")
ALLOWED = {
    # sm12x.runtime.tiny takes it only if it is a folder of this user's own.
    "/tmp/sm12x-tiny",  # noqa: S108
    # PyTorch's own default, which the doctor reads.
    "/tmp/torchinductor_",  # noqa: S108
}


def shipped() -> Iterator[tuple[Path, str]]:
    for place in PLACES:
        path = ROOT / place
        for one in sorted(path.rglob("*")) if path.is_dir() else [path]:
            # A cache of ruff has the checkout's own place, which may be in /tmp.
            cached = any(part.endswith("_cache") for part in one.relative_to(ROOT).parts)
            if one.is_file() and not cached and one.suffix not in (".pyc", ".svg", ".lock"):
                yield one, one.read_text(encoding="utf-8", errors="replace")


def test_no_name_in_tmp_is_fixed() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in shipped()
        for name in FIXED.findall(text)
        if name not in ALLOWED
    }
    assert not found


def test_the_package_is_never_started_with_the_working_folder_on_its_path() -> None:
    """`python -m` searches it first: a model's folder or a volume with a json.py would run."""
    start = re.compile(r"""(?<!-P )(?<!"-P", )(?:-m sm12x\b|"-m", "sm12x\b)""")
    # Not what a page says of the package's own folder.
    found = {
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path, text in shipped()
        if path.suffix != ".md"
        for line in text.split("\n")
        if start.search(line) and not line.startswith('"""`python -m sm12x`')
    }
    assert not found


def test_no_file_of_the_image_runs_as_another_user() -> None:
    text = (ROOT / "Dockerfile.bundle").read_text(encoding="utf-8")
    last = "find / -xdev -type f -perm /6000 -exec chmod a-s {} +"
    assert last in text
    # After all that apt-get brings, and nothing is installed with it later.
    assert "apt-get" not in text.partition(last)[2]


def test_a_folder_of_others_gets_no_model(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    tiny.make(mine)
    assert (mine / "config.json").is_file()
    assert mine.stat().st_mode & 0o777 == 0o700
    tiny.make(mine)
    link, file, shared = tmp_path / "link", tmp_path / "file", tmp_path / "shared"
    link.symlink_to(mine)
    file.write_text("")
    shared.mkdir()
    shared.chmod(0o777)
    for folder in (link, file, shared):
        with pytest.raises(BadFileError, match="this user alone"):
            tiny.make(folder)
    assert not list(shared.iterdir())


def test_a_folder_of_another_user_gets_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(BadFileError, match="this user alone"):
        tiny.make(tmp_path / "theirs")
