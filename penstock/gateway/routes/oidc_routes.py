"""Signing in at somebody else's provider of identities.

POST /api/auth/oidc             where to go, and a cookie that comes back with the browser (Lax)
GET  /api/auth/oidc/callback    where the provider sends it; the session's first secret is a cookie (Strict)
POST /api/auth/oidc/session     the page takes the tokens for it, once
"""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import SecretStr

from penstock.gateway.accounts.oidc import LASTS, OidcSignIn
from penstock.gateway.accounts.principal import AccountError, BadInput, Forbidden
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.requests import Body, Secret, answers
from penstock.gateway.frame.route_access import GuardedRoute, address_of, parts_of
from penstock.gateway.routes.account_routes import OfferedProvider, ProviderAddress, Tokens, shown_grant

router = APIRouter(route_class=GuardedRoute, tags=["accounts"])

DEPARTURE: Final = "penstock-departure"
SESSION: Final = "penstock-session"
SESSION_PATH: Final = "/api/auth/oidc/session"
HANDED_OVER_S: Final = 60
_NONE = SecretStr("")
_Word = Annotated[str, Query(max_length=4096)]


class Leaving(Body):
    """A browser that wants to sign in at the provider. invitation: of a newcomer."""

    invitation: Secret = _NONE


@router.get("/api/auth/oidc", responses=answers(OfferedProvider))
def offered(request: Request) -> dict[str, str | None]:
    """Say what the provider is called; null where there is none."""
    oidc = parts_of(request).oidc
    return {"title": None if oidc is None else oidc.provider.settings.title}


@router.post("/api/auth/oidc", responses=answers(ProviderAddress))
def leave(request: Request, response: Response, body: Leaving) -> dict[str, str]:
    """Begin a sign-in: answer with the address at which the provider asks who it is."""
    oidc = _oidc(request)
    departure = oidc.depart(body.invitation.get_secret_value())
    response.set_cookie(
        DEPARTURE,
        departure.cookie,
        max_age=int(LASTS.total_seconds()),
        path="/api/auth/oidc/callback",
        httponly=True,
        samesite="lax",
        secure=_is_secure(oidc),
    )
    return {"address": departure.address}


@router.get("/api/auth/oidc/callback", status_code=303, response_class=RedirectResponse)
def arrive(
    request: Request, state: _Word = "", code: _Word = "", iss: _Word = "", error: _Word = ""
) -> RedirectResponse:
    """End a sign-in, and lead to the page, which says what came of it."""
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


@router.post(SESSION_PATH, responses=answers(Tokens))
def take_session(request: Request) -> JSONResponse:
    """Give the page the tokens of the session that has just begun, once."""
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
