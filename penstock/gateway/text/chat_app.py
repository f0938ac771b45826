"""OpenAI's API over HTTP: before servers of text, and for a server of text that listens itself."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.client.calls import new_request_id
from penstock.client.http_calls import EVENTS, INVALID, ChatError, HttpReply, HttpRequest, event
from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.gateway.frame.api_errors import ApiError, CallLimits
from penstock.gateway.frame.envelope import Doors, Envelope
from penstock.gateway.frame.event_stream import ANSWER_S, EventStream
from penstock.gateway.http_server import HttpServer
from penstock.gateway.sites.site import RunBehind, ServedText, Upstream
from penstock.gateway.text.agents import Agents, option_of
from penstock.rpc.address import is_local
from penstock.rpc.auth import Credentials
from penstock.runtime.health import Health, serve_http
from penstock.runtime.lifecycle import Lifecycle

ROLE: Final = "gateway"
ROUTES: Final = {
    "/v1/chat/completions": "POST",
    "/v1/rewards": "POST",
    "/v1/models": "GET",
    "/v1/models/{model}": "GET",
}
_READ: Final = ("content-type", "x-conversation-id")
"""Headers that the API reads."""
_CODES: Final = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}
"""Of what the framework refuses."""
_CUT_OFF: Final = ChatError(
    503,
    "the gateway has ended before this answer was whole: ask again",
    code="not_ready",
    kind="server_error",
)


def make_app(answer: Callable[[HttpRequest], Awaitable[HttpReply]]) -> FastAPI:
    """Return the application; `answer` is awaited in its event loop alone, and may raise ChatError."""
    app = FastAPI(
        title="Penstock text", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )

    async def handle(request: Request) -> Response:
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

    for path, method in ROUTES.items():
        app.add_api_route(path, handle, methods=[method], response_model=None)

    @app.exception_handler(ChatError)
    async def refused(_request: Request, error: ChatError) -> Response:
        return _response(error)

    @app.exception_handler(HTTPException)
    async def framework(_request: Request, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code, "refused")
        return _response(ChatError(error.status_code, str(error.detail), code=code))

    return app


def guarded_app(
    answer: Callable[[HttpRequest], Awaitable[HttpReply]], limits: CallLimits | None = None
) -> FastAPI:
    """Return the application with what surrounds every request.

    limits: of an address; None: those of every gateway.
    """
    app = make_app(answer)
    app.add_middleware(Envelope, doors=Doors(), admit=(limits or CallLimits()).admit_address, form=_in_form)
    return app


def _in_form(error: ApiError) -> Response:
    """What is refused before the API hears of it, as that API's errors are."""
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


# ---- Process body of `penstock gateway text`: the API of agents on loopback, without accounts.


def main(
    lifecycle: Lifecycle,
    settings: Settings,
    *,
    agents: Mapping[str, AbstractContextManager[RunBehind]],
    listen: str,
) -> int:
    """Serve until the lifecycle drains; returns the exit code.

    agents: at least one run with a server of text, by name; that of FIRST is known by its policy's. Raises
    ConfigurationError for an address that cannot be used, and for one of its own that lies beyond loopback.
    """
    if not is_local(listen):
        raise ConfigurationError(
            f"--listen {listen}: without accounts it answers this machine alone: say 127.0.0.1:PORT"
        )
    own = credentials(settings.security)
    health = Health(ROLE)
    with ExitStack() as stack:
        runs = {name: stack.enter_context(one) for name, one in agents.items()}
        for name, run in runs.items():
            _check_reach(name, run.addresses().server, own)
        _, metrics_port = serve_http(health, settings.metrics.host, settings.metrics.port)
        relay = Agents(
            {
                name: ServedText(Upstream(addresses=run.addresses, credentials=own))
                for name, run in runs.items()
            }
        )
        return HttpServer(guarded_app(relay.answer), listen).serve(lifecycle, health, ROLE, metrics_port)


def _check_reach(name: str, address: str, own: Credentials) -> None:
    """Raise ConfigurationError for an address to which nothing may be sent in plaintext."""
    try:
        if address:
            own.for_channel(address)
    except ValueError as error:
        raise ConfigurationError(f"{option_of(name)}: {error}") from error
