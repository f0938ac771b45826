"""The calls of the page: conversations, ratings, one's own data, the overview, and what is decided there."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request

from penstock.client import TextDescription
from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.frame.api_errors import ApiError
from penstock.gateway.frame.event_stream import ANSWER_S, EventStream, event
from penstock.gateway.routes.satisfaction_routes import LEAST, THUMB, Satisfaction, satisfaction, share_of
from penstock.gateway.sites.site import JsonRoute, RunSettings, answered, caller_of, is_editor
from penstock.registry.ratings import RatedConversation, Tally
from penstock.registry.records import Event, PolicyVersion, RegistryError, Unavailable, UnknownVersion
from penstock.registry.registry import Registry
from penstock.registry.routing import Arms
from penstock.workloads.chat.http import chat_bodies
from penstock.workloads.chat.http import chat_bodies as bodies
from penstock.workloads.chat.http.chat_api import ACCOUNT, ChatApi, TalkCounts, VersionCounts, person_of
from penstock.workloads.chat.loop import loop_state, served_judge
from penstock.workloads.chat.loop.loop_state import folder_of
from penstock.workloads.chat.loop.loop_view import look_at_canaries, look_at_loop
from penstock.workloads.chat.loop.served_judge import Change, read_weighed

# ---- What those who look after a chat see: satisfaction by version, arms, fallbacks, decisions, the loop.

DESCRIBE_S: Final = 5.0
_EVENTS: Final = 10
MOST_DAYS: Final = 30
"""Days with conversations that are shown."""
MOST_PEOPLE: Final = 20
"""People who are shown: those who talked most, of those who have rated."""
_SHOWN: Final = 6
"""Characters of a name that a browser made for itself: whoever has all of it reads what its person said."""


async def overview(api: ChatApi) -> dict[str, Any]:
    """Return it all; where the run does not answer, what is known without it. Raises ApiError."""
    run = await api.run()
    counts = await asyncio.to_thread(api.book.counts)
    blocked = await asyncio.to_thread(api.book.blocked)
    try:
        found = await asyncio.to_thread(_read, run, await api.policy())
    except ConfigurationError as error:
        raise ApiError(409, str(error)) from error  # a file of the loop that cannot be read
    described, why = await _described(api)
    return {
        "leastConversations": LEAST,
        "versions": versions_of(counts, found.tallies, described),
        "blocked": blocked,
        "learns": described.learns if described else None,
        "active": found.arms.active,
        "canary": found.arms.canary,
        "canaryShare": found.arms.traffic.canary_share,
        "canaries": found.canaries,
        "loop": found.loop,
        "unreachable": why,
        "decisions": _decisions(found.events, found.changes),
    }


async def satisfaction_by_day_and_person(api: ChatApi) -> dict[str, Any]:
    """Return a row for each day, then for each person; raises ApiError for a run of unknown registry."""
    rated = await asyncio.to_thread(_rated, *await api.kept())
    found = await asyncio.to_thread(
        api.book.by_day_and_person, rated, most_days=MOST_DAYS, most_people=MOST_PEOPLE
    )
    return {"leastConversations": LEAST, "rows": [_counted(one) for one in found]}


def _rated(url: str, policy: str) -> tuple[RatedConversation, ...]:
    with Registry.open(url, migrate=True) as opened:
        return opened.rated_conversations(
            policy, chat_bodies.THUMB, above=THUMB, without=chat_bodies.ASKED_SOURCE
        )


def _counted(one: TalkCounts) -> dict[str, Any]:
    share, low, high = share_of(one.well, one.conversations)
    return {
        "by": one.by,
        "name": shown_name(one.name) if one.by == "person" else one.name,
        "conversations": one.conversations,
        "rated": one.rated,
        "thumbsUp": one.well,
        "satisfaction": share,
        "low": low,
        "high": high,
    }


def shown_name(rater: str) -> str:
    """Return somebody's name as `penstock chat ratings` has it, of a browser's own name the beginning.

    A browser's own name is shown in part behind a token, too: several people may share that.
    """
    caller, slash, own = rater.rpartition("/")
    return rater if caller == ACCOUNT else f"{caller}{slash}{own[:_SHOWN]}…"


async def _described(api: ChatApi) -> tuple[TextDescription | None, str]:
    """Return what the text server says, or why it says nothing; a halted one takes calls all the same."""
    try:
        async with asyncio.timeout(DESCRIBE_S):
            return await answered((await api.client()).describe()), ""
    except ApiError as error:
        return None, str(error.detail)
    except TimeoutError:
        return None, f"its server has not said in {DESCRIBE_S:g} s what it serves"


def versions_of(
    counts: Sequence[VersionCounts], tallies: Sequence[Tally], described: TextDescription | None
) -> list[dict[str, Any]]:
    """Return a row for each version, newest first; the fallback, version 0, comes last."""
    arms = (
        {one.version: [arm.name.lower() for arm in one.arms] for one in described.versions}
        if described
        else {}
    )
    by_version = {one.version: one for one in counts}
    told = {one.version: one.conversations for one in counts}
    found = {one.version: one for one in satisfaction(told, tallies)}
    return [
        _row(version, found.get(version), by_version.get(version), arms.get(version, []))
        for version in sorted(found.keys() | arms.keys(), reverse=True)
    ]


def _row(
    version: int, said: Satisfaction | None, counted: VersionCounts | None, arms: list[str]
) -> dict[str, Any]:
    rated, talks = (said.rated, said.conversations) if said else (0, 0)
    return {
        "version": version,
        "arms": arms,
        "conversations": talks,
        "rated": rated,
        "ratingRate": rated / talks if talks else None,
        "thumbsUp": said.thumbs_up if said else 0,
        "satisfaction": said.share if said else None,
        "low": said.low if said else None,
        "high": said.high if said else None,
        "answers": counted.answers if counted else 0,
        "fallbacks": counted.fallbacks if counted else 0,
        "blocked": counted.blocked if counted else 0,
        "asked": counted.asked if counted else 0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What the registry, and the folder of the loop, say."""

    tallies: tuple[Tally, ...]
    events: tuple[Event, ...]
    arms: Arms
    canaries: dict[str, Any]
    loop: dict[str, Any] | None
    changes: tuple[Change, ...]


