"""Fragments of the policy server on their way to the broker: never waited for, numbered when they are sent.

    put ─► queue (bounded) ─► too old? dropped, counted ─► number ─► Append ─► acknowledged
                ▲                                                         │ FULL: nothing was stored
                └─────────────────────────────────────────────────────────┘

A rollout worker stands still while the learner is busy; a service in production does not. So this queue
refuses when it is full, and forgets what has grown older than the learner would take. The queue outlives a
session; what was under way when one ended is dropped, for it is not known whether it arrived.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from penstock.actor.link.fragment_queue import Queued, fill_message, take_through
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import MAX_FRAGMENTS_PER_APPEND
from penstock.protocol.messages import Episode
from penstock.runtime import metrics

_MOST_EPISODES: Final = 16_384


class ServedQueue:
    """Fragments that wait for their number, and episodes for their report, over all sessions. Thread-safe."""

    def __init__(self, capacity: int, stale_after: int) -> None:
        """Make an empty queue.

        capacity: most fragments that wait.
        stale_after: updates that the learner may be ahead of one; 0: any.
        """
        self._capacity, self._stale_after = capacity, stale_after
        self._lock = threading.Lock()
        self._waiting: deque[Fragment] = deque()
        self._put = self._gone = 0
        self.episodes: deque[Episode] = deque(maxlen=_MOST_EPISODES)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def put_count(self) -> int:
        """Fragments that were put into it."""
        return self._put

    @property
    def gone_count(self) -> int:
        """Fragments of these that were acknowledged or dropped; they go in the order in which they came."""
        return self._gone

    def note_gone(self, count: int) -> None:
        """Count fragments that were acknowledged or dropped."""
        with self._lock:
            self._gone += count

    def put(self, fragment: Fragment, *, even_when_full: bool = False) -> bool:
        """Keep a fragment until it is sent; False when the queue is full, and it is not kept."""
        with self._lock:
            if len(self._waiting) >= self._capacity and not even_when_full:
                return False
            self._waiting.append(fragment)
            self._put += 1
            return True

    def exchange(self, refused: Sequence[Fragment], update: int) -> list[Fragment]:
        """Put the refused back in front and take the oldest, as many as one message holds.

        What is too old at this update of the learner is dropped and counted.
        """
        with self._lock:
            self._waiting.extendleft(reversed(refused))
            while self._waiting and self._is_stale(self._waiting[0], update):
                count_not_learned("stale", self._waiting.popleft().header.steps)
                self._gone += 1
            batch = fill_message(islice(self._waiting, MAX_FRAGMENTS_PER_APPEND))
            for _ in batch:
                self._waiting.popleft()
            return batch

    def drop_waiting(self) -> None:
        """Drop all of it, counted as lost: no session follows."""
        with self._lock:
            count_not_learned("lost", sum(fragment.header.steps for fragment in self._waiting))
            self._gone += len(self._waiting)
            self._waiting.clear()

    def _is_stale(self, fragment: Fragment, update: int) -> bool:
        return 0 < self._stale_after < update - fragment.header.oldest_update


class NumberedWhenSent:
    """What one session sends of a `ServedQueue`: the `FragmentQueue` of its outbox."""

    def __init__(self, queue: ServedQueue) -> None:
        self._queue = queue
        self._claimed: deque[Queued] = deque()
        self._is_dropped = False
        self.episodes = queue.episodes

    def __len__(self) -> int:
        return len(self._queue) + len(self._claimed)

    def put(self, fragment: Fragment, *, even_when_full: bool = False) -> bool:
        """See `ServedQueue.put`."""
        return self._queue.put(fragment, even_when_full=even_when_full)

    def claim_next(self, session: int, first: int, update: int) -> list[Fragment]:
        """The oldest, numbered now: what was refused has no number, for nothing of it was stored."""
        if self._is_dropped:
            return []
        taken = self._queue.exchange([queued.fragment for queued in self._claimed], update)
        batch = [_numbered(fragment, session, sequence) for sequence, fragment in enumerate(taken, first)]
        now = time.monotonic()
        self._claimed = deque(Queued(fragment, now) for fragment in batch)
        return batch

    def claimed_through(self, sequence: int) -> list[Fragment]:
        """See `FragmentQueue`."""
        return [queued.fragment for queued in self._claimed if queued.fragment.header.sequence <= sequence]

    def acknowledge(self, sequence: int) -> list[Queued]:
        """See `FragmentQueue`."""
        taken = take_through(self._claimed, sequence)
        self._queue.note_gone(len(taken))
        return taken

    def drop(self) -> list[Fragment]:
        """Return the fragments under way, counted as lost, and claim nothing more.

        A fragment without a number is for the next session.
        """
        dropped = [queued.fragment for queued in self._claimed]
        self._claimed.clear()
        self._is_dropped = True
        self._queue.note_gone(len(dropped))
        count_not_learned("lost", sum(fragment.header.steps for fragment in dropped))
        return dropped


def _numbered(fragment: Fragment, session: int, sequence: int) -> Fragment:
    return replace(fragment, header=replace(fragment.header, session=session, sequence=sequence))


def count_not_learned(reason: str, steps: int) -> None:
    """Steps that were answered and do not go to the learner."""
    metrics.NOT_LEARNED_STEPS.labels(reason).inc(steps)
