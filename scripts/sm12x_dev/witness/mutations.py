"""Mutations: edits of the patched source that must turn a witness red, each for a line that counts.

Those that are kept are data, ``mutations.toml`` in the folder of a base; others are derived from
the lines that a patch adds. This module reads and derives them and makes the mutated text;
mutate.py runs the witnesses.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Iterator
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
# What a line of C++ begins with that cannot be left out without a syntax error further down.
_DECLARES = re.compile(
    r"^(?:const |auto |static |thread_local |using |extern |template|typedef |struct |class |"
    r"[A-Za-z_][\w:<>, ]*[ *&]+[A-Za-z_]\w*(?: *=.*|\(.*\))?;$)"
)
_STATEMENT = re.compile(r"^(?:return\b|throw\b|break;|continue;|[A-Za-z_*(].*;$)")
_CONDITION = re.compile(r"^(?P<head>(?:\} else )?(?:if|while) \()(?P<test>.*)(?P<tail>\) \{)$")
# Of a file of the release, which is compiled here.
_COMPILED = (".cpp", ".h")


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
    """The one patch whose file name begins with ``name``, numbers aside; None if not one."""
    stem = _NUMBER.sub("", name.removesuffix(".patch"))
    found = [
        patch for patch in stack.patches if stem and _NUMBER.sub("", patch.name).startswith(stem)
    ]
    return found[0] if len(found) == 1 else None


def kept(
    base: Base, stack: Stack, tree: Path, root: Path
) -> tuple[list[Mutant], list[MessageFault]]:
    """The mutations of ``base`` made on its patched ``tree``, and those that fit no patch.

    ``root`` is the checkout, which has the package.
    """
    mutants: list[Mutant] = []
    findings: list[MessageFault] = []
    for number, mutation in enumerate(load(base), start=1):
        patch = patch_of(stack, mutation.patch)
        if patch is None:
            findings.append(_unknown(base.folder / NAME, stack, mutation, number))
            continue
        text, stale = _made(mutation, patch, tree, root)
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
    """Faults of the mutations of ``base``: a patch without one, or one that is stale.

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
        _unknown(path, stack, entry, number)
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
            said = f": {entry.by} is not a test of a witness of {patch.name}"
            findings.append(_fault(path, number, said))
        if patch and tree:
            stale = _made(entry, patch, tree, root)[1]
            if stale:
                findings.append(_fault(path, number, f" is stale: {stale}"))
    return findings


def derived(stack: Stack, base_tree: Path, patched: Path, *, count: int, seed: int) -> list[Mutant]:
    """Up to ``count`` mutations of each patch, chosen by ``seed``, of the lines that it adds.

    A statement is left out, or a condition negated. A line belongs to the patch whose diff adds it,
    and to the later patch if that changes it again.
    """
    chosen: list[Mutant] = []
    owners: dict[Path, dict[str, Patch]] = {}
    for patch in stack.patches:
        for file in patch.files:
            for line in _added_text(patch, file.path):
                owners.setdefault(Path(file.path), {})[line] = patch
    made: dict[str, list[Mutant]] = {patch.name: [] for patch in stack.patches}
    for path, lines in sorted(owners.items()):
        if path.suffix not in (".py", *_COMPILED) or not (patched / path).is_file():
            continue
        text = (patched / path).read_text(encoding="utf-8")
        before = base_tree / path
        added = _added(before.read_text(encoding="utf-8") if before.is_file() else "", text)
        edits = _python(text, added) if path.suffix == ".py" else _cpp(text, added)
        for place, label, mutated in edits:
            owner = lines.get(text.split("\n")[place - 1])
            if owner is not None:
                made[owner.name].append(
                    Mutant(
                        patch=owner,
                        file=path.as_posix(),
                        label=f"line {place}",
                        why=label,
                        by="",
                        text=mutated,
                        stale="",
                    )
                )
    for name, mutants in made.items():
        # A patch's choice does not depend on the other patches.
        draw = random.Random(f"{seed} {name}")  # noqa: S311 - nothing is kept secret by it
        chosen += sorted(
            draw.sample(mutants, min(count, len(mutants))),
            key=lambda mutant: (mutant.file, int(mutant.label.split()[1])),
        )
    return chosen


