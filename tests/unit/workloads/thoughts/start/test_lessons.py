"""What a model is taught with."""

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.workloads.thoughts.environment import Layout
from penstock.workloads.thoughts.start import Lesson, Lessons
from penstock.workloads.thoughts.tasks import Continuation, Example
from tests.support.thoughts.small_thoughts import LAYOUT, TASK


@pytest.fixture
def lessons() -> Lessons:
    """Of the small rings."""
    return Lessons(TASK, LAYOUT, np.random.default_rng(0))


@pytest.fixture
def example() -> Example:
    """Three hops."""
    return TASK.example(np.random.default_rng(1), 3)


def learned(lesson: Lesson) -> tuple[str, ...]:
    """The words that are learned."""
    return LAYOUT.text(lesson.ids[lesson.start :])


def test_only_thought_and_answer_are_learned(lessons: Lessons, example: Example) -> None:
    assert learned(lessons.chain(example)) == (*example.steps, "</think>", "=", *example.answer)
    assert learned(lessons.filler(example, 4)) == (".", ".", "</think>", "=", *example.answer)
    assert learned(lessons.empty(example)) == ("</think>", "=", *example.answer)
    assert learned(lessons.direct(example)) == example.answer


def test_a_corrupted_thought_goes_on_legally_and_answers_truly(lessons: Lessons, example: Example) -> None:
    wrong = total = 0
    for _ in range(400):
        *words, end, equals, answer = learned(lessons.corrupted(example, 0.3, 5))
        assert (end, equals, answer) == ("</think>", "=", example.answer[0])
        assert len(words) == len(example.steps)
        for place, word in enumerate(words):
            left = TASK.resume(example.question, words[:place])
            assert left is not None
            wrong += left.steps[0] != word
            total += 1
    assert wrong / total == pytest.approx(0.3, abs=0.06)


class Circles:
    """A task in which each step leads to another, and none to an end: one symbol, or several."""

    words = ("a", "b")
    levels = (1,)
    most_gain = None

    def __init__(self, *symbols: str) -> None:
        self.symbols = symbols

    def example(self, random: np.random.Generator, level: int) -> Example:
        """Always the same."""
        del random
        return Example(question=("a",), answer=("b",), steps=("a",), level=level, identity="a")

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation:
        """The same step again."""
        del question, thought
        return Continuation(("a",), ("b",))


@pytest.mark.parametrize("symbols", [("a",), ("a", "b")])
def test_a_corrupted_thought_ends_where_its_way_does_not(symbols: tuple[str, ...]) -> None:
    task = Circles(*symbols)
    made = Lessons(task, Layout(task), np.random.default_rng(0))
    (lesson, again) = (made.corrupted(task.example(np.random.default_rng(0), 1), 0.5, 7) for _ in range(2))
    for one in (lesson, again):
        words = Layout(task).text(one.ids[one.start : -3])
        assert len(words) == 7
        assert set(words) <= set(symbols)


def test_random_thoughts_show_no_chain(lessons: Lessons, example: Example) -> None:
    drawn = [learned(lessons.random(example, 3))[:-3] for _ in range(300)]
    assert {len(words) for words in drawn} == {0, 1, 2, 3}
    assert sum(words == example.steps for words in drawn) < 30
