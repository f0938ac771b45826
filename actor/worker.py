"""Rollout worker: steps N environments with a local policy and sends what happened as fragments.

In: the broker's address; all else comes with the session.  Out: fragments and finished episodes.

  opening ─► rollout (see `actor.rollout`) ─► flushing ─► closed
     ▲           │ the broker ends the session: drop the outbox, count it
     └───────────┘

On a drain or a stopped run the outbox is flushed and the session closed. When the broker ends the session it drops the outbox, counts it and
opens another with new seeds; INVALID or GAP three times without an acknowledgement between, or FENCED, is
Fatal. On a crash what was not acknowledged is lost with the process; nothing is ever sent under a new number.
"""

import logging
import os
import socket
import sys

from actor import evaluator, run
from actor.link import Link
from actor.outbox import Outbox
from actor.rollout import Crew, Rollout, make_crew
from actor.session import Session, count_strikes, open_session
from penstock.runtime.credentials import credentials
from penstock.runtime.exit import EXIT_OK, Fatal
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.settings import ConfigurationError, Settings
from penstock.wire.ids import check_id, to_id
from penstock.wire.messages import Role
from penstock.wire.refusal import Reason

log = logging.getLogger(__name__)

FLUSH_S = 10.0
_SWITCH_INTERVAL_S = 0.0005
"""The sender must not wait the default 5 ms for the interpreter while environments step."""


def main(lifecycle: Lifecycle, *, broker: str, actor_id: str | None, role: Role, settings: Settings) -> int:
    """Act until the run stops or the lifecycle drains; returns the exit code.

    `actor_id`: constant over restarts of the same actor; None: made from host and process.
    Raises ConfigurationError for what this process was told wrongly, Fatal when it cannot go on.
    """
    health = Health(lifecycle.role)
    _, port = serve_http(health, settings.metrics.host, settings.metrics.port)
    announce(lifecycle.role, metrics_port=port)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    link = _connect(broker, settings)
    try:
        name = check_id("actor_id", actor_id or to_id(f"{socket.gethostname()}-{os.getpid()}"))
        kind = evaluator.Evaluator if role is Role.EVALUATION else Worker
        return kind(lifecycle, link, name, health, settings).run()
    except (Fatal, ConfigurationError) as error:
        health.fail(str(error))
        raise
    finally:
        link.close()


def _connect(broker: str, settings: Settings) -> Link:
    try:
        return Link(broker, credentials(settings.security))
    except ValueError as error:
        raise ConfigurationError(f"--broker: {error}") from error


class Worker:
    """A rollout worker; `run` is its life."""

    def __init__(
        self, lifecycle: Lifecycle, link: Link, actor_id: str, health: Health, settings: Settings
    ) -> None:
        self._lifecycle, self._link, self._actor_id = lifecycle, link, actor_id
        self._health, self._settings = health, settings
        self._crew: Crew | None = None
        self._strikes = 0

    def run(self) -> int:
        """Open sessions and serve them until there is no more to do."""
        try:
            while True:
                session = open_session(self._link, self._actor_id, Role.ROLLOUT, self._lifecycle)
                if session is None or self._serve(session):
                    return EXIT_OK
        finally:
            if self._crew is not None:
                self._crew.stepper.close()

    def _serve(self, session: Session) -> bool:
        """Act in one session; True when the worker's work is done, False when another one is needed."""
        session.start()
        try:
            crew = self._crew = self._crew_for(session)
            outbox = Outbox(session, crew.run.actor.outbox_fragments)
            outbox.start()
            self._health.set_ready(True)
            Rollout(self._lifecycle, session, outbox, crew, self._health).run(self._actor_id)
            session.check()
            return self._is_done(session, outbox)
        finally:
            session.close(politely=not session.is_over)
            log.info("session closed", extra={"session": session.number})

    def _crew_for(self, session: Session) -> Crew:
        specification = session.specification
        if self._crew is None:
            return make_crew(run.read(specification, self._settings.actor), self._health)
        known = self._crew.run.specification.run
        if known != specification.run:
            raise Fatal(
                f"the broker serves run {specification.run} now, this actor works for {known}; start it again"
            )
        return self._crew

    def _is_done(self, session: Session, outbox: Outbox) -> bool:
        if session.ended is None:
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
