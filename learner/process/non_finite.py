"""Updates that were undone: each leaves its batch as evidence, several in a row end the run.

One session alone cannot end the run of others: batches that consist only of its fragments count for
one, and at the third it is held for good (`penstock.learner.probe`).
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from penstock.broker.log.store_records import Status
from penstock.learner.algorithms.algorithm import Update
from penstock.learner.feed.log_batch import LogBatch
from penstock.learner.reporting.evidence import keep_evidence
from penstock.protocol.messages import Role
from penstock.runtime.exit import RunFailed
from penstock.runtime.health import Health

_MAX_IN_A_ROW: Final = 3
_WHAT: Final = {
    "nan": "were not finite",
    "implausible": "had a |log π/μ| above algorithm.max_log_ratio",
    "error": "raised an exception",
}
_REMEDY: Final = {
    "nan": "lower algorithm.learning_rate or look at the environment's rewards",
    "implausible": "look whether actors act with the weights they name, or raise algorithm.max_log_ratio",
    "error": "the learner's log has it",
}
LAST_READ_S: Final = 20.0
"""Longer than the 15 s after which the shipped Prometheus looks again."""

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class NonFiniteUpdates:
    """Counts them. folder: where evidence is kept. status: the run as Redis has it."""

    folder: Path
    status: Callable[[], Status]
    health: Health
    draining: threading.Event
    _in_a_row: int = field(init=False, default=0)
    _sessions: set[int] = field(init=False, default_factory=set)
    _evidence: str = field(init=False, default="")
    _reason: str = field(init=False, default="nan")

    def note(self, log_batch: LogBatch, update: Update, count: int) -> None:
        """Keep the batch of an update that was undone. count: updates applied before it."""
        self._in_a_row += 1
        self._sessions |= log_batch.sessions
        self._evidence = keep_evidence(self.folder, log_batch, update, count)
        self._reason = update.reason
        words = {"evidence": self._evidence, "last": log_batch.last, "reason": update.reason}
        log.error("update skipped", extra=words, exc_info=update.error)

    def end_row(self) -> None:
        """An update was applied."""
        self._in_a_row = 0
        self._sessions.clear()

    @property
    def too_many(self) -> bool:
        """Whether going on is hopeless: batches of as many sessions have failed, or of all that there are."""
        if self._in_a_row < _MAX_IN_A_ROW:
            return False
        senders = [row for row in self.status().sessions if row.role is not Role.EVALUATION]
        return len(self._sessions) >= min(_MAX_IN_A_ROW, len(senders))

    def give_up(self) -> NoReturn:
        """End the run rather than this process: started again it would do the same. Raises RunFailed.

        Call it when a checkpoint holds what was not finite as dropped, so that a run which is resumed with
        other settings does not meet it again. All of it may have happened within a second: wait for a
        collector of metrics.
        """
        self.health.await_readers(LAST_READ_S, self.draining)
        raise RunFailed(
            f"{_MAX_IN_A_ROW} updates in a row {_WHAT[self._reason]}; evidence in {self._evidence}; "
            f"{_REMEDY[self._reason]}"
        )
