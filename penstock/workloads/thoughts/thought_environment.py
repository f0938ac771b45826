"""The environment of thoughts, as the core asks for it: tokens are observed and tokens are chosen.

Nothing is stepped: a thought is generated whole, and rewarded by what the answer gains from it.
"""

from typing import Any, Final

from penstock.config.settings import ConfigurationError, EnvironmentSection
from penstock.protocol.spaces import Discrete, Space
from penstock.workloads.thoughts.tasks.example import Example, Task, ask
from penstock.workloads.thoughts.tasks.task_choice import open_task
from penstock.workloads.thoughts.thought_layout import Layout
from penstock.workloads.thoughts.thought_section import thoughts_section

_ASKED: Final = 64
"""Questions of each level by which the longest row is found."""


def task_of(section: EnvironmentSection) -> tuple[Task, Layout]:
    """Return the task of a run and how its rows are laid out; raises ConfigurationError."""
    place = thoughts_section(section).task
    task = open_task(place)
    try:
        return task, Layout(task)
    except ValueError as error:
        raise ConfigurationError(f"environment.kwargs.task={place!r}: {error}") from error


def spaces(section: EnvironmentSection) -> tuple[Space, Space]:
    """Return the spaces of the token at a position and of the token behind it; raises ConfigurationError."""
    vocabulary = Discrete(task_of(section)[1].vocabulary)
    return vocabulary, vocabulary


def target(section: EnvironmentSection) -> float | None:
    """Return None: `learner.target_return` says it. Raises ConfigurationError for kwargs that cannot be."""
    thoughts_section(section)
    return None


def make(section: EnvironmentSection, count: int, seed: int) -> Any:
    """Raises ConfigurationError: there is none to step."""
    del section, count, seed
    raise ConfigurationError("workload='thoughts': thoughts are generated, there is no environment to step")


def longest_legal_thought(section: EnvironmentSection) -> int:
    """Return the most steps of a legal thought, as `longest_row`."""
    return max(len(one.steps) for one in _asked(task_of(section)[0]))


def longest_row(section: EnvironmentSection) -> int:
    """Return the most tokens of a row with a thought, of some questions of every level of the task.

    Raises ConfigurationError.
    """
    task, layout = task_of(section)
    examples = _asked(task)
    most = max(len(layout.question(one.question)) + len(one.answer) for one in examples)
    # The mark that begins a thought, and those that close one and stand before the answer.
    return most + thoughts_section(section).thought_tokens + 3


def _asked(task: Task) -> list[Example]:
    import numpy as np  # noqa: PLC0415 - the launcher asks for the target alone

    random = np.random.default_rng(0)
    return [ask(task, random, level) for level in task.levels for _ in range(_ASKED)]
