"""Reports of the stack, its witnesses and the release's tests as text. Returns strings."""

from __future__ import annotations

from collections.abc import Sequence

from sm12x.stack.model.series import Stack
from sm12x.stack.worktree.apply import ApplyReport, PatchResult
from sm12x_dev.witness import upstream_tests
from sm12x_dev.witness.upstream_tests import NEEDS, Report, Suite, UpstreamPlan, UpstreamResult
from sm12x_dev.witness.witness import WitnessReport, WitnessTest
from sm12x_dev.worktree.export import RefreshReport

_STATES = {
    "applied": "applied",
    "upstream": "already in base",
    "offset": "NOT APPLIED (its text has moved)",
    "conflict": "NOT APPLIED (conflict)",
}


def stack(stack: Stack, version: str) -> str:
    """The patches one by one: subject, trailers and changed files."""
    lines = [f"stack {stack.id} of {version}, {len(stack.patches)} patches"]
    for patch in stack.patches:
        lines += [
            "",
            f"{patch.name}",
            f"  {patch.subject}",
            f"  upstream   {patch.upstream}",
            f"  drop when  {patch.drop_when}",
            f"  witness    {patch.witness}",
            f"  changes    {', '.join(file.path for file in patch.files)}",
        ]
    return "\n".join(lines) + "\n"


def applied(report: ApplyReport) -> str:
    """The outcome of every patch; for one that failed, the place and both texts."""
    lines: list[str] = []
    for result in report.results:
        lines.append(f"{result.name}: {_STATES[result.state]}")
        lines += _failure(result)
    return "\n".join(lines) + "\n" if lines else "the series lists no patch\n"


def refreshed(report: RefreshReport, folder: str) -> str:
    """The effect of a refresh on the folder."""
    kinds = (
        ("new", report.added),
        ("rewritten", report.rewritten),
        ("removed", report.removed),
    )
    lines = [f"{kind}: {name}" for kind, names in kinds for name in names]
    lines.append(f"{len(report.unchanged)} unchanged; {folder} is now stack {report.stack_id}")
    return "\n".join(lines) + "\n"


_COLOURS = {"passed": "green", "failed": "red", "absent": "-"}


def witnessed(report: WitnessReport) -> str:
    """Red and green by patch and test; the cases of one test that went alike share a line.

    Failures are repeated at the end, with pytest's output: logs are often cut to their end.
    """
    lines: list[str] = []
    place = ("", "")
    for label, cases in _alike(report.checks):
        check = cases[0]
        if (check.patch, check.witness) != place:
            place = (check.patch, check.witness)
            lines += ["", check.patch, f"  {check.witness}"]
            lines.append(f"    {'base':9} {'patched':9} test")
        before = _COLOURS.get(check.base, check.base or "-")
        after = _COLOURS.get(check.patched, check.patched or "-")
        mark = " " if check.ok else "!"
        lines.append(f"  {mark} {before:9} {after:9} {label}{' (guard)' if check.guard else ''}")
        for reason in check.reasons:
            lines.append(f"      {reason}")
    failed = [check for check in report.checks if not check.ok]
    if failed:
        lines += ["", "failed:"]
    for check in failed:
        lines.append(f"  {check.witness}::{check.test} ({check.patch[:4]})")
        lines += [f"    {reason}" for reason in check.reasons]
        lines += [f"    | {line}" for line in check.detail.split("\n") if check.detail]
    lines.append("")
    if report.recorded:
        lines.append(f"untouched base: {report.recorded} witnesses are recorded, and were not run")
    lines.append(f"{report.passed} passed, {report.failed} failed")
    return "\n".join(lines).lstrip("\n") + "\n"


def _alike(checks: Sequence[WitnessTest]) -> list[tuple[str, list[WitnessTest]]]:
    """Checks of one parametrised test in a row, where all is well, as one; others alone."""
    groups: list[tuple[str, list[WitnessTest]]] = []
    for check in checks:
        stem = check.test.split("[")[0]
        last = groups[-1][1][-1] if groups else None
        if (
            last is not None
            and check.ok
            and last.ok
            and (check.patch, check.witness, check.base, check.patched)
            == (last.patch, last.witness, last.base, last.patched)
            and stem == last.test.split("[")[0]
        ):
            cases = groups[-1][1]
            cases.append(check)
            groups[-1] = (f"{stem} ({len(cases)} cases)", cases)
        else:
            groups.append((check.test, [check]))
    return groups


def _failure(result: PatchResult) -> list[str]:
    lines: list[str] = []
    if result.follows:
        lines.append(f"  may only follow from the failure of {', '.join(result.follows)}")
    return lines + [f"  git: {message}" for message in result.messages]


