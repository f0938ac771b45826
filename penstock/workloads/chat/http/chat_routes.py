"""Routes of the chat page and of its operators, and the site that the gateway serves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Query, Request

from penstock.client import TextDescription
from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.application import Service
from penstock.gateway.frame.event_stream import ANSWER_S, EventStream, event
from penstock.gateway.frame.pages import SHARED, add_files, add_page, files_in
from penstock.gateway.frame.requests import ApiError, Body
from penstock.gateway.frame.route_access import JsonRoute, caller_of, is_editor, table
from penstock.gateway.routes.satisfaction_routes import LEAST, THUMB, satisfaction, share_of
from penstock.gateway.upstream import Loop, RunSettings, Upstream, answered
from penstock.registry.ratings import RatedConversation, Tally
from penstock.registry.records import (
    MAX_EVENTS,
    Event,
    PolicyVersion,
    RegistryError,
    Status,
    Unavailable,
    UnknownVersion,
)
from penstock.registry.registry import Registry
from penstock.workloads.chat import loop_state
from penstock.workloads.chat.commands import check_options
from penstock.workloads.chat.http import chat_bodies as bodies
from penstock.workloads.chat.http.chat_api import (
    ACCOUNT,
    AnswerBook,
    ChatApi,
    TalkCounts,
    VersionCounts,
    person_of,
)
from penstock.workloads.chat.loop_state import WeightChange, folder_of, look_at_canaries, look_at_loop

router = APIRouter(route_class=JsonRoute, tags=["chat"])


async def api_of(request: Request, agent: Annotated[str, Query(max_length=64)] = "") -> ChatApi:
    """Return the chat of an agent. agent: its name; "": the first one. Raises ApiError 404."""
    found = _apis(request).get(agent)
    if found is None:
        raise ApiError(404, f"agent={agent!r}: there is none of that name", field="agent")
    return found


def _apis(request: Request) -> dict[str, ChatApi]:
    apis: dict[str, ChatApi] = request.app.state.apis
    return apis


Api = Annotated[ChatApi, Depends(api_of)]


# ---- The operators' view: satisfaction by version, arms, fallbacks, decisions, the loop.

DESCRIBE_S: Final = 5.0
_EVENTS: Final = 10
MOST_DAYS: Final = 30
"""Days with conversations that are shown."""
MOST_PEOPLE: Final = 20
"""Raters that are shown: those with most conversations."""
_SHOWN: Final = 6
"""Shown characters of a browser's name; the whole name gives access to its person's ratings."""


@router.get("/api/chat/overview")
async def overview(api: Api) -> dict[str, Any]:
    """Return satisfaction by version, arms, fallbacks, blocked answers, decisions, and the loop.

    When the run does not answer, the fields that need it are null or empty.
    """
    run = await api.run()
    counts = await asyncio.to_thread(api.book.counts)
    blocked = await asyncio.to_thread(api.book.blocked)
    try:
        tallies, kept = await asyncio.to_thread(_read, run, await api.policy(), api.book)
    except ConfigurationError as error:
        raise ApiError(409, str(error)) from error  # a file of the loop that cannot be read
    described, why = await _described(api)
    return {
        "leastConversations": LEAST,
        "versions": versions_of(counts, tallies, described),
        "blocked": blocked,
        "ordinals": await asyncio.to_thread(bodies.ordinals, *await api.kept()),
        "learns": described.learns if described else None,
        "unreachable": why,
        **kept,
    }


@router.get("/api/chat/satisfaction")
async def satisfaction_by_day_and_person(api: Api) -> dict[str, Any]:
    """Return satisfaction by day, then by rater."""
    rated = await asyncio.to_thread(_rated, *await api.kept())
    found = await asyncio.to_thread(
        api.book.by_day_and_person, rated, most_days=MOST_DAYS, most_people=MOST_PEOPLE
    )
    return {"leastConversations": LEAST, "rows": [_counted(one) for one in found]}


def _rated(url: str, policy: str) -> tuple[RatedConversation, ...]:
    with Registry.open(url, migrate=True) as opened:
        return opened.rated_conversations(policy, bodies.THUMB, above=THUMB, without=bodies.ASKED_SOURCE)


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
    """Return a rater's name as `penstock chat ratings` shows it; a name that a browser made is cut short.

    It is cut short for callers with a token too, since several people may share a token.
    """
    caller, slash, own = rater.rpartition("/")
    return rater if caller == ACCOUNT else f"{caller}{slash}{own[:_SHOWN]}…"


async def _described(api: ChatApi) -> tuple[TextDescription | None, str]:
    """Return the text server's description, or why there is none; a halted server accepts calls, too."""
    try:
        async with asyncio.timeout(DESCRIBE_S):
            return await answered((await api.client()).describe()), ""
    except ApiError as error:
        return None, str(error.detail)
    except TimeoutError:
        return None, f"its server did not describe itself within {DESCRIBE_S:g} s"


