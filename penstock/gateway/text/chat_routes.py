"""The routes: chat completions, models, and rewards for what was answered."""

import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, FastAPI, Header, Request
from fastapi import Response as ProcessResponse
from fastapi.responses import JSONResponse, Response

from penstock.client import Generation, PolicyError
from penstock.client.asynchronous import AsyncAnswerStream, AsyncConversation
from penstock.config.configuration_error import ConfigurationError
from penstock.config.credentials import credentials
from penstock.config.settings import Settings
from penstock.gateway.frame.api_errors import ApiError, CallLimits
from penstock.gateway.frame.envelope import Doors
from penstock.gateway.frame.envelope import Envelope as ProcessEnvelope
from penstock.gateway.frame.event_stream import ANSWER_S, EventStream
from penstock.gateway.http_server import HttpServer
from penstock.gateway.sites.site import RunBehind, ServedText, Upstream
from penstock.gateway.text.agents import Agents, option_of
from penstock.gateway.text.chat_answers import (
    INVALID,
    ChatError,
    Envelope,
    add_handlers,
    event,
    of_server,
    of_value,
)
from penstock.gateway.text.chat_requests import NAME_FORM, ChatRequest, RewardRequest
from penstock.rpc.address import is_local
from penstock.rpc.auth import Credentials
from penstock.runtime.exit import EXIT_FAILED, EXIT_OK
from penstock.runtime.health import Health, announce, serve_http
from penstock.runtime.lifecycle import Lifecycle

router = APIRouter()
_FINAL = "final"
"""Name of the request that ends a conversation, and of a reward that comes with it."""
_CUT_OFF: Final = ChatError(
    503,
    "the gateway has ended before this answer was whole: ask again",
    code="not_ready",
    kind="server_error",
)

ConversationHeader = Annotated[str | None, Header(alias="X-Conversation-Id", pattern=f"^{NAME_FORM}$")]


@router.post("/v1/chat/completions")
async def complete(request: Request, body: ChatRequest, name: ConversationHeader = None) -> Response:
    """Answer messages; learned from where the caller says which conversation it is in."""
    agents = agents_of(request)
    options, messages = body.options(), [one.plain() for one in body.messages]
    chosen = await agents.choose(body.model)
    request.state.option = option_of(chosen.agent)
    envelope = Envelope(body.model, secrets.token_hex(12))
    asks: Any = chosen.client
    named: dict[str, Any] = {"client_key": body.user or "", "arm": chosen.arm, "version": chosen.version}
    if (conversation := body.conversation(name)) and not chosen.version:
        request.state.conversation = conversation
        with _sent():
            asks = await chosen.client.start_conversation(body.user or "", name=conversation, arm=chosen.arm)
        named = {}
    if body.stream:
        with _sent():
            stream = asks.stream(messages, **options, **named)
        parts = _events(stream, envelope, body)
        # What is refused before the first part is an error of the call.
        first = await anext(parts)
        behind = _behind(first, parts, request.state.option)
        return EventStream(behind, grace_s=ANSWER_S, cut_off=event(_CUT_OFF.body))
    with _sent():
        given: Generation = await asks.generate(messages, **options, **named)
    return JSONResponse(envelope.completion(given, logprobs=bool(body.logprobs)))


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the model names that can be asked for, of all agents whose servers answer."""
    return await agents_of(request).models()


@router.get("/v1/models/{model}")
async def show_model(request: Request, model: str) -> dict[str, Any]:
    """Return one of them."""
    return await agents_of(request).show(model)


@router.post("/v1/rewards")
async def reward(request: Request, body: RewardRequest) -> dict[str, Any]:
    """Add rewards to turns of a conversation; `final`: it is over, which may be said again."""
    request.state.conversation = body.conversation_id
    if body.reward is None and not body.final:
        raise ChatError(400, "reward: give one, or say that the conversation is over (final)", param="reward")
    agents = agents_of(request)
    agent = agents.only() if body.model is None else (await agents.choose(body.model)).agent
    request.state.option = option_of(agent)
    client = await agents.client(agent)
    with _sent():
        conversation: AsyncConversation = await client.start_conversation(
            body.user, name=body.conversation_id, must_exist=True
        )
        late = 0
        if body.reward is not None:
            once = body.id or (_FINAL if body.final else "")
            late = await conversation.rewards([(body.turn, body.reward)], request_id=once)
    said: dict[str, Any] = {"object": "reward", "conversation_id": body.conversation_id, "late": bool(late)}
    if body.final:
        result = await conversation.end(request_id=_FINAL)
        said |= {"total_return": result.total_return, "turns": result.turns}
    return said


def agents_of(request: Request) -> Agents:
    """Return whom a call may be about; raises ChatError 415 for a body of another type."""
    if request.headers.get("content-type", "application/json").partition(";")[0] != "application/json":
        raise ChatError(415, "content-type: send application/json", code="unsupported_type")
    agents: Agents = request.app.state.agents
    return agents


def make_app(agents: Agents) -> FastAPI:
    """Return the application; agents are used in its event loop alone."""
    app = FastAPI(
        title="Penstock text", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.agents = agents
    app.include_router(router)
    add_handlers(app)
    return app


@contextmanager
def _sent() -> Iterator[None]:
    """What the text client cannot send is the caller's mistake."""
    try:
        yield
    except ValueError as error:
        raise of_value(error) from error


