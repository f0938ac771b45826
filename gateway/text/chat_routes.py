"""The routes: chat completions, models, and rewards for what was answered."""

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway.text.chat_answers import Envelope, event, models
from gateway.text.chat_errors import ChatError, add_handlers, of_server, of_value
from gateway.text.chat_requests import NAME_FORM, ChatRequest, RewardRequest, is_plain, model_of
from penstock.client import Arm, AsyncTextClient, Generation, PolicyError
from penstock.client.text_async import AsyncAnswerStream, AsyncConversation

router = APIRouter()
_FINAL = "final"
"""Name of the request that ends a conversation, and of a reward that comes with it."""

ConversationHeader = Annotated[str | None, Header(alias="X-Conversation-Id", pattern=f"^{NAME_FORM}$")]


@router.post("/v1/chat/completions")
async def complete(request: Request, body: ChatRequest, name: ConversationHeader = None) -> Response:
    """Answer messages; learned from where the caller says which conversation it is in."""
    client = client_of(request)
    options, messages = body.options(), [one.plain() for one in body.messages]
    arm, version = await _chosen(request.app.state, client, body.model)
    envelope = Envelope(body.model, secrets.token_hex(12))
    asks: Any = client
    named: dict[str, Any] = {"client_key": body.user or "", "arm": arm, "version": version}
    if (conversation := body.conversation(name)) and not version:
        request.state.conversation = conversation
        with _sent():
            asks = await client.start_conversation(body.user or "", name=conversation, arm=arm)
        named = {}
    if body.stream:
        with _sent():
            stream = asks.stream(messages, **options, **named)
        parts = _events(stream, envelope, body)
        # What is refused before the first part is an error of the call.
        first = await anext(parts)
        return StreamingResponse(_behind(first, parts), media_type="text/event-stream")
    with _sent():
        given: Generation = await asks.generate(messages, **options, **named)
    return JSONResponse(envelope.completion(given, logprobs=bool(body.logprobs)))


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the model names that can be asked for."""
    return models(await client_of(request).describe())


@router.get("/v1/models/{model}")
async def show_model(request: Request, model: str) -> dict[str, Any]:
    """Return one of them."""
    found = models(await client_of(request).describe())["data"]
    for one in found:
        if one["id"] == model:
            return dict(one)
    raise ChatError(404, "model: there is none of that name", param="model", code="model_not_found")


@router.post("/v1/rewards")
async def reward(request: Request, body: RewardRequest) -> dict[str, Any]:
    """Add rewards to turns of a conversation; `final`: it is over, which may be said again."""
    request.state.conversation = body.conversation_id
    if body.reward is None and not body.final:
        raise ChatError(400, "reward: give one, or say that the conversation is over (final)", param="reward")
    with _sent():
        conversation: AsyncConversation = await client_of(request).start_conversation(
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


def client_of(request: Request) -> AsyncTextClient:
    """Return the client of this event loop, where it is made with the first call."""
    if request.headers.get("content-type", "application/json").partition(";")[0] != "application/json":
        raise ChatError(415, "content-type: send application/json", code="unsupported_type")
    state = request.app.state
    if state.client is None:
        state.client = state.make_client()
    client: AsyncTextClient = state.client
    return client


def make_app(make_client: Any) -> FastAPI:
    """Return the application. make_client: () → AsyncTextClient, called in its event loop."""
    app = FastAPI(
        title="Penstock text", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.client, app.state.make_client, app.state.policy = None, make_client, None
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


async def _chosen(state: Any, client: AsyncTextClient, model: str) -> tuple[Arm | None, int]:
    """The arm and the version of a model name; what is served is asked for anew where it may say another."""
    labels: Mapping[str, int] = {}
    if state.policy is None or model.partition(":")[0] != state.policy or not is_plain(model):
        described = await client.describe()
        state.policy, labels = described.policy, described.labels
    return model_of(model, state.policy, labels)


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


async def _behind(first: str, parts: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    try:
        async for part in parts:
            yield part
    except PolicyError as error:
        yield event(of_server(error).body)
