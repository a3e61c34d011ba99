"""What `verify` makes of texts, times, memory and speed."""

from __future__ import annotations

import pytest

from sm12x.verify import judge
from sm12x.verify.report import (
    AnswerReport,
    CheckReport,
    GpuUse,
    Limits,
    ServerReport,
    StressReport,
    TextVerdict,
    TurnReport,
)

GIB, MIB = 1024**3, 1024**2
SERVER = ServerReport(
    name="A",
    url="http://x",
    version="0.33.0",
    model="m",
    asleep_at_start=False,
    prompts=2,
    steady=2,
)


@pytest.mark.parametrize(
    ("text", "ids", "said"),
    [
        ("", None, "empty"),
        (" \n\n ", None, "empty"),
        ("!!!!!!!!!!!!", None, "!!!!!"),
        ("a village!!!!! by", None, "!!!!!"),
        ("Hello! A test! Really!", None, ""),
        ("the the the the the the the the the", None, "'the ' again and again"),
        ("0000000000000000", None, "'0' again and again"),
        ("abababababababababa", None, "'ab' again and again"),
        ("no no no no", None, ""),
        ("1. Mercury 2. Venus 3. Earth", None, ""),
        ("--------- a table", None, ""),
        ("x" * 7, None, ""),
        ("a b c d e f g h", (5, 5, 5, 5, 5, 5, 5, 5), "token 5 is 8 of 8 tokens"),
        ("a b c d e f g h", (5, 5, 5, 5, 5, 5, 5), ""),
        ("a b c d e f g h", (5, 5, 5, 5, 6, 6, 6, 6), ""),
    ],
)
def test_garbage(text: str, ids: tuple[int, ...] | None, said: str) -> None:
    assert judge.garbage(text, ids) == said


def test_a_long_text_is_judged_at_once() -> None:
    assert judge.garbage("ab" * 200_000 + "c") == ""
    assert judge.garbage("".join(f"{n} " for n in range(200_000))) == ""


def test_a_text_is_compared_with_all_that_were_seen_before() -> None:
    assert judge.compared("a", ("a", "a")) == "equal"
    assert judge.compared("b", ("a", "a")) == "differs"
    assert judge.compared("b", ("a", "b")) == "equal"
    assert judge.compared("c", ("a", "b")) == "unsteady"


def use(used: float | None, held: float | None = None, gpu: int = 0) -> tuple[GpuUse, ...]:
    def size(gib: float | None) -> int | None:
        return None if gib is None else int(gib * GIB)

    return (GpuUse(gpu=gpu, used=size(used), held=size(held)),)


def turn(
    cycle: int,
    *,
    sleep: float | None = 0.5,
    wake: float | None = 0.4,
    before: tuple[GpuUse, ...] | None = None,
    asleep: tuple[GpuUse, ...] | None = None,
    answers: tuple[AnswerReport, ...] | None = None,
    sleeps: str = "A",
    wakes: str = "A",
) -> TurnReport:
    return TurnReport(
        cycle=cycle,
        sleeps=sleeps,
        wakes=wakes,
        first_sleep=cycle == 1,
        first_wake=cycle == 1,
        sleep_seconds=sleep,
        wake_seconds=wake,
        answer_seconds=0.1,
        before=before,
        asleep=asleep,
        answers=answers,
    )


def stress(when: str, *, seconds: float = 10, **what: object) -> StressReport:
    settings: dict[str, object] = {
        "server": "A",
        "when": when,
        "requests": 30,
        "failed": 0,
        "garbled": 0,
        "seconds": seconds,
        "tokens": 1000,
        "median_seconds": 1.0,
        "slowest_seconds": 2.0,
        "drafted": None,
        "accepted": None,
        "faults": (),
    }
    return StressReport(**{**settings, **what})  # type: ignore[arg-type]


def answer(verdict: TextVerdict = "equal", garbage: str = "") -> AnswerReport:
    return AnswerReport(prompt=1, verdict=verdict, garbage=garbage, text="some text")


def judged(
    turns: list[TurnReport],
    bursts: list[StressReport] | None = None,
    *,
    server: ServerReport = SERVER,
    random_weights: bool = False,
    limits: Limits | None = None,
) -> dict[str, CheckReport]:
    found = judge.checks(
        limits or Limits(),
        [server],
        turns,
        bursts or [],
        random_weights=random_weights,
        memory_unseen="",
    )
    return {one.check: one for one in found}


def test_the_first_sleep_has_a_limit_of_its_own() -> None:
    found = judged([turn(1, sleep=20), turn(2, sleep=6), turn(3, sleep=1, wake=5.0)])
    assert found["first sleep"].verdict == "ok"
    assert (found["later sleeps"].verdict, found["later sleeps"].found) == ("breach", 6.0)
    assert found["wake-ups"].verdict == "ok", "5 s is within 5 s"
    assert "at most 5 s" in found["later sleeps"].text
    assert "later swaps to it" not in found


