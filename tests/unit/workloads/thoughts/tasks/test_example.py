"""Which questions are held out, and a task that has none of a side."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.config.settings import ConfigurationError
from penstock.workloads.thoughts import tasks
from penstock.workloads.thoughts.tasks import Example, Rings, Task, draw_mixed, draw_tests, is_held_out


def test_held_out_questions_are_never_trained_on() -> None:
    task = Rings(7, 4)
    trained = {one.identity for one in draw_mixed(task, np.random.default_rng(0), 500)}
    tested = {one.identity for one in draw_tests(task, 0, 200)}
    assert not trained & tested
    assert tested == {one.identity for one in draw_tests(task, 0, 200) if is_held_out(one)}
    assert {one.level for one in draw_tests(task, 0, 20)} == {4}
    assert draw_tests(task, 5, 10) == draw_tests(task, 5, 10)


def test_a_task_without_a_question_of_a_side_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_TRIES", 50)
    task = Rings(7, 4)
    monkeypatch.setattr(
        task, "example", lambda random, level: replace(Rings.example(task, random, level), identity="one")
    )
    sides = [draw_or_none(task, held_out=held_out) for held_out in (True, False)]
    assert sides.count(None) == 1


def draw_or_none(task: Task, *, held_out: bool) -> Example | None:
    """A question, or None where it is refused."""
    try:
        return tasks.draw(task, np.random.default_rng(0), 1, held_out=held_out)
    except ConfigurationError:
        return None
