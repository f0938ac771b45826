"""Rows that a model is taught with: answers without a thought, and thoughts of several kinds.

A lesson is a row and the index from which on its tokens are to be learned. Loads no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.workloads.thoughts.tasks.example import Example, Task, follow
from penstock.workloads.thoughts.thought_layout import Ids, Layout


@dataclass(frozen=True, slots=True)
class Lesson:
    """ids: the row. start: index of the first token that is learned."""

    ids: Ids
    start: int


class Lessons:
    """Makes lessons of one task; draws what it corrupts."""

    def __init__(self, task: Task, layout: Layout, random: np.random.Generator) -> None:
        self._task, self._layout, self._random = task, layout, random

    def direct(self, example: Example) -> Lesson:
        """Return the answer without a thought."""
        layout = self._layout
        question = layout.question(example.question)
        return Lesson(layout.direct(question, layout.ids(example.answer)), len(question) + 1)

    def thought(self, example: Example, words: Sequence[str], answer: Sequence[str]) -> Lesson:
        """Return a thought of these words, and the answer behind it."""
        layout = self._layout
        question = layout.question(example.question)
        row = layout.thinking(question, layout.thought(words), layout.ids(answer))
        return Lesson(row, len(question) + 1)

    def chain(self, example: Example) -> Lesson:
        """Return the legal thought."""
        return self.thought(example, example.steps, example.answer)

    def filler(self, example: Example, most: int) -> Lesson:
        """Return a thought that says nothing, as long as the legal one, or of `most` words where none is."""
        return self.thought(example, ["."] * (len(example.steps) or most), example.answer)

    def random(self, example: Example, most: int) -> Lesson:
        """Return a thought of up to `most` words that say nothing, and the true answer.

        They are symbols drawn at random, or what the task makes of them.
        """
        make = getattr(self._task, "random_thought", None)
        if make is not None:
            return self.thought(example, make(self._random, most), example.answer)
        drawn = self._random.choice(self._task.symbols, size=self._random.integers(most + 1))
        return self.thought(example, drawn.tolist(), example.answer)

    def empty(self, example: Example) -> Lesson:
        """Return a thought without a word, and the true answer."""
        return self.thought(example, (), example.answer)

    def corrupted(self, example: Example, wrong: float, most: int) -> Lesson:
        """Return a thought in which each step is wrong with this probability, and the true answer.

        It goes on legally from a wrong step, up to `most` words: from there the way may have no end. That the
        answer is true all the same keeps the model from being sure of what its own bad thoughts lead to:
        mistakes that are sure would cost so much that the first thing to be learned were not to think.
        """
        words: list[str] = []
        while len(words) < most:
            left = follow(self._task, example.question, words)
            if left is None or not left.steps:
                break
            step = left.steps[0]
            if self._random.random() < wrong:
                others = [one for one in self._task.symbols if one != step]
                step = others[self._random.integers(len(others))] if others else step
            words.append(step)
        return self.thought(example, words, example.answer)
