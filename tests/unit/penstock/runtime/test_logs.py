"""The shape of log lines."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.runtime import logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Logging of this process, as it was again after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stream(root: logging.Logger) -> io.StringIO:
    """Where this process logs during a test."""
    stream = io.StringIO()
    logs.configure("broker", "cartpole-1", stream=stream)
    return stream


@pytest.fixture
def objects(root: logging.Logger) -> io.StringIO:
    """Where it logs in JSON, before it knows its run."""
    stream = io.StringIO()
    logs.configure("actor", style="json", stream=stream)
    return stream


def test_a_line_has_time_level_role_message_and_fields(stream: io.StringIO) -> None:
    logging.getLogger("x").warning("slow append", extra={"seconds": 1.23456789, "why": "disk is full"})
    line = stream.getvalue().rstrip("\n")
    stamp, rest = line.split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == "warning broker slow append seconds=1.23457 why='disk is full' run=cartpole-1"


def test_a_value_cannot_begin_a_line_or_move_the_cursor(stream: io.StringIO) -> None:
    logging.getLogger("x").info("command", extra={"reason": "now\rinfo\x1b[2J", "by": "ε"})
    assert "reason='now\\rinfo\\x1b[2J' by=ε" in stream.getvalue()


def test_a_traceback_follows_its_line(stream: io.StringIO) -> None:
    try:
        int("bad byte")
    except ValueError:
        logging.getLogger("x").exception("failed")
    lines = stream.getvalue().splitlines()
    assert "error broker failed" in lines[0]
    assert lines[-1].startswith("ValueError: invalid literal")


def test_a_json_line_has_role_run_and_every_field(objects: io.StringIO) -> None:
    fields = {"seconds": 0.5, "count": 2, "odd": float("nan"), "where": Path("/a"), "why": "disk\nfull"}
    logging.getLogger("x").warning("slow append", extra=fields)
    (line,) = objects.getvalue().splitlines()
    read = json.loads(line)
    assert read.pop("time").endswith("Z")
    own = {"level": "warning", "role": "actor", "run": None, "logger": "x", "message": "slow append"}
    assert read == own | fields | {"odd": "nan", "where": "/a"}


def test_a_json_line_names_the_run_as_soon_as_it_is_known(objects: io.StringIO) -> None:
    logs.name_run("cartpole-1")
    logging.getLogger("x").info("ready", extra={"run": "other", "role": "other"})
    read = json.loads(objects.getvalue())
    assert (read["run"], read["role"]) == ("cartpole-1", "actor")


def test_a_traceback_is_a_field_of_its_json_line(objects: io.StringIO) -> None:
    try:
        int("bad byte")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = objects.getvalue().splitlines()
    assert json.loads(line)["exception"].splitlines()[-1].startswith("ValueError: invalid literal")


def test_lines_of_text_do_not_change_with_the_run(stream: io.StringIO) -> None:
    logs.name_run("other")
    logging.getLogger("x").info("ready")
    assert stream.getvalue().rstrip("\n").endswith("info broker ready run=cartpole-1")


def test_a_file_has_the_records_of_its_time(
    root: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launcher.log"
    file.write_text("of before\n")
    with logs.at_end_of(file, "launcher", "cartpole-1", style="text"):
        logging.getLogger("x").info("within")
    logging.getLogger("x").info("after")
    before, within = file.read_text().splitlines()
    assert (before, within.split(" ", 1)[1]) == ("of before", "info launcher within run=cartpole-1")
    (after,) = capsys.readouterr().err.splitlines()
    assert after.endswith("info launcher after run=cartpole-1")
