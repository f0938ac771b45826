"""Real text: what comes next? Thoughts before continuations, as of a plain language model.

    w1 … w12   =   w13

A question is a place in a text: the words before it are shown, those behind it are the answer. Several places
of a passage can be thought about, one behind the other: level j asks for the j-th `following` words behind
the first `context`, and shows all before them. Nothing says what a thought should hold, so that no step is
legal and no mistake can be put into one: such a run can gain and can be called theatre, and its faithfulness
cannot be tested. Passages are held out whole.

The text of the name `text` is the reference of the Python language, as `pydoc_data.topics` of every
installation has it: some 50,000 words of prose. Small letters, digits left out; rare words are one and the
same word, and a full stop is "|", because "." is a mark.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Final

import numpy as np

from penstock.workloads.thoughts.tasks.example import Continuation, Example

RARE: Final = "[rare]"
_STOP: Final = "|"
_WORD: Final = re.compile(r"[a-z]+|[.,;:?!]")
_LEAST_WORDS: Final = 24
"""Of a passage of the reference."""


class Text:
    """A `Task`. passages: texts. words: told apart. context, following: words shown, and asked for.

    places: that are thought about, one behind the other; levels are their numbers. behind: words of which one
    stands before every place; (): any.
    """

    most_gain = None
    is_certain = False
    """Not even the easiest question has an answer for sure."""

    def __init__(
        self,
        passages: Sequence[str],
        *,
        words: int = 1000,
        context: int = 12,
        following: int = 1,
        places: int = 1,
        behind: Sequence[str] = (),
    ) -> None:
        """Raise ValueError where no place of the passages can be asked for."""
        if min(words - 2, context, following, places) < 1:
            raise ValueError(
                f"{words} words, {context} shown and {following} asked for at {places} places: raise the "
                "smallest"
            )
        self.levels = tuple(range(1, places + 1))
        self._context, self._following, self._behind = context, following, frozenset(behind)
        self._answers = dict[tuple[str, ...], tuple[str, ...]]()
        split = [_split(passage) for passage in passages]
        common = Counter(word for one in split for word in one).most_common(words - 1)
        known = {word for word, _ in common}
        self._passages = [tuple(word if word in known else RARE for word in one) for one in split]
        self.words = (RARE, *(word for word, _ in common))
        self.symbols = self.words
        for level, found in self._places.items():
            if not found:
                chosen = f" of which the last is one of {', '.join(behind)}" if behind else ""
                raise ValueError(
                    f"no passage has {self._shown(level)} words{chosen} and {following} known ones behind "
                    "them"
                )

    @cached_property
    def _places(self) -> dict[int, list[tuple[int, int]]]:
        """By level, passage and first word of each question; of equal ones the first answer counts."""
        places: dict[int, list[tuple[int, int]]] = {level: [] for level in self.levels}
        for level, found in places.items():
            for number, passage in enumerate(self._passages):
                for start in range(len(passage) - self._shown(level) - self._following + 1):
                    question, answer = self._at(number, start, level)
                    if RARE in answer or not self._is_chosen(question):
                        continue
                    if self._answers.setdefault(question, answer) == answer:
                        found.append((number, start))
        return places

    def example(self, random: np.random.Generator, level: int) -> Example:
        """Return a place of a text."""
        places = self._places[level]
        number, start = places[random.integers(len(places))]
        question, answer = self._at(number, start, level)
        identity = " ".join(self._passages[number])
        return Example(question=question, answer=answer, steps=(), level=level, identity=identity)

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """Return the answer where nothing was thought; None for any thought: none is known to be legal."""
        answer = None if thought else self._answers.get(tuple(question))
        return None if answer is None else Continuation((), answer)

    def random_thought(self, random: np.random.Generator, most: int) -> tuple[str, ...]:
        """Return up to `most` words from somewhere: they look like text and say nothing of the question."""
        places = self._places[self.levels[0]]
        number, start = places[random.integers(len(places))]
        return self._passages[number][start : start + int(random.integers(most + 1))]

    def _shown(self, level: int) -> int:
        """Words before the place of a level."""
        return self._context + (level - 1) * self._following

    def _is_chosen(self, question: tuple[str, ...]) -> bool:
        return not self._behind or question[-1] in self._behind

    def _at(self, number: int, start: int, level: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        passage, border = self._passages[number], start + self._shown(level)
        return passage[start:border], passage[border : border + self._following]


@cache
def reference(context: int = 12, following: int = 1, places: int = 1) -> Text:
    """Return the task of the reference of Python. context, following, places: see `Text`.

    Raises ValueError for sizes that cannot be, and where this Python has no reference.
    """
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte
    except ImportError as error:
        raise ValueError(
            "this Python has no pydoc_data: name a module:function that returns a Text"
        ) from error
    paragraphs = [part for text in topics.values() for part in text.split("\n\n")]
    # What is indented is code or grammar.
    prose = [part for part in paragraphs if not part.startswith("   ")]
    return Text(
        [part for part in prose if len(_split(part)) >= _LEAST_WORDS],
        context=context,
        following=following,
        places=places,
    )


def _split(text: str) -> list[str]:
    return [_STOP if word == "." else word for word in _WORD.findall(text.lower())]
