"""API tokens: by each a program acts in one project, as viewer or editor.

A link for feedback is revoked when the person or token that made it loses the right to make one. The expiry
of a token revokes no links.
"""

from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit
from penstock.gateway.accounts.principal import (
    API,
    BadInput,
    NoSuchThing,
    Principal,
    Unauthenticated,
    digest,
    new_id,
    new_secret,
)
from penstock.gateway.store.tables import ApiTokenRow, FeedbackLinkRow, Role


def add(
    session: Session, now: datetime, *, project: str, name: str, role: Role, days: int | None, by: str
) -> tuple[ApiTokenRow, str]:
    """Return a new token and its secret, which is shown once; raises BadInput for an owner's.

    days: for which it is valid; None: until it is revoked.
    """
    if role is Role.OWNER:
        raise BadInput("role", "a token is viewer or editor: only people manage members")
    secret = new_secret(API)
    row = ApiTokenRow(
        id=new_id(),
        digest=digest(secret),
        project=project,
        name=name,
        role=role,
        by=by,
        created=now,
        expires=None if days is None else now + timedelta(days=days),
        revoked=None,
    )
    session.add(row)
    audit.note(
        session, now, by=by, action="token added", project=project, subject=f"token/{row.id}", role=role
    )
    return row, secret


def tokens(session: Session, project: str) -> tuple[ApiTokenRow, ...]:
    wanted = select(ApiTokenRow).where(ApiTokenRow.project == project)
    return tuple(session.scalars(wanted.order_by(ApiTokenRow.created.desc())))


def count(session: Session, now: datetime, project: str) -> int:
    valid = ApiTokenRow.revoked.is_(None) & (ApiTokenRow.expires.is_(None) | (ApiTokenRow.expires > now))
    own = (ApiTokenRow.project == project) & valid
    return session.scalar(select(func.count()).select_from(ApiTokenRow).where(own)) or 0


def revoke(session: Session, now: datetime, *, project: str, token: str, by: str) -> None:
    """Revoke a token and the links that it made; raises NoSuchThing for a token of another project."""
    row = session.get(ApiTokenRow, token)
    if row is None or row.project != project:
        raise NoSuchThing("no such token")
    if row.revoked is None:
        row.revoked = now
        audit.note(session, now, by=by, action="token revoked", project=project, subject=f"token/{token}")
        made = FeedbackLinkRow.by == f"token/{token}"
        revoke_links(session, now, made, project=project, by=by)


def revoke_links(
    session: Session, now: datetime, which: ColumnElement[bool], *, project: str, by: str
) -> None:
    """Revoke links for feedback of a project. which: a condition on their rows."""
    valid = which & (FeedbackLinkRow.project == project) & FeedbackLinkRow.revoked.is_(None)
    ids = update(FeedbackLinkRow).where(valid).values(revoked=now).returning(FeedbackLinkRow.id)
    for link in session.scalars(ids).all():
        audit.note(
            session, now, by=by, action="feedback link revoked", project=project, subject=f"link/{link}"
        )


def by_secret(session: Session, now: datetime, secret: str) -> Principal:
    return _principal(session.scalar(select(ApiTokenRow).where(ApiTokenRow.digest == digest(secret))), now)


def by_id(session: Session, now: datetime, token: str) -> Principal:
    """Return the principal of a token by its id; raises Unauthenticated unless it is still valid."""
    return _principal(session.get(ApiTokenRow, token), now)


def _principal(row: ApiTokenRow | None, now: datetime) -> Principal:
    if row is None or row.revoked is not None or (row.expires is not None and row.expires <= now):
        raise Unauthenticated("the token is not known, revoked or expired: ask the project's owner for one")
    return Principal(subject=f"token/{row.id}", name=row.name, project=row.project, role=row.role)
