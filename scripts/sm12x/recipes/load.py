"""Reads recipe files: every fault of a file is found, each with its line and a near name."""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sm12x import layout
from sm12x.core import declared, yamltext
from sm12x.core.errors import BadFileError, UsageError
from sm12x.core.text import near, perhaps
from sm12x.recipes import planned, sparkrun
from sm12x.recipes.model import THEIRS, Recipe

# Files that people take for recipes: keys that they have and no recipe has, and what they are.
_OTHERS = {
    ("services",): "a compose file",
    ("models",): "a configuration of llama-swap",
    ("apiVersion", "kind"): "a Kubernetes manifest",
}
_NOT_IN_FILES = ("key", "path", "lines", "not_applied")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something wrong in a file. ``line`` counts from 1; ``next_step`` is "" for "correct it"."""

    path: Path
    line: int
    text: str
    next_step: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def load(path: Path) -> Recipe:
    """Read one recipe. Raises BadFileError that lists every fault of the file."""
    recipe, faults = inspect(path)
    if recipe is None or faults:
        raise BadFileError(
            "; ".join(str(fault) for fault in faults),
            next_step=next((fault.next_step for fault in faults if fault.next_step), "")
            or "correct those lines; a recipe that ships with the image shows the layout",
        )
    return recipe


def load_all(folder: Path) -> dict[str, Recipe]:
    """The recipes of a folder by key, in order of their names. Raises as ``load`` does."""
    return {path.stem: load(path) for path in sorted(folder.glob("*.yaml"))}


def pool(recipe: Recipe) -> list[Recipe]:
    """The recipes that take turns, none where it is no pool. Raises as ``load`` does."""
    names = recipe.sm12x.pool if recipe.sm12x else ()
    return [load(recipe.path.with_name(f"{name}.yaml")) for name in names]


def find(word: str) -> Path:
    """Return the file of a recipe, by its name in ``layout.recipes()`` or by its path.

    Raises:
        BadFileError: ``word`` is a path, and no file is there.
        UsageError: ``word`` is not the name of a recipe; the message lists similar names.
    """
    path = layout.recipes() / f"{word}.yaml"
    is_path = word.endswith((".yaml", ".yml")) or "/" in word
    if not is_path and path.is_file():
        return path
    if Path(word).is_file():
        return Path(word)
    step = "`sm12x recipe list` has the names"
    if is_path:
        what = "is no file" if os.path.lexists(word) else "does not exist"
        raise BadFileError(f"{word} {what}", next_step=step)
    names = [file.stem for file in path.parent.glob("*.yaml")]
    if others := near(word, names, cutoff=0.5, shown=3):
        step = f"perhaps you meant {others}"
    raise UsageError(f"there is no recipe {word!r}", next_step=step)


def template_fields(template: str) -> list[str]:
    """List the fields of a `str.format` template, in order. Raises ValueError if it is none."""
    names = []
    for _, name, spec, _ in string.Formatter().parse(template):
        if name is not None:
            names.append(name.split(".")[0].split("[")[0])
            names += template_fields(spec or "")
    return names


def inspect(path: Path) -> tuple[Recipe | None, list[Fault]]:
    """Read one recipe and list its faults. The recipe is None where there are any."""
    try:
        text = yamltext.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return None, [Fault(path=path, line=1, text=f"cannot be read: {error}")]
    faults = [Fault(path=path, line=line, text=message) for line, message in text.faults]
    if not isinstance(text.data, dict):
        return None, faults or [Fault(path=path, line=1, text="is not a mapping of keys")]
    given: dict[str, Any] = text.data
    for keys, what in _OTHERS.items():
        if not {"command", "recipe_version"} & set(given) and set(keys) <= set(given):
            step = "write the server's `vllm serve ...` as the command of a recipe, as recipes/ has"
            line = text.line(keys[:1])
            return None, [
                Fault(path=path, line=line, text=f"is {what}, not a recipe", next_step=step)
            ]
    theirs = sparkrun.translate(given, path.stem) if sparkrun.is_theirs(given) else None
    if theirs and theirs.faults:
        # Further faults of its keys would say nothing about the file.
        faults_there = [(text.line((key,)), message) for key, message in theirs.faults]
        return None, [Fault(path=path, line=line, text=message) for line, message in faults_there]
    if theirs:
        given = theirs.top
    top = {
        **given,
        "not_applied": theirs.not_applied if theirs else (),
        "key": path.stem,
        "path": path,
        "lines": {
            ".".join(map(str, where)): line
            for where, line in text.lines.items()
            if len(where) < 3 and isinstance(where[-1], str)
        },
    }
    if (theirs or "sm12x" not in top) and isinstance(top.get("env"), dict):
        # Other runners export what Python makes of a truth value.
        top["env"] = {
            name: str(value) if isinstance(value, bool) else value
            for name, value in top["env"].items()
        }
    recipe, problems = declared.check(Recipe, top)
    messages = {problem.text: text.line(problem.where) for problem in problems}
    valid_keys = (*(one.name for one in fields(Recipe) if one.name not in _NOT_IN_FILES), *THEIRS)
    for key in () if theirs else given:
        if key not in valid_keys and (hint := perhaps(key, valid_keys)):
            messages[f"{key} is not a known key{hint}"] = text.line((key,))
    messages |= dict.fromkeys(_command_faults(given), text.line(("command",)))
    faults += [Fault(path=path, line=line, text=message) for message, line in messages.items()]
    if recipe is not None and not faults:
        try:
            recipe = planned.completed(recipe)
        except BadFileError as error:
            step = error.next_step
            faults.append(Fault(path=path, line=1, text=error.message, next_step=step))
    return (None if faults else recipe), sorted(faults, key=lambda fault: fault.line)


def _command_faults(top: Mapping[str, object]) -> list[str]:
    """List the names that the command uses and the defaults do not have."""
    command, defaults = top.get("command"), top.get("defaults") or {}
    if not isinstance(command, str) or not isinstance(defaults, dict):
        return []
    try:
        names = template_fields(command)
    except ValueError as error:
        return [f"command is not a str.format template: {error}; double JSON braces"]
    return [
        f"command asks for {{{name}}}, defaults has none{perhaps(name, defaults)}"
        if name.isidentifier()
        else f"command has {{{name}}}: double the braces of JSON"
        for name in dict.fromkeys(names)
        if name not in defaults
    ]
