"""Deletes what counts no more, so that the database of a gateway does not grow with every sign-in.

Sessions with their refresh tokens, invitations and feedback links go; the audit, and the API tokens that its
rows name, stay.
"""

import logging
import threading
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import CursorResult, Delete, delete, or_, select
from sqlalchemy.orm import Session

from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.store.tables import FeedbackLinkRow, InvitationRow, RefreshRow, SessionRow
from penstock.registry.registry_errors import RegistryError

KEPT: Final = timedelta(days=1)
"""For which what has ended before its time can still be looked at."""
AT_ONCE: Final = 1000
"""Most sessions in a transaction: others wait for it meanwhile."""
EVERY_S: Final = 600.0

log = logging.getLogger(__name__)


def sweep(accounts: Accounts, end: threading.Event, every_s: float = EVERY_S) -> None:
    """Delete what has expired, now and every so often, until `end` is set; a thread's body."""
    while not end.is_set():
        try:
            gone = accounts.run(delete_expired)
        except RegistryError as error:
            log.warning("what has expired was not deleted", extra={"error": str(error)})
        else:
            log.debug("expired rows deleted", extra={"rows": gone})
        end.wait(every_s)


def delete_expired(session: Session, now: datetime) -> int:
    """Delete at most AT_ONCE sessions and all else that counts no more; returns how many rows went."""
    over = or_(SessionRow.expires <= now, SessionRow.ended <= now - KEPT)
    ids = session.scalars(select(SessionRow.id).where(over).limit(AT_ONCE)).all()
    return sum(
        _count(session, statement)
        for statement in (
            delete(RefreshRow).where(RefreshRow.session.in_(ids)),
            delete(SessionRow).where(SessionRow.id.in_(ids)),
            delete(InvitationRow).where(
                or_(InvitationRow.expires <= now - KEPT, InvitationRow.used <= now - KEPT)
            ),
            delete(FeedbackLinkRow).where(
                or_(FeedbackLinkRow.expires <= now - KEPT, FeedbackLinkRow.revoked <= now - KEPT)
            ),
        )
    )


def _count(session: Session, statement: Delete) -> int:
    done = session.execute(statement)
    assert isinstance(done, CursorResult)
    return done.rowcount
