"""What tests.gpu.serve takes for the same answers."""

from __future__ import annotations

import math

import pytest
from tests.gpu.serve import EXACT, Answers, Before


def before(*, steady: bool = True, noise: float = 0.0) -> Before:
    answers = Answers(texts=["one", "two"], likelihoods=[[-1.0, -2.0], [-3.0]])
    return Before(answers=answers, steady=[True, steady], noise=[0.0, noise])


def test_the_same_answers_have_no_difference() -> None:
    seen = before()
    assert seen.differences(seen.answers) == []


def test_another_text_is_a_difference_only_where_text_is_steady() -> None:
    now = Answers(texts=["one", "three"], likelihoods=[[-1.0, -2.0], [-3.0]])
    assert len(before().differences(now)) == 1
    assert before(steady=False).differences(now) == []


@pytest.mark.parametrize(("distance", "differs"), [(0.19, 0), (0.21, 1)])
def test_a_log_probability_may_be_off_by_twice_the_noise(distance: float, differs: int) -> None:
    now = Answers(texts=["one", "two"], likelihoods=[[-1.0, -2.0], [-3.0 - distance]])
    assert len(before(noise=0.1).differences(now)) == differs
    assert len(before().differences(now)) == 1
    assert distance > EXACT


def test_a_server_that_does_not_answer_is_different() -> None:
    silent = Answers(texts=["HTTP 0"], likelihoods=[[], []])
    found = before(steady=False).differences(silent)
    assert len(found) == 3
    assert silent.distances(silent) == [math.inf, math.inf]


def test_a_text_is_steady_only_where_log_probabilities_are() -> None:
    first = Answers(texts=["one", "two", "three"], likelihoods=[[-1.0], [-2.0], [-3.0]])
    again = Answers(texts=["one", "two", "four"], likelihoods=[[-1.0], [-2.2], [-3.0]])
    seen = Before.of(first, again)
    assert seen.steady == [True, False, False]
    assert seen.noise == pytest.approx([0.0, 0.2, 0.0])
    assert Before.of(first, Answers(texts=["one"], likelihoods=[[-1.0], [-2.0], []])).steady == [
        True,
        False,
        False,
    ]
