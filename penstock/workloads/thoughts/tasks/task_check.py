"""What a task of one's own must hold to, tried on questions of each level before a run begins.

Loads no torch.
"""

import math
from typing import Any, Final

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.workloads.thoughts.tasks.example import Example, ask, draw, follow

_PARTS: Final = ("words", "symbols", "levels", "example", "resume")
_ASKED: Final = 64
"""Questions of each level that are tried."""


def check_task(task: Any) -> None:
    """Raise ConfigurationError for what does not fit, by the name of the part."""
    lacking = [part for part in _PARTS if not _has(task, part)]
    if lacking:
        raise ConfigurationError(
            f"what it returns lacks {', '.join(lacking)}; a task has {', '.join(_PARTS)} and most_gain "
            "(penstock/workloads/thoughts/tasks/example.py)"
        )
    _check_names(task)
    words = frozenset(task.words)
    for level in task.levels:
        # The same draws twice: a question that does not come from them alone is another in every process.
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
    """Raise ConfigurationError where a level has no question to train on, or none that is held out."""
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
    # What a model may write: another step, and more than is needed.
    for thought in (tuple(task.symbols[:1]), (*one.steps, *one.steps, task.symbols[-1])):
        follow(task, one.question, thought)
