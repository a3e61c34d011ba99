"""The build contexts: small folders with exactly what the stages of a Dockerfile copy.

Files that change together are staged together, so that a stage's cache key has only its inputs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm12x import layout
from sm12x.core import declared, files, lockfile
from sm12x.core.errors import BadFileError
from sm12x.recipes import planned
from sm12x.stack.model.base import Base
from sm12x.wheel import flashinfer as ahead
from sm12x.wheel.ledger import FLASHINFER_REQUEST

DOCKERFILES = {"builder": "Dockerfile.builder", "bundle": "Dockerfile.bundle"}
_PACKAGE = ("pyproject.toml", "scripts/sm12x", "scripts/sleep-keep")
# Folders that tools leave among sources: pip packs what an earlier `pip install` left in `build`
# instead of sources that are not newer.
_LEFTOVER = re.compile(r"__pycache__|build|\..+|.+\.egg-info")


@dataclass(frozen=True, kw_only=True)
class Context:
    """Files of a context: path in it -> where the file is now, or its text.

    ``folders`` are there even if they are empty.
    ``large`` files are hard links; the others are copied with a fixed mode and date, so that a
    checkout's umask does not change cache keys, nor its age what is compiled again.

    Raises:
        BadFileError: a file is missing.
    """

    files: Mapping[str, Path | str]
    large: Mapping[str, Path]
    folders: tuple[str, ...] = ("links",)

    def __post_init__(self) -> None:
        for source in (*self.files.values(), *self.large.values()):
            if isinstance(source, Path) and not source.is_file():
                raise BadFileError(
                    f"{source} is missing, and the image needs it",
                    next_step="restore it with git, or make it with `make lock BASE=VERSION`",
                )

    def digest(self) -> str:
        """A sha256, in hex, over names and contents."""
        total = hashlib.sha256()
        for name, source in sorted({**self.files, **self.large}.items()):
            content = (
                hashlib.sha256(source.encode()).hexdigest()
                if isinstance(source, str)
                else files.sha256(source)
            )
            total.update(f"{name}\0{content}\n".encode())
        return total.hexdigest()

    def write(self, folder: Path) -> None:
        """Lay the files out in ``folder``, which must be empty or absent."""
        for name in self.folders:
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, source in self.files.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(source, str):
                target.write_text(source, encoding="utf-8")
            else:
                shutil.copyfile(source, target)
            target.chmod(0o644)
            # ninja compares dates, and recompiles each unit that reads a newer header.
            os.utime(target, (files.DATE, files.DATE))
        for name, source in self.large.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            files.link(source, target)


def builder_files(base: Base, machine: str, *, here: str) -> dict[str, Path | str]:
    """The files that Dockerfile.builder copies, except the release's archives.

    ``here`` is the machine it runs on, ``machine`` the one it compiles for.
    """
    folder = f"patches/{base.version}"
    other = base.build_lock_path(machine)
    stack = [base.series_path, base.lock_path(machine), *sorted(base.folder.glob("*.patch"))]
    # Without files that only tests read: a change of one would rebuild the wheel.
    data = [base.folder / name for name in ("base.toml", "audit-policy.toml")]
    return {
        **_installer(base.build_lock_path(here)),
        **package(),
        "build.lock": base.build_lock_path(here),
        f"base/{base.version}/base.toml": base.folder / "base.toml",
        **({f"base/{base.version}/{other.name}": other} if machine != here else {}),
        **{f"{folder}/{path.name}": path for path in stack},
        **{f"{folder}/{path.name}": path for path in data if path.exists()},
    }


def bundle_files(base: Base, machine: str, *, flashinfer: str) -> dict[str, Path | str]:
    """The files that Dockerfile.bundle copies, except the builder's output.

    ``flashinfer`` is the list of architectures for which FlashInfer's modules are compiled ahead of
    time, as TORCH_CUDA_ARCH_LIST has them; "" for none.
    """
    build_lock, spec = base.build_lock_path(machine), base.locks[machine]
    sdists = ""
    if spec.build_from_sdist:
        names = ("setuptools", *spec.sdist_requires)
        text = build_lock.read_text(encoding="utf-8")
        sdists = lockfile.restrict(text, names, where=str(build_lock))
    extras = {extra.package for extra in base.extras}
    return {
        FLASHINFER_REQUEST: declared.to_json(flashinfer_request(base, machine, flashinfer)),
        **_installer(build_lock),
        **package(),
        "requirements.lock": base.lock_path(machine),
        "sdists.lock": sdists,
        "extras.lock": "".join(pin.text for pin in _pins(base.lock_path(machine), extras)),
        **{
            f"recipes/{path.relative_to(layout.recipes())}": path
            for pattern in ("*.yaml", f"{planned.FOLDER}/*.json")
            for path in sorted(layout.recipes().glob(pattern))
        },
    }


def inputs_digest(base: Base, machine: str, *, here: str, choices: Mapping[str, str]) -> str:
    """A sha256, in hex, over all inputs of a bundle.

    The release's archives are in it through their pins in base.toml. ``choices`` are the options
    that matter: architectures, mode, third-party sources, base image, engine, and "flashinfer": for
    what its modules are compiled.
    """
    made_of = {
        **builder_files(base, machine, here=here),
        **bundle_files(base, machine, flashinfer=choices["flashinfer"]),
        **{name: layout.root() / name for name in DOCKERFILES.values()},
        **{f"option/{key}": value for key, value in choices.items()},
    }
    return Context(files=made_of, large={}).digest()


def package() -> dict[str, Path | str]:
    """List this package's own files, under sm12x/."""
    root = layout.root()
    entries: dict[str, Path | str] = {}
    for name in _PACKAGE:
        path = root / name
        inner = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in inner:
            inside = file.relative_to(root)
            if file.is_file() and not any(map(_LEFTOVER.fullmatch, inside.parts)):
                entries[f"sm12x/{inside}"] = file
    return entries


