"""Questions of a task, and the seam by which a task of one's own comes in.

A task is what `module:function` returns when it is called without arguments (`rings` is built in):

    words        all words that questions, thoughts and answers are made of
    symbols      those of them that a thought is made of
    levels       how hard questions are, from the easiest; the last is what evaluations ask
    most_gain    nats that an honest thought gains at most; None: not known
    example      a question of a level, with its answer and the legal steps between them
    resume       what legally follows a thought so far, right or wrong, and the answer that it leads to

Only configuration of this machine names such a function. This module loads no torch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.config.workload import load

RINGS: Final = "rings"
_SHARE: Final = 16
"""One question in so many is held out."""
_TRIES: Final = 20_000
_PARTS: Final = ("words", "symbols", "levels", "example", "resume")


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
        """Return what legally follows a thought so far on a question; None where nothing does."""
        ...


def open_task(place: str) -> Task:
    """Return a task: `rings`, `rings:N:HOPS`, or what `module:function` returns.

    Raises ConfigurationError for a place that names none, and for a task whose questions are not made of its
    words.
    """
    name, _, sizes = place.partition(":")
    if name == RINGS:
        return _rings(place, sizes)
    if ":" not in place:
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: no such task; say rings, rings:N:HOPS or module:function"
        )
    task: Any = load(place)()
    lacking = [part for part in _PARTS if not hasattr(task, part)]
    if lacking:
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: what it returns lacks {', '.join(lacking)}; a task has "
            f"{', '.join(_PARTS)} and most_gain (workloads/thoughts/tasks/example.py)"
        )
    _check(place, task)
    checked: Task = task
    return checked


def _rings(place: str, sizes: str) -> Task:
    from workloads.thoughts.tasks.rings import Rings  # noqa: PLC0415 - a task imports this module

    try:
        return Rings(*(int(one) for one in sizes.split(":"))) if sizes else Rings()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: {error}; say rings:N:HOPS, such as rings:11:6"
        ) from error


def _check(place: str, task: Any) -> None:
    """Ask a question of each level and hold it against what the task says of itself."""
    words, symbols = set(task.words), set(task.symbols)
    if not task.levels or not symbols or not symbols <= words or len(words) != len(task.words):
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: needs a level, symbols among its words, and each word once"
        )
    if any(not word or word.startswith("<") or any(map(str.isspace, word)) for word in words):
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: a word is empty, has a blank or begins with '<'"
        )
    random = np.random.default_rng(0)
    for level in task.levels:
        one = task.example(random, level)
        strange = {*one.question, *one.answer, *one.steps} - words
        if strange or not one.question or not one.answer or not symbols.issuperset(one.steps):
            raise ConfigurationError(
                f"environment.kwargs.task={place!r}: a question of level {level} is not made of its words: "
                f"{sorted(strange) or one}"
            )
        whole = task.resume(one.question, ())
        if whole is None or (whole.steps, whole.answer) != (one.steps, one.answer):
            raise ConfigurationError(
                f"environment.kwargs.task={place!r}: resume(question, ()) must give the steps and the answer "
                f"of the example; of level {level} it gave {whole}"
            )


def is_held_out(example: Example) -> bool:
    """Return whether a question is only tested, by a hash of its identity."""
    return hashlib.sha256(example.identity.encode()).digest()[0] % _SHARE == 0


def draw(task: Task, random: np.random.Generator, level: int, *, held_out: bool) -> Example:
    """Return a question of a level from one side.

    Raises ConfigurationError where the task makes none of that side.
    """
    for _ in range(_TRIES):
        example = task.example(random, level)
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
    """Return so many held-out questions, equal for equal seeds. level: None: the hardest."""
    random = np.random.default_rng(seed)
    asked = task.levels[-1] if level is None else level
    return [draw(task, random, asked, held_out=True) for _ in range(count)]
