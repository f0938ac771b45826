"""Coherence and distance of thoughts."""

import math

import pytest

from penstock.workloads.thoughts.tasks import Rings
from penstock.workloads.thoughts.validation import coherence, edit_distance, legal_share

QUESTION = ("a>b", "b>c", "c>d", "d>e", "e>a", "a", "k3")


@pytest.mark.parametrize(
    ("words", "semantic", "syntactic"),
    [
        (("b", "c"), 1.0, 1.0),
        (("d", "e"), 0.5, 1.0),
        (("b", "."), 0.5, 0.5),
        (("b", "c", "d"), 2 / 3, 1.0),
        ((), 0.0, 0.0),
    ],
)
def test_coherence_weighs_steps_words_and_likelihood(
    words: tuple[str, ...], semantic: float, syntactic: float
) -> None:
    task, log_prob = Rings(5, 3), [math.log(0.5)] * (len(words) + 1)
    assert legal_share(task, QUESTION, words) == pytest.approx(semantic)
    expected = 0.4 * semantic + 0.3 * syntactic + 0.3 * 0.5
    assert coherence(task, QUESTION, words, log_prob) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [("", "", 0.0), ("abc", "abc", 0.0), ("abc", "", 1.0), ("kitten", "sitting", 3 / 7), ("ab", "ba", 1.0)],
)
def test_a_distance_is_a_share_of_the_longer(one: str, other: str, distance: float) -> None:
    assert edit_distance([*map(ord, one)], [*map(ord, other)]) == pytest.approx(distance)
