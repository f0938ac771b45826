"""What became of each batch, written down.

It keeps ledger, recording, feed position, and the counts of checkpoints and stalls.
"""

from dataclasses import dataclass

from learner.algorithms.algorithm import Update
from learner.checkpoint.run_checkpoints import RunCheckpoints
from learner.feed.log_batch import LogBatch
from learner.feed.source import FeedPosition
from learner.ledger import Drop, Ledger
from learner.process.stall import StallWatch
from learner.recording.writer import Consumed, RecordingWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Bookkeeping:
    """Used by the loop's thread. recording: None where nothing is recorded."""

    ledger: Ledger
    position: FeedPosition
    recording: RecordingWriter | None
    checkpoints: RunCheckpoints
    stall: StallWatch

    def book(self, log_batch: LogBatch, update: Update | None, turn: int) -> None:
        """Book a batch that was consumed.

        update: None where all of it was dropped. turn: updates made before it.
        """
        trained, dropped, steps = log_batch.trained, dict(log_batch.dropped), log_batch.steps
        if update is not None and update.reason == "nan":
            trained, dropped, steps = (), dropped | dict.fromkeys(log_batch.trained, Drop.NAN), 0
        self.ledger.book(
            log_batch.last, trained=trained, dropped=dropped, steps=steps, origins=log_batch.origins
        )
        self.stall.note_dropped(dropped.values())
        self._record(log_batch, turn)
        self.checkpoints.consumed(log_batch.size)
        self.position.advance(log_batch)

    def _record(self, log_batch: LogBatch, turn: int) -> None:
        if self.recording is None:
            return
        dropped = {number: reason.value for number, reason in log_batch.dropped.items()}
        self.recording.consumed(
            Consumed(
                position=log_batch.last,
                update=turn,
                round=log_batch.round,
                dropped=dropped,
                fragments=log_batch.fragments,
            )
        )
