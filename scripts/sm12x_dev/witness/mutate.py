"""Run the witnesses on mutated sources: a mutation that survives shows a line without a test."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from sm12x.core.declared import shown
from sm12x.core.errors import BadFileError
from sm12x.stack.model.base import Base
from sm12x.stack.model.patchfile import MessageFault
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev.witness import junit, mutations, witness
from sm12x_dev.witness.mutations import Mutant

KILLED = "killed"
SURVIVED = "survived"
UNKNOWN = "could not run"
STALE = "stale"
# Seconds one witness may take on a mutated tree.
TIME_LIMIT = 600
_POLL = 0.05
_MUTANT = "mutant"
# Where the witnesses keep what they compile, by its sources: see tests/witness/native.py.
_COMPILED = "SM12X_WITNESS_COMPILED"


@dataclass(frozen=True, kw_only=True)
class MutantOutcome:
    """The outcome of a mutant. ``test`` turned red by it; ``said`` is its or pytest's message."""

    patch: str
    file: str
    label: str
    why: str
    state: str
    test: str
    said: str


@dataclass(frozen=True, kw_only=True)
class MutationReport:
    """All outcomes in order. ``findings`` are mutations that belong to no patch."""

    base_version: str
    stack_id: str
    outcomes: tuple[MutantOutcome, ...]
    findings: tuple[MessageFault, ...]

    def count(self, state: str) -> int:
        return sum(outcome.state == state for outcome in self.outcomes)

    @shown
    def ok(self) -> bool:
        return not self.findings and self.count(KILLED) == len(self.outcomes)


def run(
    base: Base,
    stack: Stack,
    patches: Sequence[Patch],
    *,
    archive: Path,
    python: Path,
    root: Path,
    auto: int = 0,
    seed: int = 0,
    seconds: float = TIME_LIMIT,
    jobs: int = 2,
    on_outcome: Callable[[MutantOutcome, int], None] | None = None,
) -> MutationReport:
    """Run the witnesses of ``patches`` on each mutation of them, to the first red test.

    A test that turned red is then run on the tree without a mutation: only where it is green there
    has it killed the mutant.

    Args:
        archive: the sdist of the base.
        python: an interpreter that has pytest and what the witnesses import.
        root: the checkout, whose tests/ the witnesses are in.
        auto: instead of the mutations that are kept, so many derived ones for each patch.
        seed: which of them.
        seconds: how long one pytest process may take.
        jobs: how many of them may run at a time.
        on_outcome: called with (outcome, how many are left) after each.

    Raises:
        apply.StackConflictError: the stack does not apply.
    """
    with tempfile.TemporaryDirectory(prefix="sm12x-mutate-") as name:
        folder = Path(name)
        patched = folder / "patched"
        tree.unpack(archive, patched)
        if auto:
            untouched = folder / "base"
            shutil.copytree(patched, untouched, symlinks=True, copy_function=os.link)
        # Files are put in place by a rename: the other names of a hard link keep the old content.
        apply.apply(base, stack, patched, archive=archive)
        if (root / mutations.PACKAGE).is_dir():
            shutil.copytree(root / mutations.PACKAGE, patched / mutations.PACKAGE)
        findings: list[MessageFault] = []
        if auto:
            mutants = mutations.derived(stack, untouched, patched, count=auto, seed=seed)
        else:
            mutants, findings = mutations.kept(base, stack, patched, root)
        names = {patch.name for patch in patches}
        mutants = [mutant for mutant in mutants if mutant.patch.name in names]
        runner = _Runner(
            base=base,
            folder=folder,
            patched=patched,
            python=python,
            root=root,
            seconds=seconds,
            jobs=jobs,
        )
        outcomes = runner.run(mutants, on_outcome)
        outcomes = runner.confirmed(outcomes)
    return MutationReport(
        base_version=base.version,
        stack_id=stack.id,
        outcomes=tuple(outcomes),
        findings=tuple(findings),
    )


def _targets(base: Base, mutant: Mutant) -> list[str]:
    """The tests to run on a mutant, in order: its own test, then the patch's witnesses."""
    slow_last = sorted(mutant.patch.witnesses, key=lambda path: path in base.witness.first)
    return [*([mutant.by] if mutant.by else []), *slow_last]


def judge(found: witness.Run) -> tuple[str, str, str]:
    """(state, red test, what was said) of one witness on a mutated tree."""
    path = found.witness.split("::", 1)[0]
    if found.problem:
        return UNKNOWN, "", found.problem.split("\n", 1)[0]
    for test in found.tests:
        if test.outcome == junit.FAILED:
            return KILLED, f"{path}::{test.name}", test.said
    for test in found.tests:
        if test.outcome != junit.PASSED:
            said = f"{path}::{test.name} is not run ({test.outcome}): {test.said}"
            return UNKNOWN, "", said.rstrip(": ")
    if not found.tests:
        return UNKNOWN, "", f"{found.witness} has no test"
    return SURVIVED, "", ""


