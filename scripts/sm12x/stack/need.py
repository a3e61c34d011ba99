"""Whether a release still has the defect a patch is for, by the patch's witnesses.

A witness that is green on the untouched release says that the fix is there; one that is red says
that the defect is. A test that breaks before it gets to look (a module that was renamed, a header
that moved, a control that fails) says neither, and is told apart from a red one here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sm12x.stack import junit
from sm12x.stack.junit import Test
from sm12x.stack.witness import Run

NEEDED = "needed"
UPSTREAM = "upstream"
UNKNOWN = "unknown"

# What a test ends with that meets other code than it was written for, rather than the defect.
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
_HANGS = re.compile(r"^(?:Failed: )?hangs: no end after (\d+) s$")
# Seconds that the witnesses' conftest gives a test that is not marked as one that hangs. Whatever
# takes that long may be a busy machine; one that is marked has a limit of its own, which is less.
_PATIENCE = 60
_AT_LINE = re.compile(r"^\S+:\d+: (\w+)$")


@dataclass(frozen=True, kw_only=True)
class Need:
    """What the witnesses of a patch say of an untouched release.

    ``red``, ``green`` and ``silent`` are pytest ids of tests, guards aside: those that show the
    defect, those that do not, and those that did not get to look. ``why`` is the reason where
    ``state`` is "unknown", and what speaks against it elsewhere.
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


def judge(runs: Sequence[Run]) -> Need:
    """What ``runs`` of a patch's witnesses on an untouched release say."""
    red: list[str] = []
    green: list[str] = []
    silent: list[str] = []
    guards: list[str] = []
    whys: list[str] = []
    for run in runs:
        if run.problem:
            # The first line says what happened, the last what pytest said of it.
            said = [line for line in run.problem.split("\n") if line.strip()]
            whys.append(f"{run.witness}: {'; '.join(dict.fromkeys((said[0], said[-1])))}")
        for test in run.tests:
            name = f"{run.witness.split('::')[0]}::{test.name}"
            if test.guard:
                if test.outcome != junit.PASSED:
                    if test.outcome == junit.FAILED and not strange(test):
                        guards.append(name)
                    whys.append(f"the control {test.name} fails there: {_said(test)}")
            elif test.outcome == junit.PASSED:
                green.append(name)
            elif test.outcome == junit.FAILED and not strange(test):
                red.append(name)
            else:
                silent.append(name)
                whys.append(f"{test.name}: {_said(test)}")
    return Need(
        state=_state(red, green, silent, runs),
        red=tuple(red),
        green=tuple(green),
        silent=tuple(silent),
        failing_guards=tuple(guards),
        why=_shortened(whys),
    )


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
    """Whether a failed test met something else than the defect it looks for."""
    for line in (test.said, *test.detail.split("\n")):
        match = _HANGS.match(line.strip())
        if match:
            return int(match[1]) >= _PATIENCE
    return raised(test) in _STRANGE


def raised(test: Test) -> str:
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
