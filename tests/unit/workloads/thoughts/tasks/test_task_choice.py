"""The task by its name: what is opened, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.thoughts.tasks import Continuation, Example, draw_tests, open_task


class Sums:
    """A task of one's own: a + b + c, with the sum of the first two as the thought."""

    words = tuple(f"{one}" for one in range(10))
    symbols = words
    levels = (1,)
    most_gain = None

    def example(self, random: np.random.Generator, level: int) -> Example:
        """Three digits and their sum modulo ten."""
        question = tuple(str(one) for one in random.integers(10, size=3))
        whole = self.resume(question, ())
        return Example(
            question=question, answer=whole.answer, steps=whole.steps, level=level, identity="".join(question)
        )

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation:
        """The sum of the first two, and that of it and the third."""
        first = str((int(question[0]) + int(question[1])) % 10)
        last = int(thought[-1]) if thought else int(first)
        return Continuation(() if thought else (first,), (str((last + int(question[2])) % 10),))


class WithoutResume:
    """A task that forgets a part."""

    words = symbols = ("a",)
    levels = (1,)


class Wordless(Sums):
    """A task whose answers are no words of it."""

    words = symbols = tuple(f"{one}" for one in range(5))


class Blank(Sums):
    """A task with a word of two."""

    words = (*Sums.words, "a b")


class Lying(Sums):
    """A task whose examples are not what follows from their questions."""

    def example(self, random: np.random.Generator, level: int) -> Example:
        """An answer that does not follow."""
        return replace(super().example(random, level), answer=("0",), steps=("0", "0"))


def without_its_file() -> Sums:
    """A task whose file is not there."""
    raise FileNotFoundError("letters.txt")


def of_size(size: int) -> Sums:
    """A task that asks for an argument."""
    raise AssertionError(size)


def test_a_task_of_ones_own_is_opened() -> None:
    task = open_task(f"{__name__}:Sums")
    assert draw_tests(task, 1, 3)[0].level == 1


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("mazes", "rings:N:HOPS"),
        ("rings:x:4", "rings:11:6"),
        ("rings:7:4:2", "rings:11:6"),
        ("rings:3:2", "4 to 26"),
        ("rings:5:2", "none is held out: .*; say rings:N:HOPS"),
        ("no_such_module:task", "cannot be loaded"),
        (f"{__name__}:without_its_file", "it raised FileNotFoundError: letters.txt"),
        (f"{__name__}:of_size", "called without arguments, .*'size'"),
        (f"{__name__}:WithoutResume", "example, resume"),
        (f"{__name__}:Wordless", "not made of its words"),
        (f"{__name__}:Blank", "has a blank"),
        (f"{__name__}:Lying", "resume"),
    ],
)
def test_what_is_no_task_is_refused_with_the_reason(place: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as refused:
        open_task(place)
    assert place in str(refused.value)
