"""The warm start: it goes on until steps are right, or refuses."""

import threading

import pytest

from penstock.config.preparation import Progress
from penstock.config.settings import ConfigurationError
from penstock.runtime.retry import Interrupted
from tests.support.thoughts.small_thoughts import LAYOUT, TASK
from workloads.thoughts.start.lessons import Lesson
from workloads.thoughts.start.transformer import build_transformer
from workloads.thoughts.start.warm_start import Teacher, right_steps, warm_start
from workloads.thoughts.tasks.example import draw_tests
from workloads.thoughts.thought_section import Thoughts


def test_one_that_does_not_get_its_steps_right_is_refused() -> None:
    """With what was reached, what is needed, and what may be raised."""
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    section = Thoughts(task="rings:6:3", start_updates=1)
    progress = Progress(lambda _: None, threading.Event())
    with pytest.raises(ConfigurationError, match=r"start_updates=1: .*0\.98 and 0\.99 are needed"):
        warm_start(network, TASK, LAYOUT, section, seed=0, progress=progress)


def test_it_ends_when_it_is_asked_to() -> None:
    """Between two updates."""
    stop = threading.Event()
    stop.set()
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    with pytest.raises(Interrupted):
        warm_start(network, TASK, LAYOUT, Thoughts(), seed=0, progress=Progress(lambda _: None, stop))


def test_a_lesson_that_is_repeated_is_learned() -> None:
    """Its loss falls to almost nothing, of the tokens from its start on."""
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    teacher = Teacher(network, LAYOUT, learning_rate=3e-2)
    lesson = Lesson(tuple(range(4, 14)), 6)
    losses = [teacher.teach([lesson]) for _ in range(60)]
    assert losses[0] > 1.0
    assert losses[-1] < 0.05


def test_right_steps_are_those_whose_likeliest_token_is_legal() -> None:
    """Chance for a network that knows nothing; all, where no thought has a step."""
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    assert right_steps(network, LAYOUT, draw_tests(TASK, 0, 64)) < 0.5
    assert right_steps(network, LAYOUT, draw_tests(TASK, 0, 8, level=1)) == 1.0
