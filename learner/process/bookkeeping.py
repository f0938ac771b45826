"""What became of each batch, written down.

It keeps ledger, recording, feed position, and the counts of checkpoints and stalls.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.learner.algorithms.algorithm import Update
from penstock.learner.feed.log_batch import LogBatch
from penstock.learner.feed.source import FeedPosition
from penstock.learner.ledger import Drop, Ledger
from penstock.learner.probe import Quarantine
from penstock.learner.process.run_checkpoints import RunCheckpoints
from penstock.learner.process.stall import StallWatch
from penstock.learner.recording.writer import Consumed, RecordingWriter

_BOOKED_AS: Final = {"nan": Drop.NAN, "implausible": Drop.INVALID, "error": Drop.INVALID}
"""By the reason for which an update fails."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """Used by the loop's thread. recording: None where nothing is recorded."""

    ledger: Ledger
    position: FeedPosition
    recording: RecordingWriter | None
    checkpoints: RunCheckpoints
    stall: StallWatch
    quarantine: Quarantine

    def book(self, log_batch: LogBatch, update: Update | None, updates: int) -> None:
        """Book a batch that was consumed.

        update: None where all of it was dropped. updates: made before it.
        """
        failed = _failed(log_batch, update)
        self._suspect(log_batch, failed)
        trained = [number for number in log_batch.trained if number not in failed]
        dropped = dict(log_batch.dropped) | failed
        steps = log_batch.steps - _left_out(log_batch, update)
        self.ledger.book(
            log_batch.last, trained=trained, dropped=dropped, steps=steps, origins=log_batch.origins
        )
        self.stall.note_dropped(dropped.values())
        self._record(log_batch, updates)
        self.checkpoints.consumed(log_batch.size)
        self.position.advance(log_batch)

    def _suspect(self, log_batch: LogBatch, failed: Mapping[int, Drop]) -> None:
        """Tell who sent the fragments that made an update fail.

        A whole batch has no culprit, unless one session sent all of it.
        """
        if len(failed) == len(log_batch.trained) > 1:
            if len(log_batch.sessions) == 1:
                (session,) = log_batch.sessions
                self.quarantine.suspect(session, f"all of its batch up to log entry {log_batch.last} fails")
            return
        for number, reason in failed.items():
            origin = log_batch.origins.get(number)
            session = 0 if origin is None else origin.session
            words = {"number": number, "session": session, "reason": reason.value}
            log.error("a fragment was left out: the update fails with it", extra=words)
            if session:
                self.quarantine.suspect(session, f"log entry {number} makes updates fail")

    def _record(self, log_batch: LogBatch, updates: int) -> None:
        if self.recording is None:
            return
        dropped = {number: reason.value for number, reason in log_batch.dropped.items()}
        self.recording.consumed(
            Consumed(
                position=log_batch.last,
                update=updates,
                round=log_batch.round,
                dropped=dropped,
                fragments=log_batch.fragments,
                flush=log_batch.flush,
            )
        )


def _failed(log_batch: LogBatch, update: Update | None) -> dict[int, Drop]:
    """Fragments of the batch that were not trained, with the reason."""
    if update is None:
        return {}
    if update.reason in _BOOKED_AS:
        return dict.fromkeys(log_batch.trained, _BOOKED_AS[update.reason])
    in_batch = set(log_batch.trained)
    return {number: _BOOKED_AS[why] for number, why in update.culprits.items() if number in in_batch}


def _left_out(log_batch: LogBatch, update: Update | None) -> int:
    """Steps of the batch that were not trained; a recording's fragments have no numbers to tell it by."""
    if update is None:
        return 0
    return log_batch.steps if update.reason in _BOOKED_AS else update.left_out
