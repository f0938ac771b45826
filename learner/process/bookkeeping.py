"""What became of each batch, written down: ledger, recording, feed position, and the counts of checkpoints and stalls."""

from dataclasses import dataclass

from learner.algorithms.algorithm import Update
from learner.checkpoint.run_checkpoints import RunCheckpoints
from learner.feed.log_batch import Delivery
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

    def book(self, delivery: Delivery, update: Update | None, turn: int) -> None:
        """Book a batch that was consumed. update: None where all of it was dropped. turn: updates made before it."""
        trained, dropped, steps = delivery.trained, dict(delivery.dropped), delivery.steps
        if update is not None and update.reason == "nan":
            trained, dropped, steps = (), dropped | dict.fromkeys(delivery.trained, Drop.NAN), 0
        self.ledger.book(
            delivery.last, trained=trained, dropped=dropped, steps=steps, origins=delivery.origins
        )
        self.stall.note_dropped(dropped.values())
        self._record(delivery, turn)
        self.checkpoints.consumed(delivery.size)
        self.position.advance(delivery)

    def _record(self, delivery: Delivery, turn: int) -> None:
        if self.recording is None:
            return
        dropped = {number: reason.value for number, reason in delivery.dropped.items()}
        self.recording.consumed(
            Consumed(
                position=delivery.last,
                update=turn,
                round=delivery.round,
                dropped=dropped,
                fragments=delivery.fragments,
            )
        )
