"""A run is watched on a terminal or through a pipe, and goes on when that is closed."""

import os
import pty
import sys
from collections.abc import Callable

import pytest

from penstock.launch.commands.train import tell
from penstock.launch.inspection.curve import Progress
from penstock.launch.inspection.live_view import make_view

STEPS = 100


def through_a_pipe() -> tuple[int, int]:
    """Both ends of a pipe: the reader's, and the run's."""
    return os.pipe()


def on_a_terminal() -> tuple[int, int]:
    """Both ends of a terminal."""
    return pty.openpty()


@pytest.mark.parametrize("ends", [through_a_pipe, on_a_terminal])
def test_a_run_goes_on_when_its_page_is_closed(ends: Callable[[], tuple[int, int]]) -> None:
    reader, own = ends()
    with os.fdopen(own, "w") as stream:
        with make_view(stream, "run", STEPS, None) as view:
            view.event("watched")
            os.close(reader)
            for steps in range(3):
                view.event(f"unwatched {steps}")
                view.show(Progress(env_steps=steps))
        stream.write("the end")
        stream.flush()


def test_a_summary_that_nobody_reads_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, own = through_a_pipe()
    os.close(reader)
    with os.fdopen(own, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        tell(["unread"])