async def _events(stream: AsyncAnswerStream, envelope: Envelope, body: ChatRequest) -> AsyncIterator[str]:
    """The parts of answers as events; the stream is closed with them."""
    try:
        begun = set[int]()
        async for part in stream:
            if part.index not in begun:
                begun.add(part.index)
                yield envelope.part(part.index, {"role": "assistant", "content": ""})
            yield envelope.part(part.index, {"content": part.text})
        given = stream.result
        assert given is not None
        for index in sorted({*range(len(given.answers))} - begun):
            yield envelope.part(index, {"role": "assistant", "content": ""})
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        for last in envelope.last_parts(given, logprobs=bool(body.logprobs), with_usage=with_usage):
            yield last
    finally:
        stream.close()


async def _behind(first: str, parts: AsyncIterator[str], option: str) -> AsyncIterator[str]:
    yield first
    try:
        async for part in parts:
            yield part
    except PolicyError as error:
        yield event(of_server(error, option=option).body)


# ---- Process body of `penstock gateway text`: the API of agents on loopback, without accounts.

log = logging.getLogger(__name__)

ROLE: Final = "gateway"


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
        upstreams = {name: Upstream(addresses=run.addresses, credentials=own) for name, run in runs.items()}
        http = HttpServer(guarded_app(upstreams), listen)
        http.start(on_end=lambda: lifecycle.drain("the HTTP server has ended"))
        health.set_ready(True)
        announce(ROLE, metrics_port=metrics_port, address=http.address)
        log.info("serving", extra={"url": http.url, "agents": list(runs)})
        lifecycle.draining.wait()
        health.set_ready(False, "draining")
        http.stop()
    return EXIT_FAILED if http.failed else EXIT_OK


def _check_reach(name: str, address: str, own: Credentials) -> None:
    """Raise ConfigurationError for an address to which nothing may be sent in plaintext."""
    try:
        if address:
            own.for_channel(address)
    except ValueError as error:
        raise ConfigurationError(f"{option_of(name)}: {error}") from error


def guarded_app(upstreams: Mapping[str, Upstream], limits: CallLimits | None = None) -> FastAPI:
    """Return the application over these runs by name, with what surrounds every request.

    limits: of an address; None: those of every gateway.
    """
    app = make_app(Agents({name: ServedText(one) for name, one in upstreams.items()}))
    app.add_middleware(
        ProcessEnvelope, doors=Doors(), admit=(limits or CallLimits()).admit_address, form=in_form
    )
    return app


def in_form(error: ApiError) -> ProcessResponse:
    """Return what is refused before the API hears of it, as that API's errors are."""
    kind = "rate_limit_error" if error.status == HTTPStatus.TOO_MANY_REQUESTS else INVALID
    kind = "server_error" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else kind
    param = "messages" if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE else None
    return ChatError(
        error.status, str(error.detail), param=param, code=error.error, kind=kind, retry_s=error.retry_s
    ).response()
