"""The calls of the page: conversations, ratings, one's own data, the overview, and what is decided there."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from penstock.gateway.surface import (
    ANSWER_S,
    ApiError,
    EventStream,
    JsonRoute,
    answered,
    caller_of,
    event,
    is_editor,
)
from penstock.workloads.chat.http import chat_bodies as bodies
from penstock.workloads.chat.http import steering
from penstock.workloads.chat.http.chat_api import ChatApi, person_of
from penstock.workloads.chat.http.overview import overview, satisfaction_by_day_and_person

router = APIRouter(route_class=JsonRoute, tags=["chat"])


async def api_of(request: Request, agent: Annotated[str, Query(max_length=64)] = "") -> ChatApi:
    """Return what the routes work with. agent: whom it is about; "": the first. Raises ApiError 404."""
    found: ChatApi | None = _apis(request).get(agent)
    if found is None:
        raise ApiError(404, f"agent={agent!r}: there is none of that name", field="agent")
    return found


def _apis(request: Request) -> dict[str, ChatApi]:
    apis: dict[str, ChatApi] = request.app.state.apis
    return apis


Api = Annotated[ChatApi, Depends(api_of)]


@router.get("/health")
async def health(api: Api) -> dict[str, Any]:
    """Tell that something would be answered."""
    found = await answered((await api.client()).describe())
    return {"status": "ok", "versions": [one.version for one in found.versions]}


@router.get("/api/chat/agents")
async def agents(request: Request) -> dict[str, Any]:
    """Return whom one may talk to; "" is the first, whose name is that of its policy."""
    return {"agents": list(_apis(request))}


@router.post("/api/chat/begin")
async def begin(request: Request, api: Api, body: bodies.Me) -> dict[str, Any]:
    """Begin a conversation."""
    talk = await api.begin(_person(request, body))
    return {"conversation": talk.id}


@router.post("/api/chat/say", response_class=EventStream)
async def say(request: Request, api: Api, body: bodies.Say) -> EventStream:
    """Say something, or have the last message answered once more; the answer comes as events."""
    talk = api.find(_person(request, body), body.conversation)
    events = api.say(talk, body.text, looks_after=is_editor(request))
    first = await anext(events)  # what is refused before it is an error of the call
    cut_off = event("refused", {"detail": "the gateway has ended before this answer was whole: say it again"})
    return EventStream(_behind(first, events), grace_s=ANSWER_S, cut_off=cut_off)


@router.post("/api/chat/thumb")
async def thumb(request: Request, api: Api, body: bodies.Thumb) -> dict[str, Any]:
    """Keep whether somebody likes an answer."""
    talk = api.find(_person(request, body), body.conversation)
    return {"stored": True, "rewarded": await api.thumb(talk, body)}


@router.post("/api/chat/stars")
async def stars(request: Request, api: Api, body: bodies.Stars) -> dict[str, Any]:
    """Keep what somebody thinks of one side of an answer."""
    await api.stars(api.find(_person(request, body), body.conversation), body)
    return {"stored": True}


@router.post("/api/chat/prefer")
async def prefer(request: Request, api: Api, body: bodies.Prefer) -> dict[str, Any]:
    """Keep which of two answers is better; the conversation goes on with it."""
    text = await api.prefer(api.find(_person(request, body), body.conversation), body)
    return {"stored": True, "text": text}


@router.post("/api/chat/correct")
async def correct(request: Request, api: Api, body: bodies.Correction) -> dict[str, Any]:
    """Keep what an answer should have been."""
    await api.correct(api.find(_person(request, body), body.conversation), body)
    return {"stored": True}


@router.post("/api/chat/end")
async def end(request: Request, api: Api, body: bodies.OfTalk) -> dict[str, Any]:
    """End a conversation."""
    await api.end(api.find(_person(request, body), body.conversation))
    return {"ended": True}


@router.post("/api/chat/mine")
async def mine(request: Request, body: bodies.Me) -> dict[str, Any]:
    """Return everything that somebody has said of answers, of any agent."""
    said = list[dict[str, Any]]()
    for api in {await api.kept(): api for api in await _keeping(request)}.values():
        said += await api.export(_person(request, body))
    return {"ratings": said}


@router.post("/api/chat/forget")
async def forget(request: Request, body: bodies.Me) -> dict[str, Any]:
    """Delete everything that somebody has said of answers, of any agent; what they asked counts no more."""
    person = _person(request, body)
    # Of every policy in a registry at once, so that no server has to say which one is its own.
    found = {(await api.run()).registry: api for api in await _keeping(request)}
    deleted = sum([await api.forget(person) for api in found.values()])
    for api in _apis(request).values():
        await asyncio.to_thread(api.book.forget, person)
    return {"deleted": deleted}


@router.get("/api/chat/overview")
async def look(api: Api) -> dict[str, Any]:
    """Return satisfaction by version, arms, fallbacks, what was blocked, decisions, and the loop."""
    return await overview(api)


@router.get("/api/chat/satisfaction")
async def look_at_satisfaction(api: Api) -> dict[str, Any]:
    """Return satisfaction by day, and by person of those who have rated."""
    return await satisfaction_by_day_and_person(api)


@router.post("/api/chat/promote")
async def promote(request: Request, api: Api, body: bodies.OfVersion) -> dict[str, Any]:
    """Let a version answer everybody."""
    return await asyncio.to_thread(steering.promote, *await api.kept(), body, _name_of(request))


@router.post("/api/chat/rollback")
async def roll_back(request: Request, api: Api, body: bodies.OfVersion) -> dict[str, Any]:
    """Withdraw the canary, or the version that answers for the one before it."""
    return await asyncio.to_thread(steering.roll_back, *await api.kept(), body, _name_of(request))


@router.post("/api/chat/weigh")
async def weigh(request: Request, api: Api, body: bodies.Weigh) -> dict[str, Any]:
    """Change what criteria count in the reward of the loop, from its next reward model on."""
    return await asyncio.to_thread(steering.weigh, await api.run(), body, _name_of(request))


@router.post("/api/chat/pause")
async def pause(request: Request, api: Api, body: bodies.Reasoned) -> dict[str, Any]:
    """Have the loop wait."""
    return await asyncio.to_thread(steering.pause_loop, await api.run(), body, _name_of(request))


@router.post("/api/chat/resume")
async def resume(api: Api, _body: bodies.Body) -> dict[str, Any]:
    """Let the loop go on; a step that failed is tried again."""
    return await asyncio.to_thread(steering.resume_loop, await api.run())


@router.post("/api/chat/abandon")
async def abandon(request: Request, api: Api, body: bodies.Reasoned) -> dict[str, Any]:
    """Give up the round of the loop that goes on."""
    return await asyncio.to_thread(steering.abandon_round, await api.run(), body, _name_of(request))


def _person(request: Request, body: bodies.Me) -> str:
    return person_of(caller_of(request), body.me)


async def _keeping(request: Request) -> list[ChatApi]:
    """Return those by which something is kept; the first always is one, which says so itself."""
    first, *others = _apis(request).values()
    return [first, *[one for one in others if not await one.keeps_nothing()]]


def _name_of(request: Request) -> str:
    """Return who decides, for the audit."""
    return f"page/{caller_of(request)}".rstrip("/")


async def _behind(first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for one in events:
        yield one
