"""How often signing in may be tried: per account and address together, per address, and per account.

Attempts are counted before the password is looked at, in the database, so that neither parallel attempts nor
several gateways give more of them. One that succeeds is taken back: many people may share an address. The
bound of an account from everywhere is far higher than that from one address: who tries passwords from one
place does not lock the owner out elsewhere.
"""

from datetime import datetime, timedelta
from hashlib import sha256
from typing import Final

from sqlalchemy import delete, update
from sqlalchemy.orm import Session

from penstock.gateway.accounts.account_errors import TooManyAttempts
from penstock.gateway.store.tables import AttemptRow

WINDOW: Final = timedelta(minutes=15)
MOST_OF_BOTH: Final = 10
MOST_OF_ADDRESS: Final = 50
MOST_OF_ACCOUNT: Final = 200


def count(session: Session, now: datetime, *, account: str, address: str) -> float:
    """Count an attempt; returns the seconds to wait where it is one too many, else 0."""
    session.execute(delete(AttemptRow).where(AttemptRow.since < now - WINDOW))
    refused_s = _count(session, now, _subject("address", address), MOST_OF_ADDRESS)
    if refused_s:  # beyond its bound an address adds no rows, whatever names it invents
        return refused_s
    return max(
        _count(session, now, _both(account, address), MOST_OF_BOTH),
        _count(session, now, _subject("account", account), MOST_OF_ACCOUNT),
    )


def check(wait_s: float) -> None:
    """Raise TooManyAttempts where `count` said to wait; outside the transaction, which keeps its count."""
    if wait_s > 0:
        raise TooManyAttempts(wait_s)


def forgive(session: Session, *, account: str, address: str) -> None:
    """Forget the attempts of an account at an address: it was its owner. Elsewhere this one did not count."""
    session.execute(delete(AttemptRow).where(AttemptRow.subject == _both(account, address)))
    own = AttemptRow.subject.in_((_subject("address", address), _subject("account", account)))
    session.execute(update(AttemptRow).where(own, AttemptRow.count > 0).values(count=AttemptRow.count - 1))


def _count(session: Session, now: datetime, subject: str, most: int) -> float:
    row = session.get(AttemptRow, subject)
    if row is None:
        session.add(AttemptRow(subject=subject, count=1, since=now))
        return 0.0
    row.count += 1
    return (row.since + WINDOW - now).total_seconds() if row.count > most else 0.0


def _both(account: str, address: str) -> str:
    return _subject("both", account, address)


def _subject(*parts: str) -> str:
    return sha256("\0".join(parts).encode(errors="replace")).hexdigest()
