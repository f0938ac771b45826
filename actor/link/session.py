"""One open session: what the broker last said, kept fresh by a thread of its own.

                     ┌────────────── ended (refusal) ─► the actor opens the next session
  opened ─► watching ┤
                     └────────────── closing ─► closed

The watcher hangs in WatchLatest, which also renews the session, so an environment that takes long costs
nothing. `changed` is notified whenever a field moves; other threads wait on it. Leave is absolute: what
arrives late or twice changes nothing. An error in a thread of the session is kept in `failure` and raised
by `check`, in the main thread.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from actor.link.broker_client import Link, Opened
from penstock.runtime import logs, metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted
from penstock.wire.limits import MAX_WATCH_WAIT_MS, MAX_WEIGHT_BYTES
from penstock.wire.messages import Leave, News, Publication, Role, RunState, Watch
from penstock.wire.refusal import Reason, Refusal

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 2.0
MAX_STRIKES = 3
_IDLE_S = 0.05
"""Pause after a watch that came back early with nothing new, so that a hasty broker costs no core."""
_WAITING = (Reason.NOT_READY, Reason.FULL)
_LEAST_WAIT_S = 0.05
_EVERY_VERSION = 2**53


@dataclass(frozen=True, slots=True)
class Weights:
    """A publication, its bytes (digest checked), when they arrived (monotonic seconds), and the numbers that came with it."""

    publication: Publication
    blob: bytes
    arrived_s: float
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Answer:
    publication: Publication
    probe: tuple[float, ...] = ()


class Session:
    """An open session. Fields are written under `changed` and may be read without it."""

    def __init__(self, link: Link, opened: Opened, *, follows_weights: bool = True) -> None:
        """Without `follows_weights` publications neither end a wait nor are fetched."""
        self.link = link
        self.number = opened.session
        self.specification = opened.specification
        self.seed_salt = opened.seed_salt
        self.changed = threading.Condition()
        self.closing = threading.Event()
        self.leave = opened.leave
        self.state = RunState.RUNNING
        self.weights: Weights | None = None
        self.evaluate_version = 0
        self.ended: Refusal | None = None
        self.failure: Exception | None = None
        self.begun_through = 0
        self._lag = (0, 0)
        self._on_lag: Callable[[int, int], None] = _ignore
        self._revision = 0
        self._follows_weights = follows_weights
        self._answer = _Answer(Publication())
        self._threads: list[threading.Thread] = []
        self._wait_ms = min(self.specification.session_timeout_ms // 3, MAX_WATCH_WAIT_MS)

    def start(self) -> None:
        """Begin to watch."""
        self.run_thread("watcher", self._watch)

    def run_thread(self, name: str, body: Callable[[], None]) -> None:
        """Run `body` until it returns; its error, Interrupted apart, becomes the session's `failure`."""

        def run() -> None:
            try:
                body()
            except Interrupted:
                return
            except Exception as error:  # noqa: BLE001 - handed to the main thread, which raises it
                self._fail(error)
            finally:
                failpoint(f"{name}.over.waiting")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def offer(self, leave: Leave) -> None:
        """Leave from any reply; older than what is known: ignored."""
        with self.changed:
            if (leave.begin_through, leave.min_version) > (self.leave.begin_through, self.leave.min_version):
                self.leave = leave
                self.changed.notify_all()

    def follow_lag(self, on_lag: Callable[[int, int], None]) -> None:
        """Have `on_lag` told, from now on, which version is held here and which is published."""
        self._on_lag = on_lag
        on_lag(*self._lag)

    def answer(self, publication: Publication, probe: tuple[float, ...]) -> None:
        """Weights that are applied now and the probe's log-probabilities under them; goes up next time."""
        with self.changed:
            self._answer = _Answer(publication, probe)

    def end(self, refusal: Refusal) -> None:
        """The broker takes nothing more from this session."""
        with self.changed:
            self.ended = self.ended or refusal
            self.changed.notify_all()

    def wake(self) -> None:
        """Have every thread that waits on `changed` look again."""
        with self.changed:
            self.changed.notify_all()

    def check(self) -> None:
        """Raise what ended one of the session's threads."""
        if self.failure is not None:
            raise self.failure

    @property
    def is_over(self) -> bool:
        """Ended by the broker or by a failure."""
        return self.ended is not None or self.failure is not None

    def close(self, *, politely: bool) -> None:
        """Stop the threads; `politely`: tell the broker, which closes the session at once."""
        if politely:
            self.link.close_session(self.number, CLOSE_DEADLINE_S)
        self.closing.set()
        with self.changed:
            self.changed.notify_all()

    def fetch(self, version: int) -> Weights | None:
        """The bytes of a version in chunks, from where a broken transfer stopped; None: no longer kept.

        Raises Fatal when the bytes do not have the digest published.
        """
        pieces: list[memoryview] = []
        size = 0
        while True:
            failpoint("weights.fetching", version)
            chunk = self.link.weights(self.number, version, size, self.closing)
            if chunk is None:
                return None
            if chunk.publication.size > MAX_WEIGHT_BYTES:
                raise Fatal(
                    f"weights {version}: {chunk.publication.size} bytes, {MAX_WEIGHT_BYTES} are allowed"
                )
            pieces.append(chunk.data)
            size += len(chunk.data)
            if size >= chunk.publication.size or not chunk.data:
                return _checked(chunk.publication, b"".join(pieces))

    def _watch(self) -> None:
        while not self.closing.is_set() and not self.is_over:
            asked_s, answer = time.monotonic(), self._answer
            failpoint("watch.waiting", self.begun_through)
            reply = self.link.watch(self._request(answer), self.closing)
            failpoint("watch.answered", self.begun_through)
            if isinstance(reply, Refusal):
                self._refused(reply)
                continue
            if not self._take(reply) and time.monotonic() - asked_s < self._wait_ms / 2000:
                failpoint("watch.waiting", self.begun_through)
                self.closing.wait(_IDLE_S)
            with self.changed:
                if self._answer is answer:
                    self._answer = _Answer(answer.publication)

    def _request(self, answer: _Answer) -> Watch:
        return Watch(
            session=self.number,
            begun_through=self.begun_through,
            known_version=self._known_version(),
            known_begin_through=self.leave.begin_through,
            known_revision=self._revision,
            applied_version=answer.publication.version,
            applied_sha256=answer.publication.sha256,
            probe_log_prob=answer.probe,
            wait_ms=self._wait_ms,
        )

    def _refused(self, refusal: Refusal) -> None:
        if refusal.reason in _WAITING:
            failpoint("watch.waiting", self.begun_through)
            self.closing.wait(max(_LEAST_WAIT_S, refusal.retry_after_ms / 1000))
        else:
            self.end(refusal)

    def _take(self, news: News) -> bool:
        """Whether anything was new."""
        known, newest = self._known_version(), news.latest.version
        self._note_lag(known, newest)
        fresh = self._newer(news) if newest > known else None
        if fresh is not None:
            self._note_lag(newest, newest)
        self.offer(news.leave)
        with self.changed:
            before = (self.state, self._revision, self.evaluate_version)
            self.state, self._revision = news.state, max(self._revision, news.revision)
            self.evaluate_version = news.evaluate_version
            self.weights = fresh or self.weights
            self.changed.notify_all()
            return fresh is not None or before != (self.state, self._revision, self.evaluate_version)

    def _note_lag(self, known: int, newest: int) -> None:
        self._lag = (known, newest)
        self._on_lag(known, newest)

    def _known_version(self) -> int:
        if not self._follows_weights:
            return _EVERY_VERSION
        return self.weights.publication.version if self.weights else 0

    def _newer(self, news: News) -> Weights | None:
        weights = _checked(news.latest, news.weights) if news.weights else self.fetch(news.latest.version)
        return None if weights is None else replace(weights, scalars=news.scalars)

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()


