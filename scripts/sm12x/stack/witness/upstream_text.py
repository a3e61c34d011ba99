"""Reports on the release's own tests as text for people. Everything here returns strings."""

from __future__ import annotations

from collections.abc import Sequence

from sm12x.stack.witness import upstream_tests
from sm12x.stack.witness.upstream_tests import NEEDS, Report, Suite, UpstreamPlan, UpstreamResult


def listed(plan: UpstreamPlan, suite: Suite) -> str:
    """Which tests belong to which changed file, and which cannot run here, and why."""
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


def report(report: Report) -> str:
    """What became of the tests: first what is not green on both trees, then the counts."""
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
        lines += ["reasons that no longer hold:", *(f"  {text}" for text in report.stale), ""]
    lines += _faults(report.plan)
    same = len(report.of(upstream_tests.SAME))
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
