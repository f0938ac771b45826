"""The task by its name: `rings`, or one of one's own.

    rings, rings:N:HOPS   hops on a ring of N symbols
    text, text:N:NEXT     the next words of real text, of which N are shown
    text:N:NEXT:PLACES    the same at several places, one behind the other
    module:function       what the function returns when it is called without arguments

Only configuration of this machine names such a function. Parts and questions of a task are checked when it is
opened (`task_check`). This module loads no torch.
"""

from collections.abc import Callable
from typing import Any, Final

from penstock.config.settings import ConfigurationError
from penstock.config.workload import load
from penstock.workloads.thoughts.tasks.example import Task
from penstock.workloads.thoughts.tasks.rings import Rings
from penstock.workloads.thoughts.tasks.task_check import check_sides, check_task
from penstock.workloads.thoughts.tasks.text import reference

_BUILT_IN: Final[dict[str, tuple[Callable[..., Task], str]]] = {
    "rings": (Rings, "rings:N:HOPS, such as rings:11:6"),
    "text": (reference, "text:N:NEXT or text:N:NEXT:PLACES, such as text:12:1:4"),
}


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
