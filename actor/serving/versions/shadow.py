"""A second version that is asked what a first one has answered: its answers reach no client and delay none.

    answer ─► waits (at most MAX_ROWS) ─► its client's reply is written ─► one pass for many, in a thread
                  └── full: left out, counted       (GRACE_S; later while clients wait)   of its own

The thread has the least priority and a copy of the shadow's weights, so that no client waits for it. What it
costs is a metric; what there is no time for is not asked.
"""

import asyncio
import copy
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from actor.serving.inference.batcher import Batcher
from actor.serving.inference.forward_pass import Answer, Loaded, Question, answer
from actor.serving.versions.shadow_record import ShadowRecord
from penstock.registry.routing import Arm
from penstock.runtime import metrics
from penstock.runtime.compute_threads import ComputePool
from penstock.runtime.priority import give_way

MAX_ROWS: Final = 1024
"""Most observations that wait for the shadow; with one request more there may be as many again."""
GRACE_S: Final = 0.005
"""After which a reply is written; within it others come and share the pass."""
_LEAST_PRIORITY: Final = 19


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """shadow: who is asked.   arm, question, given: what was answered, and to whom."""

    shadow: Loaded
    arm: Arm
    question: Question
    given: Answer


class Shadow:
    """Used by one event loop."""

    def __init__(self, batcher: Batcher, record: ShadowRecord | None) -> None:
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
