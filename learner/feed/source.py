"""Where the loop's batches come from.

They come from the log (`learner.feed.log_feed`) or a recording (`learner.recording.recorded_feed`).
"""

from dataclasses import dataclass
from typing import Protocol

from learner.feed.log_batch import LogBatch


class FeedEnded(Exception):
    """Everything that a feed holds was taken; raised by `Feed.take`."""


class Feed(Protocol):
    """Batches in the one order in which they are learned. `run` fills a bounded queue, `take` empties it."""

    def run(self) -> None:
        """Read ahead in a thread until the process ends or the source does."""
        ...

    def take(self, timeout_s: float) -> LogBatch | None:
        """The next batch, called by the loop; None when there is none within `timeout_s` seconds.

        Raises FeedEnded, at this and every later call, where the source has an end and it is reached.
        """
        ...

    def skipped(self) -> None:
        """Note that the batch taken last made no update.

        The batches behind it have their turn one update earlier.
        """
        ...


@dataclass(slots=True, kw_only=True)
class FeedPosition:
    """How far the loop has consumed its feed, beside the ledger's log entries.

    A checkpoint holds both figures.

    round: next of lock-step. recorded: batches of a recording consumed so far.
    """

    round: int = 0
    recorded: int = 0

    def advance(self, log_batch: LogBatch) -> None:
        """Move behind a batch that was consumed."""
        if log_batch.round is not None:
            self.round = log_batch.round + 1
        self.recorded = log_batch.recorded
