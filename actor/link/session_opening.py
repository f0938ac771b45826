"""From one session of an actor to its next: asking for one, and when to give up.

While no learner has written the run specification the broker is asked again, with a message. Any other
refusal of a session ends the process, and so do MAX_STRIKES sessions in a row that the broker ended.
"""

import logging
from typing import Final

from penstock.actor.link.broker_client import BrokerClient, SessionReply
from penstock.actor.link.session import LEAST_WAIT_S, WAITING, Session
from penstock.protocol.messages import Role
from penstock.protocol.refusal import Reason, Refusal
from penstock.protocol.specification import RunSpecification
from penstock.runtime import logs, metrics
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import failpoint
from penstock.runtime.lifecycle import Lifecycle
from penstock.runtime.retry import Interrupted

log = logging.getLogger(__name__)

MAX_STRIKES: Final = 3


def open_session(
    broker_client: BrokerClient, actor_id: str, role: Role, lifecycle: Lifecycle
) -> Session | None:
    """Return the actor's next session; None when the process drains or the run has ended.

    Waits, with a message, while no learner has written the run specification. Raises Fatal when refused.
    """
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
    """Return what a session would be for, without one: waits, raises and is None as `open_session`."""
    described = _ask(broker_client, actor_id, role, lifecycle, describe_only=True)
    return None if described is None else described.specification


def _ask(
    broker_client: BrokerClient, actor_id: str, role: Role, lifecycle: Lifecycle, *, describe_only: bool
) -> SessionReply | None:
    said = False
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
        if not said:
            log.info("waiting for the run", extra={"refusal": reply})
            said = True
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