def test_what_was_not_measured_is_not_seen_and_no_breach() -> None:
    found = judged([turn(1, sleep=None, wake=None)])
    unseen = ["first sleep", "later sleeps", "wake-ups", "freed", "residue", "growth", "answers"]
    assert [name for name, one in found.items() if one.verdict == "not seen"][:7] == unseen
    assert all(found[name].found is None for name in unseen)
    assert not any(one.verdict == "breach" for one in found.values())


def test_a_swap_is_judged_without_first_sleeps() -> None:
    turns = [
        turn(1, sleep=30, wake=1, wakes="B"),
        turn(2, sleep=6, wake=5, wakes="B"),
    ]
    other = ServerReport(**{**vars(SERVER), "name": "B"})
    found = judged(turns, server=other)["later swaps to it"]
    assert (found.verdict, found.found) == ("breach", 11.0)


def test_residue_and_what_was_freed() -> None:
    good = [turn(n, before=use(41, 40), asleep=use(3, 2)) for n in (1, 2)]
    found = judged(good)
    assert (found["freed"].verdict, found["freed"].found) == ("ok", 0.95)
    assert (found["residue"].verdict, found["residue"].found) == ("ok", 2.0)
    found = judged([turn(1, before=use(41, 40), asleep=use(41, 40))])
    assert (found["freed"].verdict, found["residue"].verdict) == ("breach", "breach")


def test_without_processes_the_memory_of_all_counts_and_is_called_so() -> None:
    found = judged([turn(1, before=use(41), asleep=use(3))])
    assert found["residue"].found == 3.0
    assert "of all processes" in found["residue"].text


def test_a_gpu_that_the_server_is_not_on_is_left_out() -> None:
    before, asleep = use(41, 40) + use(80, None, gpu=1), use(3, 2) + use(80, None, gpu=1)
    found = judged([turn(n, before=before, asleep=asleep) for n in (1, 2)])
    assert found["freed"].verdict == "ok"
    assert (found["residue"].verdict, found["residue"].found) == ("ok", 2.0)


def test_growth_leaves_the_first_sleep_out_and_takes_four() -> None:
    def grown(*gib: float) -> CheckReport:
        turns = [
            turn(n, before=use(None, 40), asleep=use(None, size)) for n, size in enumerate(gib, 1)
        ]
        return judged(turns)["growth"]

    assert grown(2, 2, 2).verdict == "not seen"
    assert grown(1, 2, 2, 2).verdict == "ok"
    leak = 3 / 1024
    found = grown(2, 2, 2 + leak, 2 + 2 * leak)
    assert found.verdict == "breach"
    assert found.found == pytest.approx(6, abs=0.01)
    # One page of the driver, once.
    assert grown(2, 2, 2, 2 + 2 / 1024).verdict == "ok"


def test_other_text_is_a_breach_and_unsteady_text_is_unknown() -> None:
    assert judged([turn(1, answers=(answer(), answer()))])["answers"].verdict == "ok"
    found = judged([turn(1, answers=(answer(), answer("differs")))])["answers"]
    assert found.verdict == "breach"
    assert "1 of 2" in found.text
    assert "'some text'" in found.text
    unsteady = [turn(1, answers=(answer("unsteady"),))]
    never = ServerReport(**{**vars(SERVER), "steady": 0})
    assert judged(unsteady)["answers"].verdict == "ok"
    assert judged(unsteady, server=never)["answers"].verdict == "not seen"


def test_garbage_is_a_breach_wherever_it_was_said_unless_weights_are_random() -> None:
    turns = [turn(1, answers=(answer("differs", "!!!!!"),))]
    assert judged(turns)["garbage"].verdict == "breach"
    before = judged([], [stress("before", garbled=2, faults=("empty",))])["garbage"]
    assert before.verdict == "breach"
    assert "2 of them before any sleep" in before.text
    assert "garbage" not in judged(turns, random_weights=True)


def test_speed_and_acceptance_are_shares_of_those_before() -> None:
    both = [
        stress("before", drafted=100, accepted=80),
        stress("after", seconds=25, drafted=100, accepted=10, failed=1, faults=("a 500",)),
    ]
    found = judged([], both)
    assert (found["speed"].verdict, found["speed"].found) == ("breach", 0.4)
    assert (found["acceptance"].verdict, found["acceptance"].found) == ("breach", 0.125)
    assert found["requests"].verdict == "breach"
    assert "a 500" in found["requests"].text
    assert "acceptance" not in judged([], [stress("before"), stress("after")])
    assert judged([], both, limits=Limits(min_speed=0.3))["speed"].verdict == "ok"


def test_drafts_that_stop_altogether_are_not_taken_for_well() -> None:
    both = [stress("before", drafted=100, accepted=80), stress("after", drafted=0, accepted=0)]
    assert judged([], both)["acceptance"].verdict != "ok"


def test_the_verdict() -> None:
    good, bad = judged([turn(1, answers=(answer(),))]), judged([turn(1, sleep=99)])
    assert judge.verdict([*good.values()]) == "passed"
    assert judge.verdict([*bad.values()]) == "breached"
    assert judge.verdict([*judged([turn(1)]).values()]) == "unknown"
    assert judge.verdict([]) == "passed"
