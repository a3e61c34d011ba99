"""Run the witnesses on mutated sources: a mutation that survives shows a line without a test.

This is `sm12x-dev mutate`. What each mutation came to is kept in the cache as it ends: a run that
was stopped goes on where it was.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click
from tests.tools import derive

from sm12x import layout
from sm12x.commands import emit, reports, say
from sm12x.core import progress
from sm12x.core.declared import shown
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.stack.model.patchfile import MessageFault
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev.commands.options import BASE, FIND_LINKS, JOBS, chosen, fetch, named
from sm12x_dev.witness import environment, junit, mutations, record
from sm12x_dev.witness.mutations import Mutant
from sm12x_dev.witness.pytests import Pytests, Run

KILLED = "killed"
SURVIVED = "survived"
UNKNOWN = "could not run"
STALE = "stale"
# Seconds one witness may take on a mutated tree.
TIME_LIMIT = 600
# The side of a mutated tree, for its witnesses.
_MUTANT = "mutant"
# The folder of outcomes, in the cache.
_OUTCOMES = "mutations"


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
        """Return the number of mutants with this outcome."""
        return sum(outcome.state == state for outcome in self.outcomes)

    @shown
    def ok(self) -> bool:
        """Return whether every mutation turned a witness red."""
        return not self.findings and self.count(KILLED) == len(self.outcomes)


class Kept:
    """The outcomes of earlier runs, in a file: one line of JSON for each mutant, by its key."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._outcomes: dict[str, MutantOutcome] = {}
        if path and path.is_file():
            # A run that was killed may have left half a line.
            *lines, half = path.read_text(encoding="utf-8").split("\n")
            if half:
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            for key, entry in map(json.loads, lines):
                self._outcomes[key] = MutantOutcome(**entry)

    def get(self, key: str) -> MutantOutcome | None:
        """Return the outcome that was kept under ``key``."""
        return self._outcomes.get(key)

    def add(self, key: str, outcome: MutantOutcome) -> None:
        """Keep an outcome; one that says nothing of the mutant is tried again."""
        if self._path is None or outcome.state not in (KILLED, SURVIVED):
            return
        with self._lock:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([key, vars(outcome)]) + "\n")


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
    kept: Path | None = None,
    conditions: str = "",
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
        kept: the file of earlier outcomes, which counts for the same mutants, witnesses, stack and
          ``conditions``.
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
        apply.apply(base, stack, patched)
        if (root / mutations.PACKAGE).is_dir():
            shutil.copytree(root / mutations.PACKAGE, patched / mutations.PACKAGE)
        findings: list[MessageFault] = []
        if auto:
            mutants = derive.derived(stack, untouched, patched, count=auto, seed=seed)
        else:
            mutants, findings = mutations.kept(base, stack, patched, root)
        names = {patch.name for patch in patches}
        mutants = [mutant for mutant in mutants if mutant.patch.name in names]
        earlier = Kept(kept)
        places: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(min(jobs, len(mutants))):
            # Hard links to the patched tree, for one job to mutate.
            place = folder / f"tree-{number}"
            shutil.copytree(patched, place, symlinks=True, copy_function=os.link)
            places.put(place)
        left = len(mutants)
        # Hundreds of mutants have few witnesses.
        inputs_of = functools.cache(partial(record.witness_inputs, base, root=root))

        def one(mutant: Mutant) -> MutantOutcome:
            nonlocal left
            targets = _targets(base, mutant)
            inputs = [inputs_of(path) for path in targets]
            words = (stack.id, conditions, mutant.file, mutant.text, *inputs)
            key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
            outcome = earlier.get(key)
            if outcome is None:
                place = places.get()
                try:
                    outcome = _outcome(mutant, targets, place, pytests)
                finally:
                    places.put(place)
                earlier.add(key, outcome)
            left -= 1
            # The label and the reason are of this list, whatever list the outcome was kept for.
            outcome = replace(outcome, label=mutant.label, why=mutant.why)
            if on_outcome:
                on_outcome(outcome, left)
            return outcome

        with Pytests(python=python, root=root, seconds=seconds, jobs=jobs) as pytests:
            done = [pytests.submit(one, mutant) for mutant in mutants]
            outcomes = _confirmed([future.result() for future in done], patched, pytests)
    return MutationReport(
        base_version=base.version,
        stack_id=stack.id,
        outcomes=tuple(outcomes),
        findings=tuple(findings),
    )


def _targets(base: Base, mutant: Mutant) -> list[str]:
    """Return the tests to run on a mutant, in order: its own test, then the patch's witnesses."""
    slow_last = sorted(mutant.patch.witnesses, key=lambda path: path in base.witness.first)
    return [*([mutant.by] if mutant.by else []), *slow_last]


def judge(run: Run) -> tuple[str, str, str]:
    """Return (state, red test, message) of one witness on a mutated tree."""
    path = run.witness.split("::", 1)[0]
    if run.problem:
        return UNKNOWN, "", run.problem.split("\n", 1)[0]
    for test in run.tests:
        if test.outcome == junit.FAILED:
            return KILLED, f"{path}::{test.name}", test.said
    for test in run.tests:
        if test.outcome != junit.PASSED:
            said = f"{path}::{test.name} is not run ({test.outcome}): {test.said}"
            return UNKNOWN, "", said.rstrip(": ")
    if not run.tests:
        return UNKNOWN, "", f"{run.witness} has no test"
    return SURVIVED, "", ""


