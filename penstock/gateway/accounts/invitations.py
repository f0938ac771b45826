"""Ways into a project: a secret that an owner hands to one person, good once and for some days."""

from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit, projects
from penstock.gateway.accounts.account_errors import AccountConflict, BadInput
from penstock.gateway.accounts.principal import Membership
from penstock.gateway.accounts.secrets import INVITATION, digest, is_secret, new_secret
from penstock.gateway.store.tables import InvitationRow, MemberRow, Role

MAX_DAYS: Final = 30


def invite(session: Session, now: datetime, member: Membership, *, role: Role, days: int) -> str:
    """Return the secret of a new invitation, which is shown once."""
    secret = new_secret(INVITATION)
    session.add(
        InvitationRow(
            digest=digest(secret),
            project=member.project,
            role=role,
            by=member.principal.subject,
            expires=now + timedelta(days=days),
            used=None,
        )
    )
    audit.note(session, now, by=member.principal.subject, action="invited", project=member.project, role=role)
    return secret


def stored(session: Session, project: str) -> int:
    """Return how many invitations of a project are stored; one that has ended is, for a day."""
    own = InvitationRow.project == project
    return session.scalar(select(func.count()).select_from(InvitationRow).where(own)) or 0


def find(session: Session, now: datetime, secret: str) -> InvitationRow:
    """Return an invitation that still counts.

    Raises BadInput for one that is unknown, used or expired: it does not say which.
    """
    row = session.get(InvitationRow, digest(secret)) if is_secret(secret, INVITATION) else None
    if row is None or row.used is not None or row.expires <= now:
        raise BadInput("invitation", "not known, used already, or expired: ask for a new one")
    return row


def redeem(session: Session, now: datetime, row: InvitationRow, *, user: str) -> str:
    """Make a person a member as an invitation says, and return the project.

    The audit says that they did, and who had invited them. Raises AccountConflict for somebody who may do as
    much already: an invitation makes nobody less.
    """
    member = session.get(MemberRow, (row.project, user))
    if member is not None and member.role.includes(row.role):
        raise AccountConflict(f"you are {member.role} of {row.project} already: this invites a {row.role}")
    row.used = now
    by = f"user/{user}"
    projects.set_role(session, now, project=row.project, user=user, role=row.role, by=by, invited_by=row.by)
    return row.project
