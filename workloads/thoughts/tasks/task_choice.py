"""The task by its name: `rings`, or one of one's own.

    rings, rings:N:HOPS   hops on a ring of N symbols
    text, text:N:NEXT     the next words of real text, of which N are shown
    text:N:NEXT:PLACES    the same at several places, one behind the other
    module:function       what the function returns when it is called without arguments

Only configuration of this machine names such a function. Parts and questions of a task are checked when it is
opened. This module loads no torch.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from penstock.config.settings import ConfigurationError
from penstock.config.workload import load
from workloads.thoughts.tasks.example import Task
from workloads.thoughts.tasks.rings import Rings
from workloads.thoughts.tasks.text import reference

_BUILT_IN: Final[dict[str, tuple[Callable[..., Task], str]]] = {
    "rings": (Rings, "rings:N:HOPS, such as rings:11:6"),
    "text": (reference, "text:N:NEXT or text:N:NEXT:PLACES, such as text:12:1:4"),
}
_PARTS: Final = ("words", "symbols", "levels", "example", "resume")


def open_task(place: str) -> Task:
    """Return a task: `rings` or `text` with sizes behind it, or what `module:function` returns.

    Raises ConfigurationError for a place that names none, and for a task whose questions are not made of its
    words.
    """
    name, _, sizes = place.partition(":")
    if name in _BUILT_IN:
        return _built_in(place, name, sizes)
    if ":" not in place:
        raise ConfigurationError(
            f"environment.kwargs.task={place!r}: no such task; say rings, rings:N:HOPS, text, text:N:NEXT or "
            "module:function"
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


def _built_in(place: str, name: str, sizes: str) -> Task:
    make, form = _BUILT_IN[name]
    try:
        return make(*(int(one) for one in sizes.split(":"))) if sizes else make()
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"environment.kwargs.task={place!r}: {error}; say {form}") from error


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
