"""Witnesses: each patch's tests, red on the untouched base and green on the patched one.

A test is red only if it ran and its own assertions failed. One that could not be collected, whose
set-up failed, that was skipped, or whose pytest crashed or hung, is neither red nor green.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sm12x.core.declared import shown
from sm12x.core.errors import ToolMissingError
from sm12x.stack.model.base import Base, Witness
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import apply, tree
from sm12x_dev.witness import junit, record
from sm12x_dev.witness.pytests import TIME_LIMIT, Pytests, Run
from sm12x_dev.witness.record import Outcomes, Record

BASE = "base"
PATCHED = "patched"
SIDES = (BASE, PATCHED)
# The outcome of a test that a tree's run does not have.
_ABSENT = "absent"
# Loading torch and vLLM takes longer than most tests of a witness: witnesses of one rig share a
# pytest, at most so many: a fork with vLLM's engine waits more than it computes.
_RIGS = {"executor_rig": 7, "kernels": 16, "world": 12}


@dataclass(frozen=True, kw_only=True)
class WitnessTest:
    """One test of one patch, on both trees.

    ``base`` and ``patched`` are its outcomes ("passed", "failed", "error", "skipped", "absent", or
    "crashed" when pytest did not live to tell). ``reasons`` are the violations of the rule: a test
    that is marked ``patched_only`` is absent from the base.
    """

    patch: str
    witness: str
    test: str
    guard: bool
    base: str
    patched: str
    reasons: tuple[str, ...]
    detail: str

    @property
    def ok(self) -> bool:
        """Return whether the rule holds."""
        return not self.reasons


@dataclass(frozen=True, kw_only=True)
class WitnessReport:
    """All checks. ``recorded`` counts the witnesses with recorded outcomes on the base."""

    base_version: str
    stack_id: str
    checks: tuple[WitnessTest, ...]
    recorded: int = 0

    @shown
    def passed(self) -> int:
        """Return how many checks hold."""
        return sum(check.ok for check in self.checks)

    @shown
    def failed(self) -> int:
        """Return how many checks do not hold."""
        return len(self.checks) - self.passed


def run(
    base: Base,
    stack: Stack,
    patches: Sequence[Patch],
    *,
    archive: Path,
    python: Path,
    root: Path,
    baseline: Record | None = None,
    record_for: str = "",
    seconds: float = TIME_LIMIT,
    jobs: int = 2,
    on_run: Callable[[str, str], None] | None = None,
) -> WitnessReport:
    """Run the witnesses of ``patches`` on the untouched and on the fully patched source.

    Args:
        archive: the sdist of the base.
        python: an interpreter that has pytest and what the witnesses import.
        root: the checkout, whose tests/ the witnesses are in.
        baseline: the recorded outcomes on the untouched source. A witness that has not changed
          since and has the same tests on the patched source is not run on the untouched one.
        record_for: unless empty, every witness is run on both sources, and this is recorded as what
          the outcomes depend on. ``baseline`` stays where it is of the same.
        seconds: how long one pytest process may take for each of its witnesses.
        jobs: how many of them may run at a time.
        on_run: called with (witness, side) before each.

    Raises:
        apply.StackConflictError: the stack does not apply.
    """
    witnesses = sorted(
        dict.fromkeys(path for patch in patches for path in patch.witnesses),
        key=lambda path: path not in base.witness.first,
    )
    inputs = {path: record.witness_inputs(base, path, root=root) for path in witnesses}
    files = dict(baseline.files) if baseline and not record_for else {}
    settled = [path for path in witnesses if path in files and files[path].inputs == inputs[path]]
    with tempfile.TemporaryDirectory(prefix="sm12x-witness-") as name:
        trees = {side: Path(name) / side for side in SIDES}
        tree.unpack(archive, trees[PATCHED])
        apply.apply(base, stack, trees[PATCHED])

        ran = partial(
            run_on,
            trees,
            python=python,
            root=root,
            seconds=seconds,
            jobs=jobs,
            on_run=on_run,
        )
        if len(settled) < len(witnesses):
            tree.unpack(archive, trees[BASE])
        runs = ran(witnesses, skip={(path, BASE) for path in settled})
        as_required = {path: required(runs[path, PATCHED], base.witness) for path in witnesses}
        outcomes = {
            path: Outcomes.of(as_required[path].outcomes, inputs=inputs[path]) for path in witnesses
        }
        same = [path for path in settled if outcomes[path] == files[path]]
        runs |= {(path, BASE): as_required[path] for path in same}
        differing = [path for path in settled if path not in same]
        if differing and not trees[BASE].exists():
            tree.unpack(archive, trees[BASE])
        runs |= ran(differing, skip={(path, PATCHED) for path in differing})
    if record_for:
        # One that breaks the rule is not recorded: it is run each time.
        held = {
            path: outcomes[path]
            for path in witnesses
            if runs[path, BASE].outcomes == as_required[path].outcomes
        }
        every = {path for patch in stack.patches for path in patch.witnesses} - {*witnesses}
        others = {p: baseline.files[p] for p in every & baseline.files.keys()} if baseline else {}
        record.write(base, record.WITNESSES, record_for, {**others, **held})
    return WitnessReport(
        base_version=base.version,
        stack_id=stack.id,
        checks=tuple(
            check
            for patch in patches
            for path in patch.witnesses
            for check in judge(patch.name, runs[path, BASE], runs[path, PATCHED], base.witness)
        ),
        recorded=len(same),
    )


def run_on(
    trees: Mapping[str, Path],
    witnesses: Sequence[str],
    *,
    python: Path,
    root: Path,
    seconds: float = TIME_LIMIT,
    jobs: int = 2,
    on_run: Callable[[str, str], None] | None = None,
    skip: Container[tuple[str, str]] = (),
) -> dict[tuple[str, str], Run]:
    """Run ``witnesses`` on the source in each of ``trees``, side -> folder; see ``run``.

    Those of one rig share a process. Where it crashes or hangs, each of them is run again in one
    of its own. ``skip`` are (witness, side) that are not run.
    """
    if shutil.which(str(python)) is None:
        raise ToolMissingError(
            f"{python} is not an executable",
            next_step="give the Python of an environment that has pytest and torch",
        )
    with Pytests(python=python, root=root, seconds=seconds, jobs=jobs) as pytests:

        def share(paths: Sequence[str], side: str) -> tuple[Run, ...]:
            for path in paths:
                if on_run:
                    on_run(path, side)
            runs = pytests.run(paths, side, trees[side])
            if len(runs) > 1 and any(run.problem for run in runs):
                # One of them has ended the pytest of all.
                runs = tuple(pytests.run((path,), side, trees[side])[0] for path in paths)
            return runs

        shares = [
            [
                (paths, side)
                for paths in _shares([p for p in witnesses if (p, side) not in skip], root)
            ]
            for side in trees
        ]
        # By turns: the longest are first for each tree.
        turns = itertools.chain.from_iterable(itertools.zip_longest(*shares))
        done = [pytests.submit(share, *item) for item in turns if item]
        return {(run.witness, run.side): run for future in done for run in future.result()}


def _shares(witnesses: Sequence[str], root: Path) -> list[list[str]]:
    """Return the witnesses that share a pytest: those of one rig, in as few as _RIGS allows."""
    by_rig: dict[str, list[str]] = {}
    for path in witnesses:
        by_rig.setdefault(_rig(root / path) or path, []).append(path)
    return [
        paths[first::count]
        for rig, paths in by_rig.items()
        for count in [math.ceil(len(paths) / _RIGS.get(rig, 1))]
        for first in range(count)
    ]


def _rig(witness: Path) -> str:
    """Return the one of _RIGS that a witness imports, "" for none."""
    try:
        text = witness.read_text(encoding="utf-8", errors="replace")
    except OSError:
        # Pytest says what is wrong with it.
        return ""
    imported = re.compile(rf"^from tests\.witness\b.*\b({'|'.join(_RIGS)})\b", re.MULTILINE)
    match = imported.search(text)
    return match[1] if match else ""


def required(patched: Run, exceptions: Witness) -> Run:
    """Return the outcomes that the tests of a patched run must have on the untouched tree.

    ``exceptions`` names the tests that the untouched tree passes, or fails, unlike that of other
    releases.
    """
    upstream, needed = (
        _of(names, patched.witness) for names in (exceptions.upstream, exceptions.needed)
    )
    tests = []
    for test in patched.tests:
        holds = test.name not in needed and (test.guard or test.name in upstream)
        outcome = junit.PASSED if holds else junit.FAILED
        tests.append(replace(test, outcome=outcome, guard=holds, said="", detail=""))
    left = (test for test in tests if not test.patched_only)
    return Run(witness=patched.witness, side=BASE, tests=tuple(left), problem="")


def judge(patch: str, base: Run, patched: Run, exceptions: Witness) -> list[WitnessTest]:
    """Compare a witness's run on the untouched tree with the one on the patched tree."""

    def whole(reason: str, *, crashed: str = "", detail: str = "") -> WitnessTest:
        return WitnessTest(
            patch=patch,
            witness=base.witness,
            test="(the whole witness)",
            guard=False,
            base="crashed" if crashed == BASE else "",
            patched="crashed" if crashed == PATCHED else "",
            reasons=(reason,),
            detail=detail,
        )

    checks = [
        whole(f"on the {_tree(run.side)}: {first}", crashed=run.side, detail=rest)
        for run in (base, patched)
        for first, _, rest in [run.problem.partition("\n")]
        if first
    ]
    if checks:
        return checks
    before, after = ({test.name: test for test in run.tests} for run in (base, patched))
    names = {**before, **after}
    every = replace(patched, tests=tuple(names.values()))
    requirements = {test.name: test for test in required(every, exceptions).tests}
    if not any(test.outcome == junit.FAILED for test in requirements.values()):
        checks.append(whole("has no test, guards aside: nothing shows that the patch is needed"))
    listed = _of((*exceptions.upstream, *exceptions.needed), base.witness)
    checks += [
        whole(f"has no test {name}, which [witness] in base.toml names")
        for name in sorted(listed - names.keys())
    ]
    for name in names:
        due = requirements[name].outcome if name in requirements else _ABSENT
        reasons: list[str] = []
        detail = ""
        for side, test, outcome in (
            (BASE, before.get(name), due),
            (PATCHED, after.get(name), junit.PASSED),
        ):
            if (test.outcome if test else _ABSENT) != outcome:
                reasons.append(_reason(side, test))
                detail = detail or (test.detail if test else "")
        checks.append(
            WitnessTest(
                patch=patch,
                witness=base.witness,
                test=name,
                guard=due == junit.PASSED,
                base=before[name].outcome if name in before else _ABSENT,
                patched=after[name].outcome if name in after else _ABSENT,
                reasons=tuple(reasons),
                detail=detail,
            )
        )
    return checks


_REASONS = {
    junit.PASSED: "passes on the {}: it does not show that the patch is needed",
    junit.FAILED: "fails on the {}",
    junit.ERROR: "did not get to run on the {}",
    junit.SKIPPED: "is skipped on the {}",
    _ABSENT: "is not there on the {}",
}


def _reason(side: str, test: junit.Test | None) -> str:
    """Return why the outcome of ``test`` on a tree is against the rule."""
    outcome = test.outcome if test else _ABSENT
    message = f": {test.said[:200]}" if test and test.said and outcome != junit.PASSED else ""
    return _REASONS[outcome].format(_tree(side)) + message


def _of(tests: Iterable[str], witness: str) -> set[str]:
    """Return the names of those of ``tests`` (path::test) that are the witness's."""
    prefix = f"{witness}::"
    return {name.removeprefix(prefix) for name in tests if name.startswith(prefix)}


def _tree(side: str) -> str:
    return "untouched base" if side == BASE else "patched tree"
