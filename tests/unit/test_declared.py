"""Files that are declared: each fault is told with its key and a near name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import jsonschema
import pytest
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticSerializationError

from sm12x.core import declared
from sm12x.core.declared import (
    Declared,
    KeyFaultError,
    Machine,
    NotInFile,
    NotNull,
    in_file,
    one_of,
    shown,
    unless_empty,
)
from sm12x.core.errors import BadFileError


@dataclass(frozen=True, kw_only=True)
class Part(Declared):
    name: str
    size: float
    on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0:
            raise KeyFaultError("size", "is less than nothing")


@dataclass(frozen=True, kw_only=True)
class Whole(Declared):
    folder: Path
    schema: Literal[1]
    kind: Annotated[str, one_of("a", "b")]
    parts: Annotated[tuple[Part, ...], Field(alias="part")]
    by: Annotated[dict[Machine, Part], Field(alias="machine")] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Written(Declared):
    """``size`` is read from a text or a number; ``low`` is not in a file."""

    size: Annotated[float, BeforeValidator(float), in_file(type=["string", "number"])]
    low: Annotated[float, NotInFile()]
    rest: Annotated[tuple[str, ...], unless_empty] = ()
    part: Annotated[Part | None, NotNull()] = None
    of: Annotated[str, Field(alias="from")] = "here"

    @shown
    def large(self) -> bool:
        return self.size > 1


def test_what_is_written_fits_the_schema_of_what_is_written() -> None:
    schema = declared.schema(Written, "serialization")
    made = Written(size=2.0, low=1.0)
    text = declared.to_json(made)
    assert json.loads(text) == {
        "size": 2.0,
        "low": 1.0,
        "part": None,
        "from": "here",
        "large": True,
    }
    assert made.large is True
    full = Written(size=0.0, low=0.0, rest=("a",), part=Part(name="x", size=1.0))
    for one in (made, full):
        jsonschema.validate(json.loads(declared.to_json(one)), schema)
    assert json.loads(declared.to_json(full))["rest"] == ["a"]
    for bad in ({"size": "2"}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**json.loads(text), **bad}, schema)
    for gone in ("low", "large", "from"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({k: v for k, v in json.loads(text).items() if k != gone}, schema)


def test_what_a_file_may_hold_is_not_what_is_written() -> None:
    schema = declared.schema(Written)
    assert schema["properties"].keys() == {"size", "rest", "part", "from"}
    jsonschema.validate({"size": "2"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"size": 2, "part": None}, schema)


def test_what_is_written_is_what_was_said_to_be() -> None:
    with pytest.raises(PydanticSerializationError):
        declared.to_json({"x": Part(name="x", size=1.0), "y": 3}, dict[str, Part])


GOOD = """\
schema = 1
kind = "a"  # or b

[[part]]
name = "x"
size = 1
[[part]]
name = "y"
size = 2.5
on = ["m", "n"]

[machine.x86_64]
name = "z"
size = 0
"""


def _read(path: Path, text: str) -> Whole:
    path.write_text(text)
    return declared.read_toml(Whole, path, given={"folder": path.parent}, next_step="correct it")


def test_a_file_is_read_into_its_dataclass(tmp_path: Path) -> None:
    read = _read(tmp_path / "f.toml", GOOD)
    assert read.folder == tmp_path
    assert read.parts[1] == Part(name="y", size=2.5, on=("m", "n"))
    assert read.by == {"x86_64": Part(name="z", size=0.0)}


@pytest.mark.parametrize(
    ("old", "new", "facts"),
    [
        ("schema = 1", "schema = 2", ("schema", "2", "1")),
        ("schema = 1", "", ("schema",)),
        ('kind = "a"', 'kind = "c"', ("kind", "'c'", "'a' or 'b'")),
        ('kind = "a"', "kind = 1", ("kind", "1")),
        ("size = 2.5", 'size = "2.5"', ("part[1].size", "str")),
        ("size = 2.5", "size = -1", ("part[1].size",)),
        ("size = 2.5", "", ("part[1].size",)),
        ("size = 2.5", "sise = 2.5", ("part[1].sise", "size")),
        ('on = ["m", "n"]', 'on = ["m", 1]', ("part[1].on[1]", "int")),
        ('on = ["m", "n"]', 'on = "m"', ("part[1].on", "str")),
        ("machine.x86_64", "machine.arm", ("machine.arm", "'x86_64'")),
        ('kind = "a"', 'folder = "/"', ("folder",)),
        ("[[part]]", "[part]", ("line",)),
        ("schema = 1", "schema = ", ("line 1",)),
    ],
)
def test_a_fault_is_told_with_its_key(
    tmp_path: Path, old: str, new: str, facts: tuple[str, ...]
) -> None:
    assert old in GOOD
    with pytest.raises(BadFileError) as caught:
        _read(tmp_path / "f.toml", GOOD.replace(old, new, 1))
    reason = caught.value.message.removeprefix(str(tmp_path / "f.toml"))
    assert all(fact in reason for fact in facts)


def test_a_list_is_no_number_and_a_number_no_text(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    for value in ("1", True, None, [1], {"a": 1}):
        path.write_text(json.dumps({"name": "x", "size": value}))
        with pytest.raises(BadFileError, match="size"):
            declared.read_json(Part, path, next_step="correct it")


@pytest.mark.parametrize("text", ["", "[", "[]", "3", "null", '"x"', "{}", "\x00", "[" * 5000])
def test_what_is_something_else_is_named_as_such(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(BadFileError, match=r"f\.json .*\bpart\b"):
        declared.read_json(Part, path, next_step="correct it", what="part")