def _outcome(
    mutant: Mutant, targets: Sequence[str], place: Path, pytests: Pytests
) -> MutantOutcome:
    """Return what ``targets`` give where ``mutant`` is made on the tree ``place``."""
    state, test, said = UNKNOWN, "", f"{mutant.patch.name} names no witness"
    if mutant.stale:
        state, said = STALE, mutant.stale
    elif fault := _syntax_fault(mutant):
        said = fault
    else:
        with _mutated(place / mutant.file, mutant.text):
            for target in targets:
                state, test, said = judge(pytests.run((target,), _MUTANT, place, "-x")[0])
                if state != SURVIVED:
                    break
    return MutantOutcome(
        patch=mutant.patch.name,
        file=mutant.file,
        label=mutant.label,
        why=mutant.why,
        state=state,
        test=test,
        said=said,
    )


def _syntax_fault(mutant: Mutant) -> str:
    if mutant.file.endswith(".py"):
        try:
            compile(mutant.text, mutant.file, "exec")
        except (SyntaxError, ValueError) as error:
            return f"the mutated file is not Python: {error}"
    return ""


def _confirmed(
    outcomes: Sequence[MutantOutcome], patched: Path, pytests: Pytests
) -> list[MutantOutcome]:
    """Return ``outcomes``, without kills by a test that is red without a mutation too."""
    tests = dict.fromkeys(outcome.test for outcome in outcomes if outcome.state == KILLED)
    files = dict.fromkeys(test.split("::", 1)[0] for test in tests)
    green: set[str] = set()
    for path in files:
        first, *others = (test for test in tests if test.split("::", 1)[0] == path)
        (run,) = pytests.run((first,), _MUTANT, patched, *others)
        green |= {f"{path}::{test.name}" for test in run.tests if test.outcome == junit.PASSED}
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


@contextmanager
def _mutated(path: Path, text: str) -> Iterator[None]:
    """Replace the file's text, and restore the file afterwards."""
    aside = path.with_name(f"{path.name}.unmutated")
    mode = path.stat().st_mode
    # By a rename: the file is a hard link of the other trees'.
    path.rename(aside)
    try:
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        _forget(path)
        yield
    finally:
        aside.replace(path)
        _forget(path)


def _forget(path: Path) -> None:
    """Remove a module's bytecode: Python checks only the source's size and its time in seconds."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def text(report: MutationReport) -> str:
    """Return the outcomes by patch, as text: survivors and unknown outcomes are marked."""
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


@click.command("mutate")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@BASE
@click.option(
    "--auto",
    type=click.IntRange(min=1),
    metavar="N",
    help="Instead of the mutations in mutations.toml: N derived ones per patch, from the lines it "
    "adds.",
)
@click.option("--seed", default=0, show_default=True, help="Seed that selects the N mutations.")
@click.option("--fresh", is_flag=True, help="Run all, whatever earlier runs have ended.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=TIME_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="Limit for one witness on one mutation.",
)
@JOBS
@FIND_LINKS
@reports(MutationReport)
def mutate_command(
    names: tuple[str, ...],
    version: str | None,
    auto: int | None,
    seed: int,
    fresh: bool,
    time_limit: float,
    jobs: int,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Mutate lines of the patched source, and see whether the patch's witnesses turn red.

    A mutation is an entry of mutations.toml of the base: a text of the patched source and what
    replaces it. The run fails if a mutation survives every witness of its patch, if its text is not
    in the source (stale), or if it could not be judged. With --auto a rule leaves out or negates
    lines instead; judge each survivor yourself: a line without a witness, or one that makes no
    difference. NAME is a patch's file name or number; without one, all are run. A run that was
    stopped goes on where it was, as long as stack, witnesses and packages are the same.

    Example: sm12x-dev mutate --base 0.33.0 0001
    """
    base = chosen(version)
    stack = series.load(base)
    patches = named(stack, names)
    if not auto:
        require(base)
    archive = fetch(base, find_links)
    root = layout.root()
    with progress.spinner("setting up the witnesses' environment"):
        python = environment.environment(base, root=root, cache=layout.cache(), say=say)
    conditions = record.witness_conditions(base, root=root, machine=platform.machine())
    kept = layout.cache() / _OUTCOMES / f"{base.version}.jsonl"
    if fresh:
        kept.unlink(missing_ok=True)
    report = run(
        base,
        stack,
        patches,
        archive=archive,
        python=python,
        root=root,
        auto=auto or 0,
        seed=seed,
        kept=kept,
        conditions=conditions,
        seconds=time_limit,
        jobs=jobs,
        on_outcome=lambda one, left: say(
            f"{one.state}: {one.patch}, {one.file}, {one.label} ({left} left)"
        ),
    )
    emit(as_json, report, text(report))
    if auto or report.ok:
        return
    bad = len(report.outcomes) - report.count(KILLED) + len(report.findings)
    raise FindingsError(
        f"{bad} mutations turned no witness red",
        next_step="write a test that fails without the line, or remove the line; if the text is "
        f"stale, correct {mutations.NAME} of the base",
    )
