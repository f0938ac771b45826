"""Lets in the browser that has the cookie; the secret of the address is exchanged for it."""

from typing import Final

from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.personal.admission import PARAMETER, Admission

_NOT_LET_IN: Final = (
    "open the address that `penstock ui` printed; it lets in one browser: start it again for another"
)


class PersonalDoor:
    """The middleware."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app, self._admission = app, admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        is_known = self._admission.admits(asked.cookies.get(self._admission.cookie))
        entrance = self._entrance(asked, is_known=is_known)
        if entrance is not None:
            await entrance(scope, receive, send)
        elif is_known:
            await self._app(scope, receive, send)
        else:
            await ApiError(401, _NOT_LET_IN).response()(scope, receive, send)

    def _entrance(self, asked: HTTPConnection, *, is_known: bool) -> RedirectResponse | None:
        """Return the way from the printed address to the page without a secret, for whom it lets in."""
        secret = asked.query_params.get(PARAMETER)
        if secret is None or (asked.scope["method"], asked.scope["path"]) != ("GET", "/"):
            return None
        session = self._admission.exchange(secret)
        if session is None and not is_known:
            return None
        away = RedirectResponse("/", status_code=303)
        if session is not None:
            away.set_cookie(self._admission.cookie, session, httponly=True, samesite="strict")
        return away
