"""Reads recipe files: every fault of a file is found, each with its line and a near name."""

from __future__ import annotations

import datetime
import difflib
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from sm12x.core.errors import BadFileError
from sm12x.recipes.model import (
    BASES,
    HARDWARE,
    NEVER,
    RECIPE_VERSION,
    STATES,
    Block,
    Memory,
    MemoryTerm,
    Recipe,
    Scalar,
    Sleep,
    Status,
)

REQUIRED = ("name", "recipe_version", "container", "command")
# The other keys eugr's runner or its forks know. Its runner ignores what it does not know.
OPTIONAL = (
    "description",
    "model",
    "mods",
    "defaults",
    "env",
    "build_args",
    "cluster_only",
    "solo_only",
    "model_revision",
    "model_required_files",
    "benchmark",
    "launch",
    "sm12x",
)
# The format of sparkrun, and the keys of it that ours does not have.
SPARKRUN_VERSION = "2"
SPARKRUN_ONLY = (
    *("runtime", "runtime_config", "metadata", "min_nodes", "max_nodes", "executor_config"),
    *("distribution_config", "pre_exec", "post_exec"),
)
BLOCK = ("hardware", "gpus", "machines", "memory", "sleep", "status", "pair", "notes")
TERMS = ("weights", "kv", "outside", "sleep_residue")
_STATUS = {
    "source": "say who ran it and where, or what it was written from",
    "date": "say when it was run",
    "evidence": "say what was run and what came out",
}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something wrong in a file. ``line`` counts from 1; ``next_step`` is "" for "mend it"."""

    path: Path
    line: int
    text: str
    next_step: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class _Value:
    """A YAML value and the line it starts on."""

    data: object
    line: int


_Map = dict[str, _Value]


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


def fields(template: str) -> list[str]:
    """The names a `str.format` template asks for, in order. Raises ValueError if it is none."""
    found = []
    for _, name, spec, _ in string.Formatter().parse(template):
        if name is not None:
            found.append(name.split(".")[0].split("[")[0])
            found += fields(spec or "")
    return found


def inspect(path: Path) -> tuple[Recipe | None, list[Fault]]:
    """Read one recipe and list its faults. The recipe is None where there is none to speak of."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        return None, [Fault(path=path, line=1, text=f"cannot be read: {error}")]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = mark.line + 1 if mark else 1
        return None, [Fault(path=path, line=line, text=f"is not YAML: {error.problem}")]
    except yaml.YAMLError as error:
        return None, [Fault(path=path, line=1, text=f"is not YAML: {error}")]
    reader = _Reader(path)
    if not isinstance(node, yaml.MappingNode):
        return None, [Fault(path=path, line=1, text="is not a mapping of keys")]
    top = reader.mapping(node)
    foreign = _foreign(path, top)
    if foreign is not None:
        # What else its keys would be faulted for says nothing about the file.
        return None, [foreign]
    recipe = reader.recipe(top)
    return (None if reader.faults else recipe), sorted(reader.faults, key=lambda fault: fault.line)


def _foreign(path: Path, top: _Map) -> Fault | None:
    """The fault of a file in the other format that goes by `recipe_version`, None for ours."""
    version = top.get("recipe_version")
    theirs = [key for key in SPARKRUN_ONLY if key in top]
    # Its own tools take a file without a version for the newest.
    if (str(version.data) != SPARKRUN_VERSION) if version else ("runtime" not in theirs):
        return None
    keys = f" (with {', '.join(theirs)})" if theirs else ""
    return Fault(
        path=path,
        line=version.line if version else top["runtime"].line,
        text=f'recipe_version "{SPARKRUN_VERSION}"{keys} is the format of sparkrun, which is not '
        f'read yet; this version reads "{RECIPE_VERSION}"',
        next_step=f'run it with sparkrun, or write it as recipe_version "{RECIPE_VERSION}": '
        f"{', '.join(REQUIRED)}, and the settings under defaults",
    )


