"""Files and reports that are declared: a dataclass says what a file holds, or what is printed.

A dataclass that derives from ``Declared`` takes exactly its fields, of exactly their types. A
fault is told with the file, the path of the key, and a near name where a key is not known; with its
line where a file does not parse. JSON and its schema are made of the dataclass.
"""

from __future__ import annotations

import functools
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args

from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    computed_field,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, PydanticOmit, core_schema

from sm12x.core import files
from sm12x.core.errors import BadFileError
from sm12x.core.text import perhaps

_T = TypeVar("_T")

_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")


class Declared:
    """Base of dataclasses that files are read into: no other keys, no other types."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, validate_by_name=False, validate_by_alias=True
    )


def one_of(*names: str) -> GetPydanticSchema:
    """Allow, in ``Annotated[str, one_of(...)]``, a text or a key that is one of ``names``."""
    return GetPydanticSchema(lambda source, handler: core_schema.literal_schema([*names]))


class NotNull:
    """For ``Annotated[T | None, NotNull()]``: None where the key is left out, but no null there."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        (kind,) = (one for one in get_args(source) if one is not type(None))
        return handler.generate_schema(kind)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        result = handler(schema)
        return result if handler.mode == "validation" else {"anyOf": [result, {"type": "null"}]}


class NotInFile:
    """For ``Annotated[T, NotInFile()]``: a field that is given to ``read_toml``, or computed."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        if handler.mode == "validation":
            raise PydanticOmit
        return handler(schema)


def in_file(**schema: Any) -> WithJsonSchema:
    """Say, in ``Annotated[T, in_file(type=...)]``, of what in a file a ``T`` is made."""
    return WithJsonSchema(schema, mode="validation")


MACHINES = ("x86_64", "aarch64")
Machine = Annotated[str, one_of(*MACHINES)]


# A size beyond this is a mistake, in any unit that is used.
_LARGEST = 1e12


def ends(value: object) -> tuple[float, float]:
    """Return the low and the high end of a size: a number from 0 up, or [low, high].

    Raises ValueError for anything else.
    """
    items = value if isinstance(value, list | tuple) else [value]
    try:
        numbers = [float(end) for end in items if isinstance(end, int | float)]
    except OverflowError:
        numbers = []
    good = len(numbers) in (1, 2) and 0 <= numbers[0] <= numbers[-1] <= _LARGEST
    if not good or len(numbers) != len(items) or any(isinstance(end, bool) for end in items):
        raise ValueError(f"is neither a number from 0 to {_LARGEST:g} nor [low, high]")
    return numbers[0], numbers[-1]


# What ``ends`` takes, in a JSON schema.
_SIZE = {"type": "number", "minimum": 0}
ENDS: JsonSchemaValue = {
    "oneOf": [_SIZE, {"type": "array", "items": _SIZE, "minItems": 2, "maxItems": 2}]
}


# For ``Annotated[T, unless_empty]``: the key is left out of the JSON where the value is empty.
unless_empty = Field(exclude_if=lambda value: not value)

if TYPE_CHECKING:
    shown = property
else:

    def shown(function: Any) -> Any:
        """Return a property that stands in the JSON of its dataclass beside the fields."""
        return computed_field(property(function))


class KeyFaultError(ValueError):
    """What is wrong with one key, raised in ``__post_init__``: "since", "is missing".

    The key is "" for the value itself, in a validator of one field.
    """

    def __init__(self, key: str, what: str) -> None:
        super().__init__(what)
        self.key = key


def read_toml(
    kind: type[_T], path: Path, *, given: Mapping[str, object] | None = None, next_step: str
) -> _T:
    """Read a TOML file into the dataclass ``kind``.

    Args:
        given: fields that are not in the file.
        next_step: what to do about a fault.

    Raises:
        BadFileError: the file cannot be read or does not parse, or a key is missing, unknown or of
          another type; the message has the first fault and the number of further ones.
    """
    given = given or {}
    text = _text(path, next_step)
    raw = _parsed(tomllib.loads, text, f"{path} cannot be read", next_step)
    mine = sorted(given.keys() & raw.keys())
    if mine:
        raise BadFileError(f"{path}: {mine[0]} is not a known key", next_step=next_step)
    return _convert(kind, {**raw, **given}, f"{path}: ", next_step)


def read_json(kind: type[_T], path: Path, *, next_step: str, what: str = "") -> _T:
    """Read a JSON file into the dataclass ``kind``; raises as ``read_toml``."""
    return parse_json(kind, _text(path, next_step), path, next_step=next_step, what=what)


def parse_json(kind: type[_T], text: str, path: Path, *, next_step: str, what: str = "") -> _T:
    """Read the JSON ``text``, which comes out of ``path``; raises as ``read_toml``.

    ``what`` names what the file should be, where any file may have been given.
    """
    raw = _parsed(json.loads, text, f"{path} holds no {what or 'JSON'}", next_step)
    return _convert(kind, raw, f"{path} holds no {what}: " if what else f"{path}: ", next_step)


def _text(path: Path, next_step: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path} cannot be read: {error}", next_step=next_step) from None


def _parsed(parse: Callable[[str], Any], text: str, fault: str, next_step: str) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise BadFileError(f"{fault}: {error}", next_step=next_step) from None


def _convert(kind: type[_T], raw: object, where: str, next_step: str) -> _T:
    """Return ``raw`` as the dataclass ``kind``; ``where`` begins the message of what is raised."""
    value, faults = check(kind, raw)
    if value is not None:
        return value
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    raise BadFileError(f"{where}{faults[0].text}{more}", next_step=next_step)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in a file: the path of the key, and the text of the fault, path included."""

    where: tuple[str | int, ...]
    text: str


