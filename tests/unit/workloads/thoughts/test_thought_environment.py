"""Lengths of a run: those of the longest of many questions, not of the first."""

from dataclasses import replace

import numpy as np

from penstock.config.settings import EnvironmentSection
from penstock.workloads.thoughts.environment import most_tokens
from penstock.workloads.thoughts.tasks import Continuation, Example, Rings


class Ragged(Rings):
    """Rings behind up to three words that say nothing."""

    def __init__(self) -> None:
        super().__init__(6, 2)

    def example(self, random: np.random.Generator, level: int) -> Example:
        """Of differing length."""
        one = super().example(random, level)
        return replace(one, question=(*one.question[:1] * int(random.integers(4)), *one.question))

    def resume(self, question: tuple[str, ...], thought: tuple[str, ...]) -> Continuation | None:  # type: ignore[override]
        """What is before the ring is not read."""
        return super().resume(question[-8:], thought)


def test_the_longest_question_counts() -> None:
    section = EnvironmentSection(id="ragged", kwargs={"task": f"{__name__}:Ragged", "thought_tokens": 4})
    assert most_tokens(section) == (1, 1 + 3 + 6 + 2 + 3 + 4 + 1)
