"""What a person handed out in a project counts no more once they may not do it themselves.

Tokens are known to those who made them: a member who is removed would go on through them.
"""

from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from penstock.gateway.accounts import api_tokens
from penstock.gateway.store.tables import ApiTokenRow, FeedbackLinkRow, InvitationRow, Role


def withdraw(session: Session, now: datetime, *, project: str, user: str, role: Role | None, by: str) -> None:
    """Revoke what a person made in a project and could not make in `role`; None: they are no member now."""
    maker = f"user/{user}"
    made = (ApiTokenRow.project == project) & (ApiTokenRow.by == maker) & ApiTokenRow.revoked.is_(None)
    for token in session.scalars(select(ApiTokenRow).where(made)).all():
        if role is None or not role.includes(token.role):
            api_tokens.revoke(session, now, project=project, token=token.id, by=by)
    if role is not Role.OWNER:
        _end_invitations(session, now, project, maker)
    if role is None or role is Role.VIEWER:
        api_tokens.revoke_links(session, now, FeedbackLinkRow.by == maker, project=project, by=by)


def _end_invitations(session: Session, now: datetime, project: str, maker: str) -> None:
    sent = (InvitationRow.project == project) & (InvitationRow.by == maker) & (InvitationRow.expires > now)
    session.execute(update(InvitationRow).where(sent).values(expires=now))
