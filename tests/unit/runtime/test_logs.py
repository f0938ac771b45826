"""The shape of log lines."""

import io
import logging
from collections.abc import Iterator

import pytest

from penstock.runtime import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where this process logs during a test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("broker", "cartpole-1", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_has_time_level_role_message_and_fields(stream: io.StringIO) -> None:
    """Values with spaces are quoted, floats are short."""
    logging.getLogger("x").warning("slow append", extra={"seconds": 1.23456789, "why": "disk is full"})
    line = stream.getvalue().rstrip("\n")
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == "warning broker slow append seconds=1.23457 why='disk is full' run=cartpole-1"


def test_a_traceback_follows_its_line(stream: io.StringIO) -> None:
    """The cause is in the log."""
    try:
        int("bad byte")
    except ValueError:
        logging.getLogger("x").exception("failed")
    lines = stream.getvalue().splitlines()
    assert "error broker failed" in lines[0]
    assert lines[-1].startswith("ValueError: invalid literal")
