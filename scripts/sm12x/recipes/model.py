"""What a recipe file holds: these dataclasses are its reader and its JSON schema."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from sm12x.core import declared
from sm12x.core.declared import Declared, KeyFaultError, NotInFile, NotNull, in_file, one_of

# `recipe_version` of the files that are read here.
RECIPE_VERSION = "1"
# The deployments that exist; "any" is for a recipe that does not depend on the device.
_HARDWARE = ("rtx-pro-6000", "rtx-5090", "gb10", "any")
# verified: run by this project on that hardware, on a date, with evidence. reported: run by others,
# the source says by whom. untested: written from documents, no known run.
_STATES = ("verified", "reported", "untested")
# measured: by this project. reported: by others. estimated: computed, the source says from what.
_BASES = ("measured", "reported", "estimated")
# The level of a recipe that must stay awake, as it stands in the file.
_NEVER = "never"
_VARIABLE_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*"
# With `.yaml` appended it must still be a valid file name.
_LONGEST_NAME = 200
# Keys of forks of eugr's runner that have no effect here.
THEIRS = ("model_required_files", "benchmark", "launch")


def _scalar(value: object) -> object:
    if not isinstance(value, str | int | float):
        raise KeyFaultError("", "is not a string, number or truth value")
    return value


def _words(value: object) -> object:
    """A list of texts, in which numbers may stand for themselves."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str | int | float) for one in value):
        raise KeyFaultError("", "is not a list of strings")
    return tuple(str(one).strip() for one in value)


def _variable(value: object) -> object:
    # A shell has no booleans: true, True and 1 are three different values there.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise KeyFaultError("", "is not a string or number: put it in quotes")
    text = str(value)
    if "`" in text or "$(" in text:
        raise KeyFaultError("", "runs a command: only $NAME is expanded")
    if "\0" in text:
        raise KeyFaultError("", "holds a NUL, which no variable can")
    return text


def _variable_name(value: str) -> str:
    # It stands unquoted in `export NAME=...` and `-e NAME=...`.
    if not re.fullmatch(_VARIABLE_NAME, value):
        raise KeyFaultError("", "is not a variable's name: it takes letters, digits and _ only")
    return value


def _image(value: str) -> str:
    # An engine would read it as its own option, or as an image and words for it.
    if not re.fullmatch(_IMAGE, value):
        raise KeyFaultError("", f"is {value!r}, which names no image")
    return value


def _version(value: object) -> object:
    if str(value) != RECIPE_VERSION:
        raise KeyFaultError("", f"is {value!r}; this version reads {RECIPE_VERSION!r}")
    return str(value)


def _level(value: object) -> object:
    if value == _NEVER:
        return 0
    if isinstance(value, bool) or value not in (1, 2):
        raise KeyFaultError("", f"is {value!r}, not 1, 2 or never")
    return value


def _date(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"(\d{4}-\d{2}-\d{2})?", value):
        raise KeyFaultError("", f"is {value!r}, not YYYY-MM-DD")
    return value


def _pool(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) == 1 or len(set(value)) < len(value):
        raise KeyFaultError("", "does not name two or more recipes, each once")
    for name in value:
        if not name or "/" in name or not name.isprintable() or len(name) > _LONGEST_NAME:
            raise KeyFaultError("", f"has {name[:40]!r}, not the name of a recipe beside this one")
    return value


# A key without a value counts as absent.
_or_empty = BeforeValidator(lambda value: {} if value is None else value)


def _with_theirs(schema: dict[str, Any]) -> None:
    note = {"description": "Known to forks of eugr's runner; not used here."}
    schema["properties"] |= dict.fromkeys(THEIRS, note)


_SCALARS = ["string", "number", "boolean"]
_Text = Annotated[str, StringConstraints(strip_whitespace=True)]
_Words = Annotated[
    tuple[str, ...],
    BeforeValidator(_words),
    in_file(type=["array", "null"], items={"type": _SCALARS}),
]


