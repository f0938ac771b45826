"""Questions of a task, and what a task has.

    words        all words that questions, thoughts and answers are made of
    symbols      those of them that a thought is made of
    levels       how hard questions are, from the easiest; the last is what evaluations ask
    most_gain    nats that an honest thought gains at most; None: not known
    example      a question of a level, with its answer and the legal steps between them
    resume       what legally follows a thought so far, right or wrong, and the answer that it leads to

A task may have two parts more. `is_certain = False` says that not even the easiest question has an answer
for sure, so that a warm start ends where its loss falls no more, and evaluations ask all levels alike.
`random_thought(random, most)` gives up to `most` words that look like a thought and say nothing, where
symbols drawn alike would not.

`task_choice` opens a task by its name. A task is called through `ask` and `follow`, which say what it gets
wrong. This module loads no torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from penstock.config.settings import ConfigurationError

_SHARE: Final = 16
"""One question in so many is held out."""
_TRIES: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question with its answer.

    question, answer: words, at least one each. steps: the legal thought between them, without marks; () where
    none is needed. level: how hard it is.
    identity: equal for questions of which none may be trained on where another is tested.
    """

    question: tuple[str, ...]
    answer: tuple[str, ...]
    steps: tuple[str, ...]
    level: int
    identity: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """What legally follows a thought so far: the steps still to come, and the answer behind them."""

    steps: tuple[str, ...]
    answer: tuple[str, ...]


class Task(Protocol):
    """Makes questions; see the module's table."""

    @property
    def words(self) -> tuple[str, ...]:
        """Return all words, each once, none of them with a blank or in angle brackets."""
        ...

    @property
    def symbols(self) -> tuple[str, ...]:
        """Return the words that a thought is made of."""
        ...

    @property
    def levels(self) -> tuple[int, ...]:
        """Return the levels, the easiest first."""
        ...

    @property
    def most_gain(self) -> float | None:
        """Return the nats that an honest thought gains at most."""
        ...

    def example(self, random: np.random.Generator, level: int) -> Example:
        """Return a question of a level."""
        ...

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """Return what legally follows a thought so far on a question; None where nothing does.

        thought: any symbols, as many as a model may write.
        """
        ...


def ask(task: Task, random: np.random.Generator, level: int) -> Example:
    """Return a question of a level.

    Raises ConfigurationError where the task raises anything, or what it returns is no `Example` of tuples of
    words: a list would never equal the thought that it is held against.
    """
    call = f"environment.kwargs.task: example(random, {level!r})"
    try:
        example: Any = task.example(random, level)
    except Exception as error:
        raise ConfigurationError(f"{call} raised {type(error).__name__}: {error}") from error
    if not isinstance(example, Example):
        raise ConfigurationError(f"{call} returned {example!r}; return an Example")
    _check_words(call, question=example.question, answer=example.answer, steps=example.steps)
    identity: Any = example.identity
    if not isinstance(identity, str) or example.level != level:
        raise ConfigurationError(
            f"{call} returned identity={identity!r} and level={example.level!r}; identity is a text, "
            "and level the one that was asked for"
        )
    return example


def follow(task: Task, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
    """Return what legally follows a thought so far; raises ConfigurationError as `ask`."""
    call = f"environment.kwargs.task: resume({tuple(question)}, {tuple(thought)})"
    try:
        left: Any = task.resume(question, thought)
    except Exception as error:
        raise ConfigurationError(
            f"{call} raised {type(error).__name__}: {error}; return None where nothing follows, whatever the "
            "symbols of the thought"
        ) from error
    if left is None:
        return None
    if not isinstance(left, Continuation):
        raise ConfigurationError(f"{call} returned {left!r}; return a Continuation or None")
    _check_words(call, steps=left.steps, answer=left.answer)
    return left


def _check_words(call: str, **parts: Any) -> None:
    for name, part in parts.items():
        if not isinstance(part, tuple) or not all(isinstance(word, str) for word in part):
            raise ConfigurationError(f"{call} returned {name}={part!r}; give a tuple of words, each a text")


def is_held_out(example: Example) -> bool:
    """Return whether a question is only tested, by a hash of its identity."""
    return hashlib.sha256(example.identity.encode()).digest()[0] % _SHARE == 0


def draw(task: Task, random: np.random.Generator, level: int, *, held_out: bool) -> Example:
    """Return a question of a level from one side.

    Raises ConfigurationError where the task makes none of that side, and as `ask`.
    """
    for _ in range(_TRIES):
        example = ask(task, random, level)
        if is_held_out(example) is held_out:
            return example
    side = "held out" if held_out else "trained on"
    raise ConfigurationError(
        f"environment.kwargs.task: {_TRIES:,} questions of level {level}, and none is {side}: give examples "
        "more identities"
    )


def draw_mixed(task: Task, random: np.random.Generator, count: int) -> list[Example]:
    """Return so many questions to train on, of all levels alike."""
    levels = random.integers(len(task.levels), size=count)
    return [draw(task, random, task.levels[level], held_out=False) for level in levels]


def draw_tests(task: Task, seed: int, count: int, level: int | None = None) -> list[Example]:
    """Return so many held-out questions, equal for equal seeds.

    level: None: the hardest, or one after the other where none is harder than another.
    """
    random = np.random.default_rng(seed)
    hardest = task.levels[-1:] if getattr(task, "is_certain", True) else task.levels
    asked = hardest if level is None else (level,)
    return [draw(task, random, asked[number % len(asked)], held_out=True) for number in range(count)]
