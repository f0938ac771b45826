"""Signing in and out, and what one person or program is."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Form, Request
from pydantic import SecretStr

from penstock.gateway.accounts import projects
from penstock.gateway.accounts.principal import Principal
from penstock.gateway.accounts.sessions import Grant
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.requests import Answer, Body, Secret, Text, answers
from penstock.gateway.frame.route_access import GuardedRoute, accounts_of, address_of, principal_of
from penstock.gateway.store.tables import Role

# ---- Answers about people, programs and projects, as the document describes them.


class Health(Answer):
    """The gateway answers."""

    status: Literal["ok"]


class Tokens(Answer):
    """Tokens of a session. expires_in: seconds. refresh_token: of people alone."""

    access_token: str
    token_type: Literal["bearer"]
    expires_in: int
    refresh_token: str = ""


class Joined(Answer):
    """The project that somebody now belongs to."""

    project: str


class Belonging(Answer):
    """What somebody is in a project."""

    project: str
    role: Role


class Me(Answer):
    """Who calls. subject: `user/ID` or `token/ID`."""

    subject: str
    name: str
    projects: list[Belonging]


class OfferedProvider(Answer):
    """The provider of identities at which people may sign in. title: null where there is none."""

    title: str | None


class ProviderAddress(Answer):
    """Where the browser goes to sign in."""

    address: str


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
    """An invitation. invitation: its secret, which is shown this once."""

    invitation: str
    role: Role
    days: int


class TokenShown(Answer):
    """An API token without its secret. expires: null: when it is revoked."""

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
    """A new API token. token: its secret, which is shown this once."""

    token: str


class AuditEntryShown(Answer):
    """What somebody did. by: `user/ID`, `token/ID` or `operator`. detail: facts, by what was done."""

    number: int
    time: datetime
    by: str
    action: str
    subject: str
    detail: dict[str, Any]


class AuditLog(Answer):
    """Who did what in a project, newest first."""

    entries: list[AuditEntryShown]


class ApiDocument(Answer):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]


router = APIRouter(route_class=GuardedRoute, tags=["accounts"])

Caller = Annotated[Principal, Depends(principal_of)]
_NONE = SecretStr("")
_SIGN_IN: Final = {"grant_type": "password", "username": "ada", "password": "correct horse battery"}


class SignUp(Body):
    """A new account for the holder of an invitation."""

    invitation: Secret
    name: Text
    password: Secret


class Join(Body):
    """An invitation, redeemed by a person who has an account."""

    invitation: Secret


class NewPassword(Body):
    """The password of today and the one of tomorrow."""

    current: Secret
    new: Secret


@router.get("/api/health", responses=answers(Health))
def health() -> dict[str, str]:
    """Say that the gateway answers."""
    return {"status": "ok"}


@router.post(
    "/api/auth/token",
    responses=answers(Tokens),
    openapi_extra={"requestBody": {"content": {"application/x-www-form-urlencoded": {"example": _SIGN_IN}}}},
)
def token(
    request: Request,
    grant_type: Annotated[str, Form(max_length=32)],
    username: Annotated[str, Form(max_length=128)] = "",
    password: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
    refresh_token: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
    client_secret: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
) -> dict[str, Any]:
    """Give an access token (OAuth 2): for a password, a refresh token, or an API token as client secret."""
    accounts = accounts_of(request)
    match grant_type:
        case "password":
            grant = accounts.sign_in(username, password.get_secret_value(), address=address_of(request))
        case "refresh_token":
            grant = accounts.refresh(refresh_token.get_secret_value())
        case "client_credentials":
            grant = accounts.sign_in_program(client_secret.get_secret_value())
        case _:
            raise ApiError(
                400,
                "use password, refresh_token or client_credentials",
                field="grant_type",
                error="unsupported_grant_type",
            )
    return shown_grant(grant)


@router.post("/api/auth/sign-out", status_code=204)
def sign_out(request: Request, caller: Caller) -> None:
    """End this session: its access and refresh tokens count no more."""
    accounts_of(request).sign_out(caller)


@router.post("/api/auth/sign-up", status_code=201, responses=answers(Joined, 201))
def sign_up(request: Request, body: SignUp) -> dict[str, str]:
    """Make the account of a person who was invited, and make them a member."""
    project = accounts_of(request).sign_up(
        body.invitation.get_secret_value(),
        body.name,
        body.password.get_secret_value(),
        address=address_of(request),
    )
    return {"project": project}


@router.post("/api/auth/join", responses=answers(Joined))
def join(request: Request, body: Join, caller: Caller) -> dict[str, str]:
    """Redeem an invitation for the account that calls."""
    user = _person(caller)
    secret = body.invitation.get_secret_value()
    project = accounts_of(request).run(
        lambda session, now: projects.redeem(
            session, now, projects.find_invitation(session, now, secret), user=user
        )
    )
    return {"project": project}


@router.post("/api/auth/password", status_code=204)
def change_password(request: Request, body: NewPassword, caller: Caller) -> None:
    """Set a new password. Every session of the account ends, this one too."""
    _person(caller)
    accounts_of(request).change_password(
        caller, body.current.get_secret_value(), body.new.get_secret_value(), address=address_of(request)
    )


@router.get("/api/me", responses=answers(Me))
def me(request: Request, caller: Caller) -> dict[str, Any]:
    """Return who calls, and what they are in which project."""
    belongs = [{"project": one.project, "role": one.role} for one in accounts_of(request).projects_of(caller)]
    return {"subject": caller.subject, "name": caller.name, "projects": belongs}


def _person(caller: Principal) -> str:
    if caller.user is None:
        raise ApiError(403, "a token stands for a program: a person must sign in for this")
    return caller.user


def shown_grant(grant: Grant) -> dict[str, Any]:
    answer = {
        "access_token": grant.access,
        "token_type": "bearer",
        "expires_in": int(grant.lasts.total_seconds()),
    }
    return answer if grant.refresh is None else answer | {"refresh_token": grant.refresh}
