"""Links for feedback: who holds one rates the responses that it names, once each, without an account.

A link is a secret of 256 random bits of which the digest is stored. That each response is rated once is held
by the ratings: they carry the request key of `request_key`. A link ends with the rights of who made it, be it
a person or a program (`revoke_made_by`); that a token has expired in its time ends none.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import Integer, func, select, update
from sqlalchemy.orm import Session

from gateway.accounts import audit
from gateway.accounts.account_errors import NoSuchThing
from gateway.accounts.principal import Membership
from gateway.accounts.secrets import LINK, digest, is_secret, new_id, new_secret
from gateway.store.tables import FeedbackLinkRow

MAX_DAYS: Final = 90


class FeedbackLink(NamedTuple):
    """A link without its secret, for who holds it."""

    id: str
    project: str
    agent: str
    items: Sequence[Mapping[str, Any]]
    rater: str
    expires: datetime

    def request_key(self, item: int) -> str:
        """Return the key under which the rating of an item is stored once."""
        return f"link/{self.id}/{item}"


class LinkSummary(NamedTuple):
    """A link without its texts, for a list of them. items: how many there are."""

    id: str
    rater: str
    items: int
    created: datetime
    expires: datetime
    revoked: datetime | None


def add(
    session: Session,
    now: datetime,
    member: Membership,
    *,
    agent: str,
    items: Sequence[Mapping[str, Any]],
    rater: str,
    days: int,
) -> tuple[LinkSummary, str]:
    """Return a new link and its secret, which is shown once."""
    secret, by = new_secret(LINK), member.principal.subject
    row = FeedbackLinkRow(
        id=new_id(),
        digest=digest(secret),
        project=member.project,
        agent=agent,
        items=[dict(item) for item in items],
        rater=rater,
        by=by,
        created=now,
        expires=now + timedelta(days=days),
        revoked=None,
    )
    session.add(row)
    audit.note(
        session,
        now,
        by=by,
        action="feedback link added",
        project=member.project,
        subject=f"link/{row.id}",
        agent=agent,
        items=len(items),
    )
    return LinkSummary(row.id, rater, len(items), now, row.expires, None), secret


def stored(session: Session, project: str) -> int:
    """Return how many links of a project are stored; one that has ended is, for a day."""
    own = FeedbackLinkRow.project == project
    return session.scalar(select(func.count()).select_from(FeedbackLinkRow).where(own)) or 0


def by_secret(session: Session, now: datetime, secret: str) -> FeedbackLink:
    """Return the link of a secret; raises NoSuchThing for one that is unknown, revoked or expired."""
    row = None
    if is_secret(secret, LINK):
        row = session.scalar(select(FeedbackLinkRow).where(FeedbackLinkRow.digest == digest(secret)))
    if row is None or row.revoked is not None or row.expires <= now:
        raise NoSuchThing("this link does not count, or no more: ask who sent it for a new one")
    return _record(row)


def links(session: Session, project: str, agent: str) -> tuple[LinkSummary, ...]:
    """Return the links of an agent, newest first; the database counts their items, which may be long."""
    row = FeedbackLinkRow
    own = (row.project == project) & (row.agent == agent)
    count = func.json_array_length(row.items, type_=Integer)
    wanted = select(row.id, row.rater, count, row.created, row.expires, row.revoked).where(own)
    return tuple(LinkSummary(*one) for one in session.execute(wanted.order_by(row.created.desc())))


def revoke(session: Session, now: datetime, *, project: str, link: str, by: str) -> None:
    """Refuse a link from now on; raises NoSuchThing for one of another project."""
    row = session.get(FeedbackLinkRow, link)
    if row is None or row.project != project:
        raise NoSuchThing("no such link")
    if row.revoked is None:
        row.revoked = now
        _note_revoked(session, now, project, link, by)


def revoke_made_by(session: Session, now: datetime, *, project: str, maker: str, by: str) -> None:
    """Refuse every link of a project that a person or a program made. maker: `user/ID` or `token/ID`."""
    own = (FeedbackLinkRow.project == project) & (FeedbackLinkRow.by == maker)
    counts = own & FeedbackLinkRow.revoked.is_(None)
    ids = update(FeedbackLinkRow).where(counts).values(revoked=now).returning(FeedbackLinkRow.id)
    for link in session.scalars(ids).all():
        _note_revoked(session, now, project, link, by)


def _note_revoked(session: Session, now: datetime, project: str, link: str, by: str) -> None:
    audit.note(session, now, by=by, action="feedback link revoked", project=project, subject=f"link/{link}")


def _record(row: FeedbackLinkRow) -> FeedbackLink:
    return FeedbackLink(row.id, row.project, row.agent, row.items, row.rater, row.expires)
