"""What the learner's loop does for its other ranks; nothing where there are none.

Rank 0 holds the lease, reads the log, publishes and writes checkpoints as a single rank does. All others
get its state at the start, are told of every update before it begins, and end when it ends.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from safetensors.torch import save

from learner.algorithms.algorithm import Algorithm, Update
from learner.feed.payloads import Payloads
from learner.ranks.rendezvous import Meeting
from learner.ranks.sharing import SharedPayloads
from penstock.runtime.exit import Fatal

log = logging.getLogger(__name__)


class Ranks(Protocol):
    """The ranks of this learner, seen from rank 0."""

    def start(self, algorithm: Algorithm) -> None:
        """Give all the state that `algorithm` has now."""
        ...

    def payloads(self, own: Payloads) -> Payloads:
        """Where the feed finds payloads."""
        ...

    def turn(self, progress: float) -> None:
        """An update begins; before it."""
        ...

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """It was made; raises Fatal when the ranks have drifted apart."""
        ...

    def end(self, *, failed: bool) -> None:
        """Let the others end."""
        ...


class SingleRank:
    """A learner of one process."""

    def start(self, algorithm: Algorithm) -> None:
        """Nobody to give it to."""

    def payloads(self, own: Payloads) -> Payloads:
        """All of them."""
        return own

    def turn(self, progress: float) -> None:
        """Nobody to tell."""

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """With itself."""

    def end(self, *, failed: bool) -> None:
        """Nobody waits."""


class LeadingRank:
    """Rank 0 of several. drain: called, with the reason, when another rank was asked to end."""

    def __init__(self, meeting: Meeting, drain: Callable[[str], None]) -> None:
        self._meeting = meeting
        self._drain = drain

    def start(self, algorithm: Algorithm) -> None:
        """See `Ranks`."""
        state = algorithm.state()
        self._meeting.turns.say({"what": "state", "numbers": state.numbers}, save(state.tensors))

    def payloads(self, own: Payloads) -> Payloads:
        """Divided among the ranks."""
        return SharedPayloads(own, self._meeting.feed)

    def turn(self, progress: float) -> None:
        """See `Ranks`."""
        self._meeting.turns.say({"what": "update", "progress": progress})

    def agree(self, algorithm: Algorithm, update: Update) -> None:
        """See `Ranks`."""
        if self._meeting.agree(algorithm, update, draining=False):
            self._drain("another rank was asked to end")

    def end(self, *, failed: bool) -> None:
        """See `Ranks`; others that are gone already need not be told."""
        try:
            self._meeting.turns.say({"what": "end", "failed": failed})
        except Fatal as error:
            log.warning("the other ranks were not told of the end", extra={"why": str(error)})
