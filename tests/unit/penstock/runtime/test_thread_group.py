"""Threads live and die together."""

import threading

import pytest

from penstock.runtime.compute_threads import ThreadGroup
from penstock.runtime.retry import Interrupted


def test_the_first_error_of_a_thread_ends_all() -> None:
    thread_group, seen = ThreadGroup(), threading.Event()

    def fails() -> None:
        raise ValueError("the cause")

    def waits() -> None:
        thread_group.stop.wait()
        seen.set()

    thread_group.check()
    thread_group.start("waits", waits)
    thread_group.start("fails", fails)
    assert seen.wait(10)
    thread_group.join(10)
    with pytest.raises(ValueError, match="the cause"):
        thread_group.check()


def test_a_thread_that_is_interrupted_ends_quietly() -> None:
    thread_group = ThreadGroup()

    def interrupted() -> None:
        thread_group.stop.wait()
        raise Interrupted

    thread_group.start("interrupted", interrupted)
    thread_group.join(10)
    thread_group.check()
