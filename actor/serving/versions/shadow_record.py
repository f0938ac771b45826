"""What a shadow would have answered, one JSON line for each request, written by a thread of its own.

    {"time": 1790000000.25, "episode_id": "", "request_id": "r-7",
     "answered": {"version": 5, "arm": "active", "action": {"action": [1]}, "log_prob": [-0.2]},
     "shadow": {"version": 7, "log_prob": [-1.6], "distribution": {"action/probability": [[0.8, 0.2]]}}}

`log_prob` is that of the action which was answered, under each version, as drawn; "shadow" has an "error"
where that version could not answer. The file is turned over at 64 MiB and the one before it kept. Answers
never wait for it: what it cannot keep up with is counted and left out.
"""

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Any, Final, Protocol

from actor.serving.inference.forward_pass import Answer, Question
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.wire.tensor import Array

_MOST_BYTES: Final = 64 * 2**20
_MOST_WAITING: Final = 4096
_MOST_WAITING_ROWS: Final = 16_384
"""Of all requests together: one may have a thousand, each with an action and a distribution."""

log = logging.getLogger(__name__)


class ToldLater(Protocol):
    """What becomes a line of the record."""

    def told(self) -> Mapping[str, Any]:
        """Return the line's content; called once, by the thread that writes."""


class ShadowRecord:
    """A file that grows by `note`; used by one event loop."""

    def __init__(self, path: Path) -> None:
        """path: made with the first line; each server needs a file of its own."""
        file = _File(path, maxBytes=_MOST_BYTES, backupCount=1, encoding="utf-8", delay=True)
        file.setFormatter(_JsonLine())
        self._file = file
        self._waiting: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self._rows = _Rows()
        self._listener = _Listener(self._waiting, file, self._rows)
        self._listener.start()

    def note(
        self, arm: Arm, question: Question, answered: Answer, shadow: int, other: Answer | BaseException
    ) -> None:
        """Note what was answered, and what version `shadow` says of it or why it could not."""
        row = _Row(time.time(), arm, question.episode_id, question.request_id, answered, shadow, other)
        self.put(row, question.rows)

    def put(self, line: "ToldLater", rows: int) -> None:
        """Add a line that the other thread makes. rows: for how many observations it stands."""
        if not self._rows.take(rows):
            metrics.SHADOW_UNRECORDED.inc()
            return
        try:
            self._waiting.put_nowait(logging.makeLogRecord({"row": line, "rows": rows}))
        except queue.Full:
            self._rows.give_back(rows)
            metrics.SHADOW_UNRECORDED.inc()

    def close(self) -> None:
        """Write what waits."""
        self._listener.stop()
        self._file.close()


class _Rows:
    """How many wait; both threads use it."""

    def __init__(self) -> None:
        self._lock, self._waiting = threading.Lock(), 0

    def take(self, rows: int) -> bool:
        """So many more wait; False where too many do already."""
        with self._lock:
            if self._waiting >= _MOST_WAITING_ROWS:
                return False
            self._waiting += rows
            return True

    def give_back(self, rows: int) -> None:
        """So many do not wait any more."""
        with self._lock:
            self._waiting -= rows


class _Listener(QueueListener):
    def __init__(self, waiting: "queue.Queue[Any]", file: logging.Handler, rows: _Rows) -> None:
        super().__init__(waiting, file)
        self._rows = rows

    def handle(self, record: logging.LogRecord) -> None:
        """Write a comparison to the record."""
        super().handle(record)
        self._rows.give_back(record.__dict__["rows"])


@dataclass(frozen=True, slots=True)
class _Row:
    """Made into text by the other thread. time: Unix, in seconds.

    Of the question its names alone: what waits holds no observations.
    """

    time: float
    arm: Arm
    episode_id: str
    request_id: str
    answered: Answer
    shadow: int
    other: Answer | BaseException

    def told(self) -> dict[str, Any]:
        """See `ToldLater`."""
        return {
            "time": self.time,
            "episode_id": self.episode_id,
            "request_id": self.request_id,
            "answered": {
                "version": self.answered.loaded.version,
                "arm": str(self.arm),
                "action": _lists(self.answered.action),
                "log_prob": self.answered.log_prob.tolist(),
            },
            "shadow": {"version": self.shadow, **_told(self.other)},
        }


class _JsonLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row: ToldLater = record.__dict__["row"]
        return json.dumps(row.told(), separators=(",", ":"))


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """A full disk costs the record, not the answers."""
        metrics.SHADOW_UNRECORDED.inc()
        why = str(sys.exc_info()[1])
        log.error("a shadow's answer was not recorded", extra={"file": self.baseFilename, "why": why})


def _told(other: Answer | BaseException) -> dict[str, Any]:
    if isinstance(other, BaseException):
        return {"error": str(other)}
    return {"log_prob": other.log_prob.tolist(), "distribution": _lists(other.distribution or {})}


def _lists(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in arrays.items()}
