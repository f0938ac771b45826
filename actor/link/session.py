"""One open session of an actor: the broker's newest answers, kept fresh by a thread.

                     ┌────────────── ended (refusal) ─► the actor opens the next session
  opened ─► watching ┤
                     └────────────── closing ─► closed

The watcher waits in WatchLatest, which also renews the session, so an environment that takes long costs
nothing. Other threads wait for a change with `wait_until`, or have `on_change` call them. Credit is absolute:
what arrives late or twice changes nothing. An error in a thread of the session is kept and raised by `check`,
in the main thread.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.actor.link.broker_client import BrokerClient, SessionReply
from penstock.protocol.fragment import Fragment
from penstock.protocol.limits import (
    MAX_WATCH_WAIT_MS,
    MAX_WEIGHT_BYTES,
)
from penstock.protocol.messages import Credit, News, Publication, Report, Role, RunState, Watch
from penstock.protocol.refusal import Reason, Refusal
from penstock.protocol.specification import RunSpecification
from penstock.runtime import logs, metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """A publication, its bytes, and the numbers that came with it.

    blob: the bytes, their digest checked.   arrived_s: when they arrived, in monotonic seconds.
    """

    publication: Publication
    blob: bytes
    arrived_s: float
    scalars: Mapping[str, float] = field(default_factory=dict)


def checked(publication: Publication, blob: bytes) -> Weights:
    """Return the weights of these bytes, arrived now; raises Fatal when they are not those published."""
    digest = hashlib.sha256(blob).hexdigest()
    if len(blob) != publication.size or digest != publication.sha256:
        raise Fatal(
            f"weights {publication.version}: {len(blob)} bytes with digest {digest[:12]}…, "
            f"{publication.size} with {publication.sha256[:12]}… were published"
        )
    return Weights(publication, blob, time.monotonic())


MAX_STRIKES: Final = 3
CLOSE_DEADLINE_S = 2.0
_IDLE_S = 0.05
"""Pause after a watch that came back early with nothing new, so that a hasty broker costs no core."""
WAITING = (Reason.NOT_READY, Reason.FULL)
"""Refusals after which the call is repeated."""
LEAST_WAIT_S = 0.05
_FLUSH_WAIT_MS = 200
_EVERY_VERSION = 2**53


_Applied = tuple[Publication, tuple[float, ...]]
"""The weights that are applied here and the probe's log-probabilities under them."""


