"""What those who look after a chat see: satisfaction by version, arms, fallbacks, decisions, the loop.

Satisfaction is that of versions, of days and of people: over all conversations, rated or not, whose newest
thumb is up. Whoever had their data deleted is in none of these numbers.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from penstock.client import TextDescription
from penstock.config.configuration_error import ConfigurationError
from penstock.gateway.surface import (
    LEAST,
    THUMB,
    ApiError,
    RunSettings,
    Satisfaction,
    answered,
    satisfaction,
    share_of,
)
from penstock.registry.ratings import RatedConversation, Tally
from penstock.registry.records import Event
from penstock.registry.registry import Registry
from penstock.registry.routing import Arms
from penstock.workloads.chat.http import kept_ratings
from penstock.workloads.chat.http.answer_book import TalkCounts, VersionCounts
from penstock.workloads.chat.http.chat_api import ACCOUNT, ChatApi
from penstock.workloads.chat.loop.loop_state import folder_of
from penstock.workloads.chat.loop.loop_view import look_at_canaries, look_at_loop
from penstock.workloads.chat.loop.weighing import Change, read_weighed

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
            policy, kept_ratings.THUMB, above=THUMB, without=kept_ratings.ASKED_SOURCE
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
            tallies=opened.tally(policy, kept_ratings.THUMB, above=THUMB, without=kept_ratings.ASKED_SOURCE),
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
