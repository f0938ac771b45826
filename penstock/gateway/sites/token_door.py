"""The door of a site that other machines reach: a token of its project, before anything of a body is read.

A person signs in for one; a program has one of its own. Each may ask for so much in a second.
"""

from collections.abc import Callable
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.accounts.account_errors import Forbidden, NoSuchThing, Unauthenticated
from penstock.gateway.accounts.accounts import Accounts
from penstock.gateway.accounts.principal import Membership
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.sites.sign_in_routes import OPEN
from penstock.gateway.sites.site import Site
from penstock.gateway.store.tables import Role

_OF_ANYBODY: Final = frozenset({"/api/me", "/api/auth/sign-out"})
"""Of the routes of signing in, what every member may call."""


class TokenDoor:
    """The middleware. project: whose tokens count. admit: counts a call of somebody; raises ApiError."""

    def __init__(
        self, app: ASGIApp, accounts: Accounts, project: str, site: Site, admit: Callable[[str], None]
    ) -> None:
        self._app, self._accounts, self._project, self._site = app, accounts, project, site
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and not self._is_open(scope):
            try:
                member = await run_in_threadpool(self._admitted, scope)
                self._admit(member.principal.subject)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            scope["penstock.member"] = member
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        if scope["method"] == "POST":
            return path in OPEN
        return scope["method"] == "GET" and any(
            path == prefix or path.startswith(f"{prefix}/") for prefix in self._site.open_paths
        )

    def _admitted(self, scope: Scope) -> Membership:
        header = Headers(scope=scope).get("authorization")
        if header is None:
            raise ApiError(401, "sign in, or send a token of the project: `Authorization: Bearer TOKEN`")
        try:
            principal = self._accounts.authenticate(header)
            member = self._accounts.membership(principal, self._project)
        except Unauthenticated as error:
            raise ApiError(401, str(error)) from error
        except (Forbidden, NoSuchThing) as error:
            raise ApiError(403, "you are no member of this project") from error
        least = Role.VIEWER if scope["path"] in self._site.viewer_paths | _OF_ANYBODY else Role.EDITOR
        if not member.role.includes(least):
            raise ApiError(403, f"your role in this project is {member.role}, this needs {least}")
        return member
