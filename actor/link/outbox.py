"""Sends the fragments and episode reports of one session until they are acknowledged.

`put` waits while the queue is full, so that the environment pauses. One thread sends, with one call of many
fragments in flight, and waits while the reply is FULL. A refusal that ends the session is handed to it; what
was not acknowledged by then is lost: nothing is renumbered. The lock of the outbox guards the queue.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from penstock.actor.link.ack_journal import AckJournal
from penstock.actor.link.session import Session, count_strikes
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import (
    MAX_EPISODES_PER_REPORT,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_MESSAGE_BYTES,
    MAX_ROWS_PER_APPEND,
    MESSAGE_OVERHEAD_BYTES,
    SLOT_BYTES,
)
from penstock.protocol.messages import Episode, Report
from penstock.protocol.refusal import Reason, Refusal
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint

# ---- Fragments on their way to the broker, and which of them go into the next message.

_HEADER_BYTES: Final = 512
_APPEND_BYTES: Final = MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class Queued:
    """A fragment and when it was built, in monotonic seconds."""

    fragment: Fragment
    built_s: float


class FragmentQueue:
    """The fragments of an outbox, in order, with the numbers that they were made with."""

    def __init__(self, capacity: int) -> None:
        """capacity: most unacknowledged fragments."""
        self._capacity = capacity
        self._queued: deque[Queued] = deque()
        self.episodes: deque[Episode] = deque()
        """Finished episodes that are not reported yet, oldest first."""

    def __len__(self) -> int:
        """Return how many fragments are not acknowledged, claimed ones included."""
        return len(self._queued)

    def put(self, fragment: Fragment, *, even_when_full: bool = False) -> bool:
        """Keep a fragment until it is acknowledged; False when there is no room, and it is not kept."""
        if len(self._queued) >= self._capacity and not even_when_full:
            return False
        self._queued.append(Queued(fragment, time.monotonic()))
        return True

    def claim_next(self, session: int, first: int, update: int) -> list[Fragment]:
        """Return the fragments of the next message, numbered `first`, `first` + 1, … in this session.

        update: the learner's, of the newest weights that are known here. Empty: nothing is to be sent now.
        """
        return fill_message(queued.fragment for queued in self._queued)

    def claimed_through(self, sequence: int) -> list[Fragment]:
        """Return the fragments that an acknowledgement of `sequence` covers, in order."""
        return [queued.fragment for queued in self._queued if queued.fragment.header.sequence <= sequence]

    def acknowledge(self, sequence: int) -> list[Queued]:
        """Let go of the fragments up to `sequence`, which the log has; returns them."""
        taken = []
        while self._queued and self._queued[0].fragment.header.sequence <= sequence:
            taken.append(self._queued.popleft())
        return taken

    def drop(self) -> list[Fragment]:
        """Let go of the fragments that only this session could have sent; returns them."""
        dropped = [queued.fragment for queued in self._queued]
        self._queued.clear()
        return dropped


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


log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.05
_LEAST_WAIT_S = 0.005


class Outbox:
    """Unacknowledged fragments and unreported episodes of one session."""

    def __init__(self, session: Session, queue: FragmentQueue, journal: AckJournal | None = None) -> None:
        """journal: a record of what is acknowledged, None: no record."""
        self._session, self._queue, self._journal = session, queue, journal
        self._changed = threading.Condition()
        self._reports = 0
        self._reported_s = 0.0
        self._flushing = False
        self.acked_through = 0
        """The last sequence number that the log has."""
        session.on_change(self._notify)

    def start(self) -> None:
        self._session.run_thread("appender", self._send)

    def put(self, fragment: Fragment, stop: threading.Event) -> bool:
        """Keep a fragment; waits for room unless `stop` is set. False: the session is over."""
        with self._changed:
            while not self._session.is_over:
                if self._queue.put(fragment, even_when_full=stop.is_set()):
                    metrics.OUTBOX_FRAGMENTS.set(len(self._queue))
                    self._changed.notify_all()
                    return True
                self._changed.wait()
            return False

    def report(self, episodes: list[Episode]) -> None:
        """Report finished episodes whose return is finite; the fragment of any other one ends the session."""
        finite = [episode for episode in episodes if math.isfinite(episode.episode_return)]
        if len(finite) < len(episodes):
            log.error("episodes whose return is not finite", extra={"episodes": len(episodes) - len(finite)})
        if finite:
            with self._changed:
                self._queue.episodes.extend(finite)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged; False when the time or the session ended first."""
        failpoint("outbox.flushing", self.acked_through)
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_empty() or self._session.is_over, timeout_s)
            return self._is_empty()

    def conclude(self, strikes: int, flush_s: float) -> int | None:
        """Flush what an open session still takes; drop what a session that ended does not take any more.

        strikes: sessions in a row that ended badly before this one. Returns their number now, None when no
        other session is needed. Raises Fatal as `count_strikes`.
        """
        session = self._session
        if session.ended is None:
            if not self.flush(flush_s):
                dropped = self.drop("drain")
                if session.ended is None:
                    log.warning("flush gave up", extra={"fragments": dropped})
            return None
        dropped = self.drop(session.ended.reason.label)
        log.warning("session ended", extra={"refusal": session.ended, "dropped_fragments": dropped})
        if session.ended.reason is Reason.RUN_CLOSED:
            return None
        return count_strikes(strikes, session.ended, acknowledged=self.acked_through > 0)

    def drop(self, reason: str) -> int:
        """Forget what this session can no longer send and count it; returns the number of fragments."""
        with self._changed:
            count = len(self._queue.drop())
            self._queue.episodes.clear()
            metrics.FRAGMENTS_ABANDONED.labels(reason).inc(count)
            metrics.OUTBOX_FRAGMENTS.set(len(self._queue))
            return count

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _is_empty(self) -> bool:
        return not self._queue and not self._queue.episodes

    def _send(self) -> None:
        while self._wait_for_work():
            fragments = self._claim_next()
            if fragments:
                self._append(fragments)
            if self._is_report_due() and not self._session.is_over:
                self._report()

    def _wait_for_work(self) -> bool:
        """False when the session takes nothing more."""
        with self._changed:
            while not self._session.is_closing and not self._session.is_over:
                if self._queue or self._is_report_due():
                    return True
                failpoint("appender.waiting", self.acked_through)
                self._changed.wait(REPORT_EVERY_S if self._queue.episodes else None)
            return False

    def _is_report_due(self) -> bool:
        late = time.monotonic() - self._reported_s >= REPORT_EVERY_S
        return bool(self._queue.episodes) and (late or self._flushing)

    def _claim_next(self) -> list[Fragment]:
        session = self._session
        update = session.weights.publication.update if session.weights else 0
        with self._changed:
            claimed = self._queue.claim_next(session.number, self.acked_through + 1, update)
            metrics.OUTBOX_FRAGMENTS.set(len(self._queue))
            return claimed

    def _append(self, fragments: list[Fragment]) -> None:
        failpoint("append.sending", fragments[-1].header.sequence)
        through, refusal = self._session.append(self.acked_through, fragments)
        self._acknowledge(through)
        if refusal is not None:
            self._refused(refusal)

    def _acknowledge(self, through: int) -> None:
        now = time.monotonic()
        if self._journal is not None:
            with self._changed:
                covered = self._queue.claimed_through(through)
            self._journal.record(covered)
        with self._changed:
            self.acked_through = max(self.acked_through, through)
            for queued in self._queue.acknowledge(through):
                metrics.FRAGMENTS_ACKED.inc()
                metrics.ACK_LATENCY_SECONDS.observe(now - queued.built_s)
            metrics.OUTBOX_FRAGMENTS.set(len(self._queue))
            self._changed.notify_all()
        failpoint("append.acknowledged", through)

    def _report(self) -> None:
        episodes = self._queue.episodes
        count = min(len(episodes), MAX_EPISODES_PER_REPORT)
        report = Report(
            session=self._session.number,
            sequence=self._reports + 1,
            episodes=tuple(episodes[index] for index in range(count)),
        )
        failpoint("report.sending", report.sequence)
        acked, refusal = self._session.report(report)
        if acked >= report.sequence:
            self._reports, self._reported_s = report.sequence, time.monotonic()
            with self._changed:
                for _ in range(min(count, len(episodes))):
                    episodes.popleft()
                self._changed.notify_all()
        if refusal is not None:
            self._refused(refusal)

    def _refused(self, refusal: Refusal) -> None:
        metrics.REFUSALS.labels(refusal.reason.label).inc()
        self._session.wait_or_end(refusal, _LEAST_WAIT_S)
