"""Log lines on stderr: `time level role message key=value …`, or the same as one JSON object per line.

Fields are given as `extra={"key": value}`. A repeated call of `configure` replaces the handler.
"""

import io
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TextIO

Format = Literal["text", "json"]

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class _Formatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self, role: str, run: str | None) -> None:
        super().__init__()
        self.role = role
        self.run = run or None

    def stamp(self, record: logging.LogRecord) -> str:
        return f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z"


class KeyValueFormatter(_Formatter):
    """Formats one line per record; a traceback, where there is one, follows it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if self.run:
            fields.setdefault("run", self.run)
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        level = record.levelname.lower()
        line = f"{self.stamp(record)} {level} {self.role} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(_Formatter):
    """Formats one JSON object per record.

    Its fields are time, level, role, run (null until it is known), logger, message, `exception` for a
    traceback, then those of the record with other names.
    """

    def format(self, record: logging.LogRecord) -> str:
        own: dict[str, Any] = {
            "time": self.stamp(record),
            "level": record.levelname.lower(),
            "role": self.role,
            "run": self.run,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            own["exception"] = self.formatException(record.exc_info)
        fields = {key: _plain(value) for key, value in _fields(record).items()}
        return json.dumps(own | {key: value for key, value in fields.items() if key not in own})


def configure(
    role: str, run: str | None = None, *, style: Format = "text", stream: TextIO | None = None
) -> None:
    """Send all records of this process to `stream` (stderr), with `role` and, when known, `run` in each."""
    handler = _Handler(stream or sys.stderr)
    kind = JsonFormatter if style == "json" else KeyValueFormatter
    handler.setFormatter(kind(role, run))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


@contextmanager
def at_end_of(file: Path, role: str, run: str, *, style: Format) -> Iterator[None]:
    """Send all records of this process to `file` inside the block, and to stderr after it."""
    with file.open("ab", buffering=0) as raw, io.TextIOWrapper(raw, write_through=True) as stream:
        configure(role, run, style=style, stream=stream)
        try:
            yield
        finally:
            configure(role, run, style=style)


def name_run(run: str) -> None:
    """Add the run to JSON lines from now on: an actor learns its name with its session."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.run = run


class _Handler(logging.StreamHandler[TextIO]):
    """Drops a line that cannot be written to a full disk; reports other errors as usual."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging names it
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)


def _plain(value: object) -> object:
    """Return a value that JSON can express unchanged, anything else as text, also NaN and infinity."""
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
