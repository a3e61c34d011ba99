"""The report of `sm12x audit --json`; data/schemas/audit-1.json is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x.audit.model import (
    DEVICES,
    HOST,
    LTO,
    MIXED,
    UNIT_VERDICTS,
    Audit,
    Device,
    LibraryAudit,
)
from sm12x.audit.policy import Judgement
from sm12x.core import declared
from sm12x.core.declared import Declared, one_of, unless_empty

_DeviceName = Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]$", description="A compute capability.")]
_Counts = Annotated[
    Mapping[
        Annotated[str, Field(pattern=r"^[0-9]+\.[0-9][af]?$")],
        Annotated[int, Field(ge=1)],
    ],
    Field(description="How many, by target: 12.0, 12.0a and 12.0f are three."),
]
_Units = Annotated[
    Mapping[Annotated[str, one_of(*UNIT_VERDICTS)], Annotated[int, Field(ge=0)]],
    Field(
        description="Translation units by how they run; lto is absent where it is 0.",
        json_schema_extra={"required": [word for word in UNIT_VERDICTS if word != LTO]},
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunsReport(Declared):
    """How a library runs on one device; ``embedded`` are those of the units that it picks among
    and loads itself, absent where there are none.
    """

    verdict: Annotated[str, one_of(*UNIT_VERDICTS, MIXED, HOST)]
    units: _Units
    embedded: Annotated[_Units, unless_empty] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LibraryReport(Declared):
    """One file of code. ``runs`` is by device."""

    path: str
    sha256: Annotated[
        str,
        Field(pattern=r"^([0-9a-f]{64})?$", description="Empty when the bytes could not be read."),
    ]
    size: Annotated[int, Field(ge=0, description="Bytes.")]
    machine: Annotated[
        str,
        Field(description='Of the host code; "cuda" where there is none, empty if not readable.'),
    ]
    cubins: _Counts
    ptx: _Counts
    lto: Annotated[_Counts, unless_empty] = field(default_factory=dict)
    unknown: Annotated[
        tuple[str, ...],
        Field(description="What could not be read; anything here fails every policy."),
    ]
    unloadable: Annotated[
        str,
        unless_empty,
        Field(
            description="Why the file cannot be loaded at all, which fails every policy; absent "
            "where nothing says so."
        ),
    ] = ""
    runs: Mapping[_DeviceName, RunsReport]


@dataclass(frozen=True, kw_only=True)
class AuditReport(Declared):
    """The report of `sm12x audit --json`. ``policy`` is null when nothing was judged."""

    schema: Literal[1] = 1
    subject: Annotated[str, Field(description="The file, folder or image that was audited.")]
    kind: Annotated[str, one_of("file", "directory", "wheel", "image")]
    devices: Annotated[tuple[_DeviceName, ...], Field(min_length=1)]
    libraries: tuple[LibraryReport, ...]
    policy: Judgement | None


def document(
    audit: Audit, judgement: Judgement | None = None, devices: Sequence[Device] = DEVICES
) -> AuditReport:
    """The report of an audit, for ``devices``."""
    return AuditReport(
        subject=audit.subject,
        kind=audit.kind,
        devices=tuple(map(str, devices)),
        libraries=tuple(_library(library, devices) for library in audit.libraries),
        policy=judgement,
    )


def read(path: Path, *, next_step: str) -> AuditReport:
    """A report that `sm12x audit --json` has written. Raises BadFileError."""
    return declared.read_json(AuditReport, path, next_step=next_step, what="audit report")


def _library(library: LibraryAudit, devices: Sequence[Device]) -> LibraryReport:
    return LibraryReport(
        path=library.path,
        sha256=library.sha256,
        size=library.size,
        machine=library.machine,
        cubins=library.cubins,
        ptx=library.ptx,
        lto=library.lto,
        unknown=library.unknown,
        unloadable=library.unloadable,
        runs={
            str(device): RunsReport(
                verdict=library.verdict(device),
                units=library.units_on(device),
                embedded=library.embedded_on(device) if library.embedded else {},
            )
            for device in devices
        },
    )
