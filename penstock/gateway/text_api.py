"""OpenAI's API over HTTP: before servers of text, and for a server of text that listens itself."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.client import AsyncTextClient, PolicyError, Unreachable
from penstock.client.calls import new_request_id
from penstock.client.text_calls import (
    EVENTS,
    INVALID,
    ChatError,
    HttpReply,
    HttpRequest,
    event,
    json_reply,
    unanswered,
    unknown_model,
)
from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.gateway.frame.api_errors import ApiError, CallLimits
from penstock.gateway.frame.envelope import Doors, Envelope
from penstock.gateway.frame.event_stream import ANSWER_S, EventStream
from penstock.gateway.http_server import HttpServer
from penstock.gateway.sites.site import RunBehind, ServedText, Upstream
from penstock.rpc.address import is_local
from penstock.rpc.auth import Credentials
from penstock.runtime.health import Health, serve_http
from penstock.runtime.lifecycle import Lifecycle

# ---- Requests go to the server of text that a model's name means, and its answers come back as they are. An
# agent's names are NAME, NAME:latest, NAME:40, …; those of the first begin with its policy's name.

FIRST: Final = ""
DESCRIBE_S: Final = 5.0
"""Seconds in which a server says what it serves, or is away: a halted one takes calls and answers none."""
_MODELS: Final = "/v1/models"


def option_of(agent: str) -> str:
    return f"--agent {agent}=…" if agent else "--server"


class Agents:
    """Used by one event loop.

    servers: at least one, by name; FIRST: that which is known by its policy's. describe_s: in which a server
    says what it serves, or is away.
    """

    def __init__(self, servers: Mapping[str, ServedText], describe_s: float = DESCRIBE_S) -> None:
        self._servers, self._describe_s = servers, describe_s
        self._first_policy = ""

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Return the answer of the server that is meant; raises ChatError where there is none."""
        if request.path == _MODELS:
            return await self._models(request)
        if request.path.startswith(f"{_MODELS}/"):
            return await self._soon(self._agent_of(request.path.removeprefix(f"{_MODELS}/")), request)
        return await self._from(self._meant(request), request)

    def _meant(self, request: HttpRequest) -> str:
        """Whom a body is for, of which no more is read than its model; others say what is wrong with it."""
        try:
            body = json.loads(request.body)
        except (ValueError, RecursionError):
            body = None
        model = body.get("model") if isinstance(body, dict) else ""
        if model is None and request.path == "/v1/rewards":
            return self._only()
        return self._agent_of(model) if isinstance(model, str) and body else next(iter(self._servers))

    def _agent_of(self, model: str) -> str:
        """Return whose a model name is, FIRST where it is no agent's; raises ChatError 404 without one."""
        agent = model.partition(":")[0]
        if agent in self._servers and agent != FIRST:
            return agent
        if FIRST in self._servers:
            return FIRST
        known, *others = self._servers
        raise unknown_model(known, others)

    def _only(self) -> str:
        if FIRST in self._servers:
            return FIRST
        if len(self._servers) == 1:
            return next(iter(self._servers))
        raise ChatError(400, f"model: say which, of {', '.join(self._servers)}", param="model")

    async def _from(self, agent: str, request: HttpRequest) -> HttpReply:
        """Return the answer of one agent's server; raises ChatError where it gives none."""
        client = await self._client(agent)
        try:
            reply = await client.http(self._named(agent, request))
            if reply.status == 404 and agent != FIRST and FIRST in self._servers and not self._first_policy:
                with contextlib.suppress(ChatError, PolicyError, TimeoutError):  # away, and has no names then
                    async with asyncio.timeout(self._describe_s):
                        self._first_policy = (await (await self._client(FIRST)).describe()).policy
                await reply.parts.aclose()
                reply = await client.http(self._named(agent, request))
        except PolicyError as error:
            raise _of_server(error, agent) from error
        return replace(reply, parts=_parts(reply, agent))

    def _named(self, agent: str, request: HttpRequest) -> HttpRequest:
        """The request with what this agent and the others are called here."""
        first = [self._first_policy] if self._first_policy and agent != FIRST else []
        others = [*first, *(name for name in self._servers if name not in (agent, FIRST))]
        return replace(request, agent=agent, others=tuple(others))

    async def _client(self, agent: str) -> AsyncTextClient:
        found = await self._servers[agent].client()
        if found is None:
            raise _unready(
                f"{agent or 'the first'} has no server yet, or none any more: look after the run of "
                f"{option_of(agent)}",
                "not_ready",
            )
        return found

    async def _soon(self, agent: str, request: HttpRequest) -> HttpReply:
        """Return the whole answer of one that must not be waited for."""
        try:
            async with asyncio.timeout(self._describe_s):
                reply = await self._from(agent, request)
                return json_reply(json.loads(await reply.whole()), reply.status)
        except TimeoutError as error:
            raise _unready(
                f"the server of {agent or 'the first'} has not said in {self._describe_s:g} s what it "
                f"serves: look after that of {option_of(agent)}",
                "unreachable",
            ) from error

    async def _models(self, request: HttpRequest) -> HttpReply:
        """Return the names of all whose servers answer; raises ChatError where none does."""
        told = await asyncio.gather(*(self._models_of(one, request) for one in self._servers))
        found = [one for rows in told if not isinstance(rows, ChatError) for one in rows]
        if not found:
            raise next(one for one in told if isinstance(one, ChatError))
        return json_reply({"object": "list", "data": found})

    async def _models_of(self, agent: str, request: HttpRequest) -> list[dict[str, Any]] | ChatError:
        try:
            reply = await self._soon(agent, request)
        except ChatError as error:
            return error
        rows: list[dict[str, Any]] = json.loads(await reply.whole())["data"]
        return [] if agent == FIRST and rows[0]["id"] in self._servers else rows  # an agent has its name


async def _parts(reply: HttpReply, agent: str) -> AsyncGenerator[bytes, None]:
    try:
        async with contextlib.aclosing(reply.parts) as parts:
            async for part in parts:
                yield part
    except PolicyError as error:
        failed = _of_server(error, agent)
        if reply.headers.get("content-type") != EVENTS:
            raise failed from error
        yield event(failed.body).encode()


def _of_server(error: PolicyError, agent: str) -> ChatError:
    remedy = f"; start it, or start the gateway with another {option_of(agent)}"
    return unanswered(error, remedy if isinstance(error, Unreachable) else "")


def _unready(why: str, code: str) -> ChatError:
    return ChatError(503, f"model: {why}", param="model", code=code, kind="server_error", retry_s=1)


# ---- The application.

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
    try:
        if address:
            own.for_channel(address)
    except ValueError as error:
        raise ConfigurationError(f"{option_of(name)}: {error}") from error
