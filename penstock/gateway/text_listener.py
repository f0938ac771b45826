"""OpenAI's API over HTTP without accounts: its routes, and errors of the framework in the form of the API.

The gateway answers by the servers of text behind it; a server of text may listen itself.
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.client.calls import new_request_id
from penstock.client.text_calls import EVENTS, INVALID, ChatError, HttpReply, HttpRequest, event
from penstock.gateway.frame.event_stream import ANSWER_S, EventStream
from penstock.gateway.frame.requests import ApiError, CallLimits
from penstock.gateway.frame.route_access import GuardedRoute, Listener, table

_READ: Final = ("content-type", "x-conversation-id")
"""Headers that the API reads."""
_CODES: Final = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
"""By the status of an error of the framework."""
_ROUTES: Final = (
    "POST /v1/chat/completions",
    "POST /v1/rewards",
    "GET /v1/models",
    "GET /v1/models/{model}",
)
_CUT_OFF: Final = ChatError(
    503,
    "the gateway has ended before this answer was whole: ask again",
    code="not_ready",
    kind="server_error",
)
_router = APIRouter(route_class=GuardedRoute)
Answer = Callable[[HttpRequest], Awaitable[HttpReply]]
"""Answers a request; it may raise ChatError."""


async def _handle(request: Request) -> Response:
    answer: Answer = request.app.state.answer
    reply = await answer(
        HttpRequest(
            method=request.method,
            path=request.scope["path"],
            headers={name: request.headers[name] for name in _READ if name in request.headers},
            body=await request.body(),
            request_id=new_request_id(),
        )
    )
    if reply.headers.get("content-type") == EVENTS:
        return EventStream(reply.parts, reply.status, grace_s=ANSWER_S, cut_off=event(_CUT_OFF.body))
    return Response(await reply.whole(), reply.status, reply.headers)


for _route in _ROUTES:
    _method, _path = _route.split()
    _router.add_api_route(_path, _handle, methods=[_method], response_model=None)


def text_listener(answer: Answer, limits: CallLimits | None = None) -> Listener:
    """Return the listener of the API.

    answer: awaited in one event loop alone; it may raise ChatError. limits: of the calls of an address; None:
    those of every gateway.
    """
    return Listener(
        title="Penstock text",
        routers=[_router],
        access=table(viewer=list(_ROUTES)),
        admit=(limits or CallLimits()).admit_address,
        state={"answer": answer},
        form=_of_gateway,
        errors={ChatError: _of_api, HTTPException: _of_framework},
    )


async def _of_api(_request: Request, error: ChatError) -> Response:
    return _response(error)


async def _of_framework(_request: Request, error: HTTPException) -> Response:
    code = _CODES.get(error.status_code, "refused")
    return _response(ChatError(error.status_code, str(error.detail), code=code))


def _of_gateway(error: ApiError) -> Response:
    kind = "rate_limit_error" if error.status == HTTPStatus.TOO_MANY_REQUESTS else INVALID
    kind = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else kind
    param = "messages" if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else None
    return _response(
        ChatError(
            error.status, str(error.detail), param=param, code=error.error, kind=kind, retry_s=error.retry_s
        )
    )


def _response(error: ChatError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)
