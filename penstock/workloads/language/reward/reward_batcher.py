"""Rows of calls that come at the same time are scored together.

    ask ─► waiting ─► a pass in a thread, with all that wait up to `max_rows` ─► scores
              ▲                        │ what comes meanwhile makes the next pass
              └────────────────────────┘

No request waits for others to come: under load the pass before is long enough. One event loop uses it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from penstock.protocol.refusal import Reason, Refusal, Refused
from penstock.runtime.compute_threads import ComputePool
from penstock.workloads.language.reward import reward_metrics

log = logging.getLogger(__name__)

MAX_WAITING_ROWS: Final = 8192
"""Rows that may wait; a caller with more is told to come again."""
RETRY_MS: Final = 200

T = TypeVar("T")
Rows = Sequence[Sequence[int]]
Scores = tuple[float | None, ...]


@dataclass(slots=True, eq=False)
class _Waiting:
    rows: Rows
    future: "asyncio.Future[Scores]"


class Batcher:
    """See the module. score: rows of token ids to their scores, called by one thread at a time.

    on_begin, on_end: told of each pass.
    """

    def __init__(
        self,
        score: Callable[[Rows], Scores],
        *,
        max_rows: int,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._score, self._max_rows = score, max_rows
        self._on_begin, self._on_end = on_begin, on_end
        self._loop = asyncio.get_running_loop()
        self._thread = ComputePool(1, "scoring")
        self._waiting: deque[_Waiting] = deque()
        self._rows = 0
        self._is_busy = False

    async def ask(self, rows: Rows) -> Scores:
        """Scores of the rows in their order; raises Refused (OVERLOADED), and what scoring raises."""
        if self._rows and self._rows + len(rows) > MAX_WAITING_ROWS:
            text = f"{self._rows} samples wait; send it again"
            raise Refused(Refusal(reason=Reason.OVERLOADED, detail=text, retry_after_ms=RETRY_MS))
        waiting = _Waiting(rows, self._loop.create_future())
        self._waiting.append(waiting)
        self._rows += len(rows)
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._pass)
        return await waiting.future

    async def alone(self, work: Callable[[], T]) -> T:
        """Return what work of another kind gives, done between two passes."""
        return await self._loop.run_in_executor(self._thread, work)

    def close(self) -> None:
        """Wait for the pass under way."""
        self._thread.shutdown()

    def _pass(self) -> None:
        batch = self._take()
        if not batch:
            self._is_busy = False
            return
        self._on_begin()
        running = self._loop.run_in_executor(
            self._thread, self._timed, [row for one in batch for row in one.rows]
        )
        running.add_done_callback(lambda done: self._passed(batch, done))

    def _take(self) -> list[_Waiting]:
        """The next calls whose caller still waits, as many as one pass takes; a larger one alone."""
        batch: list[_Waiting] = []
        rows = 0
        while self._waiting and (not batch or rows + len(self._waiting[0].rows) <= self._max_rows):
            one = self._waiting.popleft()
            self._rows -= len(one.rows)
            if not one.future.done():
                batch.append(one)
                rows += len(one.rows)
        return batch

    def _timed(self, rows: Rows) -> Scores:
        began = time.perf_counter()
        scores = self._score(rows)
        reward_metrics.REWARD_PASS_SECONDS.observe(time.perf_counter() - began)
        reward_metrics.REWARD_BATCH_ROWS.observe(len(rows))
        reward_metrics.REWARDS.inc(len(rows))
        for score in scores:
            if score is not None:
                reward_metrics.REWARD_VALUE.observe(score)
        return scores

    def _passed(self, batch: Sequence[_Waiting], done: "asyncio.Future[Scores]") -> None:
        """Hand out the scores; the error of a pass goes to each of its callers."""
        self._on_end()
        error = done.exception()
        at = 0
        for one in batch:
            if not one.future.done():
                if error is None:
                    one.future.set_result(done.result()[at : at + len(one.rows)])
                else:
                    one.future.set_exception(error)
            at += len(one.rows)
        self._pass()
