"""Reads recipe files: every fault of a file is found, each with its line and a near name."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from sm12x.core import declared, yamltext
from sm12x.core.errors import BadFileError
from sm12x.core.text import perhaps
from sm12x.core.yamltext import Yaml
from sm12x.recipes.model import RECIPE_VERSION, THEIRS, Recipe

# The format of sparkrun, and the keys of it that ours does not have.
_SPARKRUN_VERSION = "2"
_SPARKRUN_ONLY = (
    *("runtime", "runtime_config", "metadata", "min_nodes", "max_nodes", "executor_config"),
    *("distribution_config", "pre_exec", "post_exec"),
)
_NOT_IN_FILES = ("key", "path", "lines")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something wrong in a file. ``line`` counts from 1; ``next_step`` is "" for "mend it"."""

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
            or "mend those lines; a recipe that ships with the image shows the layout",
        )
    return recipe


def load_all(folder: Path) -> dict[str, Recipe]:
    """The recipes of a folder by key, in order of their names. Raises as ``load`` does."""
    return {path.stem: load(path) for path in sorted(folder.glob("*.yaml"))}


def template_fields(template: str) -> list[str]:
    """The names a `str.format` template asks for, in order. Raises ValueError if it is none."""
    found = []
    for _, name, spec, _ in string.Formatter().parse(template):
        if name is not None:
            found.append(name.split(".")[0].split("[")[0])
            found += template_fields(spec or "")
    return found


def inspect(path: Path) -> tuple[Recipe | None, list[Fault]]:
    """Read one recipe and list its faults. The recipe is None where there are any."""
    try:
        text = yamltext.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return None, [Fault(path=path, line=1, text=f"cannot be read: {error}")]
    found = [Fault(path=path, line=line, text=said) for line, said in text.faults]
    if not isinstance(text.data, dict):
        return None, found or [Fault(path=path, line=1, text="is not a mapping of keys")]
    foreign = _foreign(path, text)
    if foreign is not None:
        # What else its keys would be faulted for says nothing about the file.
        return None, [foreign]
    top = {
        **text.data,
        "key": path.stem,
        "path": path,
        "lines": {
            ".".join(map(str, where)): line
            for where, line in text.lines.items()
            if len(where) < 3 and isinstance(where[-1], str)
        },
    }
    if "sm12x" not in top and isinstance(top.get("env"), dict):
        # eugr's runner exports what Python makes of a truth value.
        top["env"] = {
            name: str(value) if isinstance(value, bool) else value
            for name, value in top["env"].items()
        }
    recipe, faults = declared.check(Recipe, top)
    said = {fault.text: text.line(fault.where) for fault in faults}
    known = (*(one.name for one in fields(Recipe) if one.name not in _NOT_IN_FILES), *THEIRS)
    for key in text.data:
        if key not in known and (hint := perhaps(key, known)):
            said[f"{key} is not a known key{hint}"] = text.line((key,))
    said |= dict.fromkeys(_command_faults(text.data), text.line(("command",)))
    found += [Fault(path=path, line=line, text=one) for one, line in said.items()]
    return (None if found else recipe), sorted(found, key=lambda fault: fault.line)


def _foreign(path: Path, text: Yaml) -> Fault | None:
    """The fault of a file in the other format that goes by `recipe_version`, None for ours."""
    top = text.data
    theirs = [key for key in _SPARKRUN_ONLY if key in top]
    # Its own tools take a file without a version for the newest.
    given = "recipe_version" in top
    if (str(top["recipe_version"]) != _SPARKRUN_VERSION) if given else ("runtime" not in theirs):
        return None
    keys = f" (with {', '.join(theirs)})" if theirs else ""
    return Fault(
        path=path,
        line=text.line(("recipe_version" if given else "runtime",)),
        text=f'recipe_version "{_SPARKRUN_VERSION}"{keys} is the format of sparkrun, which is not '
        f'read yet; this version reads "{RECIPE_VERSION}"',
        next_step=f'run it with sparkrun, or write it as recipe_version "{RECIPE_VERSION}": '
        "name, recipe_version, container, command, and the settings under defaults",
    )


def _command_faults(top: Mapping[str, object]) -> list[str]:
    """What the command asks for and the defaults do not have."""
    command, defaults = top.get("command"), top.get("defaults") or {}
    if not isinstance(command, str) or not isinstance(defaults, dict):
        return []
    try:
        asked = template_fields(command)
    except ValueError as error:
        return [f"command is not a str.format template: {error}; double JSON braces"]
    return [
        f"command asks for {{{name}}}, defaults has none{perhaps(name, defaults)}"
        if name.isidentifier()
        else f"command has {{{name}}}: double the braces of JSON"
        for name in dict.fromkeys(asked)
        if name not in defaults
    ]
