"""Rollout worker: steps N environments with a local policy and sends what happened as fragments.

In: the broker's address; all else the broker tells.  Out: fragments and finished episodes.

  making environments ─► opening ─► rollout (see `penstock.actor.rollout`) ─► flushing ─► closed
                            ▲           │ the broker ends the session: drop the outbox, count it
                            └───────────┘ or the environment stood still and has come back

On a drain or a stopped run the outbox is flushed and the session closed. When the broker ends the session it
drops the outbox, counts it and opens another with new seeds; INVALID or GAP three times without an
acknowledgement between, or FENCED, is Fatal. On a crash what was not acknowledged is lost with the process;
nothing is ever sent under a new number.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from penstock.actor.link.ack_journal import AckJournal
from penstock.actor.link.broker_client import BrokerClient
from penstock.actor.link.fragment_queue import RolloutQueue
from penstock.actor.link.outbox import Outbox
from penstock.actor.link.session import Session
from penstock.actor.link.session_opening import count_strikes, describe_run, open_session
from penstock.actor.rollout.loop import FragmentGenerator, Rollout
from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason
from penstock.protocol.specification import RunSpecification
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.health import Health
from penstock.runtime.lifecycle import Lifecycle

log = logging.getLogger(__name__)

FLUSH_S = 10.0


class Worker:
    """A rollout worker; `run` is its life."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        broker_client: BrokerClient,
        actor_id: str,
        health: Health,
        make_generator: Callable[[RunSpecification], FragmentGenerator],
        *,
        ack_journal: Path | None = None,
    ) -> None:
        """ack_journal: folder for the record of what was acknowledged; None: no record."""
        self._lifecycle, self._broker_client, self._actor_id = lifecycle, broker_client, actor_id
        self._health, self._make_generator = health, make_generator
        self._journal_folder = ack_journal
        self._journal: AckJournal | None = None
        self._strikes = 0

    def run(self) -> int:
        """Make environments, then open sessions and serve them until there is no more to do."""
        generator = None
        try:
            generator = self._prepare()
            while generator is not None:
                session = open_session(self._broker_client, self._actor_id, Role.ROLLOUT, self._lifecycle)
                if session is None or self._serve(session, generator):
                    break
            return EXIT_OK
        finally:
            if generator is not None:
                generator.close()
            if self._journal is not None:
                self._journal.close()

    def _prepare(self) -> FragmentGenerator | None:
        """Make environments and policy while there is no session yet, so that nothing waits for them.

        None when the process drains or the run has ended.
        """
        specification = describe_run(self._broker_client, self._actor_id, Role.ROLLOUT, self._lifecycle)
        if specification is None:
            return None
        if self._journal_folder is not None:
            self._journal = AckJournal(self._journal_folder, specification.run, self._actor_id)
        return self._make_generator(specification)

    def _serve(self, session: Session, generator: FragmentGenerator) -> bool:
        """Act in one session; True when the worker's work is done, False when another one is needed."""
        session.start()
        try:
            _check_run(generator, session)
            outbox = Outbox(session, RolloutQueue(generator.outbox_fragments), self._journal)
            outbox.start()
            self._health.set_ready(True)
            rollout = Rollout(self._lifecycle, session, outbox, generator, self._health)
            rollout.run(self._actor_id)
            session.check()
            return self._is_done(session, outbox) and not rollout.stood_still
        finally:
            session.close(politely=not session.is_over)
            log.info("session closed", extra={"session": session.number})

    def _is_done(self, session: Session, outbox: Outbox) -> bool:
        if session.ended is None:
            session.give_back()
            if not outbox.flush(FLUSH_S) and session.ended is None:
                log.warning("flush gave up", extra={"fragments": outbox.drop("drain")})
            session.check()
            return True
        reason = session.ended.reason
        dropped = outbox.drop(reason.label)
        log.warning("session ended", extra={"refusal": session.ended, "dropped_fragments": dropped})
        if reason is Reason.RUN_CLOSED:
            return True
        self._strikes = count_strikes(self._strikes, session.ended, acknowledged=outbox.acked_through > 0)
        return False


def _check_run(generator: FragmentGenerator, session: Session) -> None:
    known, served = generator.specification.run, session.specification.run
    if known != served:
        raise Fatal(f"the broker serves run {served} now, this actor works for {known}; start it again")
