"""Tasks, which make questions (`Task`); the built-in ones, and the check of a user's own.

A task may have two more parts. `is_certain = False` says that even the easiest question has no certain
answer: a warm start then ends where its loss falls no further, and evaluations ask all levels equally.
`random_thought(random, most)` returns up to `most` words that look like a thought without information, for a
task of which uniformly drawn symbols would not.

`open_task` opens a task by its name. Call a task through `ask` and `follow`, which explain its mistakes. This
module loads no torch.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Final, Protocol

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.config.workload import load

_SHARE: Final = 16
"""One question in so many is held out."""
_TRIES: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question with its answer.

    question, answer: words, at least one each. steps: the legal thought between them, without marks; () where
    none is needed. level: the difficulty. identity: equal for questions that must all be trained on, or all
    be tested.
    """

    question: tuple[str, ...]
    answer: tuple[str, ...]
    steps: tuple[str, ...]
    level: int
    identity: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """The legal continuation of an unfinished thought: the remaining steps, and the answer after them."""

    steps: tuple[str, ...]
    answer: tuple[str, ...]


class Task(Protocol):
    """Makes questions."""

    @property
    def words(self) -> tuple[str, ...]:
        """Return all words, each once, none of them with a blank or in angle brackets."""

    @property
    def symbols(self) -> tuple[str, ...]:
        """Return the words that a thought may contain."""

    @property
    def levels(self) -> tuple[int, ...]:
        """Return the levels, the easiest first; evaluations ask the last."""

    @property
    def most_gain(self) -> float | None:
        """Return the nats that an honest thought gains at most; None: not known."""

    def example(self, random: np.random.Generator, level: int) -> Example:
        """Return a question of a level."""

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """Return the legal continuation of a thought, right or wrong, and the answer that it leads to.

        thought: any symbols, as many as a model may write. Returns None where there is no continuation.
        """


def ask(task: Task, random: np.random.Generator, level: int) -> Example:
    """Return a question of a level.

    Raises ConfigurationError where the task raises anything, or does not return an `Example` of tuples of
    words: a list would never equal the thought that it is compared with.
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
            "and level the one of the call"
        )
    return example


def follow(task: Task, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
    """Return the legal continuation of a thought; raises ConfigurationError as `ask`."""
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
    """Return whether a question is reserved for tests, by a hash of its identity."""
    return hashlib.sha256(example.identity.encode()).digest()[0] % _SHARE == 0


def draw(task: Task, random: np.random.Generator, level: int, *, held_out: bool) -> Example:
    """Return a question of a level, held out or not.

    Raises ConfigurationError where the task makes none of that kind, and as `ask`.
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
    """Return `count` questions to train on, of all levels equally."""
    levels = random.integers(len(task.levels), size=count)
    return [draw(task, random, task.levels[level], held_out=False) for level in levels]


def draw_tests(task: Task, seed: int, count: int, level: int | None = None) -> list[Example]:
    """Return `count` held-out questions, equal for equal seeds.

    level: None: the hardest; of a task without certain answers all in turn.
    """
    random = np.random.default_rng(seed)
    hardest = task.levels[-1:] if getattr(task, "is_certain", True) else task.levels
    levels = hardest if level is None else (level,)
    return [draw(task, random, levels[number % len(levels)], held_out=True) for number in range(count)]


# ---- Hops on a ring: which symbol is k steps from s? c>a b>d … a>b s k3 = f(f(f(s))). Every question has a
# new random ring f of n symbols, shown as its n edges in random order.


class Rings:
    """A `Task`. symbols: n. hops: k at most."""

    def __init__(self, symbols: int = 11, hops: int = 6) -> None:
        if not 4 <= symbols <= 26:
            raise ValueError(f"a ring has 4 to 26 symbols, not {symbols}")
        if not 2 <= hops <= symbols - 2:
            raise ValueError(f"on {symbols} symbols there are 2 to {symbols - 2} hops, not {hops}")
        self._hops = hops
        self.symbols = tuple("abcdefghijklmnopqrstuvwxyz"[:symbols])
        self.levels = tuple(range(1, hops + 1))

    @cached_property
    def words(self) -> tuple[str, ...]:
        edges = (f"{one}>{other}" for one in self.symbols for other in self.symbols if one != other)
        return (*self.symbols, *edges, *(f"k{hops}" for hops in self.levels))

    @property
    def most_gain(self) -> float:
        """Return ln(n − 1): without a thought only s itself can be excluded."""
        return math.log(len(self.symbols) - 1)

    def example(self, random: np.random.Generator, level: int) -> Example:
        order = [self.symbols[one] for one in random.permutation(len(self.symbols))]
        following = dict(zip(order, order[1:] + order[:1], strict=True))
        edges = [f"{one}>{other}" for one, other in following.items()]
        shown = [edges[one] for one in random.permutation(len(edges))]
        way = _walk(following, order[0], level)
        first = order.index(self.symbols[0])
        return Example(
            question=(*shown, order[0], f"k{level}"),
            answer=way[-1:],
            steps=way[:-1],
            level=level,
            identity="".join(order[first:] + order[:first]),
        )

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """Return the hops after the last symbol of a thought; None for other words or a long one."""
        left = int(question[-1].removeprefix("k")) - len(thought)
        if left < 1 or not set(thought) <= set(self.symbols):
            return None
        following = dict(edge.split(">") for edge in question[: len(self.symbols)])
        start = thought[-1] if thought else question[len(self.symbols)]
        way = _walk(following, start, left)
        return Continuation(way[:-1], way[-1:])


