"""Signing in and out, here or at an identity provider, and the identity of the caller.

POST /api/auth/oidc             returns the URL of the provider, and sets a cookie for the callback (Lax)
GET  /api/auth/oidc/callback    redirect URI; sets a refresh token of the new session as a cookie (Strict)
POST /api/auth/oidc/session     returns the tokens of that session to the page, once
"""

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Form, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import SecretStr

from penstock.gateway.accounts import projects
from penstock.gateway.accounts.oidc import LASTS, OidcSignIn
from penstock.gateway.accounts.principal import AccountError, BadInput, Forbidden, Principal
from penstock.gateway.accounts.sessions import Grant
from penstock.gateway.frame.requests import Answer, ApiError, Body, Secret, Text
from penstock.gateway.frame.route_access import GuardedRoute, accounts_of, address_of, parts_of, principal_of
from penstock.gateway.store.tables import Role

# ---- Answers about people and programs, as the document describes them.


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
    """The project that the caller has joined."""

    project: str


class Belonging(Answer):
    """A project, and the role of the caller in it."""

    project: str
    role: Role


class Me(Answer):
    """The caller. subject: `user/ID` or `token/ID`."""

    subject: str
    name: str
    projects: list[Belonging]


class OfferedProvider(Answer):
    """The identity provider at which people may sign in. title: null without a provider."""

    title: str | None


class ProviderAddress(Answer):
    """URL at which the browser signs in."""

    address: str


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
    """An invitation, which a person with an account accepts."""

    invitation: Secret


class NewPassword(Body):
    """The current password and the new one."""

    current: Secret
    new: Secret


@router.get("/api/health", response_model=Health)
def health() -> dict[str, str]:
    """Say that the gateway answers."""
    return {"status": "ok"}


@router.post(
    "/api/auth/token",
    response_model=Tokens,
    response_model_exclude_unset=True,
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
    """Issue an access token (OAuth 2) for a password, a refresh token, or an API token as client secret."""
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
    """End this session, and revoke its access and refresh tokens."""
    accounts_of(request).sign_out(caller)


@router.post("/api/auth/sign-up", status_code=201, response_model=Joined)
def sign_up(request: Request, body: SignUp) -> dict[str, str]:
    """Create the account of an invited person, and make them a member."""
    project = accounts_of(request).sign_up(
        body.invitation.get_secret_value(),
        body.name,
        body.password.get_secret_value(),
        address=address_of(request),
    )
    return {"project": project}


@router.post("/api/auth/join", response_model=Joined)
def join(request: Request, body: Join, caller: Caller) -> dict[str, str]:
    """Accept an invitation for the account of the caller."""
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
    """Set a new password. Every session of the account ends, including this one."""
    _person(caller)
    accounts_of(request).change_password(
        caller, body.current.get_secret_value(), body.new.get_secret_value(), address=address_of(request)
    )


@router.get("/api/me", response_model=Me)
def me(request: Request, caller: Caller) -> dict[str, Any]:
    """Return the caller, with their projects and roles."""
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


# ---- Signing in at a provider.

DEPARTURE: Final = "penstock-departure"
SESSION: Final = "penstock-session"
SESSION_PATH: Final = "/api/auth/oidc/session"
HANDED_OVER_S: Final = 60
_Word = Annotated[str, Query(max_length=4096)]


class Leaving(Body):
    """The start of a sign-in at the provider. invitation: of a newcomer."""

    invitation: Secret = _NONE


@router.get("/api/auth/oidc", response_model=OfferedProvider)
def offered(request: Request) -> dict[str, str | None]:
    """Return the title of the provider; null without one."""
    oidc = parts_of(request).oidc
    return {"title": None if oidc is None else oidc.provider.settings.title}


@router.post("/api/auth/oidc", response_model=ProviderAddress)
def leave(request: Request, response: Response, body: Leaving) -> dict[str, str]:
    """Start a sign-in: return the URL at which the person signs in at the provider."""
    oidc = _oidc(request)
    address, cookie = oidc.depart(body.invitation.get_secret_value())
    response.set_cookie(
        DEPARTURE,
        cookie,
        max_age=int(LASTS.total_seconds()),
        path="/api/auth/oidc/callback",
        httponly=True,
        samesite="lax",
        secure=_is_secure(oidc),
    )
    return {"address": address}


@router.get("/api/auth/oidc/callback", status_code=303, response_class=RedirectResponse)
def arrive(
    request: Request, state: _Word = "", code: _Word = "", iss: _Word = "", error: _Word = ""
) -> RedirectResponse:
    """Complete a sign-in, and redirect to the page, which shows the result."""
    oidc = _oidc(request)
    cookie, address = request.cookies.get(DEPARTURE, ""), address_of(request)
    refresh: str | None = None
    try:
        if code and not error:
            refresh = oidc.arrive(cookie, state=state, code=code, issuer=iss, address=address).refresh
        place = "/#/not-signed-in" if refresh is None else "/#/arrived"
    except (Forbidden, BadInput):
        place = "/#/not-invited"
    except AccountError:
        place = "/#/not-signed-in"
    away = RedirectResponse(place, status_code=303)
    away.delete_cookie(DEPARTURE, path="/api/auth/oidc/callback")
    if refresh is not None:
        away.set_cookie(
            SESSION,
            refresh,
            max_age=HANDED_OVER_S,
            path=SESSION_PATH,
            httponly=True,
            samesite="strict",
            secure=_is_secure(oidc),
        )
    return away


@router.post(SESSION_PATH, response_model=Tokens)
def take_session(request: Request) -> JSONResponse:
    """Return the tokens of the new session to the page, once."""
    _oidc(request)
    grant = parts_of(request).accounts.refresh(request.cookies.get(SESSION, ""))
    taken = JSONResponse(shown_grant(grant))
    taken.delete_cookie(SESSION, path=SESSION_PATH)
    return taken


def _oidc(request: Request) -> OidcSignIn:
    oidc = parts_of(request).oidc
    if oidc is None:
        raise ApiError(404, "this gateway has no provider: its operator names one with --oidc FILE")
    return oidc


def _is_secure(oidc: OidcSignIn) -> bool:
    return oidc.provider.settings.gateway.startswith("https:")
