"""Fragments of the policy server on their way to the broker: never waited for, numbered when they are sent.

    offer ─► queue (bounded) ─► too old? dropped, counted ─► number ─► Append ─► acknowledged
                  ▲                                                       │ FULL: nothing was stored
                  └───────────────────────────────────────────────────────┘

A rollout worker stands still while the learner is busy; a service in production does not. So this outbox refuses
when it is full, and forgets what has grown older than the learner would take. The queue outlives a session; what
was under way when one ended is dropped, for nobody knows whether it arrived.
"""

import threading
import time
from collections import deque
from dataclasses import replace
from itertools import islice
from typing import Final

from actor.link.ack_journal import AckJournal
from actor.link.outbox import Outbox, fill_message
from actor.link.session import Session
from penstock.runtime import metrics
from penstock.wire.fragment import Fragment
from penstock.wire.limits import MAX_FRAGMENTS_PER_APPEND
from penstock.wire.messages import Episode

_NO_LIMIT: Final = 2**31
_MOST_EPISODES: Final = 16_384


class Queue:
    """What waits for its number, and episodes for their report. Thread-safe."""

    def __init__(self, capacity: int, stale_after: int) -> None:
        """stale_after: updates that the learner may be ahead of a fragment (H); 0: any."""
        self._capacity, self._stale_after = capacity, stale_after
        self._lock = threading.Lock()
        self._waiting: deque[Fragment] = deque()
        self.episodes: deque[Episode] = deque(maxlen=_MOST_EPISODES)

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, fragment: Fragment) -> bool:
        """Keep it until it is sent; False when the queue is full."""
        with self._lock:
            if len(self._waiting) >= self._capacity:
                return False
            self._waiting.append(fragment)
            return True

    def exchange(self, refused: list[Fragment], update: int) -> list[Fragment]:
        """Put the refused back in front and take the oldest, as many as one message holds.

        What is too old at this update is dropped and counted.
        """
        with self._lock:
            self._waiting.extendleft(reversed(refused))
            while self._waiting and self._is_stale(self._waiting[0], update):
                count_not_learned("stale", self._waiting.popleft().header.steps)
            batch = fill_message(islice(self._waiting, MAX_FRAGMENTS_PER_APPEND))
            for _ in batch:
                self._waiting.popleft()
            return batch

    def forget(self) -> None:
        """Drop all of it, counted as lost."""
        with self._lock:
            count_not_learned("lost", sum(fragment.header.steps for fragment in self._waiting))
            self._waiting.clear()

    def _is_stale(self, fragment: Fragment, update: int) -> bool:
        return 0 < self._stale_after < update - fragment.header.oldest_update


class ServedOutbox(Outbox):
    """Sends a queue in one session."""

    def __init__(self, session: Session, queue: Queue, journal: AckJournal | None) -> None:
        super().__init__(session, _NO_LIMIT, journal)
        self._queue = queue
        self._episodes = queue.episodes

    def drop(self, reason: str) -> int:
        """Forget what is under way, counted as lost; what has no number yet is for the next session."""
        with self._changed:
            count_not_learned("lost", sum(fragment.header.steps for fragment, _ in self._fragments))
            return super().drop(reason)

    def forget_queue(self) -> None:
        """What has no number yet will not be sent either: the end."""
        self._queue.forget()

    def _has_fragments(self) -> bool:
        return bool(self._queue) or super()._has_fragments()

    def _oldest(self) -> list[Fragment]:
        """The next, numbered now: what was refused has no number, for nothing of it was stored."""
        weights = self._session.weights
        update = weights.publication.update if weights else 0
        with self._changed:
            taken = self._queue.exchange([fragment for fragment, _ in self._fragments], update)
            batch = [self._numbered(fragment, self.acked_through + 1 + i) for i, fragment in enumerate(taken)]
            now = time.monotonic()
            self._fragments = deque((fragment, now) for fragment in batch)
            metrics.OUTBOX_FRAGMENTS.set(len(self._queue) + len(batch))
        return batch

    def _numbered(self, fragment: Fragment, sequence: int) -> Fragment:
        header = replace(fragment.header, session=self._session.number, sequence=sequence)
        return replace(fragment, header=header)


def count_not_learned(reason: str, steps: int) -> None:
    """Steps that were answered and do not go to the learner."""
    metrics.NOT_LEARNED_STEPS.labels(reason).inc(steps)