@dataclass(kw_only=True)
class _Runner:
    base: Base
    folder: Path
    patched: Path
    python: Path
    root: Path
    seconds: float
    jobs: int
    reports: int = 0

    def __post_init__(self) -> None:
        compiled = self.folder / "compiled"
        compiled.mkdir()
        self.env: Mapping[str, str] = {_COMPILED: str(compiled)}

    def run(
        self, mutants: Sequence[Mutant], on_outcome: Callable[[MutantOutcome, int], None] | None
    ) -> list[MutantOutcome]:
        """The outcome of each mutant, in order."""
        outcomes: dict[int, MutantOutcome] = {}
        waiting = list(enumerate(mutants))
        free = [self._copy(number) for number in range(min(self.jobs, len(mutants)))]
        running: list[tuple[int, Path, Generator[MutantOutcome | None, None, None]]] = []
        try:
            while waiting or running:
                while waiting and free:
                    number, mutant = waiting.pop(0)
                    place = free.pop()
                    running.append((number, place, self._steps(mutant, place)))
                for item in list(running):
                    number, place, steps = item
                    outcome = next(steps)
                    if outcome is None:
                        continue
                    running.remove(item)
                    free.append(place)
                    outcomes[number] = outcome
                    if on_outcome:
                        on_outcome(outcome, len(mutants) - len(outcomes))
                time.sleep(_POLL)
        finally:
            for _, _, steps in running:
                # Ends the pytest that it waits for.
                steps.close()
        return [outcomes[number] for number in range(len(mutants))]

    def confirmed(self, outcomes: Sequence[MutantOutcome]) -> list[MutantOutcome]:
        """``outcomes``, without kills by a test that is red without a mutation too."""
        by_file: dict[str, list[str]] = {}
        for outcome in outcomes:
            if outcome.state == KILLED:
                known = by_file.setdefault(outcome.test.split("::", 1)[0], [])
                known += [] if outcome.test in known else [outcome.test]
        green: set[str] = set()
        for path, tests in by_file.items():
            # Its first argument is the first test, the others follow.
            for found in self._asked(tests[0], self.patched, tests[1:]):
                if found is None:
                    time.sleep(_POLL)
                    continue
                green |= {
                    f"{path}::{test.name}" for test in found.tests if test.outcome == junit.PASSED
                }
        return [
            outcome
            if outcome.state != KILLED or outcome.test in green
            else replace(
                outcome,
                state=UNKNOWN,
                test="",
                said=f"{outcome.test} is not green without a mutation either",
            )
            for outcome in outcomes
        ]

    def _steps(self, mutant: Mutant, place: Path) -> Generator[MutantOutcome | None, None, None]:
        """None while the mutant's witnesses run, then its outcome."""
        if mutant.stale:
            yield _outcome(mutant, STALE, "", mutant.stale)
            return
        if mutant.file.endswith(".py"):
            try:
                compile(mutant.text, mutant.file, "exec")
            except (SyntaxError, ValueError) as error:
                yield _outcome(mutant, UNKNOWN, "", f"the mutated file is not Python: {error}")
                return
        state, test, said = UNKNOWN, "", f"{mutant.patch.name} names no witness"
        with _mutated(place / mutant.file, mutant.text):
            for target in _targets(self.base, mutant):
                for found in self._asked(target, place, ("-x",)):
                    if found is None:
                        yield None
                        continue
                    state, test, said = judge(found)
                if state != SURVIVED:
                    break
        yield _outcome(mutant, state, test, said)

    def _asked(
        self, target: str, source: Path, arguments: Sequence[str]
    ) -> Generator[witness.Run | None, None, None]:
        """None while a pytest runs ``target`` on ``source``, then what it gave."""
        self.reports += 1
        job = witness.Job(
            (target,),
            _MUTANT,
            source,
            self.folder / f"{self.reports}.xml",
            self.python,
            self.root,
            arguments=arguments,
            env=self.env,
        )
        try:
            while (found := job.result(self.seconds)) is None:
                yield None
        finally:
            job.process.stop()
        yield found[0]

    def _copy(self, number: int) -> Path:
        """A tree of hard links to the patched one, for one job to mutate."""
        place = self.folder / f"tree-{number}"
        shutil.copytree(self.patched, place, symlinks=True, copy_function=os.link)
        return place


@contextmanager
def _mutated(path: Path, text: str) -> Iterator[None]:
    """Replace the file's text, and restore the file afterwards."""
    kept = path.with_name(f"{path.name}.unmutated")
    mode = path.stat().st_mode
    # By a rename: the file is a hard link of the other trees'.
    path.rename(kept)
    try:
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        _forget(path)
        yield
    finally:
        kept.replace(path)
        _forget(path)


def _forget(path: Path) -> None:
    """Remove a module's bytecode: Python checks only the source's size and its time in seconds."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def _outcome(mutant: Mutant, state: str, test: str, said: str) -> MutantOutcome:
    return MutantOutcome(
        patch=mutant.patch.name,
        file=mutant.file,
        label=mutant.label,
        why=mutant.why,
        state=state,
        test=test,
        said=said,
    )


def text(report: MutationReport) -> str:
    """The outcomes by patch, as text: survivors and unknown outcomes are marked."""
    lines: list[str] = []
    place = ""
    for outcome in report.outcomes:
        if outcome.patch != place:
            place = outcome.patch
            lines += ["", place]
        mark = " " if outcome.state == KILLED else "!"
        lines.append(f"  {mark} {outcome.state:13} {outcome.file}, {outcome.label}: {outcome.why}")
        if outcome.test:
            lines.append(f"      by {outcome.test}")
        elif outcome.said:
            lines.append(f"      {outcome.said}")
    lines += ["", *(str(finding) for finding in report.findings)]
    counts = ", ".join(f"{report.count(s)} {s}" for s in (KILLED, SURVIVED, UNKNOWN, STALE))
    lines.append(f"{len(report.outcomes)} mutations of {report.base_version}: {counts}")
    return "\n".join(lines).lstrip("\n") + "\n"


def require(base: Base) -> None:
    """Raise BadFileError where no mutation is kept for ``base``."""
    if not mutations.load(base):
        raise BadFileError(
            f"{base.folder / mutations.NAME} has no mutation",
            next_step="write one for a line of each patch, or try derived ones with --auto N",
        )