def versions_of(
    counts: Sequence[VersionCounts], tallies: Sequence[Tally], described: TextDescription | None
) -> list[dict[str, Any]]:
    """Return a row for each version, newest first; the fallback, version 0, comes last."""
    served = described.versions if described else ()
    arms = {one.version: [arm.name.lower() for arm in one.arms] for one in served}
    by_version = {one.version: one for one in counts}
    conversations = dict.fromkeys(arms, 0) | {one.version: one.conversations for one in counts}
    return [
        {
            **asdict(by_version.get(one.version, VersionCounts(one.version))),
            **one.model_dump(exclude={"verdict"}),
            "arms": arms.get(one.version, []),
        }
        for one in satisfaction(conversations, tallies)
    ]


def _read(run: RunSettings, policy: str, book: AnswerBook) -> tuple[Sequence[Tally], dict[str, Any]]:
    """Read the registry and the loop's folder; returns tallies, and fields of the overview."""
    changes = () if run.folder is None else loop_state.read_head_weights(folder_of(run.folder)).changes
    with Registry.open(run.registry, migrate=True) as opened:
        arms = opened.arms(policy)
        return opened.tally(policy, bodies.THUMB, above=THUMB, without=bodies.ASKED_SOURCE), {
            "active": arms.active,
            "canary": arms.canary,
            "canaryShare": arms.traffic.canary_share,
            "canaries": look_at_canaries(opened, policy, run.false_alarm),
            "trial": _trial(opened, policy, arms.canary, arms.active, book),
            "loop": None if run.folder is None else look_at_loop(run.folder, opened, policy),
            "decisions": _decisions(opened.events(policy, _EVENTS), changes),
        }


def _trial(
    opened: Registry, policy: str, canary: int | None, active: int | None, book: AnswerBook
) -> dict[str, Any] | None:
    """Return what people think of the canary and of the active version since the trial began."""
    begun = [
        one.time
        for one in opened.events(policy, MAX_EVENTS)
        if one.version == canary and one.detail.get("to") == Status.CANARY.value
    ]
    if canary is None or not begun:
        return None
    since = max(begun)
    counts = {one.version: one.conversations for one in book.counts(since.timestamp())}
    tallies = opened.tally(policy, bodies.THUMB, above=THUMB, without=bodies.ASKED_SOURCE, since=since)
    both = {version: counts.get(version, 0) for version in (canary, active) if version is not None}
    rows = satisfaction(both, [one for one in tallies if one.version in both])
    return {"since": since.isoformat(), "versions": [one.model_dump(exclude={"verdict"}) for one in rows]}


def _decisions(events: Sequence[Event], changes: Sequence[WeightChange]) -> list[dict[str, Any]]:
    """Return the newest decisions about versions and weights, newest first."""
    decisions: list[dict[str, Any]] = [
        {"time": one.time, "version": one.version, "action": str(one.action), "weights": None}
        | {"by": one.by, "reason": one.reason, "to": one.detail.get("to")}
        for one in events
    ]
    decisions += [
        {"time": datetime.fromtimestamp(one.at_s, UTC), "version": None, "action": "weighed"}
        | {"weights": dict(one.weights), "by": one.by, "reason": one.reason, "to": None}
        for one in changes
    ]
    newest = sorted(decisions, key=itemgetter("time"), reverse=True)[:_EVENTS]
    return [{**one, "time": one["time"].isoformat()} for one in newest]


@router.get("/health")
async def health(api: Api) -> dict[str, Any]:
    """Check that the text server answers."""
    found = await answered((await api.client()).describe())
    return {"status": "ok", "versions": [one.version for one in found.versions]}


