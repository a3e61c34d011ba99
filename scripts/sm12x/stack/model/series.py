"""The stack of a base: the patches its `series` file lists, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import files
from sm12x.core.errors import BadFileError
from sm12x.stack.model import patchfile
from sm12x.stack.model.base import Base
from sm12x.stack.model.patchfile import MessageFault, Patch

__all__ = ["Patch", "Stack", "check", "header", "load", "read", "read_id"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    patches: tuple[Patch, ...]

    @property
    def id(self) -> str:
        """Eight hex digits that change with any patch's name, content or place."""
        return _id((patch.name, patch.sha256) for patch in self.patches)

    @staticmethod
    def id_of(contents: Mapping[str, bytes]) -> str:
        """The id of a stack of these files, in order: name -> content."""
        return _id((name, hashlib.sha256(text).hexdigest()) for name, text in contents.items())

    def after(self, name: str) -> tuple[str, ...]:
        """The names of the patches after the one called ``name``; of all of them after "0"."""
        if name.isdecimal() and int(name) == 0:
            return tuple(patch.name for patch in self.patches)
        last = self.patches.index(self.get(name))
        return tuple(patch.name for patch in self.patches[last + 1 :])

    def get(self, name: str) -> Patch:
        """The patch called ``name``: its file name, with or without ".patch", or its number."""
        for patch in self.patches:
            number = patch.name.split("-")[0]
            if name in (patch.name, patch.path.stem):
                return patch
            # "0006", and "6" as one says it.
            if name.isdecimal() and number.isdecimal() and int(name) == int(number):
                return patch
        names = ", ".join(patch.name for patch in self.patches) or "none"
        raise BadFileError(
            f"there is no patch {name} in the series; it lists: {names}",
            next_step="give one of these names, or its number",
        )


def read_id(folder: Path) -> str:
    """The ``Stack.id`` of the stack in the folder of a base, from names and bytes alone.

    Raises:
        BadFileError: series or a patch that it lists cannot be read.
    """
    try:
        lines = (folder / "series").read_text(encoding="utf-8").splitlines()
        names = [line for line in lines if line and not line.startswith("#")]
        return _id((name, files.sha256(folder / name)) for name in names)
    except (OSError, ValueError) as error:
        raise BadFileError(
            f"the stack of {folder.name} cannot be read: {error}",
            next_step=f"`sm12x-dev check --base {folder.name} --messages-only` lists all faults",
        ) from None


def _id(patches: Iterable[tuple[str, str]]) -> str:
    """The id of a stack: over the name and the sha256 of each patch, in order."""
    digest = hashlib.sha256()
    for name, sha256 in patches:
        digest.update(f"{name} {sha256}\n".encode())
    return digest.hexdigest()[:8]


def load(base: Base) -> Stack:
    """Read the stack of a base.

    Raises:
        BadFileError: the series and the folder disagree, or a patch cannot be read. How messages
            are written is for ``check``: a build does not depend on it.
    """
    names, findings = read(base)
    patches: list[Patch] = []
    for name in names:
        patch, faults = patchfile.examine(base.folder / name)
        if patch is None:
            findings += faults
        else:
            patches.append(patch)
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise BadFileError(
            f"{findings[0]}{more}",
            next_step=f"`sm12x-dev check --base {base.version} --messages-only` lists all faults",
        )
    return Stack(patches=tuple(patches))


def check(base: Base, *, root: Path | None) -> list[MessageFault]:
    """Return all faults of the series, the folder and the messages.

    Args:
        root: the checkout that the witnesses' paths are in.
    """
    names, findings = read(base)
    for number, name in enumerate(names, start=1):
        path = base.folder / name
        if not path.is_file():
            continue
        patch, faults = patchfile.examine(path, root=root)
        findings += faults
        expected = patchfile.file_name(number, patch.subject) if patch is not None else name
        if name != expected:
            message = f"the file name should be {expected}: place in the series, then subject"
            findings.append(MessageFault(path=path, line=1, message=message))
    slugs = {name.partition("-")[2]: name for name in names}
    for entry in base.dropped:
        same = slugs.get(entry.patch.partition("-")[2])
        if same is not None:
            path = base.folder / "base.toml"
            message = f"[[dropped]] names {entry.patch}, and the series lists {same}: take out one"
            findings.append(
                MessageFault(path=path, line=_line_of(path, entry.patch), message=message)
            )
    return findings


def _line_of(path: Path, text: str) -> int:
    """The first line that holds ``text``, 1 where none does."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((n for n, line in enumerate(lines, start=1) if text in line), 1)


def read(base: Base) -> tuple[list[str], list[MessageFault]]:
    """The names in the series, and its differences from the folder."""
    path = base.series_path
    if path.exists() and not path.is_file():
        return [], [MessageFault(path=path, line=1, message="is not a regular file")]
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        return [], [MessageFault(path=path, line=1, message=f"cannot be read: {error}")]
    names: list[str] = []
    findings: list[MessageFault] = []

    def fault(line: int, message: str) -> None:
        findings.append(MessageFault(path=path, line=line, message=message))

    if lines[-1] != "":
        fault(len(lines), "the last line has no newline")
    for number, line in enumerate(lines, start=1):
        if line.startswith("#"):
            if names:
                fault(number, "comments belong above the first patch")
        elif line == "":
            if number != len(lines):
                fault(number, "is empty")
        elif line != line.strip():
            fault(number, f"{line!r} has blanks or a carriage return around the name")
        elif "/" in line or not line.isprintable() or not line.endswith(".patch"):
            fault(number, f"{line!r} is not the name of a .patch file of this folder")
        elif line in names:
            fault(number, f"{line} is listed twice")
        else:
            names.append(line)
            if not (base.folder / line).is_file():
                fault(number, f"{line} is listed, and there is no such file")
    listed = set(names)
    findings += [
        MessageFault(path=extra, line=1, message="is not listed in the series")
        for extra in sorted(base.folder.glob("[!.]*.patch"))
        if extra.name not in listed
    ]
    return names, findings


def is_readable(base: Base) -> bool:
    """Whether series and patches of ``base`` can be read."""
    try:
        load(base)
    except BadFileError:
        return False
    return True


def header(base: Base) -> str:
    """The comment lines at the top of the series, newlines included."""
    if not base.series_path.is_file():
        return ""
    lines = base.series_path.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#"))
