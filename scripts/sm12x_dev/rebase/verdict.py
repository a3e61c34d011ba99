"""Whether a release still has the defect a patch is for, by the patch's witnesses.

A witness that is green on the untouched release says that the fix is there; one that is red says
that the defect is. A test that breaks before its check (a module that was renamed, a header that
moved, a control that fails) says neither, and does not count as red.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from packaging.version import Version

from sm12x_dev.witness import junit
from sm12x_dev.witness.junit import Test
from sm12x_dev.witness.witness import Run

NEEDED = "needed"
UPSTREAM = "upstream"
UNKNOWN = "unknown"

# Exceptions of a test that met other code than it was written for, not the defect.
_STRANGE = frozenset(
    {
        "AttributeError",
        "CalledProcessError",
        "FileNotFoundError",
        "ImportError",
        "KeyError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "SyntaxError",
        "TypeError",
        "ValidationError",
    }
)
_RAISED = re.compile(r"^(?:E +)?(?:\w+\.)*(\w+(?:Error|Exception|Failed|Interrupt))\b")
_HANGS = re.compile(
    r"^(?:Failed: )?hangs: no end(?: after (?P<limit>\d+) s|, and nothing done for \S+ s)$"
)
# Seconds that the witnesses' conftest gives a test. A test that computes for that long may be on a
# busy machine; one that only waits is a deadlock.
_PATIENCE = 60
# Those of them that the defect itself can cause: it did if the patch's own release fails alike.
_EITHER = _STRANGE - {"ImportError", "ModuleNotFoundError", "NameError", "SyntaxError"}
# Memory addresses, which differ in each run.
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b|\b\d{11,}\b")
_AT_LINE = re.compile(r"^\S+:\d+: (\w+)$")


@dataclass(frozen=True, kw_only=True)
class PatchVerdict:
    """What the witnesses of a patch say of an untouched release.

    ``red``, ``green`` and ``silent`` are pytest ids of tests, guards aside: those that show the
    defect, those that do not, and those that broke before their check. ``why`` is the reason where
    ``state`` is "unknown", else any evidence against ``state``.
    """

    state: str
    red: tuple[str, ...] = ()
    green: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    failing_guards: tuple[str, ...] = ()
    why: str = ""

    @property
    def summary(self) -> str:
        """Such as "9 of 11 red", "" where nothing ran."""
        total = len(self.red) + len(self.green) + len(self.silent)
        if not total:
            return ""
        if self.state == UPSTREAM:
            return f"{total} of {total} green"
        tail = f", {len(self.silent)} could not run" if self.silent else ""
        return f"{len(self.red)} of {total} red{tail}"


def without_addresses(text: str) -> str:
    """``text`` with every address replaced: a record must be the same in each run."""
    return _ADDRESS.sub("ADDRESS", text)


def doubtful(runs: Sequence[Run]) -> bool:
    """Whether a failure in ``runs`` may be the defect or not: a run on its own base would tell."""
    return any(
        not test.guard and test.outcome == junit.FAILED and _raised(test) in _EITHER
        for run in runs
        for test in run.tests
    )


def repeated(first: Run, second: Run) -> Run:
    """``first``, with the outcome of ``second`` for the controls that failed once and not again.

    One failure of a control that depends on a memory address is no evidence.
    """
    again = {test.name: test for test in second.tests}
    return replace(
        first,
        tests=tuple(
            again[test.name]
            if test.guard
            and test.outcome != junit.PASSED
            and test.name in again
            and again[test.name].outcome == junit.PASSED
            else test
            for test in first.tests
        ),
    )


def judge(runs: Sequence[Run], own: Sequence[Run] = ()) -> PatchVerdict:
    """The verdict of ``runs`` of a patch's witnesses on an untouched release.

    Args:
        own: the runs of the same witnesses on the untouched release that the patch was made for,
            where every one of these tests shows the defect.
    """
    known = _known(own)
    red: list[str] = []
    green: list[str] = []
    silent: list[str] = []
    guards: list[str] = []
    whys: list[str] = []
    for run in runs:
        if run.problem:
            # The first line is what happened, the last one is pytest's message.
            said = [line for line in run.problem.split("\n") if line.strip()]
            whys.append(f"{run.witness}: {'; '.join(dict.fromkeys((said[0], said[-1])))}")
        for test in run.tests:
            name = f"{run.witness.split('::')[0]}::{test.name}"
            if test.guard:
                if test.outcome != junit.PASSED:
                    about = _ADDRESS.search(f"{test.said}\n{_said(test)}") is not None
                    if test.outcome == junit.FAILED and not strange(test) and not about:
                        guards.append(name)
                    whys.append(f"the control {test.name} fails there: {_said(test)}")
            elif test.outcome == junit.PASSED:
                green.append(name)
            elif test.outcome == junit.FAILED and (
                not strange(test) or known.get(name) == _failure(test)
            ):
                red.append(name)
            else:
                silent.append(name)
                whys.append(f"{test.name}: {_said(test)}")
    return PatchVerdict(
        state=_state(red, green, silent, runs),
        red=tuple(red),
        green=tuple(green),
        silent=tuple(silent),
        failing_guards=tuple(guards),
        why=without_addresses(_shortened(whys)),
    )


def _known(own: Sequence[Run]) -> dict[str, tuple[str, str]]:
    """How the tests of ``own`` fail, by name; of runs in which no control fails."""
    found: dict[str, tuple[str, str]] = {}
    for run in own:
        controls = [test for test in run.tests if test.guard]
        if run.problem or any(test.outcome != junit.PASSED for test in controls):
            continue
        for test in run.tests:
            if test.outcome == junit.FAILED and _raised(test) in _EITHER:
                found[f"{run.witness.split('::')[0]}::{test.name}"] = _failure(test)
    return found


def _failure(test: Test) -> tuple[str, str]:
    """The exception a test ended with, and its text without what differs from run to run."""
    return _raised(test), re.sub(r"\d+", "N", without_addresses(_said(test)))


def _state(
    red: Sequence[str], green: Sequence[str], silent: Sequence[str], runs: Sequence[Run]
) -> str:
    if red:
        return NEEDED
    controls = [test for run in runs for test in run.tests if test.guard]
    if silent or not green or any(run.problem for run in runs):
        return UNKNOWN
    return UPSTREAM if all(test.outcome == junit.PASSED for test in controls) else UNKNOWN


def strange(test: Test) -> bool:
    """Whether a test failed for another reason than the defect that it checks."""
    for line in (test.said, *test.detail.split("\n")):
        match = _HANGS.match(line.strip())
        if match:
            return match["limit"] is not None and int(match["limit"]) >= _PATIENCE
    return _raised(test) in _STRANGE


def _raised(test: Test) -> str:
    """The name of the exception a test ended with, "" where its report does not say."""
    for line in reversed([*test.said.split("\n"), *test.detail.split("\n")]):
        match = _RAISED.match(line.strip()) or _AT_LINE.match(line.strip())
        if match:
            return match[1]
    return ""


def _said(test: Test) -> str:
    lines = [line.strip() for line in test.detail.split("\n") if _RAISED.match(line.strip())]
    return (lines[-1].removeprefix("E").strip() if lines else test.said or test.outcome)[:200]


def _shortened(whys: Sequence[str]) -> str:
    different = list(dict.fromkeys(whys))
    more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
    return f"{different[0]}{more}" if different else ""


def between(releases: Sequence[str], start: str, end: str) -> list[str]:
    """Those of ``releases`` after ``start`` and before ``end``, oldest first."""
    inside = [text for text in releases if Version(start) < Version(text) < Version(end)]
    return sorted(inside, key=Version)


def first(
    candidates: Sequence[str], last: str, probe: Callable[[str], PatchVerdict]
) -> tuple[str, dict[str, PatchVerdict]]:
    """The first of ``candidates`` with the fix, else ``last``, and the result of each probe.

    Assumes that every release after one with the fix has it too; a release on which the witness
    could not run counts as one without it.

    Args:
        candidates: releases, oldest first, all before ``last``, which has the fix.
    """
    said: dict[str, PatchVerdict] = {}
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        said[candidates[middle]] = probe(candidates[middle])
        if said[candidates[middle]].state == UPSTREAM:
            high = middle
        else:
            low = middle + 1
    return (candidates[low] if low < len(candidates) else last), said
