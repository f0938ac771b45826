"""A second version that is asked what a first one has answered: its answers reach no client and delay none.

    answer ─► waits (at most MAX_ROWS) ─► its client's reply is written ─► one pass for many, in a thread
                  └── full: left out, counted       (GRACE_S; later while clients wait)   of its own

The thread has the least priority and a copy of the shadow's weights, so that no client waits for it. What it
costs is a metric; what there is no time for is not asked.

What it says is a JSON line for each request in a file, which another thread writes:

    {"time": 1790000000.25, "episode_id": "", "request_id": "r-7",
     "answered": {"version": 5, "arm": "active", "action": {"action": [1]}, "log_prob": [-0.2]},
     "shadow": {"version": 7, "log_prob": [-1.6], "distribution": {"action/probability": [[0.8, 0.2]]}}}

`log_prob` is that of the action which was answered, under each version, as drawn; "shadow" has an "error"
where that version could not answer. The file is turned over at 64 MiB and the one before it kept. Answers
never wait for it: what it cannot keep up with is counted and left out.
"""

import asyncio
import copy
import json
import logging
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.actor.serving.inference.batcher import Batcher
from penstock.actor.serving.inference.forward_pass import Answer, Loaded, Question, answer
from penstock.config.settings import ConfigurationError, ServingSection
from penstock.protocol.tensor import Array
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ComputePool
from penstock.runtime.priority import give_way

MAX_ROWS: Final = 1024
"""Most observations that wait for the shadow; with one request more there may be as many again."""
GRACE_S: Final = 0.005
"""After which a reply is written; within it others come and share the pass."""
_LEAST_PRIORITY: Final = 19
_MOST_BYTES: Final = 64 * 2**20
_MOST_WAITING: Final = 4096
_MOST_WAITING_ROWS: Final = 16_384
"""Of all requests together: one may have a thousand, each with an action and a distribution."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """shadow: who is asked.   arm, question, given: what was answered, and to whom."""

    shadow: Loaded
    arm: Arm
    question: Question
    given: Answer


class Shadow:
    """Used by one event loop."""

    def __init__(self, batcher: Batcher, record: "ShadowRecord | None") -> None:
        """batcher: of the clients, who go first. record: where the shadow's answers are kept, if they are."""
        self._batcher, self._record = batcher, record
        self._loop = asyncio.get_running_loop()
        self._thread = ComputePool(1, "shadow", partial(give_way, _LEAST_PRIORITY))
        self._waiting: deque[_Waiting] = deque()
        self._rows = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Future[Sequence[Answer | Exception]] | None = None
        self._copy: tuple[Loaded, Loaded] | None = None

    def compare(self, shadow: Loaded, arm: Arm, question: Question, given: Answer) -> None:
        """Ask `shadow`, later, how likely it finds this answer; left out while too many wait."""
        if self._rows >= MAX_ROWS:
            metrics.SHADOW_SHED.inc()
            return
        self._waiting.append(_Waiting(shadow, arm, question, given))
        self._rows += question.rows
        self._arrange()

    async def finish(self) -> None:
        """Ask what waits, clients or not, and note it."""
        while self._waiting or self._running is not None:
            if self._running is None:
                self._begin()
            else:
                await asyncio.wait([self._running])
                await asyncio.sleep(0)  # for the callback that notes it

    def close(self) -> None:
        """Ask nothing more; wait for the pass under way."""
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        self._thread.shutdown()

    def _arrange(self) -> None:
        if self._timer is None and self._running is None and self._waiting:
            self._timer = self._loop.call_later(GRACE_S, self._grace_is_over)

    def _grace_is_over(self) -> None:
        self._timer = None
        if self._batcher.is_busy:
            self._arrange()
        elif self._running is None:
            self._begin()

    def _begin(self) -> None:
        """One pass for those that the same version is asked, as far as they came behind one another."""
        shadow, group = self._waiting[0].shadow, list[_Waiting]()
        while self._waiting and self._waiting[0].shadow is shadow:
            group.append(self._waiting.popleft())
        self._rows -= sum(each.question.rows for each in group)
        self._running = self._loop.run_in_executor(self._thread, self._ask, shadow, group)
        self._running.add_done_callback(partial(self._note, group))

    def _ask(self, shadow: Loaded, group: list[_Waiting]) -> Sequence[Answer | Exception]:
        """In the thread."""
        began = time.thread_time()
        described = self._record is not None
        questions = [
            replace(each.question, taken=each.given.action, distribution=described, value=False)
            for each in group
        ]
        try:
            return answer(self._own(shadow), questions)
        except Exception as error:  # noqa: BLE001 - noted with each; clients have their answers
            return [error] * len(group)
        finally:
            metrics.SHADOW_SECONDS.inc(time.thread_time() - began)

    def _own(self, shadow: Loaded) -> Loaded:
        """The thread's copy: a version is used by one thread at a time."""
        if self._copy is None or self._copy[0] is not shadow:
            self._copy = shadow, replace(shadow, policy=copy.deepcopy(shadow.policy))
        return self._copy[1]

    def _note(self, group: list[_Waiting], done: "asyncio.Future[Sequence[Answer | Exception]]") -> None:
        self._running = None
        self._arrange()
        if done.cancelled():
            return
        for each, said in zip(group, done.result(), strict=True):
            agreement = 0.0
            if isinstance(said, Answer):
                agreement = float(np.exp(np.minimum(said.log_prob, 0.0)).mean())
            metrics.SHADOW_AGREEMENT.observe(agreement)
            if self._record is not None:
                self._record.note(each.arm, each.question, each.given, each.shadow.version, said)


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
        if not self._rows.take(question.rows):
            metrics.SHADOW_UNRECORDED.inc()
            return
        try:
            self._waiting.put_nowait(logging.makeLogRecord({"row": row, "rows": question.rows}))
        except queue.Full:
            self._rows.give_back(question.rows)
            metrics.SHADOW_UNRECORDED.inc()

    def close(self) -> None:
        """Write what waits."""
        self._listener.stop()
        self._file.close()


def open_shadow_record(section: ServingSection, run_dir: Path | None) -> ShadowRecord | None:
    """Return the file for what a shadow says, None where there is no place for it.

    Raises ConfigurationError for a place that was named and cannot be written to.
    """
    named = section.shadow_record
    path = named or (run_dir / "shadow.jsonl" if run_dir is not None else None)
    if path is None:
        return None
    if os.access(path.parent, os.W_OK):
        return ShadowRecord(path)
    if named is None:
        return None  # a folder that is only read
    raise ConfigurationError(
        f"serving.shadow_record={str(named)!r}: its folder is not there or cannot be written to; name a "
        "file in one that can"
    )


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
        """Return the line's content; called once, by the thread that writes."""
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
        row: _Row = record.__dict__["row"]
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
