"""The states of a model and the steps of a swap: what can follow what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sm12x.pool import state
from sm12x.pool.state import ENDS, FOLLOWING, Phase, Step


def walk(outcomes: list[bool], *, wakes: bool) -> list[tuple[Step, bool]]:
    step, steps = Step.DRAIN, []
    for well in outcomes:
        steps.append((step, well))
        step = state.following(step, well=well, wakes=wakes)
        if step in ENDS:
            break
    return [*steps, (step, True)]


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.booleans())
def test_every_swap_ends_and_says_truly_how(outcomes: list[bool], wakes: bool) -> None:
    steps = walk(outcomes, wakes=wakes)
    end = steps[-1][0]
    failed = [step for step, well in steps[:-1] if not well]
    assert end in ENDS
    assert (end is Step.DONE) == (not failed)
    assert (end is Step.CANCELLED) == (failed[:1] == [Step.DRAIN])


@given(st.lists(st.booleans(), min_size=8, max_size=8), st.booleans())
def test_nothing_wakes_up_before_the_memory_is_proved_free(
    outcomes: list[bool], wakes: bool
) -> None:
    steps = walk(outcomes, wakes=wakes)
    names = [step for step, _ in steps]
    if Step.WAKE in names:
        assert wakes
        assert steps[names.index(Step.WAKE) - 1] == (Step.PROVE, True)


@given(st.lists(st.booleans(), min_size=8, max_size=8))
def test_what_fails_after_a_sleep_is_restored(outcomes: list[bool]) -> None:
    steps = walk(outcomes, wakes=True)
    names = [step for step, _ in steps]
    if names[-1] is Step.FAILED:
        assert names[-2] is Step.RESTORE
    if Step.RETREAT in names:
        assert names[names.index(Step.RETREAT) - 1] in (Step.WAKE, Step.CANARY)
        assert names[names.index(Step.RETREAT) + 1] is Step.RESTORE


def test_no_step_follows_an_end() -> None:
    for end in ENDS:
        with pytest.raises(KeyError):
            state.following(end, well=True, wakes=True)


def test_every_phase_leads_back_to_awake() -> None:
    assert set(FOLLOWING) == set(Phase)
    leads = {Phase.AWAKE}
    for _ in Phase:
        leads |= {phase for phase, after in FOLLOWING.items() if after & leads}
    assert leads == set(Phase)


def test_no_model_is_served_before_its_canary() -> None:
    to_awake = {phase for phase, after in FOLLOWING.items() if Phase.AWAKE in after}
    assert Phase.STARTING not in to_awake
    assert Phase.STOPPED not in to_awake


@given(st.sampled_from(Phase), st.sampled_from(Phase))
def test_a_move_is_as_the_table_says(before: Phase, after: Phase) -> None:
    if after is before or after in FOLLOWING[before]:
        assert state.require_move(before, after) is after
    else:
        with pytest.raises(state.ForbiddenMoveError):
            state.require_move(before, after)
