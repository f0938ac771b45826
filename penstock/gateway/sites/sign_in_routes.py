"""Signing in at a site that other machines reach: the gateway's own calls for it, at the same paths."""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Form, Request
from pydantic import SecretStr
from starlette.concurrency import run_in_threadpool

from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.principal import Membership
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.parts import address_of
from penstock.gateway.routes.account_routes import SignUp, shown_grant

OPEN: Final = frozenset({"/api/auth/token", "/api/auth/sign-up"})
"""What somebody calls who has not signed in."""
_NONE: Final = SecretStr("")


def sign_in_router(accounts: Accounts) -> APIRouter:
    """Return the routes on these accounts."""
    router = APIRouter(tags=["accounts"])

    @router.post("/api/auth/token")
    async def token(
        request: Request,
        grant_type: Annotated[str, Form(max_length=32)],
        username: Annotated[str, Form(max_length=128)] = "",
        password: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
        refresh_token: Annotated[SecretStr, Form(max_length=4096)] = _NONE,
    ) -> dict[str, Any]:
        """Give an access token for a password, or a refresh token."""
        address = address_of(request)
        if grant_type == "password":
            grant = await run_in_threadpool(
                accounts.sign_in, username, password.get_secret_value(), address=address
            )
        elif grant_type == "refresh_token":
            grant = await run_in_threadpool(accounts.refresh, refresh_token.get_secret_value())
        else:
            raise ApiError(
                400, "use password or refresh_token", field="grant_type", error="unsupported_grant_type"
            )
        return shown_grant(grant)

    @router.post("/api/auth/sign-up", status_code=201)
    async def sign_up(request: Request, body: SignUp) -> dict[str, str]:
        """Make the account of a person who was invited, and make them a member."""
        project = await run_in_threadpool(
            accounts.sign_up,
            body.invitation.get_secret_value(),
            body.name,
            body.password.get_secret_value(),
            address=address_of(request),
        )
        return {"project": project}

    @router.post("/api/auth/sign-out", status_code=204)
    async def sign_out(request: Request) -> None:
        """End this session: its access and refresh tokens count no more."""
        member: Membership = request.scope["penstock.member"]
        await run_in_threadpool(accounts.sign_out, member.principal)

    @router.get("/api/me")
    async def me(request: Request) -> dict[str, str]:
        """Return who calls, and what they are in the project."""
        member: Membership = request.scope["penstock.member"]
        return {"name": member.principal.name, "project": member.project, "role": member.role.value}

    return router
