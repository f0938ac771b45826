"""People: their names, their passwords, and the number that their sessions carry."""

import contextlib
import re
import threading
import unicodedata
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError, VerifyMismatchError
from argon2.profiles import RFC_9106_LOW_MEMORY
from sqlalchemy import delete, or_, select, update
from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit
from penstock.gateway.accounts.principal import (
    AccountConflict,
    BadInput,
    NoSuchThing,
    new_id,
)
from penstock.gateway.accounts.projects import withdraw
from penstock.gateway.store.tables import AttemptRow, MemberRow, SessionRow, UserRow

MAX_NAME_LENGTH: Final = 128
_NAME = re.compile(r"[a-z0-9][a-z0-9._+@-]{0,127}")


def check_name(name: str) -> str:
    lower = name.strip().lower()
    if not _NAME.fullmatch(lower):
        raise BadInput("name", f"use 1 to {MAX_NAME_LENGTH} of a-z, 0-9, . _ + @ -, a letter or digit first")
    return lower


def add(
    session: Session, now: datetime, *, name: str, password: str, by: str | None, **detail: str
) -> UserRow:
    """Add a person; raises AccountConflict for a name that is taken.

    password: its hash. by: None for one who adds themselves. detail: for the audit.
    """
    if find(session, name) is not None:
        raise AccountConflict("this name cannot be used: choose another one")
    row = UserRow(id=new_id(), name=name, password=password, session_number=1, disabled=False, created=now)
    session.add(row)
    session.flush()
    subject = f"user/{row.id}"
    audit.note(session, now, by=by or subject, action="user added", subject=subject, **detail)
    return row


def find(session: Session, name: str) -> UserRow | None:
    if not _NAME.fullmatch(name):
        return None
    return session.scalar(select(UserRow).where(UserRow.name == name))


def known(session: Session, name: str) -> UserRow:
    """Return the person of a name; raises NoSuchThing."""
    row = find(session, name.strip().lower())
    if row is None:
        raise NoSuchThing(f"no user {name!r}")
    return row


def change_password(session: Session, now: datetime, user: UserRow, *, password: str, by: str) -> None:
    """Set a new password (its hash), and end every session of the person, everywhere."""
    user.password = password
    user.session_number += 1
    end_sessions(session, now, user.id, reason="the password was changed")
    audit.note(session, now, by=by, action="password changed", subject=f"user/{user.id}")


def disable(session: Session, now: datetime, user: UserRow, *, by: str) -> None:
    """Disable the account of a person, end their sessions, and revoke what they made in all projects."""
    user.disabled = True
    user.session_number += 1
    end_sessions(session, now, user.id, reason="the account was disabled")
    for project in session.scalars(select(MemberRow.project).where(MemberRow.user == user.id)).all():
        withdraw(session, now, project=project, user=user.id, role=None, by=by)
    audit.note(session, now, by=by, action="user disabled", subject=f"user/{user.id}")


def end_sessions(session: Session, now: datetime, user: str, *, reason: str) -> None:
    open_ones = (SessionRow.user == user) & SessionRow.ended.is_(None)
    session.execute(update(SessionRow).where(open_ones).values(ended=now, reason=reason))


# ---- Passwords of people, as argon2id with the parameters of RFC 9106 for 64 MiB of memory.

MIN_LENGTH: Final = 12
MAX_LENGTH: Final = 256
MAX_TYPED: Final = 4 * MAX_LENGTH
"""A composed character is typed as up to four."""
_FORM: Final = "NFKC"
"""Of a password before it is hashed, because keyboards and browsers compose characters differently."""
_AT_ONCE: Final = threading.BoundedSemaphore(2)

_hasher = PasswordHasher.from_parameters(RFC_9106_LOW_MEMORY)
_nobodys = _hasher.hash("of no account")


def hash_password(password: str, *, name: str) -> str:
    """Return the encoded hash of a new password; raises BadInput as `check_password` does."""
    password = unicodedata.normalize(_FORM, password)
    check_password(password, name=name)
    with _AT_ONCE:
        encoded: str = _hasher.hash(password)
    return encoded


def check_password(password: str, *, name: str) -> None:
    """Raise BadInput for a new password that is too easily guessed.

    name: of the account, which the password may not contain.
    """
    if not MIN_LENGTH <= len(password) <= MAX_LENGTH:
        raise BadInput("password", f"must have {MIN_LENGTH} to {MAX_LENGTH} characters")
    if name.lower() in password.lower() or len(set(password)) < MIN_LENGTH // 2:
        raise BadInput("password", "must not contain the account's name nor repeat few characters")


def is_password(encoded: str | None, password: str) -> bool:
    """Return whether a password matches the encoded hash; takes the same time without a hash (None).

    No password matches a hash that cannot be read: the operator sets a new password then. Hashes of earlier
    releases are of the password as it was typed, which browsers mostly compose (NFC).
    """
    if len(password) > MAX_TYPED:
        return False
    forms = [*(unicodedata.normalize(form, password) for form in (_FORM, "NFC")), password]
    return any(_is_form(encoded, one) for one in dict.fromkeys(forms) if len(one) <= MAX_LENGTH)


def _is_form(encoded: str | None, password: str) -> bool:
    with _AT_ONCE:
        try:
            _hasher.verify(encoded or _nobodys, password)
        except VerifyMismatchError:
            return False
        except (InvalidHashError, VerificationError):
            with contextlib.suppress(VerifyMismatchError):
                _hasher.verify(
                    _nobodys, password
                )  # so that the time does not reveal whether there is an account
            return False
    return bool(encoded)


# ---- Limits on attempts to sign in: per account and address, per address, and per account.

WINDOW: Final = timedelta(minutes=15)
AHEAD: Final = timedelta(minutes=1)
"""How far the clock of another gateway may be ahead; attempts beyond it were counted by a wrong clock."""
MOST_OF_BOTH: Final = 10
MOST_OF_ADDRESS: Final = 50
MOST_OF_ACCOUNT: Final = 200


def count_attempt(session: Session, now: datetime, *, account: str, address: str) -> float:
    """Count an attempt; returns the seconds to wait beyond the limit, else 0."""
    is_over = or_(AttemptRow.since < now - WINDOW, AttemptRow.since > now + AHEAD)
    session.execute(delete(AttemptRow).where(is_over))
    refused_s = _count(session, now, _subject("address", address), MOST_OF_ADDRESS)
    if refused_s:  # beyond its limit an address adds no rows, whatever names it tries
        return refused_s
    return max(
        _count(session, now, _both(account, address), MOST_OF_BOTH),
        _count(session, now, _subject("account", account), MOST_OF_ACCOUNT),
    )


def forgive_attempts(session: Session, *, account: str, address: str) -> None:
    """Forget the attempts of an account at an address after a success; take back this one elsewhere."""
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
