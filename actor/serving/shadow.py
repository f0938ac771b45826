"""The shadow: a second version answers the same requests; its answers reach no client and delay none."""

import asyncio
import copy
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.actor.serving.batcher import Answer, Batcher, Loaded, Question, answer
from penstock.config.settings import ConfigurationError, ServingSection
from penstock.protocol.tensor import Array
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ComputePool
from penstock.runtime.lifecycle import give_way

MAX_ROWS: Final = 1024
"""Most observations that wait for the shadow; with one request more there may be as many again."""
GRACE_S: Final = 0.005
"""Wait in which the reply is written and other questions come that share the pass."""
_LEAST_PRIORITY: Final = 19
_MOST_BYTES: Final = 64 * 2**20
_MOST_WAITING_ROWS: Final = 16_384
"""Of all requests together: one may have a thousand, each with an action and a distribution."""
_LEAST_ROWS: Final = 4
"""A smaller request counts as so many rows, for its names and its object."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A question for `shadow`. arm, question, given: the arm, the client's question and its answer."""

    shadow: Loaded
    arm: Arm
    question: Question
    given: Answer


class Shadow:
    """Used by one event loop."""

    def __init__(self, batcher: Batcher, record: "ShadowRecord | None") -> None:
        """batcher: of the clients, whose questions go first. record: of the shadow's answers; None: none."""
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
        """Ask the shadow all waiting questions, also while clients wait, and note the answers."""
        while self._waiting or self._running is not None:
            if self._running is None:
                self._begin()
            else:
                await asyncio.wait([self._running])
                await asyncio.sleep(0)  # for the callback that notes it

    def close(self) -> None:
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
        """Begin one pass for the oldest questions that wait for the same version."""
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
        """Return the thread's copy, since a version is used by one thread at a time."""
        if self._copy is None or self._copy[0] is not shadow:
            self._copy = shadow, replace(shadow, policy=copy.deepcopy(shadow.policy))
        return self._copy[1]

    def _note(self, group: list[_Waiting], done: "asyncio.Future[Sequence[Answer | Exception]]") -> None:
        self._running = None
        self._arrange()
        if done.cancelled():
            return
        for each, result in zip(group, done.result(), strict=True):
            agreement = 0.0
            if isinstance(result, Answer):
                agreement = float(np.exp(np.minimum(result.log_prob, 0.0)).mean())
            metrics.SHADOW_AGREEMENT.observe(agreement)
            if self._record is not None:
                self._record.note(each.arm, each.question, each.given, each.shadow.version, result)


class ShadowRecord:
    """A file that grows by `note`; used by one event loop, written by one thread."""

    def __init__(self, path: Path) -> None:
        """path: made with the first line; each server needs another file."""
        self._file = _File(path, maxBytes=_MOST_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self._thread = ComputePool(1, "shadow-record")
        self._lock, self._waiting_rows, self._is_closed = threading.Lock(), 0, False

    def note(
        self, arm: Arm, question: Question, answered: Answer, shadow: int, other: Answer | BaseException
    ) -> None:
        """Note an answer, and the answer of version `shadow`, or the error in its place."""
        rows = max(question.rows, _LEAST_ROWS)
        with self._lock:
            has_room = self._waiting_rows < _MOST_WAITING_ROWS and not self._is_closed
            self._waiting_rows += rows if has_room else 0
        if not has_room:
            metrics.SHADOW_UNRECORDED.inc()
            return
        # Of the question the thread gets names alone.
        line = {
            "time": time.time(),
            "episode_id": question.episode_id,
            "request_id": question.request_id,
            "answered": {"version": answered.loaded.version, "arm": str(arm)},
            "shadow": {"version": shadow},
        }
        self._thread.submit(self._write, rows, line, answered, other)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True  # an answer under way may still come
        self._thread.shutdown()
        self._file.close()

    def _write(
        self, rows: int, line: dict[str, Any], answered: Answer, other: Answer | BaseException
    ) -> None:
        record = logging.makeLogRecord({})
        try:
            line["answered"] |= {"action": _lists(answered.action), "log_prob": answered.log_prob.tolist()}
            if isinstance(other, BaseException):
                line["shadow"]["error"] = str(other)
            else:
                described = _lists(other.distribution or {})
                line["shadow"] |= {"log_prob": other.log_prob.tolist(), "distribution": described}
            record.msg = json.dumps(line, separators=(",", ":"))
            self._file.handle(record)
        except (TypeError, ValueError):
            self._file.handleError(record)
        finally:
            with self._lock:
                self._waiting_rows -= rows


def open_shadow_record(section: ServingSection, run_dir: Path | None) -> ShadowRecord | None:
    """Return the file, None where no place is; raises ConfigurationError for a named one without access."""
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


class _File(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's own name
        """A full disk costs the record, not the answers."""
        metrics.SHADOW_UNRECORDED.inc()
        why = str(sys.exc_info()[1])
        log.error("a shadow's answer was not recorded", extra={"file": self.baseFilename, "why": why})


def _lists(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in arrays.items()}