def check(kind: type[_T], raw: object) -> tuple[_T | None, list[Fault]]:
    """Convert ``raw`` into the dataclass ``kind``; else return None and every fault of ``raw``.

    The faults that ``__post_init__`` raises for a table are included once its fields have none.
    """
    try:
        # Through JSON: a list is read as a tuple, and still no number as a string.
        return _adapter(cast(Any, kind)).validate_json(json.dumps(raw, default=str)), []
    except ValidationError as error:
        # A misspelt key is a missing one too: it is the one to show.
        details = sorted(error.errors(include_url=False), key=lambda it: it["type"] not in _UNKNOWN)
    faults = []
    for one in details:
        if one["type"] == "too_short" and any(
            other["loc"][:-1] == one["loc"] for other in details if other is not one
        ):
            # Items with faults of their own are not counted.
            continue
        where = [part for part in one["loc"] if part != "[key]"]
        reason = one.get("ctx", {}).get("error")
        if isinstance(reason, KeyFaultError) and reason.key:
            where.append(reason.key)
        faults.append(Fault(where=tuple(where), text=_fault_text({**one}, where, kind)))
    return None, faults


def to_json(value: object, kind: Any = None, *, sort_keys: bool = False) -> str:
    """Return ``value``, a dataclass or of the type ``kind``, as the text of a JSON file."""
    annotation: Any = type(value) if kind is None else kind
    plain = _adapter(annotation).dump_python(value, mode="json", by_alias=True, warnings="error")
    return json.dumps(plain, indent=1, sort_keys=sort_keys) + "\n"


def write_json(path: Path, value: object) -> None:
    """Write ``value``, whole or not at all, as ``read_json`` takes it: the same bytes each time."""
    files.write_text(path, to_json(value, sort_keys=True))


class _Schema(GenerateJsonSchema):
    """Without titles that repeat the names of keys, and without null for what is left out.

    A written file has every declared key except those left out when empty, and no other key.
    """

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        if schema.get("default", "") is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)

    def field_is_required(self, field: Any, total: bool) -> bool:
        if self.mode == "serialization":
            return "serialization_exclude_if" not in field
        return super().field_is_required(field, total)

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        result = super().dataclass_schema(schema)
        return result if self.mode == "validation" else {"additionalProperties": False, **result}


def schema(
    kind: Any, mode: Literal["validation", "serialization"] = "validation"
) -> JsonSchemaValue:
    """Return the JSON schema of the files that are read into ``kind``, or written from it."""
    body = _adapter(kind).json_schema(schema_generator=_Schema, mode=mode)
    return {"$schema": _Schema.schema_dialect, **body}


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _fault_text(fault: Mapping[str, Any], where: list[Any], kind: Any) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    key = "".join(parts).removeprefix(".")
    value, context = fault["input"], fault.get("ctx", {})
    match fault["type"]:
        case "missing" | "missing_argument" | "missing_keyword_only_argument":
            return f"{key} is missing"
        case unknown if unknown in _UNKNOWN:
            return f"{key} is not a known key{perhaps(str(where[-1]), _keys(kind))}"
        case "literal_error":
            near = perhaps(str(value), re.findall("'([^']*)'", context["expected"]))
            return f"{key} is {value!r}, and not {context['expected']}{near}"
        case "too_short":
            return f"{key} has {len(value)} items, at least {context['min_length']} are needed"
        case "value_error" if isinstance(context["error"], KeyFaultError):
            return f"{key} {context['error']}"
        case "value_error":
            return f"{key}: {context['error']}"
    message = fault["msg"].lower()
    if fault["type"].endswith(("_type", "_from_float")):
        return f"{key} has the wrong type ({type(value).__name__}): {message}"
    return f"{key} is {value!r}: {message}" if where else f"cannot be used: {message}"


@functools.cache
def _keys(kind: Any) -> tuple[str, ...]:
    """Return every key that a file of this kind may have, in any of its tables."""
    schema = _adapter(kind).json_schema()
    tables = [schema, *schema.get("$defs", {}).values()]
    return tuple(sorted({key for table in tables for key in table.get("properties", {})}))
