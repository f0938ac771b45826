"""Threads live and die together."""

import threading

import pytest

from learner.thread_group import Crew
from penstock.runtime.retry import Interrupted


def test_the_first_error_of_a_thread_ends_all() -> None:
    """It is raised where it is asked for, and the others are told to stop."""
    crew, seen = Crew(), threading.Event()

    def fails() -> None:
        raise ValueError("the cause")

    def waits() -> None:
        crew.stop.wait()
        seen.set()

    crew.check()
    crew.start("waits", waits)
    crew.start("fails", fails)
    assert seen.wait(10)
    crew.join(10)
    with pytest.raises(ValueError, match="the cause"):
        crew.check()


def test_a_thread_that_is_interrupted_ends_quietly() -> None:
    """Stopping is no error."""
    crew = Crew()

    def interrupted() -> None:
        crew.stop.wait()
        raise Interrupted

    crew.start("interrupted", interrupted)
    crew.join(10)
    crew.check()