@router.get("/api/chat/agents")
async def agents(request: Request) -> dict[str, Any]:
    """Return the names of the agents; "" is the first, whose name is that of its policy."""
    return {"agents": list(_apis(request))}


@router.get("/api/chat/ready")
async def ready(api: Api) -> dict[str, str]:
    """Return why nothing answers, such as a model that is still being made; "" where it does."""
    return {"unreachable": (await _described(api))[1]}


@router.post("/api/chat/begin")
async def begin(request: Request, api: Api, body: bodies.Me) -> dict[str, Any]:
    """Begin a conversation."""
    talk = await api.begin(_person(request, body))
    return {"conversation": talk.id}


@router.post("/api/chat/say", response_class=EventStream)
async def say(request: Request, api: Api, body: bodies.Say) -> EventStream:
    """Send a message, or have the last one answered again; the answer comes as events."""
    talk = _talk(request, api, body)
    # Without accounts everybody is an editor, and who rates is not to know what is expected.
    looks_after = is_editor(request) and caller_of(request) != ""
    events = api.say(talk, body.text, looks_after=looks_after)
    first = await anext(events)  # a refusal before it is an error of the call
    cut_off = event("refused", {"detail": "the gateway ended before the answer was complete: send it again"})
    return EventStream(_behind(first, events), grace_s=ANSWER_S, cut_off=cut_off)


@router.post("/api/chat/thumb")
async def thumb(request: Request, api: Api, body: bodies.Thumb) -> dict[str, Any]:
    """Store whether a person likes an answer."""
    return {"stored": True, "rewarded": await api.thumb(_talk(request, api, body), body)}


@router.post("/api/chat/stars")
async def stars(request: Request, api: Api, body: bodies.Stars) -> dict[str, Any]:
    """Store a rating of one aspect of an answer."""
    await api.stars(_talk(request, api, body), body)
    return {"stored": True}


@router.post("/api/chat/prefer")
async def prefer(request: Request, api: Api, body: bodies.Prefer) -> dict[str, Any]:
    """Store which of two answers is better; the conversation continues with it."""
    return {"stored": True, "text": await api.prefer(_talk(request, api, body), body)}


@router.post("/api/chat/correct")
async def correct(request: Request, api: Api, body: bodies.Correction) -> dict[str, Any]:
    """Store a better text for an answer."""
    await api.correct(_talk(request, api, body), body)
    return {"stored": True}


@router.post("/api/chat/end")
async def end(request: Request, api: Api, body: bodies.OfTalk) -> dict[str, Any]:
    """End a conversation."""
    await api.end(_talk(request, api, body))
    return {"ended": True}


@router.post("/api/chat/mine")
async def mine(request: Request, body: bodies.Me) -> dict[str, Any]:
    """Return all ratings of a person, of any agent."""
    ratings = list[dict[str, Any]]()
    for api in {await api.kept(): api for api in await _keeping(request)}.values():
        ratings += await api.export(_person(request, body))
    return {"ratings": ratings}


@router.post("/api/chat/forget")
async def forget(request: Request, body: bodies.Me) -> dict[str, Any]:
    """Delete all ratings of a person, of any agent, and the counts of their conversations."""
    person = _person(request, body)
    # A deletion covers every policy in a registry, so that no server has to name its own.
    found = {(await api.run()).registry: api for api in await _keeping(request)}
    deleted = sum([await api.forget(person) for api in found.values()])
    for api in _apis(request).values():
        await asyncio.to_thread(api.book.forget, person)
    return {"deleted": deleted}


@router.post("/api/chat/promote")
async def promote(request: Request, api: Api, body: bodies.OfVersion) -> dict[str, Any]:
    """Make a version active."""
    by = _name_of(request)
    return await _decided(
        api, lambda registry, policy: registry.promote(policy, body.version, body.reason, by=by)
    )


@router.post("/api/chat/rollback")
async def roll_back(request: Request, api: Api, body: bodies.OfVersion) -> dict[str, Any]:
    """Withdraw the canary, or return from the active version to the one before it."""
    by = _name_of(request)
    return await _decided(
        api,
        lambda registry, policy: (
            registry.rollback(policy, body.reason, by=by, version=body.version).withdrawn
        ),
    )


