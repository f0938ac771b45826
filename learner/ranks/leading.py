"""The calls of the learner's loop to its other ranks; they do nothing where there are none.

Rank 0 holds the lease, reads the log, publishes and writes checkpoints as a single rank does. All others
get its state at the start, are told of every update before it begins, and end when it ends.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

from safetensors.torch import save

from penstock.learner.algorithms.algorithm import Algorithm, AlgorithmState, Update
from penstock.learner.feed.payloads import Payloads
from penstock.learner.ranks.rendezvous import Meeting
from penstock.learner.ranks.sharing import SharedPayloads
from penstock.runtime.exit import Fatal

log = logging.getLogger(__name__)


RESTORED: Final = Update(applied=True, reason="", steps=0, gradient_steps=0, metrics={})
"""What ranks compare after a restore, beside their weights."""


class Ranks(Protocol):
    """The ranks of this learner, seen from rank 0."""

    def start(self, algorithm: Algorithm) -> None:
        """Send the current state of `algorithm` to all ranks."""
        ...

    def payloads(self, own: Payloads) -> Payloads:
        """Return the source from which the feed takes payloads; `own`: that of this rank alone."""
        ...

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """Announce an update before it begins. progress: share of the run that is done, 0 to 1.

        is_flushed: see `Batch`.
        """
        ...

    def skip(self) -> None:
        """Drop the batch that every rank has its part of."""
        ...

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """Have all ranks restore what `algorithm` has; raises Fatal unless all of them then agree."""
        ...

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """Compare the ranks after an update; raises Fatal when they have drifted apart."""
        ...

    def end(self, *, failed: bool) -> None:
        """Let the other ranks end. failed: whether they end with a failure."""
        ...


class SingleRank:
    """A learner of one process: there is no other rank to call."""

    def start(self, algorithm: Algorithm) -> None:
        """Do nothing."""

    def payloads(self, own: Payloads) -> Payloads:
        """Return `own`."""
        return own

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """Do nothing."""

    def skip(self) -> None:
        """Do nothing."""

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """Do nothing."""

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """Do nothing."""

    def end(self, *, failed: bool) -> None:
        """Do nothing."""


class LeadingRank:
    """Rank 0 of several. drain: called, with the reason, when another rank was asked to end."""

    def __init__(self, meeting: Meeting, drain: Callable[[str], None]) -> None:
        self._meeting = meeting
        self._drain = drain

    def start(self, algorithm: Algorithm) -> None:
        """Send the current state of `algorithm` to all ranks."""
        state = algorithm.state()
        self._meeting.turns.say({"what": "state", "numbers": state.numbers}, save(state.tensors))

    def payloads(self, own: Payloads) -> Payloads:
        """Return a source that divides payloads among the ranks."""
        return SharedPayloads(own, self._meeting.feed)

    def begin_update(self, progress: float, *, is_flushed: bool = False) -> None:
        """Announce an update before it begins."""
        self._meeting.turns.say({"what": "update", "progress": progress, "is_flushed": is_flushed})

    def skip(self) -> None:
        """Drop the batch that every rank has its part of."""
        self._meeting.turns.say({"what": "skip"})

    def restore(self, algorithm: Algorithm, state: AlgorithmState) -> None:
        """Have all ranks restore what `algorithm` has; raises Fatal unless all of them then agree."""
        self._meeting.turns.say({"what": "restore", "numbers": state.numbers}, save(state.tensors))
        self.agree(algorithm, RESTORED)

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """Compare the ranks after an update; raises Fatal when they have drifted apart."""
        if self._meeting.agree(algorithm, update, draining=False):
            self._drain("another rank was asked to end")

    def end(self, *, failed: bool) -> None:
        """Let the other ranks end; ranks that are gone already are skipped."""
        try:
            self._meeting.turns.say({"what": "end", "failed": failed})
        except Fatal as error:
            log.warning("the other ranks were not told of the end", extra={"why": str(error)})
