"""Mutations: edits of the patched source that must turn a witness red, each for a line that counts.

They are data, ``mutations.toml`` in the folder of a base. tests/tools/mutate.py makes them and runs
the witnesses; ``check`` finds those that fit the stack no more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x.core import declared
from sm12x.core.declared import Declared
from sm12x.stack.model.base import Base
from sm12x.stack.model.patchfile import MessageFault, Patch
from sm12x.stack.model.series import Stack

NAME = "mutations.toml"
# The package of which a tree under mutation has a copy: its witnesses take it from there.
PACKAGE = "scripts/sleep-keep"
_NUMBER = re.compile(r"^\d{4}-")


@dataclass(frozen=True, kw_only=True)
class Mutation(Declared):
    """An entry of mutations.toml.

    ``patch`` is the beginning of the patch's file name without its number: it stays right when the
    series is numbered anew. ``file`` is one that it changes, or one of ``PACKAGE``. ``find`` occurs
    exactly once in ``file`` of the patched tree and becomes ``replace``. ``why`` says what the line
    is for. ``by`` is a test (path::test) that is asked first; "" where the patch's witnesses are
    asked in turn.
    """

    patch: str
    file: str
    find: str
    replace: str
    why: str
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class Mutations(Declared):
    """``mutations.toml``."""

    schema: Literal[1]
    mutations: Annotated[tuple[Mutation, ...], Field(alias="mutation")] = ()


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A mutation made on a tree: ``text`` is the whole new content of ``file``.

    ``stale`` says why it could not be made, "" where it was.
    """

    patch: Patch
    file: str
    label: str
    why: str
    by: str
    text: str
    stale: str


def load(base: Base) -> tuple[Mutation, ...]:
    """Read the mutations of ``base``; none where there is no such file.

    Raises:
        BadFileError: a key is missing, unknown or of the wrong kind.
    """
    path = base.folder / NAME
    if not path.exists():
        return ()
    return declared.read_toml(Mutations, path, next_step="correct it, or restore it").mutations


def patch_of(stack: Stack, name: str) -> Patch | None:
    """Return the one patch whose file name begins with ``name``, numbers aside; None if not one."""
    stem = _NUMBER.sub("", name.removesuffix(".patch"))
    matches = [
        patch for patch in stack.patches if stem and _NUMBER.sub("", patch.name).startswith(stem)
    ]
    return matches[0] if len(matches) == 1 else None


def kept(
    base: Base, stack: Stack, tree: Path, root: Path
) -> tuple[list[Mutant], list[MessageFault]]:
    """Return the mutations of ``base`` made on its patched ``tree``, and those that fit no patch.

    ``root`` is the checkout, which has the package.
    """
    mutants: list[Mutant] = []
    findings: list[MessageFault] = []
    for number, mutation in enumerate(load(base), start=1):
        patch = patch_of(stack, mutation.patch)
        if patch is None:
            findings.append(_unknown(base.folder / NAME, mutation, number))
            continue
        text, stale = _edited(mutation, patch, tree, root)
        mutants.append(
            Mutant(
                patch=patch,
                file=mutation.file,
                label=f"mutation {number}",
                why=mutation.why,
                by=mutation.by,
                text=text,
                stale=stale,
            )
        )
    return mutants, findings


def check(base: Base, stack: Stack, tree: Path | None, root: Path) -> list[MessageFault]:
    """Return the faults of the mutations of ``base``: a patch without one, or one that is stale.

    A base that keeps none yet has nothing to check; those of this repository have to keep them.

    Args:
        tree: the patched source; without it no text is compared.
        root: the checkout, which has the package.
    """
    path = base.folder / NAME
    if not path.exists():
        return []
    entries = load(base)
    findings = [
        _unknown(path, entry, number)
        for number, entry in enumerate(entries, start=1)
        if not patch_of(stack, entry.patch)
    ]
    having = {patch.name for entry in entries if (patch := patch_of(stack, entry.patch))}
    findings += [
        MessageFault(
            path=path,
            line=1,
            message=f"no mutation shows that a line of {patch.name} is needed",
        )
        for patch in stack.patches
        if patch.name not in having
    ]
    for number, entry in enumerate(entries, start=1):
        patch = patch_of(stack, entry.patch)
        if patch and entry.by and entry.by.split("::", 1)[0] not in patch.witnesses:
            reason = f": {entry.by} is not a test of a witness of {patch.name}"
            findings.append(_fault(path, number, reason))
        if patch and tree:
            stale = _edited(entry, patch, tree, root)[1]
            if stale:
                findings.append(_fault(path, number, f" is stale: {stale}"))
    return findings


def _edited(mutation: Mutation, patch: Patch, tree: Path, root: Path) -> tuple[str, str]:
    """Return the mutated text, and why there is none, "" where there is one."""
    of_package = mutation.file.startswith(f"{PACKAGE}/")
    if not of_package and mutation.file not in {file.path for file in patch.files}:
        return "", f"{patch.name} does not change {mutation.file}"
    path = (root if of_package else tree) / mutation.file
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return "", f"{mutation.file} is not a text file of the patched source"
    times = text.count(mutation.find) if mutation.find else 0
    if times != 1:
        return "", f"its text is {times} times in {mutation.file}, and must be there once"
    if mutation.find == mutation.replace:
        return "", "it replaces the text by itself"
    return text.replace(mutation.find, mutation.replace), ""


def _unknown(path: Path, mutation: Mutation, number: int) -> MessageFault:
    reason = f": no one patch has a name that begins with {mutation.patch!r}, its number aside"
    return _fault(path, number, f"{reason}; delete the entry of a patch that was dropped")


def _fault(path: Path, number: int, reason: str) -> MessageFault:
    return MessageFault(path=path, line=_line(path, number), message=f"mutation {number}{reason}")


def _line(path: Path, number: int) -> int:
    """Return the line at which the entry begins."""
    text = path.read_text(encoding="utf-8").split("\n")
    places = [place for place, line in enumerate(text, 1) if line.strip() == "[[mutation]]"]
    return places[number - 1] if number <= len(places) else 1
