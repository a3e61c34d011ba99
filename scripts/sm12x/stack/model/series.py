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
from sm12x.stack.model.diff import DiffError
from sm12x.stack.model.patchfile import MessageFault, Patch

__all__ = ["Patch"]


@dataclass(frozen=True, kw_only=True)
class Stack:
    patches: tuple[Patch, ...]

    @property
    def id(self) -> str:
        """Eight hex digits that change with any patch's name, content or place."""
        return id_of((patch.name, patch.sha256) for patch in self.patches)

    @staticmethod
    def id_of(contents: Mapping[str, bytes]) -> str:
        """The id of a stack of these files, in order: name -> content."""
        return id_of((name, hashlib.sha256(text).hexdigest()) for name, text in contents.items())

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
        return id_of((name, files.sha256(folder / name)) for name in names)
    except (OSError, ValueError) as error:
        raise BadFileError(
            f"the stack of {folder.name} cannot be read: {error}", next_step=_lists_all(folder.name)
        ) from None


def _lists_all(version: str) -> str:
    return f"`sm12x-dev check --base {version} --messages-only` lists all faults"


def id_of(patches: Iterable[tuple[str, str]]) -> str:
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
        path = base.folder / name
        try:
            patches.append(patchfile.read(path)[0])
        except DiffError as error:
            findings.append(MessageFault(path=path, line=error.line, message=str(error)))
    if findings:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise BadFileError(f"{findings[0]}{more}", next_step=_lists_all(base.version))
    return Stack(patches=tuple(patches))


def read(base: Base) -> tuple[list[str], list[MessageFault]]:
    """The names in the series, and its differences from the folder."""
    path = base.series_path

    def fault(line: int, message: str, where: Path = path) -> MessageFault:
        return MessageFault(path=where, line=line, message=message)

    if path.exists() and not path.is_file():
        # A pipe would be waited for without end.
        return [], [fault(1, "is not a regular file")]
    try:
        lines = path.read_bytes().decode().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        return [], [fault(1, f"cannot be read: {error}")]
    there = {file.name for file in base.folder.glob("[!.]*.patch")}
    names: list[str] = []
    findings: list[MessageFault] = []
    if lines.pop() != "":
        findings.append(fault(len(lines) + 1, "the last line has no newline"))
    for number, line in enumerate(lines, start=1):
        if line.startswith("#"):
            if names:
                findings.append(fault(number, "comments belong above the first patch"))
        elif line in names:
            findings.append(fault(number, f"{line} is listed twice"))
        elif line not in there:
            findings.append(
                fault(number, f"{line!r} is not the name of a .patch file of this folder")
            )
        else:
            names.append(line)
    findings += [
        fault(1, "is not listed in the series", base.folder / extra)
        for extra in sorted(there.difference(names))
    ]
    return names, findings