def _walk(following: dict[str, str], start: str, hops: int) -> tuple[str, ...]:
    way = [start]
    for _ in range(hops):
        way.append(following[way[-1]])
    return tuple(way[1:])


# ---- Real text: which words come next?

RARE: Final = "[rare]"
_STOP: Final = "|"
_WORD: Final = re.compile(r"[a-z]+|[.,;:?!]")
_LEAST_WORDS: Final = 24
"""Of a passage of the reference."""


class Text:
    """A `Task`. passages: texts. words: size of the vocabulary. context, following: words shown, and asked.

    places: successive places of a passage with a thought; levels are their numbers. behind: words of which
    one precedes every place; (): any.
    """

    most_gain = None
    is_certain = False
    """Even the easiest question has no certain answer."""

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
        """Raise ValueError where the passages have no place for a question."""
        if min(words - 2, context, following, places) < 1:
            raise ValueError(
                f"{words} words, {context} shown and {following} to predict at {places} places: raise the "
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
                    f"no passage has {self._shown(level)} words{chosen} and {following} known ones after them"
                )

    @cached_property
    def _places(self) -> dict[int, list[tuple[int, int]]]:
        """By level, passage and first word of each question; of equal questions the first answer counts."""
        places: dict[int, list[tuple[int, int]]] = {level: [] for level in self.levels}
        for level, found in places.items():
            for number, passage in enumerate(self._passages):
                for start in range(len(passage) - self._shown(level) - self._following + 1):
                    question, answer = self._at(number, start, level)
                    if RARE in answer or (self._behind and question[-1] not in self._behind):
                        continue
                    if self._answers.setdefault(question, answer) == answer:
                        found.append((number, start))
        return places

    def example(self, random: np.random.Generator, level: int) -> Example:
        places = self._places[level]
        number, start = places[random.integers(len(places))]
        question, answer = self._at(number, start, level)
        identity = " ".join(self._passages[number])
        return Example(question=question, answer=answer, steps=(), level=level, identity=identity)

    def resume(self, question: Sequence[str], thought: Sequence[str]) -> Continuation | None:
        """Return the answer for an empty thought; None for any other, since none is known to be legal."""
        answer = None if thought else self._answers.get(tuple(question))
        return None if answer is None else Continuation((), answer)

    def random_thought(self, random: np.random.Generator, most: int) -> tuple[str, ...]:
        """Return up to `most` words of a random place, which look like text without information."""
        places = self._places[self.levels[0]]
        number, start = places[random.integers(len(places))]
        return self._passages[number][start : start + int(random.integers(most + 1))]

    def _shown(self, level: int) -> int:
        return self._context + (level - 1) * self._following

    def _at(self, number: int, start: int, level: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        passage, border = self._passages[number], start + self._shown(level)
        return passage[start:border], passage[border : border + self._following]


@cache
def reference(context: int = 12, following: int = 1, places: int = 1) -> Text:
    """Return the task of Python's language reference. context, following, places: see `Text`.

    Raises ValueError for impossible sizes, and where this Python has no reference.
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


# ---- The check of a user's own task, on questions of each level before a run begins.

_PARTS: Final = ("words", "symbols", "levels", "example", "resume")
_ASKED: Final = 64
"""Questions of each level that are checked."""


def check_task(task: Any) -> None:
    """Raise ConfigurationError that names the first part of a task that does not fit."""
    lacking = [part for part in _PARTS if not _has(task, part)]
    if lacking:
        raise ConfigurationError(
            f"the task lacks {', '.join(lacking)}; a task has {', '.join(_PARTS)} and most_gain "
            "(penstock/workloads/thoughts/tasks.py)"
        )
    _check_names(task)
    words = frozenset(task.words)
    for level in task.levels:
        # With equal draws a task must return equal questions, in every process.
        random, again = np.random.default_rng(0), np.random.default_rng(0)
        for _ in range(_ASKED):
            example = ask(task, random, level)
            _check_example(task, example, words)
            if ask(task, again, level) != example:
                raise ConfigurationError(
                    f"example(random, {level}) gave two questions for equal draws; take all chance from "
                    "`random`"
                )
    check_sides(task)


def check_sides(task: Any) -> None:
    """Raise ConfigurationError where a level has no question for training, or none for tests."""
    random = np.random.default_rng(0)
    for level in task.levels:
        for is_tested in (False, True):
            draw(task, random, level, held_out=is_tested)


def _has(task: Any, part: str) -> bool:
    try:
        return hasattr(task, part)
    except Exception as error:  # hasattr passes on all but AttributeError
        raise ConfigurationError(f"{part} raised {type(error).__name__}: {error}") from error


def _check_names(task: Any) -> None:
    for part in ("words", "symbols"):
        given = getattr(task, part)
        if not isinstance(given, tuple | list) or not all(isinstance(word, str) for word in given):
            raise ConfigurationError(f"{part}={given!r}: give a tuple of words, each a text")
    if not isinstance(task.levels, tuple | list | range):
        raise ConfigurationError(f"levels={task.levels!r}: give a tuple of whole numbers, the easiest first")
    words, symbols = set(task.words), set(task.symbols)
    if not task.levels or not symbols or not symbols <= words or len(words) != len(task.words):
        raise ConfigurationError("needs a level, symbols among its words, and each word once")
    if any(not word or word.startswith("<") or any(map(str.isspace, word)) for word in words):
        raise ConfigurationError("a word is empty, has a blank or begins with '<'")
    if not all(isinstance(level, int) for level in task.levels) or len(set(task.levels)) != len(task.levels):
        raise ConfigurationError(f"levels={task.levels!r}: give whole numbers, each once, the easiest first")
    gain = getattr(task, "most_gain", None)
    if gain is not None and not (isinstance(gain, int | float) and math.isfinite(gain) and gain > 0.0):
        raise ConfigurationError(f"most_gain={gain!r}: give nats above 0, or None where it is not known")


def _check_example(task: Any, one: Example, words: frozenset[str]) -> None:
    strange = {*one.question, *one.answer, *one.steps} - words
    if strange or not one.question or not one.answer or not set(one.steps) <= set(task.symbols):
        raise ConfigurationError(
            f"a question of level {one.level} is not made of its words: {sorted(strange) or one}"
        )
    whole = follow(task, one.question, ())
    if whole is None or (whole.steps, whole.answer) != (one.steps, one.answer):
        raise ConfigurationError(
            "resume(question, ()) must give the steps and the answer of the example; of level "
            f"{one.level} it gave {whole}"
        )
    # A model may write another step, and more steps than needed.
    for thought in (tuple(task.symbols[:1]), (*one.steps, *one.steps, task.symbols[-1])):
        follow(task, one.question, thought)


# ---- The task of a name: `rings`, `text`, or a user's own.

_BUILT_IN: Final[dict[str, tuple[Callable[..., Task], str]]] = {
    "rings": (Rings, "rings:N:HOPS, such as rings:11:6"),
    "text": (reference, "text:N:NEXT or text:N:NEXT:PLACES, such as text:12:1:4"),
}


def open_task(place: str) -> Task:
    """Return a task: `rings` or `text`, with sizes after a colon, or the result of `module:function`.

    Raises ConfigurationError for a place that names no task, and for a task that `check_task` refuses.
    """
    name, _, sizes = place.partition(":")
    if name in _BUILT_IN:
        return _built_in(place, name, sizes)
    if ":" not in place:
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: no such task; write rings, rings:N:HOPS, text, text:N:NEXT "
            "or module:function"
        )
    make = load(place)
    try:
        task: Any = make()
    except Exception as error:
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: called without arguments, it raised "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        check_task(task)
    except ConfigurationError as error:
        raise ConfigurationError(f"environment.kwargs.task={place!r}: {_without_key(error)}") from error
    checked: Task = task
    return checked


def _without_key(error: Exception) -> str:
    return str(error).removeprefix("environment.kwargs.task: ")


def _built_in(place: str, name: str, sizes: str) -> Task:
    make, form = _BUILT_IN[name]
    try:
        task = make(*(int(one) for one in sizes.split(":"))) if sizes else make()
        check_sides(task)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: {_without_key(error)}; say {form}"
        ) from error
    return task