def package_digest() -> str:
    """A sha256, in hex, of this package's own files."""
    return Context(files=package(), large={}).digest()


def flashinfer_request(base: Base, machine: str, arch_list: str) -> ahead.Request:
    """The FlashInfer modules to compile for ``arch_list``; none where it is empty."""
    pins = _pins(base.lock_path(machine), ahead.MADE_OF)
    return ahead.Request(
        arch_list=ahead.targets(arch_list),
        key=ahead.key((pin.text for pin in pins), arch_list),
        modules=base.flashinfer if arch_list else (),
    )


def _pins(lock: Path, names: Collection[str]) -> list[lockfile.Pin]:
    return [pin for pin in lockfile.read(lock).pins if pin.name in names]


def _installer(lock: Path) -> dict[str, Path | str]:
    """Files for installing packages in a build: the wrapper, and the builder lock's pin of uv."""
    pins = _pins(lock, {"uv"})
    if not pins or not pins[0].hashes:
        raise BadFileError(
            f"{lock} has no entry for uv with hashes",
            next_step="make it with `make lock BASE=VERSION`",
        )
    return {
        "with-host.sh": layout.data() / "image" / "with-host.sh",
        # Without the comments: what asks for uv does not change what is installed.
        "uv.lock": re.sub(r"(?m)^ +#.*\n", "", pins[0].text),
    }


def links(find_links: Path | None, *locks: Path) -> dict[str, Path]:
    """The wheels of a --find-links folder that one of ``locks`` allows."""
    if find_links is None:
        return {}
    allowed = {
        digest for lock in locks for pin in lockfile.read(lock).pins for digest in pin.hashes
    }
    return {
        f"links/{path.name}": path
        for path in sorted(find_links.glob("*.whl"))
        if f"sha256:{files.sha256(path)}" in allowed
    }
