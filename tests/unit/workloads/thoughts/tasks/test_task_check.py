"""What a task of one's own gets wrong is said before a run begins, by the name of the part."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.thoughts.tasks import Continuation, Example, Rings, check_task


class Fine:
    """A task that holds to all of it: rings, told anew."""

    words, symbols = Rings(6, 2).words, Rings(6, 2).symbols
    levels: Any = (1, 2)
    most_gain: Any = None

    def example(self, random: np.random.Generator, level: int) -> Any:
        """As rings has it."""
        return Rings(6, 2).example(random, level)

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Any:
        """As rings has it."""
        return Rings(6, 2).resume(question, thought)


def with_parts(**parts: Any) -> Fine:
    """A task of which some parts are others."""
    made: Fine = type("Odd", (Fine,), parts)()
    return made


def examples(change: Callable[[Example, np.random.Generator], Any]) -> Fine:
    """A task whose examples are changed. change: gets the example and its source of chance."""

    def example(self: Fine, random: np.random.Generator, level: int) -> Any:
        return change(Fine.example(self, random, level), random)

    return with_parts(example=example)


def replace(example: Example, **parts: Any) -> Any:
    """The example with parts that its class does not take."""
    return dataclasses.replace(example, **parts)


def in_time(example: Example, random: np.random.Generator) -> Example:
    """Now and then a question fails."""
    if random.random() < 0.05:
        raise LookupError("no more questions")
    return example


def unready(self: Fine) -> Any:
    """A part that cannot be made."""
    raise OSError("no list of words")


OTHER_CHANCE = np.random.default_rng(1)


def as_list(self: Fine, question: Sequence[str], thought: Sequence[str]) -> Any:
    """Steps as a list, which equals no thought."""
    left = Fine.resume(self, question, thought)
    return left and Continuation(list(left.steps), left.answer)  # type: ignore[arg-type]


def of_any_length(self: Fine, question: Sequence[str], thought: Sequence[str]) -> Any:
    """Fails at a thought that is too long."""
    left = Fine.resume(self, question, thought)
    assert left is not None
    return left


def test_a_task_that_fits_is_taken() -> None:
    check_task(Fine())
    check_task(Rings(7, 4))


@pytest.mark.parametrize(
    ("task", "named"),
    [
        (with_parts(words=(word for word in Fine.words)), "words=.*a tuple of words"),
        (with_parts(symbols="abcde"), "symbols='abcde'"),
        (with_parts(levels=("easy", "hard")), "levels=.*whole numbers"),
        (with_parts(levels=(1, 1)), "levels=.*each once"),
        (with_parts(levels=3), "levels=3: give a tuple"),
        (with_parts(levels={1, 2}), "levels={1, 2}: give a tuple"),
        (with_parts(words=property(unready)), "words raised OSError: no list of words"),
        (with_parts(most_gain="1.9"), "most_gain='1.9'"),
        (with_parts(most_gain=float("nan")), "most_gain=nan"),
        (examples(lambda *_: ("a", "b")), r"example\(random, 1\) returned \('a', 'b'\)"),
        (examples(lambda one, _: replace(one, answer=one.answer[0])), "answer='.'; give a tuple"),
        (examples(lambda one, _: replace(one, question=list(one.question))), r"question=\["),
        (examples(lambda one, _: replace(one, identity=7)), "identity=7"),
        (examples(lambda one, _: replace(one, level=9)), "level=9"),
        (examples(lambda one, _: replace(one, identity="one")), "20,000 questions of level 1, and none is"),
        (examples(in_time), "raised LookupError: no more questions"),
        (examples(lambda one, _: Fine().example(OTHER_CHANCE, one.level)), "two questions for equal draws"),
        (
            examples(lambda one, random: replace(one, answer=("z",)) if random.random() < 0.05 else one),
            r"not made of its words: \['z'\]",
        ),
        (with_parts(resume=lambda *_: ((), ())), "return a Continuation or None"),
        (with_parts(resume=as_list), r"steps=\["),
        (with_parts(resume=of_any_length), "raised AssertionError.*return None where nothing follows"),
    ],
)
def test_what_does_not_fit_is_named(task: Fine, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_task(task)