class _Reader:
    """Turns nodes into values, and collects faults instead of stopping at the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.faults: list[Fault] = []

    def fault(self, line: int, text: str) -> None:
        self.faults.append(Fault(path=self.path, line=line, text=text))

    def recipe(self, top: _Map) -> Recipe:
        self.known(top, (*REQUIRED, *OPTIONAL), "")
        for key in REQUIRED:
            if key not in top:
                self.fault(1, f"required key {key!r} is missing")
        version = top.get("recipe_version")
        if version is not None and str(version.data) != RECIPE_VERSION:
            self.fault(
                version.line,
                f"recipe_version is {version.data!r}; this version reads {RECIPE_VERSION!r}",
            )
        defaults = self.scalars(top, "defaults")
        command = self.take(top, "command", str, "")
        self.command(top, command, defaults)
        return Recipe(
            key=self.path.stem,
            path=self.path,
            name=self.take(top, "name", str, ""),
            container=self.take(top, "container", str, ""),
            command=command,
            description=self.take(top, "description", str, ""),
            model=self.take(top, "model", str, ""),
            model_revision=self.take(top, "model_revision", str, ""),
            defaults=defaults,
            env=self.env(top),
            mods=self.texts(top, "mods"),
            build_args=self.texts(top, "build_args"),
            cluster_only=self.take(top, "cluster_only", bool, False),
            solo_only=self.take(top, "solo_only", bool, False),
            sm12x=self.block(top["sm12x"]) if "sm12x" in top else None,
            lines=_lines(top),
        )

    def command(self, top: _Map, command: str, defaults: Mapping[str, Scalar]) -> None:
        if not command:
            return
        line = top["command"].line
        try:
            asked = fields(command)
        except ValueError as error:
            self.fault(line, f"command is not a str.format template: {error}; double JSON braces")
            return
        for name in dict.fromkeys(asked):
            if not name.isidentifier():
                self.fault(line, f"command has {{{name}}}: double the braces of JSON")
            elif name not in defaults:
                self.fault(
                    line, f"command asks for {{{name}}}, defaults has none{near(name, defaults)}"
                )

    def env(self, top: _Map) -> dict[str, str]:
        found = {}
        for name, value in self.child(top, "env").items():
            if isinstance(value.data, bool) and "sm12x" not in top:
                # eugr's runner exports what Python makes of it.
                found[name] = str(value.data)
            elif isinstance(value.data, bool) or not isinstance(value.data, str | int | float):
                # A shell has no booleans: true, True and 1 are three different values there.
                self.fault(value.line, f"env.{name} is not a string or number: put it in quotes")
            elif "`" in str(value.data) or "$(" in str(value.data):
                self.fault(value.line, f"env.{name} runs a command: only $NAME is expanded")
            else:
                found[name] = str(value.data)
        return found

    def block(self, value: _Value) -> Block | None:
        if not isinstance(value.data, dict):
            self.fault(value.line, "sm12x is not a mapping")
            return None
        block: _Map = value.data
        self.known(block, BLOCK, "sm12x.")
        for key in ("hardware", "gpus", "sleep", "status"):
            if key not in block:
                self.fault(value.line, f"sm12x.{key} is missing")
        hardware = self.texts(block, "hardware")
        if "hardware" in block and not hardware:
            self.fault(block["hardware"].line, "sm12x.hardware is empty")
        for word in hardware:
            self.one_of(block["hardware"].line, "sm12x.hardware", word, HARDWARE)
        counts = {}
        for key in ("gpus", "machines"):
            counts[key] = self.take(block, key, int, 1)
            if counts[key] < 1:
                self.fault(block[key].line, f"sm12x.{key} is {counts[key]}")
        pair = self.texts(block, "pair")
        if pair and len(pair) != 2:
            self.fault(block["pair"].line, f"sm12x.pair names {len(pair)} recipes, not two")
        return Block(
            hardware=hardware,
            gpus=counts["gpus"],
            machines=counts["machines"],
            memory=self.memory(block),
            sleep=self.sleep(block),
            status=self.status(block),
            pair=pair,
            notes=self.texts(block, "notes"),
        )

    def sleep(self, block: _Map) -> Sleep:
        table = self.child(block, "sleep")
        self.known(table, ("level", "reason"), "sm12x.sleep.")
        reason = self.take(table, "reason", str, "").strip()
        if "level" not in table:
            if "sleep" in block:
                self.fault(block["sleep"].line, "sm12x.sleep.level is missing: 1, 2 or never")
            return Sleep(level=0, reason=reason)
        level, line = table["level"].data, table["level"].line
        if level == NEVER:
            if not reason:
                self.fault(line, "sm12x.sleep.reason is missing: say why it must stay awake")
            return Sleep(level=0, reason=reason)
        if isinstance(level, bool) or level not in (1, 2):
            self.fault(line, f"sm12x.sleep.level is {level!r}, not 1, 2 or never")
            return Sleep(level=0, reason=reason)
        return Sleep(level=int(str(level)), reason=reason)

    def status(self, block: _Map) -> Status:
        table = self.child(block, "status")
        self.known(table, ("state", "source", "date", "evidence", "blocked"), "sm12x.status.")
        texts = {
            key: self.take(table, key, str, "").strip()
            for key in ("state", "source", "evidence", "blocked")
        }
        date = table["date"].data if "date" in table else ""
        # YAML reads a bare 2026-05-16 as a date.
        texts["date"] = date.isoformat() if isinstance(date, datetime.date) else str(date)
        if texts["date"] and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", texts["date"]):
            self.fault(table["date"].line, f"sm12x.status.date is {date!r}, not YYYY-MM-DD")
        if "status" in block:
            line = block["status"].line
            self.one_of(line, "sm12x.status.state", texts["state"], STATES)
            verified = texts["state"] == "verified"
            for key in ("date", "evidence") if verified else ("source",):
                if not texts[key]:
                    self.fault(line, f"sm12x.status.{key} is missing: {_STATUS[key]}")
        return Status(**texts)

    def memory(self, block: _Map) -> Memory:
        table = self.child(block, "memory")
        self.known(table, TERMS, "sm12x.memory.")
        return Memory(**{key: self.term(table, key) for key in TERMS if key in table})

    def term(self, memory: _Map, key: str) -> MemoryTerm | None:
        table, line, where = self.child(memory, key), memory[key].line, f"sm12x.memory.{key}"
        self.known(table, ("gib", "basis", "source"), f"{where}.")
        value = table["gib"].data if "gib" in table else None
        items = [one.data for one in value] if isinstance(value, list) else [value]
        ends = [
            float(item)
            for item in items
            if isinstance(item, int | float) and not isinstance(item, bool) and item >= 0
        ]
        if len(ends) != len(items) or len(ends) > 2 or not ends or ends != sorted(ends):
            self.fault(line, f"{where}.gib is not a number of GiB, nor [low, high]")
            return None
        basis = self.take(table, "basis", str, "")
        self.one_of(line, f"{where}.basis", basis, BASES)
        source = self.take(table, "source", str, "").strip()
        if not source:
            self.fault(line, f"{where}.source is missing: say where the figure is from")
        return MemoryTerm(gib=ends[-1], low=ends[0], basis=basis, source=source)

    def one_of(self, line: int, where: str, word: str, known: tuple[str, ...]) -> None:
        if word not in known:
            self.fault(
                line, f"{where} is {word!r}, not one of {', '.join(known)}{near(word, known)}"
            )

    def known(self, table: _Map, names: tuple[str, ...], where: str) -> None:
        """Fault a key that is close to a known one, and, in our own block, any unknown key."""
        for key, value in table.items():
            if key in names:
                continue
            hint = near(key, names)
            if where or hint:
                self.fault(value.line, f"{where}{key} is not a known key{hint}")

    def take(self, table: _Map, key: str, kind: type[T], default: T) -> T:
        value = table.get(key)
        if value is None:
            return default
        data = value.data
        if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
            self.fault(value.line, f"{key} is not {_KINDS[kind]}")
            return default
        return data

    def texts(self, table: _Map, key: str) -> tuple[str, ...]:
        value = table.get(key)
        if value is None or value.data is None:
            return ()
        if not isinstance(value.data, list) or not all(
            isinstance(item.data, str | int | float) for item in value.data
        ):
            self.fault(value.line, f"{key} is not a list of strings")
            return ()
        return tuple(str(item.data).strip() for item in value.data)

    def scalars(self, table: _Map, key: str) -> dict[str, Scalar]:
        found: dict[str, Scalar] = {}
        for name, value in self.child(table, key).items():
            if isinstance(value.data, str | int | float | bool):
                found[name] = value.data
            else:
                self.fault(value.line, f"{key}.{name} is not a string, number or truth value")
        return found

    def child(self, table: _Map, key: str) -> _Map:
        value = table.get(key)
        if value is None or value.data is None:
            return {}
        if not isinstance(value.data, dict):
            self.fault(value.line, f"{key} is not a mapping")
            return {}
        return value.data

    def mapping(self, node: yaml.MappingNode) -> _Map:
        found: _Map = {}
        for key_node, value_node in node.value:
            key = str(getattr(key_node, "value", ""))
            line = key_node.start_mark.line + 1
            if key in found:
                # PyYAML keeps the last one silently.
                self.fault(line, f"{key} is given twice, first on line {found[key].line}")
            found[key] = _Value(data=self.value(value_node), line=line)
        return found

    def value(self, node: yaml.Node) -> object:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node)
        if isinstance(node, yaml.SequenceNode):
            return [
                _Value(data=self.value(item), line=item.start_mark.line + 1) for item in node.value
            ]
        loader = yaml.SafeLoader("")
        try:
            data: object = loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            self.fault(node.start_mark.line + 1, f"value cannot be read: {error}")
            data = None
        return data


def _lines(top: _Map) -> dict[str, int]:
    found = {}
    for key, value in top.items():
        found[key] = value.line
        if isinstance(value.data, dict):
            for name, inner in value.data.items():
                found[f"{key}.{name}"] = inner.line
    return found


_KINDS: dict[type, str] = {str: "a string", int: "a whole number", bool: "true or false"}


def near(word: str, known: Iterable[str]) -> str:
    """`; perhaps you meant X`, or "" when nothing is close."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; perhaps you meant {found[0]!r}" if found else ""
