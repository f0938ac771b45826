"""A route of a site that takes JSON alone, so that no form of another page reaches it."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from penstock.gateway.frame.api_errors import ApiError

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """Refuses what is posted as anything but JSON."""

    def get_route_handler(self) -> Handler:
        """Return the handler behind the check."""
        handle = self.inner_handler()

        async def checked(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if request.method == "POST" and kind != "application/json":
                raise ApiError(415, "content-type: send application/json")
            return await handle(request)

        return checked

    def inner_handler(self) -> Handler:
        """Return the handler of the framework."""
        return super().get_route_handler()
