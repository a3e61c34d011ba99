"""The outcome of each test, from pytest's junit file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

PASSED = "passed"
FAILED = "failed"
ERROR = "error"
SKIPPED = "skipped"
# Lines of a failure that are kept: its end says what was asserted.
_DETAIL = 30


@dataclass(frozen=True, kw_only=True)
class Test:
    """One test: ``outcome`` is "passed", "failed", "error" (not in the test itself) or "skipped".

    ``said`` is the first line of what it failed with, ``detail`` the end of its report.
    ``guard`` and ``patched_only`` are the marks of CONTRIBUTING.md. ``module`` is its file, as a
    dotted name from pytest's root.
    """

    name: str
    outcome: str
    guard: bool
    said: str
    detail: str
    seconds: float
    patched_only: bool = False
    module: str = ""

    # Not a test class, whatever pytest thinks of the name.
    __test__ = False


def read(path: Path) -> tuple[Test, ...]:
    """Read the tests of a junit file, in order.

    Raises:
        ValueError: the file is not there or was not written to its end.
    """
    try:
        # Written by the pytest that we started.
        root = ElementTree.parse(path).getroot()  # noqa: S314
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"{path.name}: {error}") from None
    tests: dict[tuple[str, str], Test] = {}
    for case in root.iter("testcase"):
        test = _test(case)
        earlier = tests.get((test.module, test.name))
        # A test that failed and whose teardown failed as well is two cases: the error counts.
        if earlier is None or test.outcome == ERROR:
            tests[test.module, test.name] = test
    return tuple(tests.values())


def _test(case: ElementTree.Element) -> Test:
    outcome, message, detail = PASSED, "", ""
    for kind, name in ((ERROR, "error"), (FAILED, "failure"), (SKIPPED, "skipped")):
        element = case.find(name)
        if element is not None:
            outcome = kind
            message = (element.get("message") or "").strip().split("\n")[0]
            detail = "\n".join((element.text or "").rstrip().split("\n")[-_DETAIL:])
            break
    marks = {item.get("name") for item in case.iter("property") if item.get("value") == "yes"}
    # "tests.witness.test_it.TestThis" -> "TestThis::name"; modules are lower case.
    parts = (case.get("classname") or "").split(".")
    classes = [part for part in parts if part[:1].isupper()]
    name = case.get("name") or "?"
    return Test(
        name="::".join([*classes, name]),
        # A file that cannot be collected is a case without a class, and its module is the name.
        module=".".join(part for part in parts if part not in classes) or name,
        outcome=outcome,
        guard="guard" in marks,
        said=message,
        detail=detail,
        seconds=float(case.get("time") or 0),
        patched_only="patched_only" in marks,
    )
