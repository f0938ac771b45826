"""Log lines on stderr: `time level role message key=value …`.

Fields travel as `extra={"key": value}`. Configured once per process; repeated calls replace.
"""

import logging
import sys
import time
from typing import Final, TextIO

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class KeyValueFormatter(logging.Formatter):
    """One line per record; a traceback, where there is one, follows it."""

    converter = staticmethod(time.gmtime)

    def __init__(self, role: str, run: str | None) -> None:
        super().__init__()
        self._role = role
        self._run = run

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        stamp = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        fields = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        if self._run:
            fields.setdefault("run", self._run)
        pairs = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
        level = record.levelname.lower()
        line = f"{stamp}.{int(record.msecs):03d}Z {level} {self._role} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(role: str, run: str | None = None, *, stream: TextIO | None = None) -> None:
    """Send all records of this process to `stream` (stderr), stamped with `role` and, when known, `run`."""
    handler = _Handler(stream or sys.stderr)
    handler.setFormatter(KeyValueFormatter(role, run))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class _Handler(logging.StreamHandler[TextIO]):
    """Loses a line that its disk has no room for; every other error is told as usual."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging names it
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


def _quoted(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or "\n" in text or not text else text
