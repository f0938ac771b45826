"""Fragments on their way to the broker, and which of them go into the next message.

    put ─► waiting ─► claimed (sent, perhaps not taken) ─► acknowledged
              ▲            │
              └────────────┘  a claim is repeated until it is acknowledged

An outbox sends what its queue claims, one message at a time, and calls the queue under a lock of its own.
"""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import (
    MAX_FRAGMENTS_PER_APPEND,
    MAX_MESSAGE_BYTES,
    MAX_ROWS_PER_APPEND,
    MESSAGE_OVERHEAD_BYTES,
    SLOT_BYTES,
)
from penstock.protocol.messages import Episode

_HEADER_BYTES: Final = 512
_APPEND_BYTES: Final = MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Queued:
    """A fragment and when it was built, in monotonic seconds."""

    fragment: Fragment
    built_s: float


class FragmentQueue(Protocol):
    """The policy of an outbox: what it may hold, and what is sent next."""

    episodes: deque[Episode]
    """Finished episodes that are not reported yet, oldest first."""

    def __len__(self) -> int:
        """Fragments that are not acknowledged, claimed ones included."""

    def put(self, fragment: Fragment, *, even_when_full: bool = False) -> bool:
        """Keep a fragment until it is acknowledged; False when there is no room, and it is not kept."""

    def claim_next(self, session: int, first: int, update: int) -> list[Fragment]:
        """Fragments for the next message, oldest first, numbered `first`, `first` + 1, … in this session.

        update: the learner's, of the newest weights that are known here. Empty: nothing is to be sent now.
        """

    def claimed_through(self, sequence: int) -> list[Fragment]:
        """The fragments that an acknowledgement of `sequence` covers, in order."""

    def acknowledge(self, sequence: int) -> list[Queued]:
        """Let go of the fragments up to `sequence`, which the log has; returns them."""

    def drop(self) -> list[Fragment]:
        """Let go of the fragments that only this session could have sent; returns them."""


class RolloutQueue:
    """Fragments that were numbered when they were made, sent in that order.

    It is the `FragmentQueue` of one session.
    """

    def __init__(self, capacity: int) -> None:
        """capacity: most unacknowledged fragments."""
        self._capacity = capacity
        self._queued: deque[Queued] = deque()
        self.episodes: deque[Episode] = deque()

    def __len__(self) -> int:
        return len(self._queued)

    def put(self, fragment: Fragment, *, even_when_full: bool = False) -> bool:
        """See `FragmentQueue`."""
        if len(self._queued) >= self._capacity and not even_when_full:
            return False
        self._queued.append(Queued(fragment, time.monotonic()))
        return True

    def claim_next(self, session: int, first: int, update: int) -> list[Fragment]:
        """Return as many of the oldest as one message takes."""
        return fill_message(queued.fragment for queued in self._queued)

    def claimed_through(self, sequence: int) -> list[Fragment]:
        """See `FragmentQueue`."""
        return [queued.fragment for queued in self._queued if queued.fragment.header.sequence <= sequence]

    def acknowledge(self, sequence: int) -> list[Queued]:
        """See `FragmentQueue`."""
        return take_through(self._queued, sequence)

    def drop(self) -> list[Fragment]:
        """Drop all fragments: none is ever sent under another number."""
        dropped = [queued.fragment for queued in self._queued]
        self._queued.clear()
        return dropped


def take_through(queued: deque[Queued], sequence: int) -> list[Queued]:
    """Remove from the front of `queued` what has a number up to `sequence`; returns it."""
    taken = []
    while queued and queued[0].fragment.header.sequence <= sequence:
        taken.append(queued.popleft())
    return taken


def fill_message(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Return the first of `fragments`, as many as one message takes, at least one."""
    batch: list[Fragment] = []
    size = rows = 0
    for fragment in islice(fragments, MAX_FRAGMENTS_PER_APPEND):
        header = fragment.header
        size += len(fragment.payload) + _HEADER_BYTES + SLOT_BYTES * len(header.slots)
        rows += len(header.slots) + len(header.weights) + len(header.tensors)
        if batch and (size > _APPEND_BYTES or rows > MAX_ROWS_PER_APPEND):
            break
        batch.append(fragment)
    return batch