def upstream_listed(plan: UpstreamPlan, suite: Suite) -> str:
    """The tests of each changed file, and those that cannot run here, with the reasons."""
    lines: list[str] = []
    for file in plan.touched:
        lines.append(file.path)
        lines += [f"  {'run' if test in plan.files else 'not run':8} {test}" for test in file.tests]
        if not file.tests or file.why:
            lines.append(f"  {'none' if not file.tests else 'note':8} {file.why or 'see below'}")
    shown = [entry for entry in suite.cannot if entry.file in plan.files or entry in plan.not_run]
    lines += ["", f"cannot be green here ({len(shown)} entries of {suite.path.name}):"]
    for entry in shown:
        lines.append(f"  {entry.test}{'' if entry.run else '  (not run)'}")
        lines.append(f"      {NEEDS[entry.needs]}: {entry.why}")
    lines += _faults(plan)
    whole = sum(entry.test == entry.file for entry in plan.not_run)
    lines += ["", f"{len(plan.files)} test files are run, {whole} are not"]
    return "\n".join(lines) + "\n"


def upstream_report(report: Report) -> str:
    """The outcomes of the tests: first those not green on both trees, then the counts."""
    lines: list[str] = []
    unexplained = [result for result in report.of(upstream_tests.NOT_GREEN) if not result.why]
    explained = [result for result in report.of(upstream_tests.NOT_GREEN) if result.why]
    skipped = [result for result in report.of(upstream_tests.SAME) if result.base == "skipped"]
    for title, results in (
        ("skipped on both trees", skipped),
        ("green on neither tree, for the reason that is stated", explained),
        ("green on neither tree, and no reason is stated", unexplained),
        ("better on the patched tree", report.of(upstream_tests.BETTER)),
        ("flaky: worse on the patched tree once, and not when run again alone",
         report.of(upstream_tests.FLAKY)),
        ("WORSE ON THE PATCHED TREE", report.of(upstream_tests.WORSE)),
    ):  # fmt: skip
        if results:
            lines += [f"{title}: {len(results)}", *_results(results), ""]
    if report.plan.not_run:
        lines.append(f"not run: {len(report.plan.not_run)} test files, or tests in one")
        for entry in report.plan.not_run:
            lines.append(f"  {entry.test}")
            lines.append(f"      {NEEDS[entry.needs]}: {entry.why}")
        lines.append("")
    if report.stale:
        lines += [
            "reasons that no longer hold:",
            *(f"  {text}" for text in report.stale),
            "",
        ]
    lines += _faults(report.plan)
    same = len(report.of(upstream_tests.SAME))
    if report.recorded:
        lines.append(
            f"untouched tree: {report.recorded} files gave what is recorded of it, "
            f"{len(report.plan.files) - report.recorded} were run on it"
        )
    lines.append(
        f"{len(report.plan.files)} test files of {report.base_version}, {len(report.results)} "
        f"tests: {same - len(skipped)} green and {len(skipped)} skipped on both trees, "
        f"{len(report.of(upstream_tests.NOT_GREEN))} green on neither, "
        f"{len(report.of(upstream_tests.BETTER))} better, "
        f"{len(report.of(upstream_tests.FLAKY))} flaky, "
        f"{len(report.of(upstream_tests.WORSE))} worse on the patched tree"
    )
    return "\n".join(lines) + "\n"


def _results(results: Sequence[UpstreamResult]) -> list[str]:
    """By file; tests of a file that went alike for the same reason share a line."""
    lines: list[str] = []
    file = ""
    groups: dict[tuple[str, ...], list[UpstreamResult]] = {}
    for result in results:
        worse = result.verdict == upstream_tests.WORSE
        key = (
            result.file,
            f"{result.base} -> {result.patched}",
            " -> ".join(result.alone) if result.alone else "",
            result.test if worse else result.test.split("[", 1)[0],
            result.why or result.said[:160],
        )
        groups.setdefault(key, []).append(result)
    for (path, went, alone, name, why), members in groups.items():
        if path != file:
            file = path
            lines.append(f"  {file}")
        cases = f" ({len(members)} cases)" if len(members) > 1 else ""
        again = f"; alone: {alone}" if alone else ""
        lines.append(f"    {went}{again}  {name}{cases}")
        if why:
            lines.append(f"      {why}")
        if members[0].verdict == upstream_tests.WORSE and members[0].detail:
            lines += [f"      | {line}" for line in members[0].detail.split("\n")[-12:]]
    return lines


def _faults(plan: UpstreamPlan) -> list[str]:
    if not plan.faults:
        return []
    return ["faults of the list of tests:", *(f"  {fault}" for fault in plan.faults), ""]
