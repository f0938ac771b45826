"""Token ids of questions, thoughts and answers, and how they stand in a row.

    with a thought    <bos> question <think> thought </think> = answer
    without one       <bos> question = answer

A thought ends with `</think>`, which is part of what was sampled; one that its length ended gets it behind.
Loads no torch.
"""

from collections.abc import Sequence
from typing import Final

from penstock.config.settings import ConfigurationError
from penstock.workloads.thoughts.tasks.example import Task

Ids = tuple[int, ...]

SPECIAL: Final = ("<pad>", "<bos>", "<eos>", "<unk>")
"""First words of every tokenizer of `penstock.workloads.language.tiny_models`."""
MARKS: Final = ("<think>", "</think>", "=", ".")
"""Begin and end of a thought, what stands before an answer, and a filler that says nothing."""


class Layout:
    """Knows the tokens of one task; raises ValueError where a word of the task is a mark.

    pad, bos, think, end, equals, filler: ids of the marks. symbols: ids of what a thought is made of.
    """

    def __init__(self, task: Task) -> None:
        """Raise ValueError for a word that is a mark."""
        shared = set(task.words) & {*SPECIAL, *MARKS}
        if shared:
            raise ValueError(f"words of the task are marks: {sorted(shared)}")
        self.words = (*MARKS, *task.words)
        """All words but the special ones, as a tokenizer is built of them."""
        self._ids = {word: number for number, word in enumerate((*SPECIAL, *self.words))}
        self._word = tuple(self._ids)
        self.pad, self.bos = self._ids["<pad>"], self._ids["<bos>"]
        self.think, self.end, self.equals, self.filler = (self._ids[mark] for mark in MARKS)
        self.symbols = self.ids(task.symbols)

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens."""
        return len(self._ids)

    def ids(self, words: Sequence[str]) -> Ids:
        """Return the tokens of words; raises ConfigurationError for one that the task does not have."""
        try:
            return tuple(self._ids[word] for word in words)
        except KeyError as error:
            raise ConfigurationError(
                f"environment.kwargs.task: {error.args[0]!r} stands in a question or an answer, and is none "
                "of the task's words"
            ) from error

    def text(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the words of tokens."""
        return tuple(self._word[one] for one in ids)

    def question(self, words: Sequence[str]) -> Ids:
        """Return the tokens of a question."""
        return (self.bos, *self.ids(words))

    def thought(self, words: Sequence[str]) -> Ids:
        """Return the tokens of a whole thought."""
        return (*self.ids(words), self.end)

    def said(self, thought: Sequence[int]) -> Ids:
        """Return a thought without the mark that ends it."""
        return tuple(thought[:-1]) if thought and thought[-1] == self.end else tuple(thought)

    def begun(self, question: Ids, thought: Sequence[int] = ()) -> Ids:
        """Return what is read before a thought, or before the rest of one."""
        return (*question, self.think, *thought)

    def thinking(self, question: Ids, thought: Sequence[int], answer: Sequence[int]) -> Ids:
        """Return a row with a thought; what its length ended is closed."""
        return (*question, self.think, *self.said(thought), self.end, self.equals, *answer)

    def direct(self, question: Ids, answer: Sequence[int]) -> Ids:
        """Return a row without a thought."""
        return (*question, self.equals, *answer)
