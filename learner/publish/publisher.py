"""Publication of weights, encoded and sent in a thread of its own.

The learner offers a copy of the weights and continues. At most one offer waits: a newer one replaces it, and
takes over its settled position and its request for an evaluation. Versions come from Redis and only rise. A
crash loses nothing: a resumed learner publishes its restored weights first.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from functools import partial
from typing import Final

from penstock.broker.log.learner_log import LearnerLog
from penstock.config.settings import LearnerSection
from penstock.learner.evaluation import Candidate
from penstock.learner.lease import LeaseKeeper
from penstock.learner.probe import Quarantine
from penstock.policy import weights
from penstock.protocol.limits import WEIGHT_CHUNK_BYTES
from penstock.protocol.messages import Publication
from penstock.protocol.tensor import Array
from penstock.runtime import metrics
from penstock.runtime.failpoint import failpoint

LOOK_S: Final = 0.02
"""Seconds between two checks whether weights are being fetched."""


@dataclass(eq=False)
class PublishInterval:
    """Decides when weights may be published again; used by one thread.

    fetched: returns how many versions of more than one chunk are being fetched. clock: monotonic seconds.
    """

    section: InitVar[LearnerSection]
    fetched: Callable[[], int]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self, section: LearnerSection) -> None:
        self._interval_s = section.publish_interval_ms / 1000
        self._longest_s = max(self._interval_s, section.publish_fetch_wait_s)
        self._last_s, self._size = -math.inf, 0

    def published(self, size: int) -> None:
        self._last_s, self._size = self.clock(), size

    def is_over(self) -> bool:
        passed_s = self.clock() - self._last_s
        if passed_s < self._interval_s or passed_s >= self._longest_s:
            return passed_s >= self._interval_s
        return self._size <= WEIGHT_CHUNK_BYTES or self.fetched() == 0


_WAIT_S: Final = 0.5
_REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPublication:
    """Weights to publish, or a position to settle.

    weights: a `penstock.policy.weights.snapshot`; None: only settle.
    settled: position that publishing settles. evaluate: pin the version and have it evaluated. round: the
    lock-step round that it opens.
    """

    settled: int
    weights: Mapping[str, Array] | None = None
    update: int = 0
    scalars: Mapping[str, float] = field(default_factory=dict)
    evaluate: bool = False
    round: int | None = None
    env_steps: int = 0
    at_s: float = 0.0


@dataclass(eq=False)
class Publisher:
    """Publishes offers: call `offer` in the loop and `run` in a thread. latest: newest of this process.

    on_candidate: called with a version to evaluate, returns the one that it replaces, if any. on_published:
    called with each publication and its bytes. count: publications of all learners of the run so far.
    """

    learner_log: LearnerLog
    lease: LeaseKeeper
    quarantine: Quarantine
    on_candidate: Callable[[Candidate], Candidate | None]
    interval: PublishInterval
    stop: threading.Event
    on_published: Callable[[Publication, bytes], None] = lambda _publication, _blob: None
    _: KW_ONLY
    count: int = 0

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: PendingPublication | None = None
        self._busy = False
        self._flushing = 0
        self._serial = threading.Lock()
        self._place: dict[int, int] = {}
        self.latest = Publication()
        self.seconds = 0.0

    def offer(self, offer: PendingPublication) -> None:
        """Publish as soon as possible, instead of an offer that still waits."""
        with self._changed:
            self._waiting = offer if self._waiting is None else _merged(self._waiting, offer)
            self._changed.notify_all()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def publish(self, offer: PendingPublication) -> None:
        """Publish now, in this thread, after any publication in progress."""
        self.flush()
        with self._serial:
            self._publish(offer)

    def flush(self) -> None:
        """Have a waiting offer published now, and wait until no publication is in progress."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            while (self._waiting is not None or self._busy) and not self.stop.is_set():
                self._changed.wait(_WAIT_S)
            self._flushing -= 1

    def observe_generations(self, versions: Iterable[int]) -> None:
        """Observe how many publications of this process each fragment's oldest version lags behind.

        The difference of versions would be wrong: they leap when Redis restarts.
        """
        for place in map(self._place.get, versions):
            if place is not None:
                metrics.GENERATIONS.observe(self.count - place)

    def withdraw(self, candidate: Candidate) -> None:
        self.lease.patiently(lambda: self.learner_log.end_evaluation(candidate.version))

    def run(self) -> None:
        while not self.stop.is_set():
            failpoint("publisher.waiting")
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self.stop.is_set(), _WAIT_S)
            self._await_interval()
            with self._changed:
                offer, self._waiting = self._waiting, None
                self._busy = offer is not None
            if offer is not None:
                with self._serial:
                    self._publish(offer)
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _await_interval(self) -> None:
        """Wait until the offer is due; one that only settles, or that the loop awaits, is due at once."""

        def is_urgent() -> bool:
            nothing = self._waiting is None or self._waiting.weights is None
            return nothing or self._flushing > 0 or self.stop.is_set()

        while not (is_urgent() or self.interval.is_over()):
            with self._changed:
                self._changed.wait_for(is_urgent, LOOK_S)

    def _publish(self, offer: PendingPublication) -> None:
        started = time.perf_counter()
        if offer.weights is None:
            self.lease.patiently(lambda: self.learner_log.settle(offer.settled))
            return
        blob = weights.encode(offer.weights)
        failpoint("publish.before", offer.update)
        send = partial(
            self.learner_log.publish,
            blob,
            update=offer.update,
            settled=offer.settled,
            scalars=offer.scalars,
            round=offer.round,
            pin=offer.evaluate,
        )
        self.latest = self.lease.patiently(send)
        self.interval.published(len(blob))
        failpoint("publish.after", offer.update)
        self.count += 1
        self._place[self.latest.version] = self.count
        if len(self._place) > _REMEMBERED:
            del self._place[next(iter(self._place))]
        self.quarantine.expect(self.latest.version, self.latest.sha256, offer.weights)
        if offer.evaluate:
            self._have_evaluated(blob, offer)
        self.on_published(self.latest, blob)
        self.seconds += time.perf_counter() - started
        metrics.UPDATE_SECONDS.labels("publish").observe(time.perf_counter() - started)
        metrics.WEIGHT_VERSION_PUBLISHED.set(self.latest.version)

    def _have_evaluated(self, blob: bytes, offer: PendingPublication) -> None:
        candidate = Candidate(
            version=self.latest.version,
            update=offer.update,
            env_steps=offer.env_steps,
            at_s=offer.at_s,
            blob=blob,
        )
        replaced = self.on_candidate(candidate)
        self.lease.patiently(lambda: self.learner_log.request_evaluation(candidate.version))
        if replaced is not None:
            self.withdraw(replaced)


def _merged(old: PendingPublication, new: PendingPublication) -> PendingPublication:
    if new.weights is None:
        return replace(old, settled=new.settled)
    return replace(new, evaluate=old.evaluate or new.evaluate)