@router.post("/api/chat/weigh")
async def weigh(request: Request, api: Api, body: bodies.Weigh) -> dict[str, Any]:
    """Change weights of criteria in the loop's reward, from its next reward model on."""
    folder = _loop_of(await api.run())
    try:
        weights = await asyncio.to_thread(
            loop_state.weigh, folder, body.weights, body.reason, _name_of(request)
        )
    except ConfigurationError as error:
        raise ApiError(422, str(error), field="weights") from error
    return {"weights": weights}


@router.post("/api/chat/pause")
async def pause(request: Request, api: Api, body: bodies.Reasoned) -> dict[str, Any]:
    """Pause the loop."""
    folder = _loop_of(await api.run())
    await asyncio.to_thread(loop_state.pause, folder, body.reason, _name_of(request))
    return {"paused": True}


@router.post("/api/chat/resume")
async def resume(api: Api, _body: Body) -> dict[str, Any]:
    """Resume the loop; a failed step is tried again."""
    await asyncio.to_thread(loop_state.resume, _loop_of(await api.run()))
    return {"paused": False}


@router.post("/api/chat/abandon")
async def abandon(request: Request, api: Api, body: bodies.Reasoned) -> dict[str, Any]:
    """Abandon the loop's current round."""
    folder = _loop_of(await api.run())
    try:
        given_up = await asyncio.to_thread(loop_state.abandon, folder, body.reason, _name_of(request))
    except ConfigurationError as error:
        raise ApiError(409, str(error)) from error
    return {"abandoned": given_up}


async def _decided(api: ChatApi, decide: Callable[[Registry, str], PolicyVersion]) -> dict[str, Any]:
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
    folder = None if run.folder is None else loop_state.folder_of(run.folder)
    if folder is None or not folder.is_dir():
        raise ApiError(409, "there is no loop: start it with --learn, or `penstock chat loop run`")
    return folder


def _person(request: Request, body: bodies.Me) -> str:
    return person_of(caller_of(request), body.me)


def _talk(request: Request, api: ChatApi, body: bodies.OfTalk) -> bodies.TalkRecord:
    return api.find(_person(request, body), body.conversation)


async def _keeping(request: Request) -> list[ChatApi]:
    """Return the chats that store ratings, and always the first, which reports it where it does not."""
    first, *others = _apis(request).values()
    return [first, *[one for one in others if not await one.keeps_nothing()]]


def _name_of(request: Request) -> str:
    return f"page/{caller_of(request)}".rstrip("/")


async def _behind(first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for one in events:
        yield one


# ---- The site.

_FILES: Final = files_in(Path(__file__).parent / "static") | SHARED
add_page(router, "/chat", _FILES["chat.html"], include_in_schema=False)
add_files(router, "/chat", _FILES, include_in_schema=False)


@contextlib.asynccontextmanager
async def life(upstream: Upstream, app: FastAPI) -> AsyncIterator[None]:
    """Hold the chats of all agents while the application serves."""
    apis = app.state.apis = {"": ChatApi(upstream)}
    apis |= {name: ChatApi(one) for name, one in upstream.agents.items()}
    yield
    for one in apis.values():
        await one.close()


def site() -> Service:
    """Return the site that `penstock gateway chat` serves.

    Beyond loopback a viewer's token suffices to chat and to rate; the overview needs an editor's.
    """
    talking = ("begin", "say", "thumb", "stars", "prefer", "correct", "end", "mine", "forget")
    deciding = ("promote", "rollback", "weigh", "pause", "resume", "abandon")
    return Service(
        title="Penstock chat",
        router=router,
        access=table(
            anybody=["GET /health", "GET /chat", "GET /chat/{file}"],
            viewer=[
                *(f"GET /api/chat/{name}" for name in ("agents", "ready")),
                *(f"POST /api/chat/{name}" for name in talking),
            ],
            editor=[
                "GET /api/chat/overview",
                "GET /api/chat/satisfaction",
                *(f"POST /api/chat/{name}" for name in deciding),
            ],
        ),
        recipe=Path(__file__).resolve().parents[3] / "recipes" / "chat-tiny.toml",
        life=life,
        takes_agents=True,
        page="/chat",
        loop=Loop(
            words=("chat", "loop", "run"),
            # A first version, with which canaries are compared.
            settings=("learner.keep_every_updates=1000",),
            options=("--reward=learning_rate=3e-3",),  # of the small model that the recipe makes
            check=check_options,
        ),
    )
