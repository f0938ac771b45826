"""People: their names, their passwords, and the number that their sessions carry."""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit
from penstock.gateway.accounts.account_errors import AccountConflict, BadInput, NoSuchThing
from penstock.gateway.accounts.secrets import new_id
from penstock.gateway.accounts.withdrawal import withdraw
from penstock.gateway.store.tables import MemberRow, SessionRow, UserRow

MAX_NAME_LENGTH: Final = 128
_NAME = re.compile(r"[a-z0-9][a-z0-9._+@-]{0,127}")


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A person, as others may see them."""

    id: str
    name: str


def check_name(name: str) -> str:
    """Return the name of an account in lower case; raises BadInput."""
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
    """Return the person of a name, None where there is none, or where it is no name."""
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
    """Let a person sign in no more, end their sessions, and refuse what they handed out in any project."""
    user.disabled = True
    user.session_number += 1
    end_sessions(session, now, user.id, reason="the account was disabled")
    for project in session.scalars(select(MemberRow.project).where(MemberRow.user == user.id)).all():
        withdraw(session, now, project=project, user=user.id, role=None, by=by)
    audit.note(session, now, by=by, action="user disabled", subject=f"user/{user.id}")


def end_sessions(session: Session, now: datetime, user: str, *, reason: str) -> None:
    """End every open session of a person."""
    open_ones = (SessionRow.user == user) & SessionRow.ended.is_(None)
    session.execute(update(SessionRow).where(open_ones).values(ended=now, reason=reason))
