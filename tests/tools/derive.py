"""Edits of the lines that patches add, as a rule makes them: what `mutate --auto` tries."""

from __future__ import annotations

import ast
import difflib
import random
import re
from collections.abc import Iterator
from pathlib import Path

from sm12x.stack.model.patchfile import Patch
from sm12x.stack.model.series import Stack
from sm12x_dev.witness.mutations import Mutant

# What a line of C++ begins with that cannot be left out without a syntax error further down.
_DECLARES = re.compile(
    r"^(?:const |auto |static |thread_local |using |extern |template|typedef |struct |class |"
    r"[A-Za-z_][\w:<>, ]*[ *&]+[A-Za-z_]\w*(?: *=.*|\(.*\))?;$)"
)
_STATEMENT = re.compile(r"^(?:return\b|throw\b|break;|continue;|[A-Za-z_*(].*;$)")
_CONDITION = re.compile(r"^(?P<head>(?:\} else )?(?:if|while) \()(?P<test>.*)(?P<tail>\) \{)$")
# Of a file of the release, which is compiled here.
_COMPILED = (".cpp", ".h")


def derived(stack: Stack, base_tree: Path, patched: Path, *, count: int, seed: int) -> list[Mutant]:
    """Return up to ``count`` mutations of the lines that each patch adds, chosen by ``seed``.

    A statement is left out, or a condition negated. A line belongs to the patch whose diff adds it,
    and to the later patch if that changes it again.
    """
    chosen: list[Mutant] = []
    owners: dict[Path, dict[str, Patch]] = {}
    for patch in stack.patches:
        for file in patch.files:
            for line in _added_text(patch, file.path):
                owners.setdefault(Path(file.path), {})[line] = patch
    by_patch: dict[str, list[Mutant]] = {patch.name: [] for patch in stack.patches}
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
                by_patch[owner.name].append(
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
    for name, mutants in by_patch.items():
        # A patch's choice does not depend on the other patches.
        draw = random.Random(f"{seed} {name}")  # noqa: S311 - nothing is kept secret by it
        chosen += sorted(
            draw.sample(mutants, min(count, len(mutants))),
            key=lambda mutant: (mutant.file, int(mutant.label.split()[1])),
        )
    return chosen


def _added_text(patch: Patch, path: str) -> Iterator[str]:
    """Yield the lines that ``patch`` adds to the file ``path``."""
    inside = False
    for line in patch.content().decode("utf-8", errors="replace").split("\n"):
        if line.startswith("diff --git "):
            inside = line.endswith(f" b/{path}")
        elif inside and line.startswith("+") and not line.startswith("+++ "):
            yield line[1:]


def _added(before: str, after: str) -> set[int]:
    """Return the lines of ``after``, counted from 1, that are not in ``before``."""
    matcher = difflib.SequenceMatcher(None, before.split("\n"), after.split("\n"), autojunk=False)
    return {
        line + 1
        for tag, _, _, start, end in matcher.get_opcodes()
        if tag in ("insert", "replace")
        for line in range(start, end)
    }


def _python(text: str, added: set[int]) -> Iterator[tuple[int, str, str]]:
    """Yield (line, what was done, new text) for each added statement and condition."""
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
    """Yield the same of C++, by line: what is left out or negated stands on one line."""
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
