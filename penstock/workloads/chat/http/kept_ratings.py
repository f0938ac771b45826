"""What people have said of answers, in the registry of the run: kept, shown to its person, deleted."""

import re
from typing import Any, Final

from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.chat.http.chat_bodies import OfTurn
from penstock.workloads.chat.http.talk_record import Answered, TalkRecord

THUMB: Final = "thumb"
CORRECTED: Final = "corrected"
SOURCE: Final = "chat"
ASKED_SOURCE: Final = "chat-asked"
"""Of ratings that somebody was asked for."""
_PAGE: Final = 1000
_UNSTORABLE: Final = re.compile("[\0\ud800-\udfff]")
"""NUL, and half of a pair of surrogates."""


def rating_of(
    talk: TalkRecord,
    answer: Answered,
    body: OfTurn,
    *,
    key: str,
    score: float | None = None,
    rejected: str | None = None,
    response: str | None = None,
) -> Rating:
    """Return what is kept of somebody's opinion of an answer. response: in place of what was answered.

    A model may say characters that no PostgreSQL holds; they are kept as U+FFFD, and its answer is not lost.
    """
    return Rating(
        prompt=[{"role": str(one["role"]), "content": _kept(str(one["content"]))} for one in answer.before],
        response=_kept(answer.text if response is None else response),
        score=score,
        rejected=None if rejected is None else _kept(rejected),
        key=key,
        source=ASKED_SOURCE if answer.asked else SOURCE,
        conversation=talk.name,
        version=answer.version or None,
        rater=talk.person,
        request_key=f"chat-{body.id}",
    )


def _kept(text: str) -> str:
    return _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def store(url: str, policy: str, rating: Rating) -> int:
    """Keep a rating, once by its request key, and return its number. url: of the registry.

    Raises RegistryError.
    """
    with Registry.open(url, migrate=True) as opened:
        (kept,) = opened.add_ratings(policy, (rating,))
    return kept.number


def delete(url: str, rater: str) -> int:
    """Delete all that somebody has said, of every policy; returns how many ratings it was."""
    with Registry.open(url, migrate=True) as opened:
        return sum(len(numbers) for numbers in opened.delete_ratings("", rater).values())


def ratings_by(url: str, policy: str, rater: str) -> list[dict[str, Any]]:
    """Return all that somebody has said of a policy's answers, oldest first, as JSON values."""
    found, after = list[dict[str, Any]](), 0
    with Registry.open(url, migrate=True) as opened:
        while page := opened.ratings(policy, after, _PAGE):
            after = page[-1].number
            found += [
                {
                    "policy": kept.policy,
                    "prompt": kept.rating.prompt,
                    "response": kept.rating.response,
                    "key": kept.rating.key,
                    "score": kept.rating.score,
                    "rejected": kept.rating.rejected,
                    "version": kept.rating.version,
                    "created": kept.created.isoformat(),
                }
                for kept in page
                if kept.rating.rater == rater
            ]
    return found