class Session:
    """An open session: the one owner of its state, which others read and change by named methods only."""

    def __init__(
        self, broker_client: BrokerClient, opened: SessionReply, *, follows_weights: bool = True
    ) -> None:
        """Without `follows_weights` publications neither end a wait nor are fetched."""
        self._broker_client = broker_client
        self.number, self.specification = opened.session, opened.specification
        self.seed_salt = opened.seed_salt
        self._follows_weights = follows_weights
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._listeners: list[Callable[[], None]] = []
        self._threads: list[threading.Thread] = []
        self._wait_ms = min(self.specification.session_timeout_ms // 3, MAX_WATCH_WAIT_MS)
        self.credit = opened.credit
        self.state = RunState.RUNNING
        self.weights: Weights | None = None
        """The newest publication; None before the first."""
        self.evaluate_version = 0
        """The version that the learner wants measured; 0: none."""
        self.ended: Refusal | None = None
        """The refusal with which the broker ended the session; None while it has not."""
        self._failure: Exception | None = None
        self._begun_through = 0
        self._lag = (0, 0, 0)
        self._on_lag: Callable[[int, int, int], None] = lambda _known, _newest, _arrived_bytes: None
        self._revision = 0
        self._flush = self._flushed = 0
        self._applied: _Applied = (Publication(), ())

    # ------------------------------------------------------------ what others read

    @property
    def flush(self) -> int:
        """Number of the newest flush that an operator requested and that is not reported; 0: none."""
        return self._flush if self._flush > self._flushed else 0

    def report_flushed(self, flush: int) -> None:
        """Report with the next watch that all that was cut for this flush is acknowledged."""
        self._flushed = max(self._flushed, flush)

    @property
    def is_over(self) -> bool:
        return self.ended is not None or self._failure is not None

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def check(self) -> None:
        """Raise the error that ended one of the session's threads, if one did."""
        if self._failure is not None:
            raise self._failure

    def may_begin(self, sequence: int) -> bool:
        """Return whether credit, the state of the run and the weights allow a fragment of that number."""
        weights, credit = self.weights, self.credit
        return (
            sequence <= credit.begin_through
            and self.state is RunState.RUNNING
            and weights is not None
            and weights.publication.version >= max(1, credit.min_version)
        )

    # ------------------------------------------------------------ waiting for a change

    def wait_until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for the condition, checked after every change; False when the time was over first."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change, in the thread that made it and that holds no lock here."""
        self._listeners.append(listener)

    def notify_waiters(self) -> None:
        """Wake all threads that wait for a change."""
        with self._changed:
            self._changed.notify_all()
        for listener in self._listeners:
            listener()

    def follow_lag(self, on_lag: Callable[[int, int, int], None]) -> None:
        """Call `on_lag`, now and at every change.

        Its arguments: the version held here, the one published, and how many bytes of that have arrived.
        """
        self._on_lag = on_lag
        on_lag(*self._lag)

    # ------------------------------------------------------------ from opened to closed

    def start(self) -> None:
        self.run_thread("watcher", self._watch)

    def run_thread(self, name: str, body: Callable[[], object]) -> None:
        """Run `body` until it returns; its error, Interrupted apart, becomes the session's failure."""

        def run() -> None:
            try:
                body()
            except Interrupted:
                return
            except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
                with self._changed:
                    self._failure = self._failure or error
                self.notify_waiters()
            finally:
                failpoint(f"{name}.over.waiting")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def end_by(self, refusal: Refusal) -> None:
        """Note that the broker takes nothing more from this session; the first refusal is kept."""
        with self._changed:
            self.ended = self.ended or refusal
        self.notify_waiters()

    def wait_or_end(self, refusal: Refusal, least_wait_s: float) -> None:
        """Wait as long as FULL or NOT_READY ask, or until the session closes; any other refusal ends it."""
        if refusal.reason in WAITING:
            self._closing.wait(max(least_wait_s, refusal.retry_after_ms / 1000))
        else:
            self.end_by(refusal)

    def close(self, *, politely: bool) -> None:
        """Stop the threads; `politely`: tell the broker, which closes the session at once."""
        if politely:
            self._broker_client.close_session(self.number, CLOSE_DEADLINE_S)
        self._closing.set()
        self.notify_waiters()

    # ------------------------------------------------------------ what is done in it

    def begin(self, sequence: int) -> int:
        """Begin a fragment, which the next watch reports; returns the round of its credit."""
        self._begun_through = sequence
        return self.credit.round

    def append(self, acked_through: int, fragments: Sequence[Fragment]) -> tuple[int, Refusal | None]:
        """Send fragments and take the credit that comes back; repeated until the end (Interrupted).

        Returns how far the log got, and why no further.
        """
        through, refusal, credit = self._broker_client.append(
            self.number, acked_through, fragments, self._closing
        )
        failpoint("append.answered", through)
        self.raise_credit(credit)
        return through, refusal

    def give_back(self) -> None:
        """Give back the credit of fragments that are not begun; this session begins no more."""
        request = replace(self._request(self._applied), wait_ms=0, gives_back=True)
        self.run_thread("giver", lambda: self._broker_client.watch(request, self._closing))

    def report(self, report: Report) -> tuple[int, Refusal | None]:
        """Send episodes: the last report that was taken, and why this one was not. Raises as `append`."""
        return self._broker_client.report(report, self._closing)

    def raise_credit(self, credit: Credit) -> None:
        """Take the credit of a reply, unless a higher one is known."""
        with self._changed:
            known = self.credit
            is_newer = (credit.begin_through, credit.min_version) > (known.begin_through, known.min_version)
            if is_newer:
                self.credit = credit
        if is_newer:
            self.notify_waiters()

    def report_applied(self, publication: Publication, probe: tuple[float, ...]) -> None:
        """Report with the next watch which weights are applied here, and the probe's log-probabilities."""
        with self._changed:
            self._applied = (publication, probe)

    def fetch(self, version: int) -> Weights | None:
        """Return the weights of a version, fetched in chunks from where a broken transfer stopped.

        None when the version is no longer kept, or another run publishes under its number. Raises Fatal where
        the bytes are more than are allowed or not those published, Interrupted when the session closes.
        """
        pieces: list[memoryview] = []
        size, publication = 0, None
        while True:
            failpoint("weights.fetching", version)
            chunk = self._broker_client.weights(self.number, version, size, self._closing)
            if chunk is None or chunk[0] != (publication or chunk[0]):
                return None
            publication, data = chunk
            if publication.size > MAX_WEIGHT_BYTES:
                raise Fatal(f"weights {version}: {publication.size} bytes, {MAX_WEIGHT_BYTES} are allowed")
            pieces.append(data)
            size += len(data)
            self._note_lag(*self._lag[:2], size)
            if size >= publication.size or not data:
                return checked(publication, b"".join(pieces))

    def _watch(self) -> None:
        while not self.is_closing and not self.is_over:
            asked_s, applied = time.monotonic(), self._applied
            request = self._request(applied)
            failpoint("watch.waiting", self._begun_through)
            reply = self._broker_client.watch(request, self._closing)
            failpoint("watch.answered", self._begun_through)
            if isinstance(reply, Refusal):
                if reply.reason in WAITING:
                    failpoint("watch.waiting", self._begun_through)
                self.wait_or_end(reply, LEAST_WAIT_S)
                continue
            # Credit beyond that of the request is news as well: an Append may have brought it meanwhile.
            is_news = self._take(reply) or reply.credit.begin_through > request.known_begin_through
            if not is_news and time.monotonic() - asked_s < self._wait_ms / 2000:
                failpoint("watch.waiting", self._begun_through)
                self._closing.wait(_IDLE_S)
            with self._changed:
                if self._applied is applied:
                    self._applied = (applied[0], ())

    def _request(self, applied: _Applied) -> Watch:
        return Watch(
            session=self.number,
            begun_through=self._begun_through,
            known_version=self._known_version(),
            known_begin_through=self.credit.begin_through,
            known_revision=self._revision,
            applied_version=applied[0].version,
            applied_sha256=applied[0].sha256,
            probe_log_prob=applied[1],
            # An answer to a flush goes up soon; nothing else would end the wait.
            wait_ms=_FLUSH_WAIT_MS if self.flush else self._wait_ms,
            flushed=self._flushed,
        )

    def _take(self, news: News) -> bool:
        """Return whether anything was new."""
        known, newest = self._known_version(), news.latest.version
        self._note_lag(known, newest, 0)
        fresh = None
        if newest > known:
            fresh = checked(news.latest, news.weights) if news.weights else self.fetch(newest)
        if fresh is not None:
            fresh = replace(fresh, scalars=news.scalars)
            self._note_lag(newest, newest, 0)
        self.raise_credit(news.credit)
        with self._changed:
            before = (self.state, self._revision, self.evaluate_version)
            self.state, self._revision = news.state, max(self._revision, news.revision)
            self.evaluate_version, self._flush = news.evaluate_version, news.flush
            self.weights = fresh or self.weights
            is_new = before != (self.state, self._revision, self.evaluate_version)
        self.notify_waiters()
        return fresh is not None or is_new

    def _note_lag(self, known: int, newest: int, arrived_bytes: int) -> None:
        self._lag = (known, newest, arrived_bytes)
        self._on_lag(*self._lag)

    def _known_version(self) -> int:
        if not self._follows_weights:
            return _EVERY_VERSION
        return self.weights.publication.version if self.weights else 0


def open_session(
    broker_client: BrokerClient, actor_id: str, role: Role, lifecycle: Lifecycle
) -> Session | None:
    """Return the next session; None at a drain or the run's end. Raises Fatal when refused."""
    opened = _ask(broker_client, actor_id, role, lifecycle, describe_only=False)
    if opened is None:
        return None
    failpoint("session.opened", opened.session)
    metrics.SESSIONS_OPENED.inc()
    log.info("session open", extra={"session": opened.session, "run_name": opened.specification.run})
    return Session(broker_client, opened, follows_weights=role is not Role.EVALUATION)


def describe_run(
    broker_client: BrokerClient, actor_id: str, role: Role, lifecycle: Lifecycle
) -> RunSpecification | None:
    """Return the run's specification without a session; waits, raises and returns None as `open_session`."""
    described = _ask(broker_client, actor_id, role, lifecycle, describe_only=True)
    return None if described is None else described.specification


def _ask(
    broker_client: BrokerClient, actor_id: str, role: Role, lifecycle: Lifecycle, *, describe_only: bool
) -> SessionReply | None:
    is_logged = False
    while not lifecycle.draining.is_set():
        failpoint("session.opening")
        try:
            reply = broker_client.open_session(
                actor_id, role, lifecycle.draining, describe_only=describe_only
            )
        except Interrupted:
            break
        if isinstance(reply, SessionReply):
            logs.name_run(reply.specification.run)
            return reply
        if reply.reason is Reason.RUN_CLOSED:
            log.info("the run has ended")
            break
        if reply.reason not in WAITING:
            raise Fatal(f"the broker opens no session for {actor_id}: {reply}")
        if not is_logged:
            log.info("waiting for the run", extra={"refusal": reply})
            is_logged = True
        failpoint("session.waiting")
        lifecycle.draining.wait(max(LEAST_WAIT_S, reply.retry_after_ms / 1000))
    return None


def count_strikes(strikes: int, refusal: Refusal, *, acknowledged: bool) -> int:
    """Sessions in a row that ended badly; raises Fatal at the third, and at once when fenced."""
    if refusal.reason is Reason.FENCED:
        raise Fatal(f"another process acts under this name, or the run has a new owner: {refusal}")
    if refusal.reason is Reason.EXPIRED:
        return strikes
    strikes = 1 if acknowledged else strikes + 1
    if strikes >= MAX_STRIKES:
        raise Fatal(f"the broker refused {strikes} sessions of this actor in a row, the last with {refusal}")
    return strikes
