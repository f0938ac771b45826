"""The warm start: it goes on until steps are right, or refuses."""

import threading

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError, Progress
from penstock.runtime.retry import Interrupted
from penstock.workloads.thoughts.environment import Layout, Thoughts
from penstock.workloads.thoughts.start import (
    Lesson,
    Lessons,
    Teacher,
    build_transformer,
    measure_loss,
    right_steps,
    warm_start,
)
from penstock.workloads.thoughts.tasks import Text, draw_tests
from tests.support.thoughts.small_thoughts import LAYOUT, TASK


def test_one_that_does_not_get_its_steps_right_is_refused() -> None:
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    section = Thoughts(task="rings:6:3", start_updates=1)
    progress = Progress(lambda _: None, threading.Event())
    with pytest.raises(ConfigurationError, match=r"start_updates=1: .*0\.98 and 0\.99 are needed"):
        warm_start(network, TASK, LAYOUT, section, seed=0, progress=progress)


def test_it_ends_when_it_is_asked_to() -> None:
    stop = threading.Event()
    stop.set()
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    with pytest.raises(Interrupted):
        warm_start(network, TASK, LAYOUT, Thoughts(), seed=0, progress=Progress(lambda _: None, stop))


@pytest.mark.slow
def test_a_task_without_certain_answers_is_learned_until_its_loss_falls_no_more() -> None:
    task = Text(
        [f"{one} one two three four five six" for one in "abcdefghijklmnopqrstuvwxyz"], context=2, following=1
    )
    layout = Layout(task)
    network = build_transformer(layout, seed=0, hidden=16, layers=1)
    said = list[str]()
    section, progress = Thoughts(start="random"), Progress(said.append, threading.Event())
    tests = [Lessons(task, layout, np.random.default_rng(0)).direct(one) for one in draw_tests(task, 2, 64)]
    before = measure_loss(network, layout, tests)
    started = warm_start(network, task, layout, section, seed=0, progress=progress)
    assert started.loss is not None
    assert started.loss < 0.5 * before
    assert measure_loss(network, layout, tests) == pytest.approx(started.loss, abs=0.05)
    assert 0 < started.updates < section.start_updates
    assert started.right_steps is None


def test_a_lesson_that_is_repeated_is_learned() -> None:
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    teacher = Teacher(network, LAYOUT, learning_rate=3e-2)
    lesson = Lesson(tuple(range(4, 14)), 6)
    losses = [teacher.teach([lesson]) for _ in range(60)]
    assert losses[0] > 1.0
    assert losses[-1] < 0.05


def test_right_steps_are_those_whose_likeliest_token_is_legal() -> None:
    network = build_transformer(LAYOUT, seed=0, hidden=16, layers=1)
    assert right_steps(network, LAYOUT, draw_tests(TASK, 0, 64)) < 0.5
    assert right_steps(network, LAYOUT, draw_tests(TASK, 0, 8, level=1)) == 1.0
