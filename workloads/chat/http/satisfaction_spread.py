"""Satisfaction over time and over people, for those who look after a chat.

It is counted as that of versions: over all conversations, rated or not, whose newest thumb is up. Whoever had
their data deleted is in none of these numbers.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from gateway.surface import LEAST, THUMB, share_of
from penstock.registry.ratings import RatedConversation
from penstock.registry.registry import Registry
from workloads.chat.http import kept_ratings
from workloads.chat.http.answer_book import TalkCounts, hashed
from workloads.chat.http.chat_api import ACCOUNT, ChatApi

MOST_DAYS: Final = 30
"""Days with conversations that are shown."""
MOST_RATERS: Final = 20
"""People who are shown by name: those who talked most, of those who have rated."""
_SHOWN: Final = 6
"""Characters of a name that a browser made for itself: whoever has all of it reads what its person said."""


async def satisfaction_spread(api: ChatApi) -> dict[str, Any]:
    """Return it all as JSON values; raises ApiError where the registry of the run is not known."""
    rated = await asyncio.to_thread(_rated, *await api.kept())
    days, people = await asyncio.to_thread(api.book.spread, rated, MOST_DAYS)
    names = {hashed(one.rater): one.rater for one in rated if one.rater}
    raters = [(shown_name(names[one.name]), one) for one in people if one.name in names]
    return {
        "leastConversations": LEAST,
        "days": [{"day": one.name, **_told(one)} for one in days],
        "people": over_people(people),
        "mostRaters": MOST_RATERS,
        "raters": [{"rater": name, **_told(one)} for name, one in raters[:MOST_RATERS]],
    }


def _rated(url: str, policy: str) -> tuple[RatedConversation, ...]:
    with Registry.open(url, migrate=True) as opened:
        return opened.rated_conversations(
            policy, kept_ratings.THUMB, above=THUMB, without=kept_ratings.ASKED_SOURCE
        )


def over_people(people: Sequence[TalkCounts]) -> dict[str, Any]:
    """Return how satisfaction is spread: of how many people the own share is below that of all, or above.

    None for the shares below LEAST people, where one cannot tell.
    """
    talks, well = sum(one.conversations for one in people), sum(one.well for one in people)
    below = sum(one.well * talks < well * one.conversations for one in people)
    above = sum(one.well * talks > well * one.conversations for one in people)
    return {
        "talked": len(people),
        "everRated": sum(one.rated > 0 for one in people),
        "below": _share(below, len(people)),
        "above": _share(above, len(people)),
        **_told(TalkCounts(name="", conversations=talks, rated=sum(one.rated for one in people), well=well)),
    }


def _told(one: TalkCounts) -> dict[str, Any]:
    share, low, high = share_of(one.well, one.conversations)
    return {
        "conversations": one.conversations,
        "rated": one.rated,
        "thumbsUp": one.well,
        "satisfaction": share,
        "low": low,
        "high": high,
    }


def _share(count: int, of: int) -> dict[str, float | None]:
    share, low, high = share_of(count, of)
    return {"share": share, "low": low, "high": high}


def shown_name(rater: str) -> str:
    """Return somebody's name as `penstock chat ratings` has it, of a browser's own name the beginning.

    A browser's own name is shown in part behind a token, too: several people may share that.
    """
    caller, slash, own = rater.rpartition("/")
    return rater if caller == ACCOUNT else f"{caller}{slash}{own[:_SHOWN]}…"