def _read(run: RunSettings, policy: str) -> _Read:
    with Registry.open(run.registry, migrate=True) as opened:
        return _Read(
            tallies=opened.tally(policy, chat_bodies.THUMB, above=THUMB, without=chat_bodies.ASKED_SOURCE),
            events=opened.events(policy, _EVENTS),
            arms=opened.arms(policy),
            canaries=look_at_canaries(opened, policy, run.false_alarm),
            loop=None if run.folder is None else look_at_loop(run.folder, opened, policy),
            changes=() if run.folder is None else read_weighed(folder_of(run.folder)).changes,
        )


def _decisions(events: Sequence[Event], changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Return what was decided of versions, and of weights, newest first."""
    of_versions: list[dict[str, Any]] = [
        {"version": one.version, "action": str(one.action), "weights": None, "time": one.time, **_why(one)}
        for one in events
    ]
    of_weights: list[dict[str, Any]] = [
        {
            "version": None,
            "action": "weighed",
            "weights": dict(one.weights),
            "time": datetime.fromtimestamp(one.at_s, UTC),
            **_why(one),
        }
        for one in changes
    ]
    both = sorted((*of_versions, *of_weights), key=lambda one: one["time"], reverse=True)
    return [{**one, "time": one["time"].isoformat()} for one in both[:_EVENTS]]


def _why(one: Event | Change) -> dict[str, str]:
    return {"by": one.by, "reason": one.reason}


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
    by = _name_of(request)
    return await _decided(
        api, lambda registry, policy: registry.promote(policy, body.version, body.reason, by=by)
    )


@router.post("/api/chat/rollback")
async def roll_back(request: Request, api: Api, body: bodies.OfVersion) -> dict[str, Any]:
    """Withdraw the canary, or the version that answers for the one before it."""
    by = _name_of(request)
    return await _decided(
        api,
        lambda registry, policy: (
            registry.rollback(policy, body.reason, by=by, version=body.version).withdrawn
        ),
    )


@router.post("/api/chat/weigh")
async def weigh(request: Request, api: Api, body: bodies.Weigh) -> dict[str, Any]:
    """Change what criteria count in the reward of the loop, from its next reward model on."""
    folder = _loop_of(await api.run())
    try:
        weights = await asyncio.to_thread(
            served_judge.weigh, folder, body.weights, body.reason, _name_of(request)
        )
    except ConfigurationError as error:
        raise ApiError(422, str(error), field="weights") from error
    return {"weights": weights}


@router.post("/api/chat/pause")
async def pause(request: Request, api: Api, body: bodies.Reasoned) -> dict[str, Any]:
    """Have the loop wait."""
    folder = _loop_of(await api.run())
    await asyncio.to_thread(loop_state.pause, folder, body.reason, _name_of(request))
    return {"paused": True}


@router.post("/api/chat/resume")
async def resume(api: Api, _body: bodies.Body) -> dict[str, Any]:
    """Let the loop go on; a step that failed is tried again."""
    await asyncio.to_thread(loop_state.resume, _loop_of(await api.run()))
    return {"paused": False}


@router.post("/api/chat/abandon")
async def abandon(request: Request, api: Api, body: bodies.Reasoned) -> dict[str, Any]:
    """Give up the round of the loop that goes on."""
    folder = _loop_of(await api.run())
    try:
        given_up = await asyncio.to_thread(loop_state.abandon, folder, body.reason, _name_of(request))
    except ConfigurationError as error:
        raise ApiError(409, str(error)) from error
    return {"abandoned": given_up}


async def _decided(api: ChatApi, decide: Callable[[Registry, str], PolicyVersion]) -> dict[str, Any]:
    """Return the version of which something was decided in the registry; raises ApiError."""
    url, policy = await api.kept()

    def work() -> PolicyVersion:
        with Registry.open(url, migrate=True) as opened:
            return decide(opened, policy)

    try:
        made = await asyncio.to_thread(work)
    except UnknownVersion as error:
        raise ApiError(404, str(error), field="version") from error
    except Unavailable as error:
        raise ApiError(503, str(error), retry_s=1) from error
    except RegistryError as error:
        raise ApiError(409, str(error), field="version") from error
    return {"version": made.version, "status": made.status.value}


def _loop_of(run: RunSettings) -> Path:
    """Return the folder of a run's loop; raises ApiError 409 where there is none."""
    folder = None if run.folder is None else loop_state.folder_of(run.folder)
    if folder is None or not folder.is_dir():
        raise ApiError(409, "there is no loop: start it with --learn, or `penstock chat loop run`")
    return folder


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
