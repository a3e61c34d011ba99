"""dist/<version>/: the files of a finished bundle, and the record that it is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sm12x.core import declared, files
from sm12x.core.declared import Declared
from sm12x.core.errors import BadFileError, BuildFailedError

NAME = "image.json"
LEDGER = "ledger.json"
AUDIT = "audit.json"
AUDIT_TEXT = "audit.txt"


@dataclass(frozen=True, kw_only=True)
class Record(Declared):
    """A finished bundle. Sizes are in bytes, hashes sha256 in hex, ``seconds`` by step.

    ``inputs`` is the hash over all that the bundle was made of; ``image_id`` is "" where only the
    wheel was asked for. ``flashinfer`` are the architectures that FlashInfer's modules are compiled
    for ahead of time, "" where they are not.
    """

    version: str
    mode: str
    machine: str
    stack_id: str
    arch_list: str
    inputs: str
    engine: str
    base_image: str
    base_digest: str
    wheel: str
    wheel_sha256: str
    wheel_size: int
    ledger_sha256: str
    image_id: str
    tags: tuple[str, ...]
    image_size: int
    seconds: Mapping[str, float]
    flashinfer: str = ""
    schema: Literal[1] = 1


def read(folder: Path) -> Record | None:
    """The record in ``folder``; None if there is none, or it is of another schema."""
    try:
        return declared.read_json(Record, folder / NAME, next_step="run `make bundle` again")
    except BadFileError:
        return None


def is_whole(folder: Path, record: Record) -> bool:
    """Whether wheel, ledger and audit are there, with the hashes the record names."""
    wheel, ledger = folder / record.wheel, folder / LEDGER
    return (
        all(path.is_file() for path in (wheel, ledger, folder / AUDIT, folder / AUDIT_TEXT))
        and files.sha256(ledger) == record.ledger_sha256
        and files.sha256(wheel) == record.wheel_sha256
    )


def one_wheel(folder: Path) -> Path:
    """Return the wheel in ``folder``. Raises BuildFailedError unless there is exactly one."""
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise BuildFailedError(
            f"the builder left {len(wheels)} wheels instead of one",
            next_step="read build/VERSION/builder.log, and report it with that log",
        )
    return wheels[0]
