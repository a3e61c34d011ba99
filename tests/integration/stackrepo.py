"""A tiny sdist and a base for it, made afresh: what the stack's tests work on."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from sm12x.core import process
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.worktree import tree
from sm12x_dev.worktree import add_drop, export
from sm12x_dev.worktree.repository import make_repository

VERSION = "1.0"
BODY = (
    "The old text was wrong in a way that every reader of it could see at once, and so it went on\n"
    "for years. This says the right thing instead, which is all that was ever asked of it."
)
WITNESS = "tests/witness/test_it.py"

FILES = {
    "PKG-INFO": "Metadata-Version: 2.4\nName: tiny\nVersion: 1.0\n\nBody\n",
    ".gitignore": "*.so\nbuild/\n",
    # Text conversion, if it were on, would change this file's id.
    ".gitattributes": "* text=auto eol=crlf\n",
    "tiny/a.py": "".join(f"a = {n}\n" for n in range(1, 61)),
    "tiny/b.py": "".join(f"b = {n}\n" for n in range(1, 21)),
    "tiny/dos.txt": "one\r\ntwo\r\nthree\r\n",
    "build/kept.txt": "ignored by .gitignore, and part of the sdist\n",
    "run.sh": "#!/bin/sh\n",
}


@dataclass(frozen=True, kw_only=True)
class World:
    """A checkout with one base in it, its sdist, and a folder to work in."""

    root: Path
    archive: Path
    work: Path

    @property
    def base(self) -> Base:
        return bases.load(VERSION)

    def fresh(self, name: str = "tree") -> Path:
        """The sdist, unpacked."""
        directory = self.work / name
        tree.unpack(self.archive, directory)
        return directory

    def applied(self, name: str = "applied") -> Path:
        """The sdist with the stack on it, as a repository."""
        directory = self.fresh(name)
        make_repository(self.base, series.load(self.base), directory)
        return directory

    def commit(
        self,
        directory: Path,
        subject: str,
        path: str,
        old: str,
        new: str,
        *,
        witness: str | None = None,
    ) -> str:
        """Change a file in an applied folder and add that as a patch."""
        target = directory / path
        text = target.read_text() if target.exists() else ""
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace(old, new, 1) if old else new)
        return add_drop.new(
            self.base,
            directory,
            self.message(subject, witness=witness or WITNESS),
            author="A Person <person@example.org>",
            root=self.root,
        ).name

    def message(self, subject: str, *, witness: str = WITNESS) -> str:
        return add_drop.message(
            subject=subject,
            body=BODY,
            upstream=["owner/repo#1 (open)"],
            drop_when="upstream takes it",
            witness=[witness],
        )

    def patches(self) -> dict[str, bytes]:
        """The base's patch files and series, by name."""
        folder = self.base.folder
        paths = [*folder.glob("*.patch"), folder / "series"]
        return {path.name: path.read_bytes() for path in paths}

    def refresh(self, directory: Path) -> export.RefreshReport:
        return export.refresh(self.base, directory, root=self.root)


def git(directory: Path, *words: str) -> str:
    """git as a person runs it in a folder, cut off from this machine's settings."""
    return process.run(
        ["git", *words],
        cwd=directory,
        env={
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "A Person",
            "GIT_AUTHOR_EMAIL": "person@example.org",
            "GIT_COMMITTER_NAME": "A Person",
            "GIT_COMMITTER_EMAIL": "person@example.org",
            "GIT_EDITOR": "true",
        },
    ).stdout


def release(world: World, version: str, changes: Mapping[str, str | None]) -> None:
    """Put an sdist of a later release beside the first one; None takes a file away."""
    files = {name: text for name, text in {**FILES, **changes}.items() if text is not None}
    with tarfile.open(world.archive.parent / f"tiny-{version}.tar.gz", "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"tiny-{version}/{name}")
            body = text.replace("Version: 1.0", f"Version: {version}").encode()
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))


def snapshot(directory: Path) -> dict[str, str]:
    """Every file of a folder, .git and all, with the hash of its bytes and its mode."""
    return {
        str(path.relative_to(directory)): (
            f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        )
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def make(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, more: Mapping[str, str] | None = None
) -> World:
    """A World under ``folder``, with an empty stack, that the package takes for its checkout.

    ``more`` are further files of its sdist.
    """
    root = folder / "checkout"
    work = folder / "work"
    work.mkdir()
    archive = folder / "tiny-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in {**FILES, **(more or {})}.items():
            member = tarfile.TarInfo(f"tiny-1.0/{name}")
            member.size = len(text.encode())
            member.mode = 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(member, io.BytesIO(text.encode()))
    plain = work / "plain"
    tree.unpack(archive, plain)
    home = root / "patches" / VERSION
    home.mkdir(parents=True)
    real = bases.load(bases.default())
    text = (real.folder / "base.toml").read_text()
    for old, new in (
        (f'version = "{real.version}"', f'version = "{VERSION}"'),
        (real.sdist.name, archive.name),
        (real.sdist.sha256, hashlib.sha256(archive.read_bytes()).hexdigest()),
        (real.sdist.tree, tree.tree_id(plain)),
    ):
        text = text.replace(old, new, 1)
    (home / "base.toml").write_text(text)
    (home / "series").write_text("# The patches.\n")
    (root / WITNESS).parent.mkdir(parents=True)
    (root / WITNESS).write_text("def test_it() -> None: ...\n")
    monkeypatch.setenv("SM12X_ROOT", str(root))
    return World(root=root, archive=archive, work=work)
