"""Projects and their members. A project that the caller does not belong to is as good as absent."""

import re
from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from penstock.gateway.accounts import audit
from penstock.gateway.accounts.account_errors import AccountConflict, BadInput, NoSuchThing
from penstock.gateway.accounts.principal import Membership, Principal
from penstock.gateway.accounts.withdrawal import withdraw
from penstock.gateway.store.tables import MemberRow, ProjectRow, Role, UserRow

NO_PROJECT: Final = "no such project, or none of yours"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,22}[a-z0-9])?")


class Member(NamedTuple):
    """A member of a project."""

    user: str
    name: str
    role: Role
    since: datetime


def check_project(name: str) -> str:
    """Return the name of a project; raises BadInput."""
    if not _NAME.fullmatch(name):
        raise BadInput("project", "use 1 to 24 of a-z, 0-9 and '-', with a letter or digit at both ends")
    return name


def check_known(session: Session, name: str) -> None:
    """Raise BadInput for a project that is absent. It names those that there are: for the operator alone."""
    if session.get(ProjectRow, name) is None:
        others = ", ".join(session.scalars(select(ProjectRow.name).order_by(ProjectRow.name))) or "none"
        raise BadInput(
            "project",
            f"{name!r} is absent (there are: {others}); it is added with its owner: "
            f"penstock gateway user add NAME --project {name}",
        )


def known_or_owned(session: Session, now: datetime, name: str, role: Role, *, by: str) -> None:
    """Add a project that is absent for its first owner; raises BadInput for another role in it."""
    if role is not Role.OWNER:
        check_known(session, name)
    elif session.get(ProjectRow, name) is None:
        session.add(ProjectRow(name=name, created=now))
        audit.note(session, now, by=by, action="project added", project=name)


def membership(session: Session, principal: Principal, project: str) -> Membership:
    """Return what a principal is in a project; raises NoSuchThing where they have no part in it."""
    if principal.user is None:
        role = principal.role if principal.project == project else None
    else:
        row = session.get(MemberRow, (project, principal.user))
        role = None if row is None else row.role
    if role is None:
        raise NoSuchThing(NO_PROJECT)
    return Membership(principal=principal, project=project, role=role)


def projects_of(session: Session, principal: Principal) -> tuple[Membership, ...]:
    """Return what a principal belongs to, by name."""
    if principal.user is None:
        assert principal.project is not None
        assert principal.role is not None
        return (Membership(principal=principal, project=principal.project, role=principal.role),)
    rows = session.scalars(
        select(MemberRow).where(MemberRow.user == principal.user).order_by(MemberRow.project)
    )
    return tuple(Membership(principal=principal, project=row.project, role=row.role) for row in rows)


def members(session: Session, project: str) -> tuple[Member, ...]:
    """Return the members of a project, by name."""
    joined = select(MemberRow, UserRow.name).join(UserRow, UserRow.id == MemberRow.user)
    found = session.execute(joined.where(MemberRow.project == project).order_by(UserRow.name))
    return tuple(Member(row.user, name, row.role, row.since) for row, name in found)


def set_role(
    session: Session, now: datetime, *, project: str, user: str, role: Role, by: str, **detail: str
) -> None:
    """Make a person a member, or another kind of one; raises AccountConflict for the last owner.

    What they handed out and could not hand out in the new role counts no more. detail: for the audit.
    """
    row = session.get(MemberRow, (project, user))
    if row is None:
        session.add(MemberRow(project=project, user=user, role=role, since=now))
    elif row.role is not role:
        if role is not Role.OWNER:
            _keep_an_owner(session, row)
        row.role = role
        withdraw(session, now, project=project, user=user, role=role, by=by)
    subject, said = f"user/{user}", {"role": role, **detail}
    audit.note(session, now, by=by, action="member set", project=project, subject=subject, **said)


def remove(session: Session, now: datetime, *, project: str, user: str, by: str) -> None:
    """Remove a member, and revoke what they handed out.

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