def _ignore(_known: int, _newest: int) -> None:
    """Nobody asked about the lag."""


def _checked(publication: Publication, blob: bytes) -> Weights:
    digest = hashlib.sha256(blob).hexdigest()
    if len(blob) != publication.size or digest != publication.sha256:
        raise Fatal(
            f"weights {publication.version}: {len(blob)} bytes with digest {digest[:12]}…, "
            f"{publication.size} with {publication.sha256[:12]}… were published"
        )
    return Weights(publication, blob, time.monotonic())


def open_session(link: Link, actor_id: str, role: Role, lifecycle: Lifecycle) -> Session | None:
    """The actor's next session; None when the process drains or the run has ended.

    Waits, with a message, while no learner has written the run specification. Raises Fatal when refused.
    """
    said = False
    while not lifecycle.draining.is_set():
        failpoint("session.opening")
        try:
            reply = link.open_session(actor_id, role, lifecycle.draining)
        except Interrupted:
            break
        if isinstance(reply, Opened):
            failpoint("session.opened", reply.session)
            metrics.SESSIONS_OPENED.inc()
            logs.name_run(reply.specification.run)
            log.info("session open", extra={"session": reply.session, "run_name": reply.specification.run})
            return Session(link, reply, follows_weights=role is not Role.EVALUATION)
        if reply.reason is Reason.RUN_CLOSED:
            log.info("the run has ended")
            break
        if reply.reason not in _WAITING:
            raise Fatal(f"the broker opens no session for {actor_id}: {reply}")
        if not said:
            log.info("waiting for the run", extra={"refusal": reply})
            said = True
        failpoint("session.waiting")
        lifecycle.draining.wait(max(_LEAST_WAIT_S, reply.retry_after_ms / 1000))
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
