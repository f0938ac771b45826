"""Projects and their members. A project of others is reported as absent."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Row, func, select, update
from sqlalchemy.orm import Session

from penstock.gateway.accounts import api_tokens, audit
from penstock.gateway.accounts.principal import (
    INVITATION,
    AccountConflict,
    BadInput,
    Membership,
    NoSuchThing,
    Principal,
    digest,
    is_secret,
    new_secret,
)
from penstock.gateway.store.tables import (
    ApiTokenRow,
    FeedbackLinkRow,
    InvitationRow,
    MemberRow,
    ProjectRow,
    Role,
    UserRow,
)

# ---- Tokens, links and invitations of a person are revoked when the person loses the right to make them.


def withdraw(session: Session, now: datetime, *, project: str, user: str, role: Role | None, by: str) -> None:
    """Revoke what a person made in a project and may not make in `role`; None: they are no member now."""
    maker = f"user/{user}"
    made = (ApiTokenRow.project == project) & (ApiTokenRow.by == maker) & ApiTokenRow.revoked.is_(None)
    for token in session.scalars(select(ApiTokenRow).where(made)).all():
        if role is None or not role.includes(token.role):
            api_tokens.revoke(session, now, project=project, token=token.id, by=by)
    if role is not Role.OWNER:
        sent = (InvitationRow.project == project) & (InvitationRow.by == maker)
        session.execute(update(InvitationRow).where(sent, InvitationRow.expires > now).values(expires=now))
    if role is None or role is Role.VIEWER:
        api_tokens.revoke_links(session, now, FeedbackLinkRow.by == maker, project=project, by=by)


NO_PROJECT: Final = "no such project, or none of yours"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?")


def check_project(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise BadInput("project", "use 1 to 24 of a-z, 0-9 and '-', with a letter or digit at both ends")
    return name


def check_known(session: Session, name: str) -> None:
    """Raise BadInput for an absent project. The message lists all projects: only for the operator."""
    if session.get(ProjectRow, name) is None:
        others = ", ".join(session.scalars(select(ProjectRow.name).order_by(ProjectRow.name))) or "none"
        raise BadInput(
            "project",
            f"{name!r} is absent (there are: {others}); it is added with its owner: "
            f"penstock gateway user add NAME --project {name}",
        )


def known_or_owned(session: Session, now: datetime, name: str, role: Role, *, by: str) -> None:
    """Add an absent project for its first owner; raises BadInput for another role in an absent project."""
    if role is not Role.OWNER:
        check_known(session, name)
    elif session.get(ProjectRow, name) is None:
        session.add(ProjectRow(name=name, created=now))
        audit.note(session, now, by=by, action="project added", project=name)


def membership(session: Session, principal: Principal, project: str) -> Membership:
    """Return the membership of a principal in a project; raises NoSuchThing if they are no member."""
    if principal.user is None:
        role = principal.role if principal.project == project else None
    else:
        row = session.get(MemberRow, (project, principal.user))
        role = None if row is None else row.role
    if role is None:
        raise NoSuchThing(NO_PROJECT)
    return Membership(principal=principal, project=project, role=role)


def projects_of(session: Session, principal: Principal) -> tuple[Membership, ...]:
    if principal.user is None:
        assert principal.project is not None
        assert principal.role is not None
        return (Membership(principal=principal, project=principal.project, role=principal.role),)
    rows = session.scalars(
        select(MemberRow).where(MemberRow.user == principal.user).order_by(MemberRow.project)
    )
    return tuple(Membership(principal=principal, project=row.project, role=row.role) for row in rows)


def members(session: Session, project: str) -> Sequence[Row[str, str, Role, datetime]]:
    """Return the members of a project, by name: `user`, `name`, `role` and `since` of each."""
    shown = select(MemberRow.user, UserRow.name, MemberRow.role, MemberRow.since)
    joined = shown.join(UserRow, UserRow.id == MemberRow.user)
    return session.execute(joined.where(MemberRow.project == project).order_by(UserRow.name)).all()


def set_role(
    session: Session, now: datetime, *, project: str, user: str, role: Role, by: str, **detail: str
) -> None:
    """Add a member or change their role; raises AccountConflict for the last owner.

    What they made and may not make in the new role is revoked. detail: for the audit.
    """
    row = session.get(MemberRow, (project, user))
    if row is None:
        session.add(MemberRow(project=project, user=user, role=role, since=now))
    elif row.role is not role:
        if role is not Role.OWNER:
            _keep_an_owner(session, row)
        row.role = role
        withdraw(session, now, project=project, user=user, role=role, by=by)
    else:
        return
    subject, facts = f"user/{user}", {"role": role, **detail}
    audit.note(session, now, by=by, action="member set", project=project, subject=subject, **facts)


def remove(session: Session, now: datetime, *, project: str, user: str, by: str) -> None:
    """Remove a member, and revoke what they made.

    Raises NoSuchThing, AccountConflict for the last owner.
    """
    row = session.get(MemberRow, (project, user))
    if row is None:
        raise NoSuchThing("no such member")
    _keep_an_owner(session, row)
    session.delete(row)
    withdraw(session, now, project=project, user=user, role=None, by=by)
    audit.note(session, now, by=by, action="member removed", project=project, subject=f"user/{user}")


def _keep_an_owner(session: Session, row: MemberRow) -> None:
    owners = (MemberRow.project == row.project) & (MemberRow.role == Role.OWNER)
    count = session.scalar(select(func.count()).select_from(MemberRow).where(owners)) or 0
    if row.role is Role.OWNER and count == 1:
        raise AccountConflict("this is the project's last owner: make another member owner first")


# ---- Invitations: secrets that an owner gives to a person, valid once and for some days.

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


def stored_invitations(session: Session, project: str) -> int:
    """Return the number of stored invitations of a project, including those that ended in the last day."""
    own = InvitationRow.project == project
    return session.scalar(select(func.count()).select_from(InvitationRow).where(own)) or 0


def find_invitation(session: Session, now: datetime, secret: str) -> InvitationRow:
    """Return a valid invitation; raises BadInput for one that is unknown, used or expired."""
    row = session.get(InvitationRow, digest(secret)) if is_secret(secret, INVITATION) else None
    if row is None or row.used is not None or row.expires <= now:
        raise BadInput("invitation", "not known, used already, or expired: ask for a new one")
    return row


def redeem(session: Session, now: datetime, row: InvitationRow, *, user: str) -> str:
    """Give a person the role of an invitation, and return the project.

    The audit names the person and the inviter. Raises AccountConflict for a person who has that role or a
    higher one.
    """
    member = session.get(MemberRow, (row.project, user))
    if member is not None and member.role.includes(row.role):
        raise AccountConflict(f"you are {member.role} of {row.project} already: this invites a {row.role}")
    row.used = now
    by = f"user/{user}"
    set_role(session, now, project=row.project, user=user, role=row.role, by=by, invited_by=row.by)
    return row.project
