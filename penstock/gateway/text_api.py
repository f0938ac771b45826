"""OpenAI's API over HTTP: before servers of text, and for a server of text that listens itself."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final

from fastapi import APIRouter, Request, Response
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
from penstock.gateway.frame.event_stream import ANSWER_S, EventStream
from penstock.gateway.frame.requests import ApiError, CallLimits
from penstock.gateway.frame.route_access import GuardedRoute, Listener, table
from penstock.gateway.upstream import RunBehind, ServedText, Upstream
from penstock.rpc.auth import Credentials

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


# ---- The listener.

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
_router = APIRouter(route_class=GuardedRoute)
Answer = Callable[[HttpRequest], Awaitable[HttpReply]]


@_router.post("/v1/chat/completions", response_model=None)
@_router.post("/v1/rewards", response_model=None)
@_router.get("/v1/models", response_model=None)
@_router.get("/v1/models/{model}", response_model=None)
async def handle(request: Request) -> Response:
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


def text_listener(answer: Answer, limits: CallLimits | None = None) -> Listener:
    """Return what serves the API without accounts.

    answer: is awaited in one event loop alone, and may raise ChatError. limits: of an address; None: those of
    every gateway.
    """
    return Listener(
        title="Penstock text",
        routers=[_router],
        access=table(
            viewer=[
                "POST /v1/chat/completions",
                "POST /v1/rewards",
                "GET /v1/models",
                "GET /v1/models/{model}",
            ]
        ),
        admit=(limits or CallLimits()).admit_address,
        state={"answer": answer},
        form=_in_form,
        errors={ChatError: _refused, HTTPException: _of_framework},
    )


async def _refused(_request: Request, error: ChatError) -> Response:
    return _response(error)


async def _of_framework(_request: Request, error: HTTPException) -> Response:
    code = _CODES.get(error.status_code, "refused")
    return _response(ChatError(error.status_code, str(error.detail), code=code))


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


@contextmanager
def text_of(
    runs: Mapping[str, AbstractContextManager[RunBehind]], own: Credentials
) -> Iterator[tuple[Listener, dict[str, Any]]]:
    """Yield what `penstock gateway text` listens with: the API of the servers of runs, without accounts.

    runs: at least one with a server of text, by name; that of FIRST is known by its policy's. Raises
    ConfigurationError for an address that cannot be reached with these credentials.
    """
    with ExitStack() as stack:
        found = {name: stack.enter_context(one) for name, one in runs.items()}
        for name, run in found.items():
            try:
                if address := run.addresses().server:
                    own.for_channel(address)
            except ValueError as error:
                raise ConfigurationError(f"{option_of(name)}: {error}") from error
        served = {
            name: ServedText(Upstream(addresses=run.addresses, credentials=own))
            for name, run in found.items()
        }
        yield text_listener(Agents(served).answer), {}
