"""What the sleep benchmark takes and writes; it measures on a GPU."""

from __future__ import annotations

import pytest
from benchmarks import sleep


def test_a_case_is_a_name_a_tree_and_words() -> None:
    case = sleep.case_of("keep=/a/tree+plugin+keep+unprepared")
    assert (case.name, case.tree) == ("keep", "/a/tree")
    assert case.plugin
    assert case.setting == "keep"
    assert not case.prepared
    plain = sleep.case_of("stock=../tree")
    assert (plain.plugin, plain.setting, plain.prepared, plain.gpus) == (False, "auto", True, 1)
    assert sleep.case_of("four=../tree+4").gpus == 4


@pytest.mark.parametrize(
    "text", ["tree", "=tree", "a=", "a=tree+fast", "a=tree+keep+auto", "a=tree+2+4", "a=tree+0"]
)
def test_what_is_no_case_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="TREE"):
        sleep.case_of(text)


def test_the_report_has_a_line_for_each_case() -> None:
    # GIVEN a case that was measured and one that failed
    measured = sleep.Times(
        case="kept",
        gib=17.0,
        blocks=341,
        prepare=1.0,
        first_sleep=0.5,
        later_sleeps=[0.04, 0.05, 0.06],
        wakes=[0.36, 0.37, 0.4],
        changed_sleep=0.05,
        bare_copy=0.33,
        host_gib_awake=17.0,
        device="A GPU",
        torch="1.2",
        driver="3.4",
    )
    failed = sleep.Times(case="stock", error="ended with -6")
    # WHEN they are reported
    lines = sleep.report([measured, failed], "the command").splitlines()
    # THEN both are there, with the factor of the wake
    assert any("A GPU, driver 3.4" in line for line in lines)
    assert "Command: `the command`" in lines
    times = "1.000 | 0.500 | 0.050 (0.060) | 0.050 | 0.370 (0.400) | 0.330 | 1.12 | 17.0"
    assert lines[-2] == f"| kept | 341 | {times} |"
    assert lines[-1].startswith("| stock | ended with -6 |")
    assert lines[-1].count("|") == lines[-2].count("|")


def test_of_several_processes_the_slowest_is_told() -> None:
    # GIVEN two processes: one is slower to sleep, the other to wake up, and makes a further step
    one = sleep.Times(
        case="two",
        gib=17.0,
        first_sleep=0.5,
        later_sleeps=[0.04, 0.06],
        wakes=[0.3, 0.3],
        bare_copy=0.33,
        host_gib_awake=17.0,
        steps={"later": {"unmap": (0.01, 0.05, 0.04)}},
    )
    other = sleep.Times(
        case="two",
        gib=17.0,
        first_sleep=0.4,
        later_sleeps=[0.05, 0.04],
        wakes=[0.4, 0.2],
        bare_copy=0.35,
        host_gib_awake=17.5,
        steps={"later": {"unmap": (0.02, 0.09, 0.03), "collect": (0.1, 0.2, 0.1)}},
    )
    # WHEN their figures are put together
    both = sleep.slowest([one, other])
    # THEN each is the slowest, run by run, and what was not taken has none
    assert (both.first_sleep, both.later_sleeps, both.wakes) == (0.5, [0.05, 0.06], [0.4, 0.3])
    assert (both.bare_copy, both.host_gib_awake, both.gib) == (0.35, 17.5, 17.0)
    assert (both.prepare, both.changed_sleep) == (None, None)
    assert both.steps == {"later": {"unmap": (0.01, 0.09, 0.04), "collect": (0.1, 0.2, 0.1)}}
    # AND where one has failed, its error alone
    failed = sleep.slowest([one, sleep.Times(case="two", error="ended with -9")])
    assert failed.error == "GPU 1: ended with -9"


def test_the_report_says_when_a_sleep_made_its_steps() -> None:
    first = {"touch": (0.01, 1.2, 18.0), "register": (0.1, 1.3, 0.9)}
    later = {"unmap": (0.01, 0.05, 0.04)}
    stock = sleep.Times(case="stock")
    kept = sleep.Times(case="kept", steps={"first": first, "later": later})
    lines = sleep.report([stock, kept], "the command").splitlines()
    assert lines[-3:] == [
        "| kept | first | touch | 0.010 | 1.200 | 18.000 |",
        "| kept | first | register | 0.100 | 1.300 | 0.900 |",
        "| kept | later | unmap | 0.010 | 0.050 | 0.040 |",
    ]
    assert sum(line.startswith("| stock |") for line in lines) == 1
