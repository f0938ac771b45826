"""A project: its members, invitations, API tokens, and who did what in it."""

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import Field
from sqlalchemy.orm import Session

from penstock.gateway.accounts import api_tokens, audit, projects
from penstock.gateway.frame.requests import NUMERIC, Answer, ApiError, Body, Line, example
from penstock.gateway.frame.route_access import GuardedRoute, Member, parts_of
from penstock.gateway.routes.account_routes import Belonging
from penstock.gateway.store.tables import ApiTokenRow, Role

router = APIRouter(route_class=GuardedRoute, tags=["projects"])

# ---- Answers about projects, as the document describes them.


class MemberShown(Answer):
    """A member of a project. since: when they joined it."""

    user: str
    name: str
    role: Role
    since: datetime


class MemberList(Answer):
    """Who belongs to a project."""

    members: list[MemberShown]


class InvitationMade(Answer):
    """An invitation. invitation: its secret, which is shown only once."""

    invitation: str
    role: Role
    days: int


class TokenShown(Answer):
    """An API token without its secret. expires: null: it is valid until it is revoked."""

    id: str
    name: str
    role: Role
    created: datetime
    expires: datetime | None
    revoked: datetime | None


class TokenList(Answer):
    """The API tokens of a project."""

    tokens: list[TokenShown]


class TokenMade(TokenShown):
    """A new API token. token: its secret, which is shown only once."""

    token: str


class AuditEntryShown(Answer):
    """A row of the audit. by: `user/ID`, `token/ID` or `operator`. detail: facts, by action."""

    number: int
    time: datetime
    by: str
    action: str
    subject: str
    detail: dict[str, Any]


class AuditLog(Answer):
    """Who did what in a project, newest first."""

    entries: list[AuditEntryShown]


class NewRole(Body):
    """The new role of a member."""

    model_config = example(role="viewer")

    role: Role


class NewInvitation(Body):
    """The role of the invited person, and the days for which the invitation is valid."""

    model_config = example(role="editor", days=7)

    role: Role
    days: Annotated[int, Field(ge=1, le=projects.MAX_DAYS), NUMERIC] = 7


class NewToken(Body):
    """A token for a program. days: for which it is valid; default: until it is revoked."""

    model_config = example(name="nightly", role="editor", days=90)

    name: Line
    role: Role = Role.EDITOR
    days: Annotated[int, Field(ge=1, le=3650), NUMERIC] | None = None


@router.get("/api/projects/{project}", response_model=Belonging)
def project(member: Member) -> dict[str, Any]:
    """Return a project, and the role of the caller in it."""
    return {"project": member.project, "role": member.role}


@router.get("/api/projects/{project}/members", response_model=MemberList)
def members(request: Request, member: Member) -> dict[str, Any]:
    """Return who belongs to a project."""
    found = parts_of(request).accounts.look(lambda session: projects.members(session, member.project))
    return {"members": found}


@router.put("/api/projects/{project}/members/{user}", status_code=204)
def set_member(request: Request, member: Member, user: str, body: NewRole) -> None:
    """Give a member another role."""
    by, name = member.principal.subject, member.project

    def change(session: Any, now: Any) -> None:
        if user not in {one.user for one in projects.members(session, name)}:
            raise ApiError(404, "no such member: invite the person first")
        projects.set_role(session, now, project=name, user=user, role=body.role, by=by)

    parts_of(request).accounts.run_by(member, change)


@router.delete("/api/projects/{project}/members/{user}", status_code=204)
def remove_member(request: Request, member: Member, user: str) -> None:
    """Remove a member; their account stays."""
    by, name = member.principal.subject, member.project
    parts_of(request).accounts.run_by(
        member, lambda session, now: projects.remove(session, now, project=name, user=user, by=by)
    )


@router.post("/api/projects/{project}/invitations", status_code=201, response_model=InvitationMade)
def invite(request: Request, member: Member, body: NewInvitation) -> dict[str, Any]:
    """Invite one person. The secret is shown only once."""
    quotas = parts_of(request).quotas

    def add(session: Session, now: datetime) -> str:
        quotas.check("invitations", projects.stored_invitations(session, member.project))
        return projects.invite(session, now, member, role=body.role, days=body.days)

    secret = parts_of(request).accounts.run_by(member, add)
    return {"invitation": secret, "role": body.role, "days": body.days}


@router.get("/api/projects/{project}/tokens", response_model=TokenList)
def tokens(request: Request, member: Member) -> dict[str, Any]:
    """Return the project's API tokens, without their secrets."""
    found = parts_of(request).accounts.look(lambda session: api_tokens.tokens(session, member.project))
    return {"tokens": found}


@router.post("/api/projects/{project}/tokens", status_code=201, response_model=TokenMade)
def add_token(request: Request, member: Member, body: NewToken) -> dict[str, Any]:
    """Make an API token. Its secret is shown only once."""
    project, by, quotas = member.project, member.principal.subject, parts_of(request).quotas

    def add(session: Session, now: datetime) -> tuple[ApiTokenRow, str]:
        quotas.check("tokens", api_tokens.count(session, now, project))
        return api_tokens.add(
            session, now, project=project, name=body.name, role=body.role, days=body.days, by=by
        )

    made, secret = parts_of(request).accounts.run_by(member, add)
    return {"token": secret, **dict(TokenShown.model_validate(made))}


@router.delete("/api/projects/{project}/tokens/{token}", status_code=204)
def revoke_token(request: Request, member: Member, token: str) -> None:
    """Revoke an API token: further requests with it are refused."""
    by, name = member.principal.subject, member.project
    parts_of(request).accounts.run_by(
        member, lambda session, now: api_tokens.revoke(session, now, project=name, token=token, by=by)
    )


@router.get("/api/projects/{project}/audit", response_model=AuditLog)
def read_audit(
    request: Request,
    member: Member,
    before: Annotated[int | None, Query(ge=1, lt=2**63)] = None,
    limit: Annotated[int, Query(ge=1, le=audit.MAX_READ)] = 100,
) -> dict[str, Any]:
    """Return who did what in a project, newest first."""
    found = parts_of(request).accounts.look(
        lambda session: audit.read(session, member.project, before=before, limit=limit)
    )
    return {"entries": found}
