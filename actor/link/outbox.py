"""Fragments and episode reports on their way to the broker, sent until acknowledged.

In: fragments in sequence order (at most `capacity` unacknowledged; `put` waits while full, so that the
environment pauses) and finished episodes.  Out: Append and ReportEpisodes from one thread, one call in
flight, many fragments per call. FULL is waited out. A refusal that ends the session (INVALID, GAP, EXPIRED,
FENCED, RUN_CLOSED) is handed to the session; what was not acknowledged then never is: nothing is renumbered.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from actor.link.ack_journal import AckJournal
from actor.link.session import Session
from penstock.runtime import metrics, tracing
from penstock.runtime.failpoint import failpoint
from penstock.wire.fragment import Fragment
from penstock.wire.limits import (
    MAX_EPISODES_PER_REPORT,
    MAX_FRAGMENTS_PER_APPEND,
    MAX_MESSAGE_BYTES,
    MAX_ROWS_PER_APPEND,
    MESSAGE_OVERHEAD_BYTES,
    SLOT_BYTES,
)
from penstock.wire.messages import Episode, Report
from penstock.wire.refusal import Reason, Refusal

log = logging.getLogger(__name__)

REPORT_EVERY_S = 0.05
_LEAST_WAIT_S = 0.005
_HEADER_BYTES = 512
_APPEND_BYTES = MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES


class Outbox:
    """Unacknowledged fragments and unreported episodes of one session."""

    def __init__(self, session: Session, capacity: int, journal: AckJournal | None = None) -> None:
        self._session = session
        self._journal = journal
        self._capacity = capacity
        self._changed = session.changed
        self._fragments: deque[tuple[Fragment, float]] = deque()
        self._episodes: deque[Episode] = deque()
        self._reports = 0
        self._reported_s = 0.0
        self._flushing = False
        self.acked_through = 0

    def start(self) -> None:
        """Begin to send."""
        self._session.run_thread("appender", self._send)

    def put(self, fragment: Fragment, stop: threading.Event) -> bool:
        """Keep a fragment until acknowledged; waits while full unless `stop` is set.

        False when the session is over: the fragment is not kept.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._fragments) < self._capacity or self._session.is_over or stop.is_set()
            )
            if self._session.is_over:
                return False
            self._fragments.append((fragment, time.monotonic()))
            metrics.OUTBOX_FRAGMENTS.set(len(self._fragments))
            self._changed.notify_all()
            return True

    def report(self, episodes: list[Episode]) -> None:
        """Tell the learner of finished episodes, soon.

        One whose return is no number is left out: the fragment with its rewards ends the session as INVALID.
        """
        finite = [episode for episode in episodes if math.isfinite(episode.episode_return)]
        if len(finite) < len(episodes):
            log.error("episodes whose return is no number", extra={"episodes": len(episodes) - len(finite)})
        if finite:
            with self._changed:
                self._episodes.extend(finite)
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged; False when the time or the session ended first."""
        failpoint("outbox.flushing", self.acked_through)
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_empty() or self._session.is_over, timeout_s)
            return self._is_empty()

    def drop(self, reason: str) -> int:
        """Forget what is unacknowledged and count it; returns the number of fragments."""
        with self._changed:
            count = len(self._fragments)
            self._fragments.clear()
            self._episodes.clear()
            metrics.FRAGMENTS_ABANDONED.labels(reason).inc(count)
            metrics.OUTBOX_FRAGMENTS.set(0)
            return count

    def _has_fragments(self) -> bool:
        return bool(self._fragments)

    def _is_empty(self) -> bool:
        return not self._has_fragments() and not self._episodes

    def _send(self) -> None:
        while self._wait_for_work():
            fragments = self._oldest()
            if fragments:
                self._append(fragments)
            if self._is_report_due() and not self._session.is_over:
                self._report()

    def _wait_for_work(self) -> bool:
        """False when there is nobody to send for any more."""
        with self._changed:
            while not self._session.closing.is_set() and not self._session.is_over:
                if self._has_fragments() or self._is_report_due():
                    return True
                failpoint("appender.waiting", self.acked_through)
                self._changed.wait(REPORT_EVERY_S if self._episodes else None)
            return False

    def _is_report_due(self) -> bool:
        late = time.monotonic() - self._reported_s >= REPORT_EVERY_S
        return bool(self._episodes) and (late or self._flushing)

    def _oldest(self) -> list[Fragment]:
        """As many of the oldest as one message takes."""
        with self._changed:
            return fill_message(fragment for fragment, _ in self._fragments)

    def _append(self, fragments: list[Fragment]) -> None:
        session = self._session
        failpoint("append.sending", fragments[-1].header.sequence)
        began = time.monotonic()
        reply = session.link.append(session.number, self.acked_through, fragments, session.closing)
        if tracing.is_on():
            _trace(fragments, reply.acked_through, time.monotonic() - began)
        failpoint("append.answered", reply.acked_through)
        session.offer(reply.leave)
        self._acknowledge(reply.acked_through)
        if reply.refusal is not None:
            self._refused(reply.refusal)

    def _acknowledge(self, through: int) -> None:
        now = time.monotonic()
        if self._journal is not None:
            self._journal.record(self._covered(through))
        with self._changed:
            self.acked_through = max(self.acked_through, through)
            while self._fragments and self._fragments[0][0].header.sequence <= through:
                _, built_s = self._fragments.popleft()
                metrics.FRAGMENTS_ACKED.inc()
                metrics.ACK_LATENCY_SECONDS.observe(now - built_s)
            metrics.OUTBOX_FRAGMENTS.set(len(self._fragments))
            self._changed.notify_all()
        failpoint("append.acknowledged", through)

    def _covered(self, through: int) -> list[Fragment]:
        with self._changed:
            return [fragment for fragment, _ in self._fragments if fragment.header.sequence <= through]

    def _report(self) -> None:
        count = min(len(self._episodes), MAX_EPISODES_PER_REPORT)
        report = Report(
            session=self._session.number,
            sequence=self._reports + 1,
            episodes=tuple(self._episodes[index] for index in range(count)),
        )
        failpoint("report.sending", report.sequence)
        acked, refusal = self._session.link.report(report, self._session.closing)
        if acked >= report.sequence:
            self._reports, self._reported_s = report.sequence, time.monotonic()
            with self._changed:
                for _ in range(min(count, len(self._episodes))):
                    self._episodes.popleft()
                self._changed.notify_all()
        if refusal is not None:
            self._refused(refusal)

    def _refused(self, refusal: Refusal) -> None:
        metrics.REFUSALS.labels(refusal.reason.label).inc()
        if refusal.reason in (Reason.FULL, Reason.NOT_READY):
            self._session.closing.wait(max(_LEAST_WAIT_S, refusal.retry_after_ms / 1000))
        else:
            self._session.end(refusal)


def _trace(fragments: Iterable[Fragment], acked_through: int, took_s: float) -> None:
    for header in (fragment.header for fragment in fragments):
        tracing.record(
            "actor.append",
            took_s,
            header=header.traceparent,
            session=header.session,
            sequence=header.sequence,
            acked=header.sequence <= acked_through,
        )


def fill_message(fragments: Iterable[Fragment]) -> list[Fragment]:
    """The first of `fragments`, as many as one message takes, at least one."""
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
