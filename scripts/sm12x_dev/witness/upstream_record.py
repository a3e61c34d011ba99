"""What the release's own tests give on its untouched source: ``upstream-base.json`` of a base.

The untouched source of a release does not change, and running its tests on it takes as long as on
the patched source. A file of tests whose outcomes on the patched source are exactly the recorded
ones has none that is worse there. Only where one differs is the file run on the untouched source.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sm12x.core import declared
from sm12x.core.declared import Declared
from sm12x.stack.model.base import Base
from sm12x_dev.witness import junit, upstream_tests
from sm12x_dev.witness.upstream_tests import FileRun, Suite

NAME = "upstream-base.json"


@dataclass(frozen=True, kw_only=True)
class Outcomes(Declared):
    """The outcomes of a file's tests: how many there are, how many passed, and all in a digest."""

    tests: int
    passed: int
    digest: str

    @classmethod
    def of(cls, run: FileRun) -> Outcomes:
        found = {name: upstream_tests.outcome(run, name) for name in run.tests}
        lines = [f"problem {run.problem}", *(f"{name} {found[name]}" for name in sorted(found))]
        return cls(
            tests=len(found),
            passed=Counter(found.values())[junit.PASSED],
            digest=hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
        )


@dataclass(frozen=True, kw_only=True)
class Record(Declared):
    """``files`` by the path of the test file; ``conditions`` is what the outcomes depend on."""

    schema: Literal[1]
    conditions: str
    files: Mapping[str, Outcomes]

    def has(self, file: str, run: FileRun) -> bool:
        """Whether ``run`` of ``file`` ended with exactly the recorded outcomes."""
        return self.files.get(file) == Outcomes.of(run)


def conditions(base: Base, suite: Suite, packages: Iterable[str]) -> str:
    """A digest of the release, of the environment of its tests, and of the locked ``packages``.

    Which tests are run is no part of it: a file without a record, or one that runs other tests
    than the record has, is run on the untouched source too.
    """
    told = hashlib.sha256(base.sdist.sha256.encode())
    # Its packages are among the locked ones, in whichever list they are.
    told.update(repr((replace(suite.environment, packages=()), suite.models)).encode())
    for line in sorted({line for text in packages for line in text.splitlines()}):
        told.update(line.encode())
    return told.hexdigest()[:16]


def path(base: Base) -> Path:
    return base.folder / NAME


def load(base: Base) -> Record | None:
    """The record of ``base``, None where there is none.

    Raises:
        BadFileError: it holds something else.
    """
    if not path(base).is_file():
        return None
    return declared.read_json(
        Record,
        path(base),
        what="record of the release's tests",
        next_step=f"make it again: sm12x-dev upstream-tests --base {base.version} --record",
    )


def write(base: Base, made_for: str, runs: Mapping[str, FileRun]) -> None:
    """Record ``runs``, file -> its run on the untouched source."""
    found = {file: Outcomes.of(run) for file, run in runs.items()}
    declared.write_json(path(base), Record(schema=1, conditions=made_for, files=found))