def _made(mutation: Mutation, patch: Patch, tree: Path, root: Path) -> tuple[str, str]:
    """The mutated text, or why there is none."""
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


def _unknown(path: Path, stack: Stack, mutation: Mutation, number: int) -> MessageFault:
    names = ", ".join(patch.name for patch in stack.patches)
    said = f": {mutation.patch!r} is not the beginning of the name of one patch, its number aside"
    return _fault(path, number, f"{said} ({names})")


def _fault(path: Path, number: int, said: str) -> MessageFault:
    return MessageFault(path=path, line=_line(path, number), message=f"mutation {number}{said}")


def _line(path: Path, number: int) -> int:
    """The line at which the entry begins."""
    met = 0
    for place, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        met += line.strip() == "[[mutation]]"
        if met == number:
            return place
    return 1


def _added_text(patch: Patch, path: str) -> Iterator[str]:
    """The lines that ``patch`` adds to the file ``path``."""
    inside = False
    for line in patch.content().decode("utf-8", errors="replace").split("\n"):
        if line.startswith("diff --git "):
            inside = line.endswith(f" b/{path}")
        elif inside and line.startswith("+") and not line.startswith("+++ "):
            yield line[1:]


def _added(before: str, after: str) -> set[int]:
    """The lines of ``after``, counted from 1, that are not in ``before``."""
    matcher = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    return {
        line + 1
        for tag, _, _, start, end in matcher.get_opcodes()
        if tag in ("insert", "replace")
        for line in range(start, end)
    }


def _python(text: str, added: set[int]) -> Iterator[tuple[int, str, str]]:
    """(line, what was done, new text) for each added statement and condition."""
    lines = text.split("\n")
    simple = (
        *(ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Raise, ast.Delete, ast.Assert),
        *(ast.Break, ast.Continue),
    )
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, simple):
            first, last = node.lineno, node.end_lineno or node.lineno
            indent = lines[first - 1][: node.col_offset]
            text_only = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if text_only or indent.strip() or not set(range(first, last + 1)) <= added:
                continue
            said = lines[first - 1].strip()
            mutated = [*lines[: first - 1], f"{indent}pass", *lines[last:]]
            yield first, f"without: {said}", "\n".join(mutated)
        elif isinstance(node, ast.If | ast.While):
            test = node.test
            if test.lineno not in added or test.end_lineno != test.lineno:
                continue
            line = lines[test.lineno - 1]
            start, end = test.col_offset, test.end_col_offset or 0
            changed = f"{line[:start]}not ({line[start:end]}){line[end:]}"
            mutated = [*lines[: test.lineno - 1], changed, *lines[test.lineno :]]
            yield test.lineno, f"negated: {line.strip()}", "\n".join(mutated)


def _cpp(text: str, added: set[int]) -> Iterator[tuple[int, str, str]]:
    """The same of C++, by line: what is left out or negated stands on one line."""
    lines = text.split("\n")
    before = "{"
    for number, line in enumerate(lines, start=1):
        code = line.split("//", 1)[0].strip()
        if not code or code.startswith("#"):
            continue
        whole = before[-1] in ";{}:"
        before = code
        if number not in added or not whole:
            continue
        indent = line[: len(line) - len(line.lstrip())]
        condition = _CONDITION.match(code)
        if condition:
            changed = f"{indent}{condition['head']}!({condition['test']}){condition['tail']}"
            label = f"negated: {code}"
        elif _STATEMENT.match(code) and not _DECLARES.match(code):
            changed, label = f"{indent};", f"without: {code}"
        else:
            continue
        yield number, label, "\n".join([*lines[: number - 1], changed, *lines[number:]])
