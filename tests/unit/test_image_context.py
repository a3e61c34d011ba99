"""What each stage is given, and what counts as a change."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import files
from sm12x.core.errors import BadFileError
from sm12x.image.bundle import context
from sm12x.stack.model import base as bases
from sm12x.stack.model.base import Base


@pytest.fixture
def base() -> Base:
    return bases.load(bases.versions()[0])


def test_the_toolchain_stage_is_not_given_the_patches(base: Base) -> None:
    names = context.builder_files(base, "x86_64", here="x86_64")
    stages = {
        folder: [name for name in names if name.startswith(f"{folder}/")]
        for folder in ("base", "patches", "sm12x")
    }
    assert stages["base"] == [f"base/{base.version}/base.toml"]
    assert f"patches/{base.version}/series" in stages["patches"]
    assert "sm12x/pyproject.toml" in stages["sm12x"]
    assert not any("__pycache__" in name or "/tests/" in f"/{name}" for name in names)
    assert not any(name.endswith(("mutations.toml", "upstream-tests.toml")) for name in names)


def test_everything_copied_by_a_dockerfile_is_staged(base: Base) -> None:
    root = Path(__file__).parents[2]
    staged = {
        "builder": {*context.builder_files(base, "x86_64", here="x86_64"), "sources/x", "links/x"},
        "bundle": {
            *context.bundle_files(base, "x86_64", flashinfer=""),
            "ledger.json",
            "wheel/x",
            "links/x",
        },
    }
    for name, dockerfile in context.DOCKERFILES.items():
        tops = {path.partition("/")[0] for path in staged[name]}
        for line in (root / dockerfile).read_text().splitlines():
            words = line.split()
            if words[:1] == ["COPY"] and not words[1].startswith("--from="):
                assert set(words[1:-1]) <= tops, line


def test_a_context_is_laid_out_with_fixed_modes(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(b"x")
    small = tmp_path / "small"
    small.write_text("y")
    small.chmod(0o600)
    made = context.Context(files={"a/small": small, "text": "z"}, large={"b/big": big})
    made.write(tmp_path / "out")
    assert (tmp_path / "out/a/small").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "out/b/big").samefile(big)
    assert (tmp_path / "out/text").read_text() == "z"
    assert (tmp_path / "out/links").is_dir()


def test_what_tools_leave_among_the_sources_is_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install scripts/sleep-keep` leaves a copy of the package that pip would pack again."""
    root = tmp_path / ".home" / "build"
    ours = [
        "pyproject.toml",
        "scripts/sm12x/commands/build.py",
        "scripts/sleep-keep/pyproject.toml",
    ]
    left = [
        "scripts/sleep-keep/build/lib/vllm_sleep_keep/backend.py",
        "scripts/sleep-keep/vllm_sleep_keep.egg-info/PKG-INFO",
        "scripts/sleep-keep/.ruff_cache/CACHEDIR.TAG",
        "scripts/sm12x/__pycache__/cli.pyc",
        # What maintainers use: an edit of it must not rebuild an image or a wheel.
        "scripts/sm12x_dev/cli.py",
        "scripts/sm12x_dev/commands/lock.py",
    ]
    for name in (*ours, *left):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    monkeypatch.setattr(layout, "root", lambda: root)
    assert sorted(context.package()) == sorted(f"sm12x/{name}" for name in ours)


def test_nothing_that_only_maintainers_use_is_staged(base: Base) -> None:
    staged = {
        **context.builder_files(base, "x86_64", here="x86_64"),
        **context.bundle_files(base, "x86_64", flashinfer=""),
    }
    places = {str(place) for place in staged.values() if isinstance(place, Path)}
    assert any("/sm12x/cli.py" in place for place in places)
    assert not [place for place in places if "sm12x_dev" in place]


def test_any_change_changes_the_inputs(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = {"arch_list": "12.0a", "engine": "docker", "flashinfer": ""}
    digest = functools.partial(context.inputs_digest, base, "x86_64", here="x86_64")
    first = digest(choices=choices)
    assert first == digest(choices=dict(reversed(choices.items())))
    assert first != digest(choices={**choices, "engine": "podman"})
    files = context.package()
    name = next(iter(files))
    monkeypatch.setattr(context, "package", lambda: {**files, name: "changed"})
    assert first != digest(choices=choices)


def test_uv_is_pinned_by_the_builders_lock(base: Base, tmp_path: Path) -> None:
    lock = tmp_path / "build-x86_64.lock"
    base = dataclasses.replace(base, folder=tmp_path)
    lock.write_text(
        "uvicorn==1.0 \\\n    --hash=sha256:aa\n"
        "uv==0.9.1 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n    # via -r build\n"
    )
    assert context.builder_files(base, "x86_64", here="x86_64")["uv.lock"] == (
        "uv==0.9.1 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
    )
    for text in ("uvicorn==1.0\n", "uv==0.9.1\n"):
        lock.write_text(text)
        with pytest.raises(BadFileError, match="uv with hashes"):
            context.builder_files(base, "x86_64", here="x86_64")


def test_only_wheels_a_lock_allows_are_taken_from_find_links(base: Base, tmp_path: Path) -> None:
    allowed = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # sha256 of abc
    locks = tmp_path / "base"
    shutil.copytree(base.folder, locks)
    base = dataclasses.replace(base, folder=locks)
    with base.build_lock_path("x86_64").open("a") as lock:
        lock.write(f"good==1 \\\n    --hash=sha256:{allowed}\n")
    (tmp_path / "good-1-py3-none-any.whl").write_bytes(b"abc")
    (tmp_path / "other-1-py3-none-any.whl").write_bytes(b"abd")
    assert list(context.links(tmp_path, base.build_lock_path("x86_64"))) == [
        "links/good-1-py3-none-any.whl"
    ]


def test_a_missing_file_is_named(base: Base, tmp_path: Path) -> None:
    gone = tmp_path / "nowhere.whl"
    for small, large in (({"a": gone}, {}), ({}, {"a": gone})):
        with pytest.raises(BadFileError, match=r"nowhere\.whl"):
            context.Context(files=small, large=large)


def test_what_ninja_may_read_has_the_date_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that looks new compiles every unit that reads it again."""
    small, large = tmp_path / "small.h", tmp_path / "large.h"
    for path in (small, large):
        path.write_text("")
    os.utime(large, (1000, 1000))
    made = context.Context(files={"a.h": small, "b.h": "text"}, large={"c.h": large})

    def refuse(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", refuse)
    made.write(tmp_path / "out")
    dates = {path.name: path.stat().st_mtime for path in (tmp_path / "out").glob("*.h")}
    assert dates == {"a.h": files.DATE, "b.h": files.DATE, "c.h": 1000}
