"""What those who look after a chat see: satisfaction by version, arms, fallbacks, blocks, decisions."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from gateway.surface import LEAST, THUMB, ApiError, Satisfaction, answered, satisfaction
from penstock.client import TextDescription
from penstock.registry.ratings import Tally
from penstock.registry.records import Event
from penstock.registry.registry import Registry
from workloads.chat.http import chat_api
from workloads.chat.http.answer_book import VersionCounts
from workloads.chat.http.chat_api import ChatApi

_EVENTS: Final = 10


async def overview(api: ChatApi) -> dict[str, Any]:
    """Return it all; where the run does not answer, what is known without it. Raises ApiError."""
    url = await api.registry()
    counts = await asyncio.to_thread(api.book.counts)
    blocked = await asyncio.to_thread(api.book.blocked)
    tallies, events, canary_share, canary = await asyncio.to_thread(_read, url)
    try:
        described, why = await answered((await api.client()).describe()), ""
    except ApiError as error:
        described, why = None, str(error.detail)
    return {
        "leastConversations": LEAST,
        "versions": versions_of(counts, tallies, described),
        "blocked": blocked,
        "learns": described.learns if described else None,
        "canary": canary,
        "canaryShare": canary_share,
        "unreachable": why,
        "decisions": [_decision(one) for one in events],
    }


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
    }


def _read(url: str) -> tuple[tuple[Tally, ...], tuple[Event, ...], float, int | None]:
    with Registry.open(url, migrate=True) as opened:
        arms = opened.arms(chat_api.POLICY)
        tallies = opened.tally(chat_api.POLICY, chat_api.THUMB, above=THUMB)
        return tallies, opened.events(chat_api.POLICY, _EVENTS), arms.traffic.canary_share, arms.canary


def _decision(one: Event) -> dict[str, Any]:
    return {
        "version": one.version,
        "action": str(one.action),
        "by": one.by,
        "reason": one.reason,
        "time": one.time.isoformat(),
    }
