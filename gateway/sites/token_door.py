"""The door of a site that other machines reach: a token of its project, before anything of a body is read."""

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.accounts.account_errors import Forbidden, NoSuchThing, Unauthenticated
from gateway.accounts.accounts import Accounts
from gateway.frame.api_errors import ApiError
from gateway.sites.site import Site
from gateway.store.tables import Role


class TokenDoor:
    """The middleware. project: whose tokens count."""

    def __init__(self, app: ASGIApp, accounts: Accounts, project: str, site: Site) -> None:
        self._app, self._accounts, self._project, self._site = app, accounts, project, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and not self._is_open(scope):
            try:
                scope["penstock.caller"] = await run_in_threadpool(self._admitted, scope)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"]
        return scope["method"] == "GET" and any(
            path == prefix or path.startswith(f"{prefix}/") for prefix in self._site.open_paths
        )

    def _admitted(self, scope: Scope) -> str:
        header = Headers(scope=scope).get("authorization")
        if header is None:
            raise ApiError(401, "send a token of the project: `Authorization: Bearer TOKEN`")
        try:
            principal = self._accounts.authenticate(header)
            role = self._accounts.membership(principal, self._project).role
        except Unauthenticated as error:
            raise ApiError(401, str(error)) from error
        except (Forbidden, NoSuchThing) as error:
            raise ApiError(403, "this token is of another project") from error
        least = Role.VIEWER if scope["path"] in self._site.viewer_paths else Role.EDITOR
        if not role.includes(least):
            raise ApiError(403, f"the role of this token is {role}, this needs {least}")
        return principal.subject
