"""Tests of the image that `make bundle` left: they run it with a real engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import process
from sm12x.core.process import Completed
from sm12x.image.bundle import record
from sm12x.image.bundle.record import Record
from sm12x.image.engine import engines
from sm12x.image.engine.engine import Engine
from sm12x.stack.model import base as bases
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.ledger import Ledger

Run = Callable[..., Completed]


@pytest.fixture(scope="session")
def base() -> bases.Base:
    return bases.load(os.environ.get("BASE") or bases.versions()[0])


@pytest.fixture(scope="session")
def folder(base: bases.Base) -> Path:
    return layout.dist(base.version)


@pytest.fixture(scope="session")
def made(folder: Path) -> Record:
    found = record.read(folder)
    if found is None or not found.tags:
        pytest.fail(f"{folder} holds no bundle with an image: run `make bundle` first")
    return found


@pytest.fixture(scope="session")
def ledger(folder: Path, made: Record) -> Ledger:
    return ledgers.read(folder / record.LEDGER)


@pytest.fixture(scope="session")
def engine(made: Record) -> Engine:
    return engines.find(made.engine.split()[0], say=print)


@pytest.fixture(scope="session")
def docker_run(engine: Engine, made: Record) -> Run:
    """Run the image with no network and return what it did; ``options`` go before its name."""

    def run(*words: str, options: tuple[str, ...] = ()) -> Completed:
        argv: list[str | Path] = [
            engine.program,
            "run",
            "--rm",
            "--network",
            "none",
            *options,
            made.tags[0],
            *words,
        ]
        return process.run(argv, check=False, timeout=900)

    return run
