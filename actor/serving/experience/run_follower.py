"""The policy server's line to a live run: its sessions, the learner's newest weights, and the outbox.

A thread of its own opens a session, and the next when the broker has ended one; meanwhile the server goes on
answering. When the run has ended it polls until the run is resumed.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from penstock.actor.link.ack_journal import AckJournal, SampleJournal
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.outbox import Outbox
from penstock.actor.link.session import Session, count_strikes, open_session
from penstock.actor.serving.experience.recorder import NumberedWhenSent, ServedQueue
from penstock.actor.serving.loaded_versions import Weights
from penstock.protocol.limits import SERVER_FLUSH_S
from penstock.protocol.messages import Publication, Role, RunState
from penstock.protocol.refusal import Reason
from penstock.protocol.specification import RunSpecification
from penstock.runtime import metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.lifecycle import Lifecycle

log = logging.getLogger(__name__)

ENDED_S: Final = 10.0
"""Between two looks at a run that has ended: somebody may resume it."""

FLUSH_LOOK_S: Final = 0.1
"""Between two looks at what was cut for a flush: acknowledgements end no wait of their own."""

Apply = Callable[[Weights], Awaitable[tuple[float, ...]]]
"""Answer with these weights from now on; the probe's log-probabilities under them."""


class RunFollower:
    """`begin` once, then `start`; `join` at the end."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        broker_client: BrokerClient,
        actor_id: str,
        *,
        run: str,
        ack_journal: Path | None,
    ) -> None:
        """Follow one run.

        run: "" where only the broker knows it.
        ack_journal: folder for a record of what was acknowledged.
        """
        self._lifecycle, self._broker_client, self._actor_id = lifecycle, broker_client, actor_id
        self._journal_folder = ack_journal
        self._journal: AckJournal | None = None
        self._thread: threading.Thread | None = None
        self._session: Session | None = None
        self._applied = Publication()
        self._run, self._strikes = run, 0
        self._finishing = threading.Event()
        self.queue: ServedQueue | None = None
        self._failure: Exception | None = None
        self._cut: Callable[[], object] = _nothing
        self._flushing, self._flush_through = 0, 0

    def begin(self) -> RunSpecification | None:
        """Open the first session, waiting for the run; None when the process drains first."""
        self._session = open_session(self._broker_client, self._actor_id, Role.SERVER, self._lifecycle)
        if self._session is None:
            return None
        self._run = self._session.specification.run
        return self._session.specification

    def fetch(self, version: int) -> Weights | None:
        """Return the weights of a version that the run still holds. Blocks."""
        session = self._session
        if session is None or session.is_over:
            return None
        found = session.fetch(version)
        return None if found is None else Weights(version, found.publication.update, found.blob)

    def send_queued(self) -> None:
        """Have what was put into the queue sent by the open session, if there is one."""
        session = self._session
        if session is not None:
            session.notify_waiters()

    def start(
        self,
        loop: asyncio.AbstractEventLoop,
        apply: Apply,
        on_over: Callable[[], object],
        cut: Callable[[], object],
    ) -> None:
        """Serve sessions, in a thread, until `finish` or until it cannot go on; then `on_over`.

        cut: puts what open episodes hold into the queue; called in the loop.
        """
        self._cut = cut
        self._thread = threading.Thread(
            target=self._serve_all, args=(loop, apply, on_over), name="following", daemon=True
        )
        self._thread.start()

    def open_sample_journal(self, run: str, server: str) -> SampleJournal | None:
        """Return the record of what this server samples; None where none is kept.

        server: drawn anew in each life of it. Raises ConfigurationError.
        """
        if self._journal_folder is None:
            return None
        return SampleJournal(self._journal_folder, run, self._actor_id, server)

    def finish(self) -> None:
        """Send what is in the queue, to which nothing will come, then close the session."""
        self._finishing.set()
        self.send_queued()

    def join(self) -> None:
        """Wait until the last session is closed; raises what ended it."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _serve_all(
        self, loop: asyncio.AbstractEventLoop, apply: Apply, on_over: Callable[[], object]
    ) -> None:
        try:
            if self._journal_folder is not None:
                self._journal = AckJournal(self._journal_folder, self._run, self._actor_id)
            while not self._finishing.is_set() and not self._lifecycle.draining.is_set():
                session = self._session or open_session(
                    self._broker_client, self._actor_id, Role.SERVER, self._lifecycle
                )
                if session is None or self._serve(session, loop, apply):
                    self._finishing.wait(ENDED_S)
                self._session = None
        except Exception as error:  # noqa: BLE001 - raised by the main thread
            self._failure = error
        finally:
            if self._journal is not None:
                self._journal.close()
            on_over()

    def _serve(self, session: Session, loop: asyncio.AbstractEventLoop, apply: Apply) -> bool:
        """One session; True when the run has ended, or is to be left."""
        if session.specification.run != self._run:
            raise Fatal(f"the broker serves run {session.specification.run}, not {self._run}: start again")
        self._session = session
        session.start()
        outbox = None
        if self.queue is not None:
            outbox = Outbox(session, NumberedWhenSent(self.queue), self._journal)
            outbox.start()
        try:
            self._follow(session, loop, apply)
            session.check()
            return self._is_done(session, outbox)
        finally:
            session.close(politely=not session.is_over)

    def _follow(self, session: Session, loop: asyncio.AbstractEventLoop, apply: Apply) -> None:
        """Hand on every publication until the session is over or `finish`."""
        while True:
            session.wait_until(
                lambda: self._is_over(session) or self._is_new(session) or session.flush > self._flushing,
                FLUSH_LOOK_S if session.flush else None,
            )
            if self._is_over(session):
                return
            if session.flush:
                self._flush(session, loop)
            if not self._is_new(session):
                continue
            weights = session.weights
            assert weights is not None
            publication = weights.publication
            fresh = Weights(publication.version, publication.update, weights.blob, weights.scalars)
            probe = asyncio.run_coroutine_threadsafe(_awaited(apply(fresh)), loop).result()
            self._applied = publication
            metrics.WEIGHT_VERSION_APPLIED.set(publication.version)
            session.report_applied(publication, probe)

    def _flush(self, session: Session, loop: asyncio.AbstractEventLoop) -> None:
        """Cut once for each flush, and report it when what was in the queue then has left it."""
        if session.flush > self._flushing:
            flush = session.flush
            asyncio.run_coroutine_threadsafe(_called(self._cut), loop).result()
            self._flush_through = 0 if self.queue is None else self.queue.put_count
            self._flushing = flush
            self.send_queued()
        if self.queue is None or self.queue.gone_count >= self._flush_through:
            session.report_flushed(self._flushing)

    def _is_new(self, session: Session) -> bool:
        weights = session.weights
        return weights is not None and weights.publication.version > self._applied.version

    def _is_over(self, session: Session) -> bool:
        return self._finishing.is_set() or session.is_over or session.state is RunState.STOPPING

    def _is_done(self, session: Session, outbox: Outbox | None) -> bool:
        if session.ended is None:
            if outbox is not None and self.queue is not None and not outbox.flush(SERVER_FLUSH_S):
                log.warning("flush gave up", extra={"fragments": outbox.drop("drain")})
                self.queue.drop_waiting()
            return True
        lost = 0 if outbox is None else outbox.drop(session.ended.reason.label)
        log.warning("session ended", extra={"refusal": session.ended, "dropped_fragments": lost})
        if session.ended.reason is Reason.RUN_CLOSED:
            return True
        acknowledged = outbox is not None and outbox.acked_through > 0
        self._strikes = count_strikes(self._strikes, session.ended, acknowledged=acknowledged)
        return False


async def _awaited(given: Awaitable[tuple[float, ...]]) -> tuple[float, ...]:
    return await given


async def _called(body: Callable[[], object]) -> None:
    body()


def _nothing() -> None:
    """A server that is not started has cut nothing."""
