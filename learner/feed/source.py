"""Where the loop's batches come from.

They come from the log (`penstock.learner.feed.log_feed`) or a recording
(`penstock.learner.recording.recorded_feed`).
"""

from dataclasses import dataclass
from typing import Protocol

from penstock.learner.feed.log_batch import LogBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """What is pending up to an entry, as one batch. number: of the command. least: fewest steps."""

    number: int
    least: int
    through: int


class FeedEnded(Exception):
    """Everything that a feed holds was taken; raised by `Feed.take`."""


class Feed(Protocol):
    """Batches in the one order in which they are learned. `run` fills a bounded queue, `take` empties it."""

    def run(self) -> None:
        """Read ahead in a thread until the process ends or the source does."""
        ...

    def take(self, timeout_s: float) -> LogBatch | None:
        """Return the next batch, called by the loop; None when there is none within `timeout_s` seconds.

        Raises FeedEnded, at this and every later call, where the source has an end and it is reached.
        """
        ...

    def drop_before(self, version: int) -> None:
        """Drop experience that was begun with an older version, as `restored`, where it is not taken yet."""
        ...

    def flush(self, flush: Flush) -> None:
        """Take what is pending up to an entry as the batch behind the whole ones there; see `too_few`.

        Raises NotImplementedError where there is no log.
        """
        ...

    def too_few(self, number: int) -> int | None:
        """Steps that were pending where a flush asks for more; None: it is taken, or will be."""
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

    round: next of lock-step. recorded: batches and events of a recording consumed so far.
    restored_from: oldest version whose experience is learned from; 0: any.
    """

    round: int = 0
    recorded: int = 0
    restored_from: int = 0

    def is_before_restore(self, log_batch: LogBatch) -> bool:
        """Return whether a batch that was read ahead holds experience from before a restore."""
        return any(version < self.restored_from for version in log_batch.versions)

    def advance(self, log_batch: LogBatch) -> None:
        """Move behind a batch that was consumed."""
        if log_batch.round is not None:
            self.round = log_batch.round + 1
        self.recorded = log_batch.recorded