@dataclass(frozen=True, kw_only=True)
class MemoryTerm(Declared):
    """One term of the memory budget, in GiB on each GPU; on GB10 of each machine."""

    # ``gib`` is the value to plan with: the upper end where the source gives a range. ``low`` is
    # the lower end then, and equal to ``gib`` otherwise.
    gib: Annotated[float, in_file(**declared.ENDS), Field(description="GiB, or [low, high].")]
    low: Annotated[float, NotInFile()]
    basis: Annotated[str, one_of(*_BASES), Field(description="By this project; others; computed.")]
    source: Annotated[
        _Text, Field(min_length=1, description="Where the figure is from, or computed from what.")
    ]

    @model_validator(mode="before")
    @classmethod
    def _ends(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "gib" not in raw:
            return raw
        if "low" in raw:
            raise KeyFaultError("low", "is not a known key; a range is gib: [low, high]")
        try:
            low, high = declared.ends(raw["gib"])
        except ValueError as error:
            raise KeyFaultError("gib", str(error)) from None
        return {**raw, "low": low, "gib": high}


_Term = Annotated[MemoryTerm | None, NotNull()]


@dataclass(frozen=True, kw_only=True)
class Memory(Declared):
    """The memory terms of a server, in GiB on each GPU; on GB10 of each machine.

    Terms that are neither measured nor computed are left out.
    """

    weights: Annotated[_Term, Field(description="Inside vLLM's budget.")] = None
    kv: Annotated[_Term, Field(description="The KV cache, inside vLLM's budget.")] = None
    outside: Annotated[
        _Term, Field(description="What does not count against --gpu-memory-utilization.")
    ] = None
    sleep_residue: Annotated[
        _Term, Field(description="What the server still holds while it sleeps.")
    ] = None

    @property
    def resident(self) -> float:
        """The GiB of weights and KV cache, as far as they are known: on GB10 of the machine."""
        return sum(term.gib for term in (self.weights, self.kv) if term)


@dataclass(frozen=True, kw_only=True)
class Sleep(Declared):
    """Level 1 keeps the weights in host memory, 2 discards them; never (0 here) needs a reason."""

    level: Annotated[int, BeforeValidator(_level), in_file(enum=[1, 2, _NEVER])]
    reason: Annotated[_Text, Field(description="Why it must stay awake.")] = ""

    __pydantic_config__: ClassVar[ConfigDict] = {
        **Declared.__pydantic_config__,
        "json_schema_extra": {
            "if": {"properties": {"level": {"const": _NEVER}}},
            "then": {"required": ["reason"]},
        },
    }

    def __post_init__(self) -> None:
        if not self.level and not self.reason:
            raise KeyFaultError("reason", "is missing: say why it must stay awake")

    def __str__(self) -> str:
        return f"level {self.level}" if self.level else _NEVER


@dataclass(frozen=True, kw_only=True)
class Status(Declared):
    """The evidence for a recipe."""

    state: Annotated[
        str,
        one_of(*_STATES),
        Field(description="Run by this project; run by others; no known run."),
    ]
    source: Annotated[
        _Text, Field(description="Who ran it and where that is written, or written from what.")
    ] = ""
    date: Annotated[
        str,
        BeforeValidator(_date),
        in_file(type="string", pattern=r"^\d{4}-\d{2}-\d{2}$"),
    ] = ""
    evidence: Annotated[_Text, Field(description="What was run and what came out.")] = ""
    # By release; "" stands for every one.
    blocked: Annotated[
        dict[str, _Text],
        BeforeValidator(lambda value: {"": value} if isinstance(value, str) else value),
        in_file(type=["string", "object"], additionalProperties={"type": "string"}),
        Field(
            description="What keeps it from serving with the stack of a release: a reason for each "
            "release, or one for all."
        ),
    ] = field(default_factory=dict)

    __pydantic_config__: ClassVar[ConfigDict] = {
        **Declared.__pydantic_config__,
        "json_schema_extra": {
            "if": {"properties": {"state": {"const": "verified"}}},
            "then": {"required": ["date", "evidence"]},
            "else": {"required": ["source"]},
        },
    }

    def __post_init__(self) -> None:
        if self.state != "verified":
            if not self.source:
                raise KeyFaultError(
                    "source", "is missing: say who ran it and where, or what it was written from"
                )
        elif not self.date:
            raise KeyFaultError("date", "is missing: say when it was run")
        elif not self.evidence:
            raise KeyFaultError("evidence", "is missing: say what was run and what came out")

    def blocked_on(self, release: str) -> str:
        """Why it cannot serve with the stack of ``release`` yet; "" where it can."""
        return self.blocked.get(release) or self.blocked.get("", "")


@dataclass(frozen=True, kw_only=True)
class Block(Declared):
    """Facts that the format has no other key for."""

    hardware: Annotated[
        tuple[Annotated[str, one_of(*_HARDWARE)], ...],
        Field(min_length=1, description="What it runs on."),
    ]
    # The ends are beyond any deployment: each machine has a text of its own.
    gpus: Annotated[int, Field(ge=1, le=1024, description="GPUs of each machine.")]
    machines: Annotated[int, Field(ge=1, le=1024)] = 1
    memory: Annotated[Memory, _or_empty] = field(default_factory=Memory)
    sleep: Sleep
    status: Status
    pool: Annotated[
        tuple[str, ...],
        AfterValidator(_pool),
        BeforeValidator(_words),
        in_file(type="array", items={"type": "string"}, minItems=2, uniqueItems=True),
        Field(
            description="Recipes of the same folder that take turns on the same GPUs; the first "
            "is awake at the start."
        ),
    ] = ()
    notes: Annotated[_Words, Field(description="What the user should know.")] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe(Declared):
    """A deployment: eugr's recipe_version 1 with one more block, sm12x. `sm12x recipe lint` checks
    more than this schema can say.
    """

    # Not in the file. ``key`` is what the user types: the file name without `.yaml`; ``lines`` says
    # where each key of the top level, of `defaults`, `env` and `sm12x` stands: "sm12x.sleep" -> 12.
    key: Annotated[str, NotInFile()]
    path: Annotated[Path, NotInFile()]
    recipe_version: Annotated[
        str,
        BeforeValidator(_version),
        in_file(enum=[RECIPE_VERSION, int(RECIPE_VERSION)]),
        Field(description="The format's version."),
    ]
    name: Annotated[str, Field(description="What lists show.")]
    container: Annotated[
        str, AfterValidator(_image), Field(description="The image, with a digest where it matters.")
    ]
    command: Annotated[
        str,
        Field(
            description="Filled with str.format from defaults and settings: {name} is a setting, "
            "JSON braces are doubled."
        ),
    ]
    description: Annotated[str, Field(description="One line.")] = ""
    model: Annotated[
        str, Field(description="The model's repository, for what downloads it beforehand.")
    ] = ""
    model_revision: Annotated[
        str, Field(description="A commit of the model's repository; `sm12x recipe pin` writes it.")
    ] = ""
    defaults: Annotated[
        dict[str, Annotated[Any, BeforeValidator(_scalar)]],
        _or_empty,
        in_file(type=["object", "null"], additionalProperties={"type": _SCALARS}),
        Field(description="The settings and their values; strings are allowed."),
    ] = field(default_factory=dict)
    env: Annotated[
        dict[
            Annotated[str, AfterValidator(_variable_name)],
            Annotated[str, BeforeValidator(_variable)],
        ],
        _or_empty,
        in_file(
            type=["object", "null"],
            propertyNames={"pattern": f"^{_VARIABLE_NAME}$"},
            additionalProperties={"type": _SCALARS},
        ),
        Field(description="Variables of the container; $NAME is put in there."),
    ] = field(default_factory=dict)
    mods: Annotated[_Words, Field(description="Of eugr's runner; not applied here.")] = ()
    build_args: Annotated[_Words, Field(description="Of eugr's runner; not used here.")] = ()
    cluster_only: Annotated[bool, Field(description="For several machines.")] = False
    solo_only: Annotated[bool, Field(description="For one machine.")] = False
    # None in a file that has no block of ours, as other people's files have none.
    sm12x: Annotated[Block | None, NotNull()] = None
    lines: Annotated[dict[str, int], NotInFile()]
    # What of a file of sparkrun's has no effect here.
    not_applied: Annotated[tuple[str, ...], NotInFile()] = ()

    def blocked_on(self, release: str) -> str:
        """Why it cannot serve with the stack of ``release`` yet; "" where nothing says so."""
        return self.sm12x.status.blocked_on(release) if self.sm12x else ""

    # Unknown keys are ignored, as runners ignore them.
    __pydantic_config__: ClassVar[ConfigDict] = {
        **Declared.__pydantic_config__,
        "extra": "ignore",
        "json_schema_extra": _with_theirs,
    }


@dataclass(frozen=True, kw_only=True)
class ShownRecipe(Recipe):
    """What `sm12x recipe show --json` prints: a recipe as it was read, and where from."""

    schema: Literal[1] = 1
    recipe_version: Annotated[str, Field(exclude=True)]
    lines: Annotated[dict[str, int], Field(exclude=True)]
    not_applied: Annotated[tuple[str, ...], Field(exclude=True)] = ()

    __pydantic_config__: ClassVar[ConfigDict] = Declared.__pydantic_config__
